"""What the ranks of a pipeline do in tests/parallel/test_pipeline.py."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch.distributed._composable import checkpoint as recompute
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from transformers import AutoModelForCausalLM

from shardwise.data.documents import Documents
from shardwise.foresight.zoo.run import tiny_case
from shardwise.nn.attention.document_mask import RowsMask
from shardwise.nn.attention.varlen import install
from shardwise.nn.models.build import materialise
from shardwise.nn.tiny.case import (
    CannotParallelize,
    Deviation,
    LossAndGradients,
    TinyCase,
    gradients_of,
    judge,
    mean_loss,
    units_of,
)
from shardwise.parallel.pipeline import Pipeline, Schedule, Stages, bubble, cut_model, picture, probe
from shardwise.parallel.tiny_reference import alone
from shardwise.parallel.zero.stages import ShardedModel, shard_model

CPU = torch.device("cpu")


def micro_batches_of(case: TinyCase, micros: int) -> list[dict[str, Any]]:
    """The rows of a case, divided; each knows the labels of all."""
    labels = case.labels()
    tensors = case.inputs() | {"labels": labels}
    parts = {name: value.tensor_split(micros) for name, value in tensors.items()}
    return [{name: values[i] for name, values in parts.items()} | {"units": units_of(labels)} for i in range(micros)]


def compute(model: Any, micro: dict[str, Any]) -> torch.Tensor:
    """A micro-batch's part of the mean loss."""
    inputs = {name: value for name, value in micro.items() if name not in ("labels", "units")}
    return mean_loss(model(**inputs, use_cache=False).logits, micro["labels"], micro["units"])


def gathered(stages: Stages, results: list[torch.Tensor], group: dist.ProcessGroup) -> LossAndGradients:
    """The loss and the gradients of all stages, on every rank."""
    gradients = gradients_of(stages.model)
    own = {name: gradient for name, gradient in gradients.items() if stages.owners[name][0] == stages.rank}
    parts: list[Any] = [None] * stages.ranks
    dist.all_gather_object(parts, (sum(result.item() for result in results), own), group=group)
    return LossAndGradients(
        sum(loss for loss, _ in parts), {name: gradient for _, part in parts for name, gradient in part.items()}
    )


def by_schedules(kinds: list[tuple[str, Any]], schedules: list[tuple[str, int]], count: int) -> dict[Any, Deviation]:
    """Every model by every schedule, against one process."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    found = {}
    for kind, task in kinds:
        case = tiny_case(kind, task)
        wanted, facts, micros = alone(case), probe(case), micro_batches_of(case, count)
        for style, chunks in schedules:
            schedule, model = Schedule(style, chunks), case.model()  # type: ignore[arg-type]
            cut = cut_model(model, facts, ranks * chunks)
            stages = Stages(model, cut, dist.get_rank(), ranks, schedule)
            results = Pipeline(stages, group, schedule, CPU).step(micros, compute, lambda loss: loss)
            stages.sum_shared_gradients()
            found[kind, style, chunks] = judge(gathered(stages, results, group), wanted)
    return found


def with_shards(kind: str, cases: list[tuple[str, int, int, bool]]) -> dict[Any, Deviation]:
    """Two stages, each sharded over the other ranks: (style, chunks, ZeRO stage, recomputation)."""
    ranks = dist.get_world_size()
    width = ranks // 2
    case = tiny_case(kind, "causal")
    wanted, facts = alone(case), probe(case)
    found = {}
    for style, chunks, zero, again in cases:
        data, axis = ((1, width), "shard") if zero else ((width, 1), "replicate")
        mesh = init_device_mesh("cpu", (2, *data), mesh_dim_names=("pipeline", "replicate", "shard"))
        place = mesh.get_local_rank(axis)
        schedule = Schedule(style, chunks)  # type: ignore[arg-type]
        model = case.model()
        stages = Stages(model, cut_model(model, facts, 2 * chunks), mesh.get_local_rank("pipeline"), 2, schedule)
        if again:
            for _, block in stages.blocks:
                recompute(block)
        data_mesh = mesh["replicate", "shard"]
        shard_model(model, stages.blocks, data_mesh, zero, "fp32")
        sharded = ShardedModel(model, zero, data_mesh)
        pipeline = Pipeline(stages, mesh.get_group("pipeline"), schedule, CPU)
        mine = micro_batches_of(case, 4)[place::width]
        for _ in range(2):  # what is left over from a step would show in the next
            model.zero_grad()
            results = pipeline.step(mine, compute, lambda loss: loss * width, told(sharded))
            stages.sum_shared_gradients()
        answer = gathered(stages, results, mesh.get_group("pipeline"))
        losses = [None] * width
        dist.all_gather_object(losses, answer.loss, group=mesh.get_group(axis))
        found[style, zero, again] = judge(LossAndGradients(sum(losses), answer.gradients), wanted)
    return found


def told(sharded: ShardedModel) -> Any:
    return lambda chunk, last: sharded.prepare_micro_batch(last)


def packed() -> tuple[Deviation, int]:
    """Documents of different lengths in rows of different widths, with the mask that is no tensor; a step of fewer
    micro-batches than stages after it."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    case = tiny_case("llama", "causal")
    micros = [_packed(case, lengths) for lengths in ([[5, 3], [8]], [[4, 4, 4], [12]], [[2, 6], [7]])]
    units = sum(units_of(micro["labels"]) for micro in micros)
    whole = case.model()
    install(whole)
    total = sum(_packed_loss(whole, micro) / units for micro in micros)
    total.backward()
    schedule, model = Schedule("1f1b"), case.model()
    stages = Stages(model, cut_model(model, probe(case), ranks), dist.get_rank(), ranks, schedule)
    pipeline = Pipeline(stages, group, schedule, CPU)
    results = pipeline.step(micros, _packed_loss, lambda loss: loss / units)
    answer = gathered(stages, [r / units for r in results], group)
    return judge(answer, LossAndGradients(total.item(), gradients_of(whole))), len(pipeline._known)


