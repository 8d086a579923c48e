"""Tiny models of many families, and their loss on packed rows against one document at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.data.documents import Documents
from shardwise.nn.attention.document_mask import RowsMask
from shardwise.nn.attention.varlen import attention_as, built_with
from shardwise.nn.models.build import find_blocks

WORDS = 515
WINDOW = 7  # shorter than most documents of LAYOUT
LAYOUT = [[13, 20, 5], [3, 11, 17, 2, 1]]  # the second row ends in padding
PLAIN = dict(vocab_size=WORDS, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=512)  # fmt: skip
GROUPED = PLAIN | {"num_key_value_heads": 2}
GPT2 = dict(vocab_size=WORDS, n_embd=48, n_layer=2, n_head=4, n_positions=512)
STILL = dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
FALCON = dict(vocab_size=WORDS, hidden_size=48, num_hidden_layers=2, num_attention_heads=4)
LATENT = dict(
    num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, q_lora_rank=16,
    kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, moe_intermediate_size=32,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "gpt2": GPT2 | STILL,
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 12},
    "mistral": GROUPED | {"sliding_window": WINDOW},
    "gemma2": GROUPED | {"head_dim": 12, "sliding_window": WINDOW, "attn_logit_softcapping": 0.5},
    "gemma3_text": GROUPED | {"head_dim": 12, "sliding_window": WINDOW},
    "mixtral": GROUPED | {"num_local_experts": 4},
    "qwen3_moe": GROUPED | dict(head_dim=12, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "deepseek_v3": GROUPED | LATENT,  # values have smaller heads than keys
    # transformers alone would let the documents of these see each other:
    "falcon": FALCON | {"alibi": False},
    "falcon-alibi": FALCON | {"alibi": True},
    "gpt_oss": GROUPED | {"head_dim": 12, "num_local_experts": 4, "sliding_window": WINDOW},  # sinks, eager
    "bloom": dict(vocab_size=WORDS, hidden_size=48, n_layer=2, n_head=4),  # ALiBi, eager
    "opt": PLAIN | dict(ffn_dim=96, word_embed_proj_dim=48, dropout=0.0),
    "llama4_text": GROUPED | dict(head_dim=12, attention_chunk_size=WINDOW, intermediate_size_mlp=96,
                                  num_local_experts=2),
}  # fmt: skip


# Ours computes sinks under SDPA's name, where transformers has eager attention alone; Falcon's eager attention adds its
# ALiBi twice (transformers 5.17), which SDPA does not.
FORCED = {"gpt_oss": "sdpa", "falcon-alibi": "eager"}


def tiny(kind: str, **changes: Any) -> Any:
    """A model whose attention is far from uniform, so that a wrong mask shows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.split("-")[0], **MODELS[kind] | changes)
    model = built_with(AutoModelForCausalLM, config, FORCED.get(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def recomputed(model: Any) -> Any:
    """The model with every block computed again in backward."""
    from torch.distributed._composable import checkpoint

    for _, block in find_blocks(model):
        checkpoint(block)
    return model


def rows(layout: Sequence[Sequence[int]], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Documents]:
    """Ids, labels (nothing is predicted across documents) and documents."""
    documents = Documents.of_lengths(layout)
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (documents.rows, documents.width), generator=made)
    labels = torch.cat([F.pad(d[1:], (0, 1), value=-100) for d in ids.flatten().split(documents.lengths)])
    return ids, labels.view_as(ids), documents


Result = tuple[float, dict[str, torch.Tensor]]


def _result(model: Any, loss: torch.Tensor) -> Result:
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), gradients


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def packed(model: Any, ids: torch.Tensor, labels: torch.Tensor, documents: Documents, plain: bool = False) -> Result:
    """Loss and gradients of packed rows; plain: by transformers' own masks."""
    mask = None if plain else RowsMask(documents)
    positions = documents.positions
    logits = model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
    return _result(model, _loss(logits, labels))


def alone(model: Any, ids: torch.Tensor, labels: torch.Tensor, documents: Documents) -> Result:
    """The model's definition: eager attention, one document after the other."""
    total = torch.zeros((), device=ids.device)
    pieces = (table.flatten().split(documents.lengths) for table in (ids, labels))
    with attention_as(model, "eager"):
        for piece, wanted in zip(*pieces, strict=True):
            ones = torch.ones_like(piece[None])
            logits = model(input_ids=piece[None], attention_mask=ones, use_cache=False).logits
            total = total + _loss(logits, wanted[None])
        return _result(model, total)


def distance(a: Result, b: Result) -> tuple[float, float]:
    """Relative difference of the losses, and of all gradients together."""
    assert a[1].keys() == b[1].keys()
    apart = sum((a[1][n] - b[1][n]).double().square().sum().item() for n in b[1])
    whole = sum(g.double().square().sum().item() for g in b[1].values())
    return abs(a[0] - b[0]) / abs(b[0]), (apart / whole) ** 0.5


def train_twice(run: dict[str, Any]) -> tuple[list[float], list[float]]:
    """On a rank: losses of two steps in the real set-up, documents kept apart without any mask, and by plain masks."""
    from shardwise.nn.attention.document_mask import DocumentMask
    from shardwise.train.loop import accumulate
    from support.scenarios import batch_of, parts_of

    def refuse(self: Any) -> torch.Tensor:
        raise AssertionError("a mask was built")

    found: list[list[float]] = []
    for attention in ("auto", "plain"):
        parts = parts_of(run | {"attention": attention})
        real, DocumentMask.real = DocumentMask.real, property(refuse)  # type: ignore[assignment,method-assign]
        losses = []
        for step in range(2):
            for group in parts.optimizer.param_groups:
                group["lr"] = 1e-2
            losses.append(accumulate(parts, batch_of(parts, step)).item())
            parts.update()
        DocumentMask.real = real  # type: ignore[method-assign]
        found.append(losses)
    return found[0], found[1]


def broken_then_plain(run: dict[str, Any]) -> tuple[list[str], float, float]:
    """On a rank: our path breaks in the start-up check; what is said, and the loss of a step, without and with it."""
    from torch import distributed as dist

    from shardwise.config.load import load_run
    from shardwise.distributed.mesh import init_world
    from shardwise.foresight.prepare import prepare_run
    from shardwise.nn.attention import varlen as attention
    from shardwise.train.loop import accumulate
    from shardwise.train.setup import build_state
    from shardwise.train.status import Status
    from support.scenarios import batch_of

    def broken(*args: Any) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    said: list[str] = []
    losses = []
    for function in (broken, attention._one_by_one):
        attention._one_by_one = function
        job = prepare_run(load_run(run))
        parts = build_state(job, init_world(job.run), Status(None), said.append)
        losses.append(accumulate(parts, batch_of(parts, 0)).item())
        dist.barrier()
    return said, losses[0], losses[1]


class Alone:
    """A model in one piece, with as much of a ShardedModel as the check uses."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        self.model.eval()
        with torch.no_grad():
            yield
