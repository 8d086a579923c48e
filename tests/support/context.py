"""What ranks do in the tests of context parallelism; each function runs on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise.data.documents import Documents
from shardwise.data.loader import MicroBatch
from shardwise.foresight.zoo.run import tiny_case
from shardwise.nn.models.build import find_blocks
from shardwise.nn.tiny.case import LossAndGradients, TinyCase, gradients_of, judge, mean_loss, units_of
from shardwise.parallel.context.install import Context, apply_context_parallel
from shardwise.parallel.tiny_reference import alone
from support.trial import along

LENGTHS = [[13, 3, 7], [21], [2, 17]]  # a width that ranks do not divide; windows of tiny models are 8 long


def mesh_of(ranks: int) -> Any:
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("context",))


def families(names: list[str], task: Any, kinds: list[Any]) -> dict[str, str]:
    """What differs from one process, by family and kind."""
    wrong = {}
    for name in names:
        for kind in kinds:
            verdict = along("context", tiny_case(name, task), context_kind=kind)
            if not verdict.right:
                wrong[f"{name} {kind}"] = str(verdict)
    return wrong


def packed_batch(case: TinyCase) -> MicroBatch:
    """Documents of LENGTHS in rows; nothing is predicted across them."""
    documents = Documents.of_lengths(LENGTHS)
    ids, labels = case.inputs(3, 23)["input_ids"], case.labels(3, 23).clone()
    labels[:, :-1][documents.positions[:, 1:] == 0] = -100
    labels[~_real(documents)] = -100
    return MicroBatch(ids, labels, documents.positions, None, documents=documents)


def _real(documents: Documents) -> torch.Tensor:
    lengths = torch.tensor([sum(row) for row in LENGTHS])
    return torch.arange(documents.width) < lengths[:, None]


def one_at_a_time(case: TinyCase, batch: MicroBatch) -> LossAndGradients:
    """One process, one document after the other."""
    model, documents = case.model(), batch.documents
    assert documents is not None
    units, total = units_of(batch.labels), torch.zeros((), dtype=case.dtype)
    ids, labels = (x.flatten().split(documents.lengths) for x in (batch.input_ids, batch.labels))
    for piece, wanted in zip(ids, labels, strict=True):
        total = total + mean_loss(model(input_ids=piece[None], use_cache=False).logits, wanted[None], units)
    total.backward()
    return LossAndGradients(total.item(), gradients_of(model))


def inputs_of(part: MicroBatch) -> dict[str, Any]:
    """What the model's forward takes of a rank's part."""
    positions = {} if part.position_ids is None else {"position_ids": part.position_ids}
    return {"input_ids": part.input_ids, "attention_mask": part.attention_mask, "use_cache": False, **positions}


def divided(model: Any, context: Context, batch: MicroBatch, mesh: Any) -> LossAndGradients:
    """The same divided over ranks."""
    part = context.split(batch)
    loss = mean_loss(model(**inputs_of(part)).logits, part.labels, units_of(batch.labels))
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(parameter.grad)
    return LossAndGradients(total.item(), gradients_of(model))


def packed(names: list[str], kinds: list[Any], recomputed: bool) -> dict[str, str]:
    """What differs from one document at a time, by family and kind."""
    from torch.distributed._composable import checkpoint

    mesh, wrong = mesh_of(dist.get_world_size()), {}
    for name in names:
        case = tiny_case(name, "causal")
        batch = packed_batch(case)
        wanted = one_at_a_time(case, batch)
        for kind in kinds:
            model = case.model()
            context = apply_context_parallel(model, mesh, kind)
            for _, block in find_blocks(model) if recomputed else []:
                checkpoint(block)
            verdict = judge(divided(model, context, batch, mesh), wanted)
            if not verdict.right:
                wrong[f"{name} {kind}"] = str(verdict)
    return wrong


def padded() -> str:
    """Rows of different lengths with a mask of ones and zeros, against the same rows in one process."""
    case, mesh = tiny_case("qwen3", "causal"), mesh_of(dist.get_world_size())
    ids, labels = case.inputs(3, 23)["input_ids"], case.labels(3, 23).clone()
    mask = torch.arange(23) < torch.tensor([23, 9, 14])[:, None]
    labels[~mask] = -100
    model = case.model()
    loss = mean_loss(model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits, labels, units_of(labels))
    loss.backward()
    wanted = LossAndGradients(loss.item(), gradients_of(model))
    model = case.model()
    context = apply_context_parallel(model, mesh, "ring")
    verdict = judge(divided(model, context, MicroBatch(ids, labels, None, mask.long()), mesh), wanted)
    return "" if verdict.right else str(verdict)


def growing_rotation() -> str:
    """LongRoPE, whose frequencies hang on the longest position of the batch."""
    case = tiny_case("phi3", "causal")
    config = case.config
    half = config.hidden_size // config.num_attention_heads // 2
    factors = {"short_factor": [1.0] * half, "long_factor": [3.0] * half}
    long = {"rope_type": "longrope", "original_max_position_embeddings": 14}
    config.rope_parameters = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, **long, **factors}
    config.original_max_position_embeddings = 14  # rank 1's part of 16 ends at 12
    verdict = along("context", case)
    return "" if verdict.right else str(verdict)


def wire_bytes(kind: Any) -> tuple[float, dict[str, list[int]], dict[str, int]]:
    """A step of tiny llama: gradients' distance, bytes this rank sent by direction, and the sizes they follow from."""
    from shardwise.parallel.context import ring, ulysses

    case, mesh = tiny_case("llama", "causal"), mesh_of(dist.get_world_size())
    case.config.num_key_value_heads = 2
    sent: dict[str, list[int]] = {"forward": [], "backward": []}
    now = "forward"
    pass_on, exchange = dist.batch_isend_irecv, dist.all_to_all_single

    def count_ring(operations: list[Any]) -> Any:
        sent[now] += [o.tensor.nbytes for o in operations if o.op is dist.isend]
        return pass_on(operations)

    def count_exchange(arriving: torch.Tensor, leaving: torch.Tensor, **kwargs: Any) -> Any:
        sent[now].append(leaving.nbytes)
        return exchange(arriving, leaving, **kwargs)

    ring.dist.batch_isend_irecv, ulysses.dist.all_to_all_single = count_ring, count_exchange
    model = case.model()
    context = apply_context_parallel(model, mesh, kind)
    labels = case.labels()
    part = context.split(MicroBatch(case.inputs()["input_ids"], labels, None, None))
    loss = mean_loss(model(**inputs_of(part)).logits, part.labels, units_of(labels))
    now = "backward"
    loss.backward()
    ring.dist.batch_isend_irecv, ulysses.dist.all_to_all_single = pass_on, exchange
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    wanted = alone(case)
    apart = judge(LossAndGradients(wanted.loss, gradients_of(model)), wanted).gradient
    config = model.config
    token = config.head_dim * 8 * part.input_ids.numel()  # one head of this rank's part
    sizes = {
        "layers": config.num_hidden_layers, "queries": config.num_attention_heads * token,
        "keys": config.num_key_value_heads * token,
    }  # fmt: skip
    return apart, sent, sizes


