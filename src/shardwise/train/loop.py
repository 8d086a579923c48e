"""The training loop: read it from top to bottom, nothing is hidden in callbacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.checkpoint.folders import step_folder
from shardwise.checkpoint.hf import ExportOptions
from shardwise.core.errors import RunFailed
from shardwise.data.loader import StepBatch
from shardwise.data.prefetcher import Prefetcher
from shardwise.distributed.mesh import World
from shardwise.export.command import SOON, export_folder
from shardwise.export.facts import write_data
from shardwise.nn.attention.varlen import fast_attention
from shardwise.observe.curve import write_curve_html
from shardwise.observe.metrics import read_metrics
from shardwise.observe.pace import EVERY, Pace
from shardwise.observe.prediction import beside_prediction
from shardwise.optim.schedules import set_rates
from shardwise.resolved_run import ResolvedRun
from shardwise.train.control import Control
from shardwise.train.early_stopping import EarlyStopping
from shardwise.train.guard import LossGuard
from shardwise.train.heldout import Evaluation, evaluation_of, summed_losses
from shardwise.train.outer_sync import NoSync
from shardwise.train.profiling import Profiling
from shardwise.train.report import TrainReport
from shardwise.train.samples import forget_samples_after, write_samples
from shardwise.train.setup import TrainState
from shardwise.train.state import tensors_of, write_model


@dataclass(frozen=True)
class Outcome:
    """How a run ended: steps done, last losses, and the signal that stopped it (0 = it finished, `early` says why)."""

    step: int
    loss: float | None
    eval_loss: float | None
    stopped_by: int = 0
    early: str = ""


def fit(parts: TrainState, join: Callable[[TrainState], NoSync] = lambda _: NoSync()) -> Outcome:
    """Trains from the parts' position to the last step, saving and evaluating on the way.

    `join` enters the run into synchronisation with other workers (DiLoCo).
    """
    run, world, position = parts.job.run, parts.world, parts.position
    save_every, eval_every, copy_every = run.checkpoint.every, run.train.eval_every, run.checkpoint.memory
    stop, loss, eval_loss = 0, None, None
    meeting = join(parts)  # of workers that train apart: it may move the position on
    guard = LossGuard(run.guard, world, parts.job.output, parts.scaler.is_enabled())
    skipped = guard.resume(position)  # this too
    total = parts.meter.total = parts.job.last_step(position.step, position.sequences)
    report = TrainReport(parts, total)
    watch = watch_of(parts)
    forget_samples_after(parts)
    save_seconds, eval_seconds, copy_seconds = (e.seconds if e else None for e in (save_every, eval_every, copy_every))
    control = Control(world.control, save_seconds, eval_seconds, copy_seconds, EVERY, lambda: parts.copies.busy)
    pace = Pace(world.control, parts.timer)
    profiling = Profiling(parts.job, world, total)
    epochs, rows = parts.job.epochs, run.train.batch_size
    batches = Prefetcher(
        parts.loader, rows, int(run.train.micro_batch_size), world.place.data, world.layout.data,
        end=epochs.end if epochs is not None else position.sequences + (total - position.step) * rows,
    )  # fmt: skip
    with control, report, batches, meeting, pace:
        report.noted([*skipped, *meeting.notes])
        if (position.step >= total or watch.enough) and not step_folder(parts.store.root, position.step).is_dir():
            save(parts)  # it was finished in another output folder
        while position.step < total and not stop and not watch.enough:
            step = position.step
            parts.store.raise_if_failed()
            control.begin()
            pace.begin()
            parts.status.set("computing", step + 1)
            seed_step(run.train.seed, step, world.rank // world.layout.tensor)
            with parts.timer.region("data"):
                batch = batches.step(position.sequences)
            if not parts.loader.layout.counted:
                batch = agree_on_units(batch, world)
            rate = set_rates(parts.optimizer, run.train, step, total)

            with profiling.step(step + 1, batch.tokens):
                summed = accumulate(parts, batch)
                summed = summed if parts.spread.counts else torch.zeros_like(summed)
                report.first_gradients(parts)
                with parts.timer.region("step"), profiling.update():
                    until = position.sequences + batch.sequences
                    norm = parts.update(guard.allowing(step + 1, until, summed, batch.supervised))
            report.noted(profiling.told())

            position.step, position.sequences = step + 1, position.sequences + batch.sequences
            position.tokens += batch.tokens
            position.supervised += batch.supervised
            parts.meter.add(step, rate, summed, norm, batch)
            pace.end()

            stop, save_due, eval_due = control.end()
            last = position.step >= total
            evaluating = parts.eval_loader is not None and not stop and (last or eval_due or _due(eval_every, step + 1))
            saving = last or bool(stop) or save_due or _due(save_every, step + 1)
            meets = (last or not stop) and meeting.due(position.step, last)
            copying = not saving and parts.copies.due(position.step, copy_every, control)
            # Read before anything is saved: the checkpoint of a run that has come to nothing would be of no use.
            if evaluating or saving or copying or meets or position.step % run.log.every == 0:
                records = parts.spread.annotate(parts.timer.annotate(parts.meter.flush()))
                failure = guard.look(records, position)
                failure = failure or guard.compare(lambda: tensors_of(parts.sharded, parts.optimizer), position.step)
                report.trained(records, pace.waiting)
                if trouble := parts.scaler.trouble():
                    failure = failure or RunFailed(trouble)
                if failure is not None:
                    parts.store.wait()  # a checkpoint under way is of a step before
                    parts.copies.drop()  # they may be too new to go back to
                    raise failure
                loss = records[-1]["loss"]
            if control.pace_due:
                report.slow(pace.compare(position.step))
            if meets:  # before evaluating and saving: both are of what all workers came to
                parts.status.set("meeting the other workers")
                with parts.meter.paused():
                    report.met(
                        meeting.meet(last, lambda: control.signal is not None, lambda words: report.noted([words]))
                    )
                last = position.step >= total  # who was behind the others has moved on with them
                evaluating, saving = evaluating or (last and parts.eval_loader is not None), saving or last
            if evaluating:
                parts.status.set("evaluating")
                with parts.meter.paused():
                    held_out = evaluate(parts)
                eval_loss = held_out.loss
                report.evaluated(position.step, held_out)
                saving |= watch.evaluated(held_out.record) or bool(watch.enough)
            write_samples(parts, last and not stop)
            if saving:
                parts.status.set("saving")
                with parts.meter.paused():
                    save(parts)
            elif copying:
                copy(parts)
            parts.copies.done(position.step)
            report.noted([*parts.store.notes(), *parts.copies.notes()])
        report.noted([*parts.spread.idle(), *parts.sharded.idle()])
        parts.status.set("finishing the last checkpoint")
        report.ending("the last checkpoint is being written")
        parts.store.wait()
        parts.copies.close()
        outcome = Outcome(position.step, loss, eval_loss, stop, watch.enough)
        if not stop and world.is_main:
            parts.status.set("exporting")
            report.ended(outcome.early)
            report.ending("the model is being exported, and compared with the trained one")
            best = position.best_step if run.export.checkpoint == "best" else None
            finish(parts, outcome, step_folder(parts.store.root, position.step if best is None else best))
        dist.barrier(group=world.checkpoint)
    return outcome


def accumulate(parts: TrainState, batch: StepBatch) -> torch.Tensor:
    """Forward and backward over the micro-batches; returns this rank's summed loss (and by source), on the device.

    The gradient is that of (sum of losses over all ranks) / (learned tokens of the whole step): every token counts the
    same, whatever micro-batch or rank it fell into. FSDP averages over ranks, hence the factor of their number.
    """
    scale = parts.sharded.data_parallel_size / max(1, batch.supervised)
    sources = parts.loader.source_count
    told = 1 + len(parts.objective.figures) + (sources if sources > 1 else 0)
    summed = torch.zeros(told, device=parts.world.device)
    if parts.spread.pipeline is not None:
        with fast_attention(parts.world.device), parts.timer.region("pipeline"):
            losses = parts.spread.learn(
                parts.sharded.model, parts.objective, batch.micro_batches,
                lambda loss: parts.scaler.scale(loss.total * scale), parts.sharded.prepare_micro_batch,
            )  # fmt: skip
        return sum((loss.sums() for loss in losses), summed)
    for index, micro in enumerate(batch.micro_batches):
        parts.sharded.prepare_micro_batch(last=index == len(batch.micro_batches) - 1)
        with fast_attention(parts.world.device), parts.spread.active():
            with parts.timer.region("forward"):
                loss = parts.spread.loss(parts.sharded.model, parts.objective, micro)
            with parts.timer.region("backward"):
                parts.scaler.scale(loss.total * scale).backward()
        summed = summed + loss.sums()
    return summed


def agree_on_units(batch: StepBatch, world: World) -> StepBatch:
    """The batch with the counts over all ranks, where each rank knows its own micro-batches' alone."""
    counts = torch.zeros(len(batch.by_source), dtype=torch.int64)
    for micro in batch.micro_batches:
        counts += micro.units * (micro.counts and world.leads)  # not twice
    dist.all_reduce(counts, group=world.control)
    return replace(batch, supervised=int(counts.sum()), by_source=tuple(int(n) for n in counts))


