"""Models that look ahead, or across packed documents, are refused before a step is trained; the others are not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import scenarios
from support.packed import Alone
from support.ranks import run_ranks
from support.tiny import LLAMA, saved_model, tiny_run, tokenizer_folder
from torch import nn

from shardwise.core.errors import UserError
from shardwise.parallel.selfcheck import check_model

WORDS = 515
SMALL = dict(vocab_size=WORDS, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=512)  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "gpt2": dict(vocab_size=WORDS, n_embd=48, n_layer=2, n_head=4, n_positions=512),
    "qwen3": GROUPED | {"head_dim": 12},
    "mistral": GROUPED,
    "gemma2": GROUPED | {"head_dim": 12},
    "phi": SMALL,
    "mixtral": GROUPED | {"num_local_experts": 4},
    "bert": SMALL,
    "roberta": SMALL,
    "bloom": dict(vocab_size=WORDS, hidden_size=48, n_layer=2, n_head=4),
    "opt": SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 48},
    "mamba": dict(vocab_size=WORDS, hidden_size=48, num_hidden_layers=2, state_size=8),
}


def check(model: nn.Module, packing: bool) -> None:
    sharded: Any = Alone(model)
    check_model(sharded, WORDS, packing, "the-model", torch.device("cpu"))


def tiny(kind: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **CONFIGS[kind], **changes))


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "mistral", "gemma2", "phi", "mixtral"])
def test_decoders_pass(kind: str, packing: bool) -> None:
    check(tiny(kind), packing)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_model_that_looks_ahead_is_refused(kind: str, packing: bool) -> None:
    """Fresh weights, which mix tokens the least: where a leak is hardest to see."""
    with pytest.raises(UserError, match=r"depend on later tokens(.|\n)*is_decoder: true"):
        check(tiny(kind), packing)
    check(tiny(kind, is_decoder=True), packing=False)


@pytest.mark.parametrize("kind", ["bloom", "opt", "mamba", "bert"])
def test_a_model_that_ignores_positions_is_refused_for_packing_only(kind: str) -> None:
    model = tiny(kind, is_decoder=True) if kind == "bert" else tiny(kind)
    with pytest.raises(UserError, match=r"packed documents see each other(.|\n)*data\.packing: false"):
        check(model, packing=True)
    check(model, packing=False)


class Sums(nn.Module):
    """Logits from running sums of embeddings: causal or not, apart or not, as told; positions taken or not."""

    def __init__(self, ahead: bool = False, apart: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.ahead, self.apart = nn.Embedding(WORDS, 16), ahead, apart
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=16))

    def forward(self, input_ids: torch.Tensor, use_cache: bool, position_ids: torch.Tensor | None = None) -> Any:
        length = input_ids.shape[1]
        assert length <= 16, "the check must not ask for more positions than there are"
        sees = torch.ones(length, length) if self.ahead else torch.ones(length, length).tril()
        if self.apart and position_ids is not None:
            document = (position_ids[0] == 0).cumsum(0)
            sees = sees * (document[:, None] == document[None])
        return SimpleNamespace(logits=(sees @ self.table(input_ids)) @ self.table.weight.T)


def test_each_fault_by_itself() -> None:
    """A model that keeps documents apart and looks ahead within them is the case that a coarser check would pass."""
    check(Sums(), packing=True)
    check(Sums(), packing=False)
    for packing in (True, False):
        with pytest.raises(UserError, match="depend on later tokens"):
            check(Sums(ahead=True), packing)
    with pytest.raises(UserError, match="packed documents see each other"):
        check(Sums(apart=False), packing=True)
    check(Sums(apart=False), packing=False)


def test_a_model_without_positions_is_refused_for_packing_only() -> None:
    class Plain(Sums):
        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:  # type: ignore[override]
            return super().forward(input_ids, use_cache)

    with pytest.raises(UserError, match=r"takes no position_ids(.|\n)*data\.packing: false"):
        check(Plain(), packing=True)
    check(Plain(), packing=False)


def test_ranks_refuse_together(tmp_path: Path) -> None:
    """In the real set-up, sharded over two ranks."""
    config = {"model_type": "bert"} | CONFIGS["bert"]
    model = {"config": config, "tokenizer": tokenizer_folder(tmp_path / "tokenizer")}
    with pytest.raises(AssertionError, match="not a causal language model"):
        run_ranks(scenarios.loaded_parameters, 2, tiny_run(tmp_path, model, parallel__zero=3))


def test_what_is_trained_but_never_used(tmp_path: Path) -> None:
    """A layer whose weight the model reads past its forward leaves its adapter idle: said, not passed over."""
    model = saved_model(tmp_path / "model", LLAMA)
    run = tiny_run(tmp_path, model, method="lora", train__steps=1)
    idle, fine = run_ranks(scenarios.idle_adapter, 1, run)[0]
    assert fine == ""
    assert "2 of 42 trained tensors had no part" in idle and "layers.1.mlp.down_proj.lora_A" in idle