def refusal(name: str, task: Any = "causal") -> str:
    """What is said of a family that cannot be divided."""
    from shardwise.nn.tiny.case import CannotParallelize

    try:
        apply_context_parallel(tiny_case(name, task).model(), mesh_of(dist.get_world_size()))
    except CannotParallelize as refused:
        return str(refused)
    return ""


def sharded(names: list[str]) -> dict[str, str]:
    """What differs under FSDP over the same ranks, which averages, with blocks recomputed; and whole batches after."""
    from torch.distributed._composable import checkpoint
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size()
    mesh, wrong = mesh_of(ranks), {}
    for name in names:
        case = tiny_case(name, "causal")
        wanted, labels = alone(case), case.labels()
        model = case.model()
        context = apply_context_parallel(model, mesh, "ring")
        for _, block in find_blocks(model):
            checkpoint(block)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        part = context.split(MicroBatch(case.inputs()["input_ids"], labels, None, None))
        loss = mean_loss(model(**inputs_of(part)).logits, part.labels, units_of(labels))
        (loss * ranks).backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        verdict = judge(LossAndGradients(total.item(), gradients_of(model)), wanted)
        whole = mean_loss(model(**case.inputs(), use_cache=False).logits, labels, units_of(labels))
        if not verdict.right or abs(whole.item() - wanted.loss) > 1e-6:
            wrong[name] = f"{verdict}, undivided {whole.item()} for {wanted.loss}"
    return wrong