def evaluate(parts: TrainState) -> Evaluation:
    """The loss over the held-out sequences, the same on every rank."""
    loader, world, objective, spread = parts.eval_loader, parts.world, parts.objective, parts.spread
    assert loader is not None
    model, micro = parts.sharded.model, int(parts.job.run.train.micro_batch_size)
    with parts.sharded.evaluation():
        sums = summed_losses(
            model, objective, loader, micro, world.device, world.place.data, world.layout.data,
            several=lambda batches: spread.losses(model, objective, batches), together=spread.together,
        )  # fmt: skip
    sums *= spread.counts  # the others' losses are nobody's, or another rank's too
    dist.all_reduce(sums, group=world.control)
    return evaluation_of(sums, objective, loader.names)


def watch_of(parts: TrainState) -> EarlyStopping:
    """Follows the run's evaluations from its position on."""
    sources = parts.eval_loader.names if parts.eval_loader else []
    figures = (*parts.objective.figures, *(["perplexity"] if parts.objective.of_tokens else []))
    return EarlyStopping(parts.job.run, parts.position, parts.store.root, sources, figures)


def save(parts: TrainState) -> None:
    """Starts a checkpoint of the current position."""
    job, tensors, position, run_json = _state(parts)
    parts.store.save(
        parts.position.step, tensors, position, run_json,
        lambda folder: write_model(folder, parts.sharded.model, job), parts.position.best_step,
    )  # fmt: skip
    parts.sharded.saved()


