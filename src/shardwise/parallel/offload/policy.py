"""What a run's `offload` section means: which masters are split, how much stays, and the optimizer built so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.config.schema import Offload, Run
from shardwise.core.errors import UserError
from shardwise.distributed.mesh import World
from shardwise.nn.models.build import store_in
from shardwise.optim.build import STORED, decay_groups, state_bytes, state_kind
from shardwise.optim.codecs import Kind
from shardwise.optim.rules import rule_of
from shardwise.optim.shards import local_of
from shardwise.parallel.offload.disk import DiskFolder
from shardwise.parallel.offload.optimizer import PIECE, OffloadedOptimizer
from shardwise.parallel.offload.paging import DEPTH
from shardwise.parallel.offload.parameters import ParameterOffload
from shardwise.parallel.zero.accounting import predicted_bytes
from shardwise.parallel.zero.plusplus import Float8Gathers, held_besides
from shardwise.parallel.zero.stages import ShardedModel

ROOM = 0.9  # of the device's memory that offload.ratio: auto plans with; the rest is for fragments
EAGER = (
    0.65  # share of the pieces that is updated during backward: about its share of a step's time
)


def splits_masters(offload: Offload, precision: str, masters: str = "auto") -> bool:
    """Whether parameters are kept in bf16 with the low half of their masters among the optimizer's states."""
    return (offload.optimizer != "none" or masters == "split") and precision == "bf16"


def split_in(run: Run) -> bool:
    """The same for a resolved run."""
    return splits_masters(run.offload, run.precision, run.train.master_weights)


def keeps_whole(run: Run, world: World) -> bool:
    """Whether FSDP has nothing to do: one rank, whose bf16 weights are what is trained, gathered from nowhere."""
    return world.size == 1 and _stays_whole(run)


def _stays_whole(run: Run) -> bool:
    stays = (
        run.parallel.zero < 3 and not run.parallel.beyond_data and run.offload.optimizer == "none"
    )
    return stays and split_in(run)


def float8_gathers(run: Run, shard: int) -> Float8Gathers:
    """Whether weights that are multiplied in fp8 are gathered so, over a group of `shard` ranks."""
    fp8, parallel = run.fp8, run.parallel
    wanted = fp8.recipe == "tensorwise" and fp8.gather != "bf16" and shard > 1
    if (
        not wanted
        or parallel.quantize_weights
        or parallel.beyond_data
        or run.offload.parameters != "none"
    ):
        return ""
    return "by unit" if split_in(run) or run.offload.optimizer != "none" else "once"


def eager_share(run: Run) -> float:
    """The share of the parameters updated during backward: all if asked for, some if offloaded without clipping."""
    if run.train.optimizer_in_backward:
        return 1.0
    if run.guard.skips:
        return 0.0  # an update that may be left out waits for all gradients
    return offloaded_share(run.offload, run.precision, run.train.max_grad_norm)


def offloaded_share(offload: Offload, precision: str, clip: float | None) -> float:
    """The share that offload alone lets be updated during backward."""
    return EAGER if offload.optimizer != "none" and clip is None and precision != "fp16" else 0.0


def store_in_bf16(model: nn.Module) -> None:
    """Turns the parameters of a model on `meta` into bf16 ones; buffers stay as they are."""
    store_in(model, torch.bfloat16)


def offload_optimizer(
    run: Run,
    sharded: ShardedModel,
    device: torch.device,
    disk: DiskFolder | None,
    say: Callable[[str], None] = lambda _: None,
) -> OffloadedOptimizer:
    """The optimizer that a run asks for, with its states off the device."""
    train = run.train
    kind = state_kind(train)
    defaults = {"lr": train.learning_rate, "betas": train.betas, "eps": train.eps}
    ratio = 0.0 if run.offload.optimizer == "none" else run.offload.ratio
    if ratio == "auto":
        ratio = fitting_ratio(run, sharded, device, kind)
        say(f"offload.ratio: auto → {ratio:.2f} of the optimizer's states leave the device")
    offload = run.offload
    on_disk = disk if offload.parameters == "disk" else None
    shelf = (
        ParameterOffload(sharded.units, device, on_disk) if offload.parameters != "none" else None
    )
    if shelf is not None:
        sharded.on_update.append(shelf.renew)
    groups = decay_groups(sharded.parameters, train.weight_decay, train.decay_norms)
    return OffloadedOptimizer(
        groups, _in_order(sharded), rule_of(train.optimizer, train.betas), kind, defaults, device, float(ratio),
        disk if offload.optimizer == "disk" else None, split_in(run), shelf, on_disk,
    )  # fmt: skip


def offload_given(
    given: torch.optim.Optimizer,
    offload: Offload,
    sharded: ShardedModel,
    device: torch.device,
    disk: DiskFolder | None,
    split: bool,
) -> OffloadedOptimizer:
    """An optimizer of the user's own that has not stepped, with its states off the device; its groups are kept."""
    decoupled = all(
        g.get("decoupled_weight_decay", True) or not g["weight_decay"] for g in given.param_groups
    )
    plain = not any(g.get("amsgrad") or g.get("maximize") for g in given.param_groups)
    if not (isinstance(given, torch.optim.Adam) and decoupled and plain):
        problem = f"only AdamW can be offloaded in your own loop, not {type(given).__name__} with these settings"
        raise UserError(
            "config.offload.optimizer",
            offload.optimizer,
            problem,
            "use AdamW, or offload.optimizer: none",
        )
    on_disk = disk if offload.parameters == "disk" else None
    shelf = None
    if offload.parameters != "none":
        values = {
            p: local_of(p).clone() for p in sharded.model.parameters()
        }  # frozen ones are stubbed too
        shelf = ParameterOffload(sharded.units, device, on_disk)
        for parameter, value in values.items():
            shelf.view(parameter).copy_(value)
        sharded.on_update.append(shelf.renew)
    return OffloadedOptimizer(
        given.param_groups, _in_order(sharded), rule_of("adamw", (0.9, 0.999)), "fp32", given.defaults, device,
        1.0 if offload.ratio == "auto" else float(offload.ratio), disk if offload.optimizer == "disk" else None, split,
        shelf, on_disk,
    )  # fmt: skip


