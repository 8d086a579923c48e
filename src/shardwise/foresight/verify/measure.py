"""One rank of a claim: the run's own code for two steps, held against the reference's answer.

Every rank looks for itself, for a gradient that was not summed is wrong on some ranks and may be right on others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.config.load import LoadedRun
from shardwise.config.schema import Run
from shardwise.distributed.mesh import init_world
from shardwise.foresight.prepare import prepare_run
from shardwise.foresight.verify.compare import (
    Bounds,
    ParityDifference,
    Reference,
    gradient_apart,
    relative,
    update_apart,
    write_reference,
)
from shardwise.optim.schedules import set_rates
from shardwise.parallel.offload.checkpoint_entries import masters
from shardwise.parallel.offload.disk import DiskFolder
from shardwise.parallel.offload.optimizer import OffloadedOptimizer
from shardwise.train import loop
from shardwise.train.session import agree_on_units
from shardwise.train.setup import TrainState, build_state
from shardwise.train.status import Status

STEPS = 2


def measure(work: dict[str, Any]) -> dict[str, Any]:
    """What this rank's answer is off by; without a reference to compare with, its answer becomes one."""
    job = prepare_run(LoadedRun(Run.model_validate(work["run"])))
    world = init_world(job.run)
    notes: list[str] = []
    with DiskFolder(job.offload_folder, world.rank, world.size) as disk:
        state = build_state(job, world, Status(None), notes.append if world.is_main else lambda _: None, disk)
        if work["against"] is None:
            return _own_answer(state, Path(work["answer"])) | {"notes": notes}
        reference = Reference(Path(work["against"]))
        difference, names = _compare(state, reference, Bounds(**work["bounds"]))
    return {"difference": asdict(difference), "names": names, "notes": notes}


def _compare(state: TrainState, reference: Reference, bounds: Bounds) -> tuple[ParityDifference, list[str]]:
    told, wanted = reference.told, set(reference.names)
    loss, norm, after = 0.0, 0.0, None
    worst, gradient, first, moved, update = "", -1.0, "", "", -1.0
    names: list[str] = []
    for step in range(STEPS):
        found = _forward_and_backward(state, step)
        if step == 0:
            loss = abs(found - told["loss"])
            for name, ours in gradients_of(state):
                names.append(name)
                # One that the reference does not train must not be there; it trains all that ours does.
                theirs = reference.gradient(name) if name in wanted else None
                apart = float("inf") if theirs is None else gradient_apart(ours, theirs, told["largest"])
                first = first or (name if not apart <= bounds.gradient else "")
                if not apart <= gradient:
                    worst, gradient = name, apart
        elif "after" in told:
            after = abs(found - told["after"])
        total = float(state.update())
        if step == 0:
            norm = relative(total, told["norm"])
            if bounds.update is not None:
                for name, apart in _biases_apart(state, reference):
                    if not apart <= update:
                        moved, update = name, apart
            if bounds.update is not None and "after" in told:
                rate = state.job.run.train.learning_rate
                for name, ours in parameters_of(state):
                    if name in wanted:
                        theirs, slope = reference.parameter(name), reference.gradient(name)
                        apart = update_apart(ours, theirs, slope, rate, told["largest"])
                        if not apart <= update:
                            moved, update = name, apart
    names = names or list(state.sharded.parameters)
    looked = gradient >= 0
    return ParityDifference(
        _finite(loss), _finite(norm), gradient if looked else None, worst, update if update >= 0 else None, moved,
        after if after is None else _finite(after), first,
    ), names  # fmt: skip


def _biases_apart(state: TrainState, reference: Reference) -> Iterator[tuple[str, float]]:
    """How far each bias of the layers that this rank has is off, as a share of what a step moves it by."""
    own, rate = dict(state.sharded.model.named_buffers()), state.job.run.router.bias_update
    for name in reference.told.get("biases", ()):
        if name in own:
            off = float((own[name].float().cpu() - reference.parameter(name)).abs().max())
            yield name, off / (float(rate) if rate != "auto" and rate else 1e-3)


def _finite(value: float) -> float:
    return value if value == value else float("inf")


def _own_answer(state: TrainState, file: Path) -> dict[str, Any]:
    """Where there is no plain counterpart: one rank of ours, undivided, as the others' reference."""
    assert state.world.size == 1
    told: dict[str, Any] = {"loss": _forward_and_backward(state, 0)}
    gradients = {n: torch.zeros(p.shape) for n, p in state.sharded.parameters.items()}
    gradients |= {n: g.clone() for n, g in gradients_of(state) if g is not None}
    told |= {"norm": float(state.update())}
    parameters = {n: p.clone() for n, p in parameters_of(state)}
    if (routing := state.context.routing) is not None and routing.bias is not None:
        told["biases"] = list(routing.bias.biases)
        parameters |= {n: bias.tensor.clone() for n, bias in routing.bias.biases.items()}
    told |= {"after": _forward_and_backward(state, 1)}
    write_reference(file, gradients, parameters, told)
    return told


def _forward_and_backward(state: TrainState, step: int) -> float:
    """The same batch in every step, as the loop takes it; returns the loss per unit over all ranks."""
    run, world = state.job.run, state.world
    total = run.train.steps
    assert total is not None
    loop.seed_step(run.train.seed, step, world.rank // world.layout.tensor)
    batch = state.loader.step(
        0, run.train.batch_size, int(run.train.micro_batch_size), world.place.data, world.layout.data
    )
    if not state.loader.layout.counted:
        batch = agree_on_units(batch, world)
    set_rates(state.optimizer, run.train, step, total)
    summed = loop.accumulate(state, batch)
    loss = summed[:1].double().cpu() * state.context.counts
    dist.all_reduce(loss, group=world.control)
    return float(loss) / max(1, batch.supervised)


def gradients_of(state: TrainState) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Whole gradients one after the other, the loss scale taken off; none where they are used up as they come."""
    optimizer = state.optimizer
    offloaded = optimizer if isinstance(optimizer, OffloadedOptimizer) else None
    if state.update.eager or (offloaded is not None and not offloaded.gradients()):
        return
    scale = state.scaler.get_scale() if state.scaler.is_enabled() else 1.0
    for name, parameter in state.sharded.parameters.items():
        found = parameter.grad if offloaded is None else offloaded.gradient(parameter)
        whole = None if found is None else _whole(found)
        yield name, None if whole is None else whole / scale


def parameters_of(state: TrainState) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole trained parameters one after the other, wherever they live."""
    optimizer = state.optimizer
    away = {}
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer.finish()
        away = masters(optimizer)
    for name, parameter in state.sharded.parameters.items():
        if name not in away:
            yield name, _whole(parameter.detach())
            continue
        local = away[name].read()
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            shape, stride = parameter.shape, parameter.stride()
            local = local.to(state.world.device)
            yield name, DTensor.from_local(local, mesh, placements, shape=shape, stride=stride).full_tensor()
        else:
            yield name, local


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