def _packed(case: TinyCase, lengths: list[list[int]]) -> dict[str, Any]:
    documents = Documents.of_lengths(lengths)
    rows, width = documents.rows, documents.width
    return case.inputs(rows, width) | {
        "labels": case.labels(rows, width), "attention_mask": RowsMask(documents), "position_ids": documents.positions,
    }  # fmt: skip


def _packed_loss(model: Any, micro: dict[str, Any]) -> torch.Tensor:
    inputs = {name: value for name, value in micro.items() if name != "labels"}
    return mean_loss(model(**inputs, use_cache=False).logits, micro["labels"], 1)


def other_uses() -> dict[str, Any]:
    """Fewer micro-batches than stages, evaluation, logits, and what must not work."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    case, schedule = tiny_case("gpt2", "causal"), Schedule("1f1b")
    model, whole = case.model(), case.model()
    stages = Stages(model, cut_model(model, probe(case), ranks), rank, ranks, schedule)
    pipeline = Pipeline(stages, group, schedule, CPU)
    micros = micro_batches_of(case, 1)
    results = pipeline.step(micros, compute, lambda loss: loss)
    stages.sum_shared_gradients()
    verdict = judge(gathered(stages, results, group), alone(case))
    evaluated = pipeline.evaluate(micro_batches_of(case, 4), compute)
    with torch.no_grad():
        apart = (pipeline.logits(**case.inputs()) - whole(**case.inputs()).logits).abs().max()
    try:
        model(**case.inputs())
        alone_error = ""
    except RuntimeError as error:
        alone_error = str(error)
    return {
        "verdict": verdict, "evaluated": sum(e.item() for e in evaluated), "apart": float(apart), "error": alone_error,
        "loss": alone(case).loss,
        "names": sorted(n for n, _ in model.named_parameters()), "owners": stages.owners,
        "whole": sorted(n for n, _ in whole.named_parameters()),
    }  # fmt: skip


def idle() -> tuple[float, float, str]:
    """The measured share of idle time of a pipeline and of ranks that take turns, where a forward takes long."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    case = tiny_case("gpt2", "causal")
    facts, micros = probe(case), micro_batches_of(case, 4)
    shares, drawn = [], ""
    for schedule in (Schedule("1f1b"), Schedule("naive")):
        model = case.model()
        stages = Stages(model, cut_model(model, facts, ranks), dist.get_rank(), ranks, schedule)
        pipeline = Pipeline(stages, group, schedule, CPU)
        pipeline.record = True
        for some in (micros[:1], micros):  # the first step has shapes to tell
            pipeline.step(some, _slowly, lambda loss: loss)
        spans = pipeline.all_spans()
        shares.append(bubble(spans, ranks))
        drawn = picture(spans, ranks)
    return shares[0], shares[1], drawn


def _slowly(model: Any, micro: dict[str, Any]) -> torch.Tensor:
    time.sleep(0.2)
    return compute(model, micro)