def _in_order(sharded: ShardedModel) -> dict[str, nn.Parameter]:
    """The parameters in the order of the forward, the root's own (embedding, head), gathered at its start, first."""
    inner: list[Any] = list(sharded.units[1:])
    blocks = {id(p) for unit in inner for p in unit.parameters()}
    return dict(sorted(sharded.parameters.items(), key=lambda item: id(item[1]) in blocks))


def held_by_place(
    run: Run, parameters: int, shard: int, frozen_bytes: int = 0
) -> dict[str, dict[str, float]]:
    """By place (device, cpu, disk) and kind, the bytes that a rank holds while gradients are accumulated.

    `parameters` are the trained ones, `frozen_bytes` what the others take. What `offload.ratio: auto` will divide once
    the model is on a GPU has a place of its own: "auto".
    """
    frozen = frozen_bytes / (shard if run.parallel.zero == 3 else 1)
    divided = parameters / (shard if run.parallel.zero else 1)
    split, offload = split_in(run), run.offload
    predicted = predicted_bytes(parameters, run.parallel.zero, shard, run.precision)
    if shard == 1 and run.ranks == 1 and _stays_whole(run):
        summed = run.train.batch_size > int(run.train.micro_batch_size)
        predicted |= {
            "parameters": 0.0,
            "gradients": (4 if summed else 2) * parameters,
        }  # see keeps_whole
    weights = "device" if offload.parameters == "none" else offload.parameters
    states = "device" if offload.optimizer == "none" else offload.optimizer
    open_yet = offload.ratio == "auto" and states != "device"
    if open_yet and run.device == "cpu":
        states, open_yet = "device", False  # see fitting_ratio
    share = 1.0 if open_yet or states == "device" else float(offload.ratio)
    local = shard if run.ranks == "auto" else int(run.ranks)
    besides = held_besides(run.parallel, shard, local, parameters, frozen_bytes, run.precision)
    moments = state_bytes(run.train) * divided + (2 * divided if split else 0.0)
    name = f"{run.train.optimizer}'s states" + (" and half of the fp32 weights" if split else "")
    entries = [
        ("device", "working weights", predicted["parameters"]),
        (weights, "bf16 weights" if split else "fp32 weights", (2 if split else 4) * divided),
        (weights, "frozen weights", frozen),
        (weights, "gradients", 0.0 if run.train.optimizer_in_backward else predicted["gradients"]),
        ("auto" if open_yet else states, name, share * moments),
        ("device", name, (1 - share) * moments),
        *(("device", kind, size) for kind, size in besides.items()),
    ]
    found: dict[str, dict[str, float]] = {}
    for place, kind, size in entries:
        if size:
            found.setdefault(place, {}).setdefault(kind, 0.0)
            found[place][kind] += size
    return found


def disk_bytes(run: Run, parameters: int, frozen_bytes: int = 0) -> int:
    """What the working files of all ranks take together."""
    each, frozen = 0.0, frozen_bytes if run.offload.parameters == "disk" else 0
    if run.offload.optimizer == "disk":
        each += state_bytes(run.train) + 2 * split_in(run)
    if run.offload.parameters == "disk":
        each += (2 if split_in(run) else 4) + 4  # the gradients are with them
    return int(each * parameters + frozen)


def fitting_ratio(run: Run, sharded: ShardedModel, device: torch.device, kind: Kind) -> float:
    """The least share of the states that must leave the device, by an estimate of what a step needs besides them."""
    if device.type != "cuda":
        return 0.0  # host memory is the device's own
    elements = sum(local_of(p).numel() for p in sharded.parameters.values())
    rule = rule_of(run.train.optimizer, run.train.betas)
    state = STORED[kind] * len(rule.states) + 2 * split_in(run)
    micro = int(run.train.micro_batch_size)
    lean = sharded.mesh.size() == 1 and micro >= run.train.batch_size and split_in(run)
    gradients = (0 if run.train.optimizer_in_backward else 2 if lean else 4) * elements
    rings = (DEPTH * state + 24) * PIECE["cuda"]
    used = torch.cuda.memory_allocated(device) + gradients + rings + activation_bytes(run, sharded)
    room = ROOM * torch.cuda.get_device_properties(device).total_memory - used
    return min(1.0, max(0.0, 1 - room / (state * elements)))


def activation_bytes(run: Run, sharded: ShardedModel) -> float:
    """About what the activations of one micro-batch take, logits and one gathered block included."""
    config: Any = sharded.model.config.get_text_config()  # type: ignore[operator, union-attr]
    tokens = int(run.train.micro_batch_size) * run.data.sequence_length
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    block = tokens * (16 * config.hidden_size + 6 * inner)
    layers = config.num_hidden_layers
    again = min(layers, run.recompute_blocks or layers) if run.recompute == "full" else 0
    blocks = (layers - again) * block + again * 2 * tokens * config.hidden_size + 2 * block
    largest = max(
        sum(p.numel() for p in unit.parameters(recurse=True))
        for unit in sharded.units[1:] or sharded.units
    )  # type: ignore[attr-defined]
    return float(blocks + 14 * tokens * config.vocab_size + 12 * largest)
