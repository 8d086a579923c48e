"""Applies a run's `offload` section: split masters, the offloaded share, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.config.schema import Offload, Run
from shardwise.core.errors import UserError
from shardwise.distributed.mesh import World
from shardwise.nn.models.build import store_in
from shardwise.optim.build import (
    STORED,
    check_codes,
    check_pieces,
    decay_groups,
    state_bytes,
    state_kind,
)
from shardwise.optim.codecs import Kind
from shardwise.optim.rules import rule_of
from shardwise.optim.shards import local_of
from shardwise.parallel.offload.disk import DiskFolder
from shardwise.parallel.offload.optimizer import PIECE, OffloadedOptimizer, StatePlacement
from shardwise.parallel.offload.paging import DEPTH
from shardwise.parallel.offload.parameters import ParameterOffload
from shardwise.parallel.zero.accounting import predicted_bytes
from shardwise.parallel.zero.plusplus import Float8Gathers, extra_bytes
from shardwise.parallel.zero.stages import ShardedModel

ROOM = 0.9  # share of the device's memory that offload.ratio: auto plans with, less fragmentation
EAGER = 0.65  # share of the pieces updated during backward: about backward's share of a step


def splits_masters(offload: Offload, precision: str, masters: str = "auto") -> bool:
    """Whether parameters are bf16, with the low half of their masters in the optimizer's states."""
    return (offload.optimizer != "none" or masters == "split") and precision == "bf16"


def split_in(run: Run) -> bool:
    """Whether a resolved run splits its masters."""
    return splits_masters(run.offload, run.precision, run.train.master_weights)


def is_unsharded(run: Run, world: World) -> bool:
    """Whether FSDP has nothing to do: one rank trains the bf16 weights that it computes with."""
    return world.size == 1 and _allows_unsharded(run)


def _allows_unsharded(run: Run) -> bool:
    alone = run.parallel.zero < 3 and run.offload.optimizer == "none"
    return alone and split_in(run)


def float8_gathers(run: Run, shard: int) -> Float8Gathers:
    """Whether weights that are multiplied in fp8 are gathered in fp8, over `shard` ranks."""
    parallel = run.parallel
    if run.fp8.recipe != "tensorwise" or run.fp8.gather == "bf16" or shard == 1:
        return ""
    # An fp8 weight that tensor parallelism cuts has a scale for each part: see FP8 in rules.py.
    if parallel.quantize_weights or parallel.tensor > 1 or run.offload.parameters != "none":
        return ""
    return "by unit" if split_in(run) or run.offload.optimizer != "none" else "once"


def eager_share(run: Run) -> float:
    """The share of the parameters updated during backward.

    All if requested, some if offloaded without clipping.
    """
    if run.train.optimizer_in_backward:
        return 1.0
    if run.guard.skips:
        return 0.0  # an update that may be skipped waits for all gradients
    return offloaded_share(run.offload, run.precision, run.train.max_grad_norm)


def offloaded_share(offload: Offload, precision: str, clip: float | None) -> float:
    """The share of the parameters that offload alone updates during backward."""
    return EAGER if offload.optimizer != "none" and clip is None and precision != "fp16" else 0.0


def store_in_bf16(model: nn.Module) -> None:
    """Converts the parameters of a model on `meta` to bf16; buffers are unchanged."""
    store_in(model, torch.bfloat16)