def copy(parts: TrainState) -> None:
    """Starts a copy of the current position in memory."""
    _, tensors, position, run_json = _state(parts)
    parts.copies.save(parts.position.step, tensors, position, run_json)
    parts.sharded.saved()


def _state(parts: TrainState) -> tuple[ResolvedRun, dict[str, Any], dict[str, Any], str]:
    """What a later start needs."""
    position, job = parts.position, parts.job
    position.seconds = parts.meter.seconds
    position.scaler = parts.scaler.state_dict()
    position.fp32 = parts.spread.biases
    tensors = tensors_of(parts.sharded, parts.optimizer)
    return job, tensors, position.to_json(job.data.fingerprint), job.run.model_dump_json(indent=1)


def finish(parts: TrainState, outcome: Outcome, checkpoint: Path) -> None:
    """On the main rank: the Hugging Face folder, the curve and a summary beside them."""
    job = parts.job
    target = job.output / "model"
    write_data(job)
    export = job.run.export
    trust = job.run.model.trust_remote_code
    options = ExportOptions(export.dtype, export.shard_size, overwrite=True, verified=True, trust=trust)
    exported = export_folder(checkpoint, target, options, check=export.check, most=SOON)
    if export.merged:
        options = replace(options, merged=True)
        exported = export_folder(checkpoint, job.output / "merged", options, check=export.check, most=SOON)
    records = read_metrics(job.output / "metrics.jsonl")
    write_curve_html(job.output / "loss.html", records, f"{job.source.label}: loss", str(job.output))
    # From the records, not the outcome: a run that was finished before has no losses of its own.
    losses = {record["kind"]: record["loss"] for record in records if "loss" in record}
    summary = {"step": outcome.step, "loss": losses.get("train"), "eval_loss": losses.get("eval"), "model": str(target)}
    summary |= {"check": exported.checked, "notes": list(exported.notes)}
    summary |= {"foresight": beside_prediction(job.output, job.source.label, records, job.run.train.batch_size)}
    summary |= {"seconds": round(parts.meter.seconds, 1), "tokens": parts.position.tokens}
    summary |= {"ended": outcome.early or "all steps done", "exported": checkpoint.name}
    (job.output / "result.json").write_text(json.dumps(summary, indent=1))


def seed_step(seed: int, step: int, rank: int) -> None:
    """Dropout and the like: a fresh stream for each step and rank, so that resuming needs no saved state."""
    torch.manual_seed((seed * 1_000_003 + step) * 65_537 + rank)


def _due(every: Any, step: int) -> bool:
    return every is not None and every.steps is not None and step % every.steps == 0