def refusals() -> list[str]:
    """What zero-bubble schedules cannot do with sharding."""
    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("pipeline", "replicate", "shard"))
    case, schedule, told = tiny_case("gpt2", "causal"), Schedule("zbv", 2), []
    facts = probe(case)
    for zero, again in ((3, False), (2, True)):
        model = case.model()
        stages = Stages(model, cut_model(model, facts, 4), dist.get_rank(), 2, schedule)
        pipeline = Pipeline(stages, mesh.get_group("pipeline"), schedule, CPU)
        if again:
            for _, block in stages.blocks:
                recompute(block)
        shard_model(model, stages.blocks, mesh["replicate", "shard"], zero, "fp32")
        try:
            pipeline.step(micro_batches_of(case, 2), compute, lambda loss: loss)
        except CannotParallelize as refusal:
            told.append(str(refusal))
    return told


def divided() -> Deviation:
    """Two stages of two ranks among which the positions between blocks are divided, as under tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    case, schedule, tensor = tiny_case("llama", "causal"), Schedule("1f1b"), mesh["tensor"]
    model = case.model()
    model.set_attn_implementation("eager")  # DTensor has no rule for the CPU's kernel
    stages = Stages(model, cut_model(model, probe(case), 2), mesh.get_local_rank("pipeline"), 2, schedule)
    pipeline = Pipeline(stages, mesh.get_group("pipeline"), schedule, CPU, [tensor])
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                whole = DTensor.from_local(parameter.detach(), tensor, [Replicate()], run_check=False)
                module._parameters[name] = torch.nn.Parameter(whole)
    for _, block in stages.blocks:
        block.register_forward_pre_hook(lambda _, args: (_placed(args[0], tensor, Replicate()), *args[1:]))
        block.register_forward_hook(lambda _, __, output: _placed(output, tensor, Shard(1)))
    # torch 2.11 computes no linear layer of positions that are divided; in a run the head gathers them itself.
    model.lm_head.register_forward_pre_hook(lambda _, args: (_placed(args[0], tensor, Replicate()),))
    with implicit_replication():
        results = pipeline.step(micro_batches_of(case, 2), _divided_loss, lambda loss: loss)
    ports = [port for ports in pipeline._known.values() for port in ports]
    assert [port.layout.placements for port in ports if port.layout] == [(Shard(1),)] * len(ports) and ports
    return judge(gathered(stages, results, mesh.get_group("pipeline")), alone(case))


def _placed(x: torch.Tensor, mesh: Any, where: Any) -> DTensor:
    return (x if isinstance(x, DTensor) else distribute_tensor(x, mesh)).redistribute(placements=[where])


def _divided_loss(model: Any, micro: dict[str, Any]) -> torch.Tensor:
    logits = model(input_ids=micro["input_ids"], use_cache=False).logits.full_tensor()
    return mean_loss(logits, micro["labels"], micro["units"])


def from_meta() -> tuple[float, float, list[str]]:
    """A deeper model than the one that was probed, made on `meta`, sharded and computed in bf16, as in a run."""
    ranks, schedule = dist.get_world_size(), Schedule("1f1b")
    mesh = init_device_mesh("cpu", (ranks, 1, 1), mesh_dim_names=("pipeline", "replicate", "shard"))
    tiny = tiny_case("llama", "causal")
    config = type(tiny.config)(**{**tiny.config.to_dict(), "num_hidden_layers": 7})
    case = TinyCase(config, "causal", dtype=torch.float32)
    whole = case.model()
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config)
    cut = cut_model(model, probe(tiny), ranks)
    stages = Stages(model, cut, dist.get_rank(), ranks, schedule, torch.bfloat16)
    shard_model(model, stages.blocks, mesh["replicate", "shard"], 3, "bf16")
    materialise(model, CPU)
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.train().named_parameters():
            parameter.to_local().copy_(values[name])
    pipeline = Pipeline(stages, mesh.get_group("pipeline"), schedule, CPU)
    with torch.backends.mkldnn.flags(enabled=False):  # its bf16 matmuls crash on some CPUs
        results = pipeline.step(micro_batches_of(case, 2), compute, lambda loss: loss)
    answer, wanted = gathered(stages, results, mesh.get_group("pipeline")), alone(case)
    errors = [
        float((answer.gradients[name].float() - gradient).norm() / gradient.norm())
        for name, gradient in wanted.gradients.items()
    ]
    return abs(answer.loss - wanted.loss), max(errors), [name for name, _ in model.named_parameters()]