def offload_optimizer(
    run: Run,
    sharded: ShardedModel,
    device: torch.device,
    disk: DiskFolder | None,
    say: Callable[[str], None] = lambda _: None,
) -> OffloadedOptimizer:
    """The optimizer of a run, with its states off the device."""
    train = run.train
    offload = run.offload
    kind = state_kind(train)
    defaults = {"lr": train.learning_rate, "betas": train.betas, "eps": train.eps}
    ratio = 0.0 if offload.optimizer == "none" else offload.ratio
    if ratio == "auto":
        ratio = fitting_ratio(run, sharded, device, kind)
        say(f"offload.ratio: auto → {ratio:.2f} of the optimizer's states leave the device")
    parameter_disk = disk if offload.parameters == "disk" else None
    parameters = None
    if offload.parameters != "none":
        parameters = ParameterOffload(sharded.units, device, parameter_disk)
        sharded.on_update.append(parameters.renew)
    placement = StatePlacement(
        device,
        float(ratio),
        disk if offload.optimizer == "disk" else None,
        split_in(run),
        parameters,
        parameter_disk,
    )
    groups = decay_groups(sharded.parameters, train.weight_decay, train.decay_norms)
    check_codes(sharded.parameters, kind, train.optimizer)
    check_pieces(sharded.parameters, kind, train.optimizer)
    rule = rule_of(train.optimizer, train.betas)
    return OffloadedOptimizer(groups, _in_order(sharded), rule, kind, defaults, placement)


def offload_given(
    given: torch.optim.Optimizer,
    offload: Offload,
    sharded: ShardedModel,
    device: torch.device,
    disk: DiskFolder | None,
    split: bool,
) -> OffloadedOptimizer:
    """Replaces a user's optimizer that has not stepped by one with offloaded states.

    Its parameter groups stay the same.
    """
    if not _is_plain_adamw(given):
        name = type(given).__name__
        problem = f"only AdamW can be offloaded in your own loop, not {name} with these settings"
        remedy = "use AdamW, or offload.optimizer: none"
        raise UserError("config.offload.optimizer", offload.optimizer, problem, remedy)
    parameter_disk = disk if offload.parameters == "disk" else None
    parameters = None
    if offload.parameters != "none":
        # Frozen parameters are stubbed too.
        values = {p: local_of(p).clone() for p in sharded.model.parameters()}
        parameters = ParameterOffload(sharded.units, device, parameter_disk)
        for parameter, value in values.items():
            parameters.view(parameter).copy_(value)
        sharded.on_update.append(parameters.renew)
    placement = StatePlacement(
        device,
        1.0 if offload.ratio == "auto" else float(offload.ratio),
        disk if offload.optimizer == "disk" else None,
        split,
        parameters,
        parameter_disk,
    )
    rule = rule_of("adamw", (0.9, 0.999))
    return OffloadedOptimizer(
        given.param_groups, _in_order(sharded), rule, "fp32", given.defaults, placement
    )


def _is_plain_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is AdamW without variants that offload lacks."""
    if not isinstance(optimizer, torch.optim.Adam):
        return False
    for group in optimizer.param_groups:
        if not group.get("decoupled_weight_decay", True) and group["weight_decay"]:
            return False
        if group.get("amsgrad") or group.get("maximize"):
            return False
    return True


def _in_order(sharded: ShardedModel) -> dict[str, nn.Parameter]:
    """The parameters in forward order: the root's own (embedding, head) are gathered first."""
    inner: list[Any] = list(sharded.units[1:])
    blocks = {id(p) for unit in inner for p in unit.parameters()}
    return dict(sorted(sharded.parameters.items(), key=lambda item: id(item[1]) in blocks))


