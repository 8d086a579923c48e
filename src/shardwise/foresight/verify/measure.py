"""One rank of a claim: the run's own code for two steps, compared with the reference.

Every rank compares for itself: a gradient that was not reduced is wrong on some ranks and may be right on others.
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
    gradient_difference,
    relative,
    update_difference,
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
    """Returns this rank's difference from the reference; without a reference, writes its result as one."""
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
    figures = reference.figures
    trained_names = set(reference.names)
    loss = 0.0
    norm = 0.0
    after = None
    worst_gradient = ""
    gradient = -1.0
    first = ""
    worst_update = ""
    update = -1.0
    names: list[str] = []
    for step in range(STEPS):
        step_loss = _forward_and_backward(state, step)
        if step == 0:
            loss = abs(step_loss - figures["loss"])
            for name, actual in gradients_of(state):
                names.append(name)
                # One that the reference does not train must not be there; it trains all that ours does.
                expected = reference.gradient(name) if name in trained_names else None
                difference = (
                    float("inf") if expected is None else gradient_difference(actual, expected, figures["largest"])
                )
                first = first or (name if not difference <= bounds.gradient else "")
                if not difference <= gradient:
                    worst_gradient = name
                    gradient = difference
        elif "after" in figures:
            after = abs(step_loss - figures["after"])
        total = float(state.update())
        if step == 0:
            norm = relative(total, figures["norm"])
            if bounds.update is not None:
                for name, difference in _bias_differences(state, reference):
                    if not difference <= update:
                        worst_update = name
                        update = difference
            if bounds.update is not None and "after" in figures:
                rate = state.job.run.train.learning_rate
                for name, actual in parameters_of(state):
                    if name in trained_names:
                        expected = reference.parameter(name)
                        reference_gradient = reference.gradient(name)
                        difference = update_difference(actual, expected, reference_gradient, rate, figures["largest"])
                        if not difference <= update:
                            worst_update = name
                            update = difference
    names = names or list(state.sharded.parameters)
    compared = gradient >= 0
    return ParityDifference(
        _finite(loss), _finite(norm), gradient if compared else None, worst_gradient,
        update if update >= 0 else None, worst_update, after if after is None else _finite(after), first,
    ), names  # fmt: skip


def _bias_differences(state: TrainState, reference: Reference) -> Iterator[tuple[str, float]]:
    """Difference of each router bias on this rank, as a share of one step's update."""
    buffers = dict(state.sharded.model.named_buffers())
    rate = state.job.run.router.bias_update
    for name in reference.figures.get("biases", ()):
        if name in buffers:
            difference = float((buffers[name].float().cpu() - reference.parameter(name)).abs().max())
            yield name, difference / (float(rate) if rate != "auto" and rate else 1e-3)


def _finite(value: float) -> float:
    return value if value == value else float("inf")


def _own_answer(state: TrainState, file: Path) -> dict[str, Any]:
    """Where there is no plain counterpart: one unsharded rank of ours, as the reference of the others."""
    assert state.world.size == 1
    figures: dict[str, Any] = {"loss": _forward_and_backward(state, 0)}
    gradients = {n: torch.zeros(p.shape) for n, p in state.sharded.parameters.items()}
    gradients |= {n: g.clone() for n, g in gradients_of(state) if g is not None}
    figures |= {"norm": float(state.update())}
    parameters = {n: p.clone() for n, p in parameters_of(state)}
    if (routing := state.context.routing) is not None and routing.bias is not None:
        figures["biases"] = list(routing.bias.biases)
        parameters |= {n: bias.tensor.clone() for n, bias in routing.bias.biases.items()}
    figures |= {"after": _forward_and_backward(state, 1)}
    write_reference(file, gradients, parameters, figures)
    return figures


def _forward_and_backward(state: TrainState, step: int) -> float:
    """Runs the same batch every step, as the loop does; returns the loss per unit over all ranks."""
    run = state.job.run
    world = state.world
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
    """Yields full gradients without the loss scale; nothing if they are consumed in backward."""
    optimizer = state.optimizer
    offloaded = optimizer if isinstance(optimizer, OffloadedOptimizer) else None
    if state.update.eager or (offloaded is not None and not offloaded.gradients()):
        return
    scale = state.scaler.get_scale() if state.scaler.is_enabled() else 1.0
    for name, parameter in state.sharded.parameters.items():
        gradient = parameter.grad if offloaded is None else offloaded.gradient(parameter)
        full_gradient = None if gradient is None else _full(gradient)
        yield name, None if full_gradient is None else full_gradient / scale


def parameters_of(state: TrainState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields full trained parameters, wherever they are stored."""
    optimizer = state.optimizer
    offloaded = {}
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer.finish()
        offloaded = masters(optimizer)
    for name, parameter in state.sharded.parameters.items():
        if name not in offloaded:
            yield name, _full(parameter.detach())
            continue
        local = offloaded[name].read()
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            placements = parameter.placements
            shape = parameter.shape
            stride = parameter.stride()
            local = local.to(state.world.device)
            yield name, DTensor.from_local(local, mesh, placements, shape=shape, stride=stride).full_tensor()
        else:
            yield name, local


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