def held_by_place(
    run: Run, parameters: int, shard: int, frozen_bytes: int = 0
) -> dict[str, dict[str, float]]:
    """Bytes that a rank holds while gradients accumulate, by place (device, cpu, disk) and kind.

    `parameters` are the trained ones, `frozen_bytes` the size of the others. What
    `offload.ratio: auto` splits once the model is on a GPU has a place of its own: "auto".
    """
    offload = run.offload
    split = split_in(run)
    frozen = frozen_bytes / (shard if run.parallel.zero == 3 else 1)
    sharded = parameters / (shard if run.parallel.zero else 1)
    predicted = predicted_bytes(parameters, run.parallel.zero, shard, run.precision)
    if shard == 1 and run.ranks == 1 and _allows_unsharded(run):  # see is_unsharded
        accumulated = run.train.batch_size > int(run.train.micro_batch_size)
        predicted["parameters"] = 0.0
        predicted["gradients"] = (4 if accumulated else 2) * parameters
    if run.train.optimizer_in_backward:
        predicted["gradients"] = 0.0
    weights = "device" if offload.parameters == "none" else offload.parameters
    states: str = "device" if offload.optimizer == "none" else offload.optimizer
    share = 1.0  # of the states at `states`
    if states != "device":
        if offload.ratio != "auto":
            share = float(offload.ratio)
        else:
            states = "device" if run.device == "cpu" else "auto"  # see fitting_ratio
    local = shard * run.parallel.tensor if run.ranks == "auto" else int(run.ranks)
    extra = extra_bytes(run.parallel, shard, local, parameters, frozen_bytes, run.precision)
    moments = state_bytes(run.train) * sharded
    name = f"{run.train.optimizer}'s states"
    weight_bytes = 4
    weight_name = "fp32 weights"
    if split:
        moments += 2 * sharded
        name += " and half of the fp32 weights"
        weight_bytes = 2
        weight_name = "bf16 weights"
    sizes = [
        ("device", "working weights", predicted["parameters"]),
        (weights, weight_name, weight_bytes * sharded),
        (weights, "frozen weights", frozen),
        (weights, "gradients", predicted["gradients"]),
        (states, name, share * moments),
        ("device", name, (1 - share) * moments),
    ]
    sizes += [("device", kind, size) for kind, size in extra.items()]
    result: dict[str, dict[str, float]] = {}
    for place, kind, size in sizes:
        if size:
            kinds = result.setdefault(place, {})
            kinds[kind] = kinds.get(kind, 0.0) + size
    return result


def disk_bytes(run: Run, parameters: int, frozen_bytes: int = 0) -> int:
    """Bytes of the working files of all ranks together."""
    split = split_in(run)
    frozen = 0
    per_parameter = 0.0
    if run.offload.optimizer == "disk":
        per_parameter += state_bytes(run.train) + 2 * split
    if run.offload.parameters == "disk":
        per_parameter += (2 if split else 4) + 4  # with gradients
        frozen = frozen_bytes
    return int(per_parameter * parameters + frozen)


def fitting_ratio(run: Run, sharded: ShardedModel, device: torch.device, kind: Kind) -> float:
    """The least share of the states to offload, by an estimate of a step's other memory."""
    if device.type != "cuda":
        return 0.0  # host memory is the device's own
    elements = sum(local_of(p).numel() for p in sharded.parameters.values())
    rule = rule_of(run.train.optimizer, run.train.betas)
    state = STORED[kind] * len(rule.states) + 2 * split_in(run)
    micro = int(run.train.micro_batch_size)
    gradients = 4 * elements
    if run.train.optimizer_in_backward:
        gradients = 0
    elif sharded.mesh.size() == 1 and micro >= run.train.batch_size and split_in(run):
        gradients = 2 * elements  # bf16: nothing is summed
    rings = (DEPTH * state + 24) * PIECE["cuda"]
    used = torch.cuda.memory_allocated(device) + gradients + rings + activation_bytes(run, sharded)
    room = ROOM * torch.cuda.get_device_properties(device).total_memory - used
    return min(1.0, max(0.0, 1 - room / (state * elements)))


def activation_bytes(run: Run, sharded: ShardedModel) -> float:
    """An estimate for the activations of one micro-batch, with logits and one gathered block."""
    config: Any = sharded.model.config.get_text_config()  # type: ignore[operator, union-attr]
    tokens = int(run.train.micro_batch_size) * run.data.sequence_length
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    block = tokens * (16 * config.hidden_size + 6 * inner)
    layers = config.num_hidden_layers
    recomputed = 0
    if run.recompute == "full":
        recomputed = min(layers, run.recompute_blocks or layers)
    blocks = (layers - recomputed + 2) * block + recomputed * 2 * tokens * config.hidden_size
    units: list[Any] = sharded.units[1:] or sharded.units
    largest = max(sum(p.numel() for p in unit.parameters()) for unit in units)
    return float(blocks + 14 * tokens * config.vocab_size + 12 * largest)
