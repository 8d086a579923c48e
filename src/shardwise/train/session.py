"""Everything around the loop's steps: common decisions, reports, evaluations, checkpoints, the end.

The algorithm is in loop.py; nothing here computes a loss or a gradient.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from shardwise.observe.curve import write_curve_html
from shardwise.observe.metrics import read_metrics
from shardwise.observe.pace import EVERY, Pace
from shardwise.observe.prediction import beside_prediction
from shardwise.train.control import Control
from shardwise.train.early_stopping import EarlyStopping
from shardwise.train.evaluation import Evaluation
from shardwise.train.guard import LossGuard
from shardwise.train.outer_sync import NoSync
from shardwise.train.profiling import Profiling
from shardwise.train.report import TrainReport
from shardwise.train.samples import forget_samples_after
from shardwise.train.setup import TrainState
from shardwise.train.state import tensors_of, write_model


@dataclass(frozen=True)
class Outcome:
    """How a run ended: steps done, last losses, and the signal that stopped it (0: none).

    `early` is the reason of an early stop.
    """

    step: int
    loss: float | None
    eval_loss: float | None
    stopped_by: int = 0
    early: str = ""


@dataclass(frozen=True)
class Due:
    """Actions due after a step."""

    last: bool
    report: bool
    compare_ranks: bool
    sync: bool
    evaluate: bool
    save: bool
    copy: bool  # to memory


class Session:
    """A run from its position to its end: everything around the steps."""

    def __init__(self, state: TrainState, join: Callable[[TrainState], NoSync]) -> None:
        self.state = state
        job = state.job
        run = job.run
        position = state.position
        self.stop = 0  # the signal to stop on
        self.loss: float | None = None
        self.eval_loss: float | None = None
        self.sync = join(state)  # it may move the position
        self._guard = LossGuard(run.guard, state.world, job.output, state.scaler.is_enabled())
        self._skipped = self._guard.resume(position)  # moves it too
        self.total = state.meter.total = job.last_step(position.step, position.sequences)
        self.report = TrainReport(state, self.total)
        self._early = early_stopping_of(state)
        forget_samples_after(state)
        self._control = Control(
            state.world.control,
            save_seconds=_seconds(run.checkpoint.every),
            eval_seconds=_seconds(run.train.eval_every),
            copy_seconds=_seconds(run.checkpoint.memory),
            pace_seconds=EVERY,
            busy=lambda: state.copies.busy,
        )
        self._pace = Pace(state.world.control, state.timer)
        self.profiling = Profiling(job, state.world, self.total)
        rows = run.train.batch_size
        end = position.sequences + (self.total - position.step) * rows
        if job.epochs is not None:
            end = job.epochs.end
        self._batches = Prefetcher(
            state.loader,
            rows,
            int(run.train.micro_batch_size),
            state.world.place.data,
            state.world.layout.data,
            end=end,
        )
        self._open = ExitStack()

    def __enter__(self) -> Session:
        with ExitStack() as opened:
            for part in (self._control, self.report, self._batches, self.sync, self._pace):
                opened.enter_context(part)  # type: ignore[arg-type]
            self.report.noted([*self._skipped, *self.sync.notes])
            position = self.state.position
            finished = position.step >= self.total or self._early.enough
            if finished and not step_folder(self.state.store.root, position.step).is_dir():
                save(self.state)  # the run was finished in another output folder
            self._open = opened.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.__exit__(*error)

    @property
    def has_steps(self) -> bool:
        """Whether there is another step to take."""
        return self.state.position.step < self.total and not self.stop and not self._early.enough

    def begin_step(self, step: int) -> None:
        """Raises if a save failed in the background; begins the ranks' vote on what is due."""
        self.state.store.raise_if_failed()
        self._control.begin()
        self._pace.begin()
        self.state.status.set("computing", step + 1)

    def next_batch(self) -> StepBatch:
        """This rank's micro-batches of the step, with loss tokens counted over all ranks."""
        with self.state.timer.region("data"):
            batch = self._batches.step(self.state.position.sequences)
        if not self.state.loader.layout.counted:
            batch = agree_on_units(batch, self.state.world)
        return batch

    def update(self, step: int, batch: StepBatch, loss: torch.Tensor) -> torch.Tensor:
        """Updates the parameters unless the guard skips the step; returns the unclipped norm."""
        until = self.state.position.sequences + batch.sequences
        with self.state.timer.region("step"), self.profiling.update():
            norm = self.state.update(self._guard.allowing(step + 1, until, loss, batch.supervised))
        return norm

    def end_step(self) -> Due:
        """The actions due after this step, agreed by all ranks."""
        self.report.noted(self.profiling.take_notes())
        self._pace.end()
        run = self.state.job.run
        step = self.state.position.step
        self.stop, save_due, eval_due = self._control.end()
        last = step >= self.total
        evaluates = last or eval_due or _due(run.train.eval_every, step)
        saves = last or bool(self.stop) or save_due or _due(run.checkpoint.every, step)
        syncs = (last or not self.stop) and self.sync.due(step, last)
        copies = not saves and self.state.copies.due(step, run.checkpoint.memory, self._control)
        evaluates = evaluates and self.state.eval_loader is not None and not self.stop
        # Figures are read before saving: a checkpoint after a NaN loss would be of no use.
        reports = evaluates or saves or copies or syncs or step % run.log.every == 0
        return Due(last, reports, self._control.pace_due, syncs, evaluates, saves, copies)

    def report_figures(self) -> None:
        """Reads the figures of the steps since the last report; raises on NaN, spikes and so on."""
        state = self.state
        records = state.context.annotate(state.timer.annotate(state.meter.flush()))
        failure = self._guard.look(records, state.position)
        failure = failure or self._guard.compare(
            lambda: tensors_of(state.sharded, state.optimizer), state.position.step
        )
        self.report.trained(records, self._pace.waiting)
        if trouble := state.scaler.trouble():
            failure = failure or RunFailed(trouble)
        if failure is not None:
            state.store.wait()  # a checkpoint under way is of a step before
            state.copies.drop()  # they may be too new to go back to
            raise failure
        self.loss = records[-1]["loss"]

    def compare_ranks(self) -> None:
        """Reports ranks that keep the others waiting."""
        self.report.slow(self._pace.compare(self.state.position.step))

    def synchronise(self, due: Due) -> Due:
        """Synchronises with other workers; a worker that was behind may skip to a later step."""
        self.state.status.set("meeting the other workers")
        with self.state.meter.paused():
            record = self.sync.meet(
                due.last,
                lambda: self._control.signal is not None,
                lambda words: self.report.noted([words]),
            )
            self.report.met(record)
        last = self.state.position.step >= self.total
        evaluates = due.evaluate or (last and self.state.eval_loader is not None)
        return replace(due, last=last, evaluate=evaluates, save=due.save or last)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context of an evaluation, whose time does not count as training."""
        self.state.status.set("evaluating")
        with self.state.meter.paused():
            yield

    def take_evaluation(self, due: Due, held_out: Evaluation) -> Due:
        """Reports an evaluation; a save is due if it is the best so far or ends the run."""
        self.eval_loss = held_out.loss
        self.report.evaluated(self.state.position.step, held_out)
        best = self._early.evaluated(held_out.record)
        return replace(due, save=due.save or best or bool(self._early.enough))

    def save(self, due: Due) -> None:
        """Starts a checkpoint, or a copy in memory, where one is due."""
        state = self.state
        if due.save:
            state.status.set("saving")
            with state.meter.paused():
                save(state)
        elif due.copy:
            copy(state)
        state.copies.done(state.position.step)
        self.report.noted([*state.store.notes(), *state.copies.notes()])

    def finish(self) -> Outcome:
        """Waits for the last checkpoint; exports the model on the main rank if the run is done."""
        state = self.state
        self.report.noted([*state.context.idle(), *state.sharded.ineffective_notes()])
        state.status.set("finishing the last checkpoint")
        self.report.ending("the last checkpoint is being written")
        state.store.wait()
        state.copies.close()
        position = state.position
        outcome = Outcome(position.step, self.loss, self.eval_loss, self.stop, self._early.enough)
        if not self.stop and state.world.is_main:
            state.status.set("exporting")
            self.report.ended(outcome.early)
            self.report.ending("the model is being exported, and compared with the trained one")
            step = position.step
            if state.job.run.export.checkpoint == "best" and position.best_step is not None:
                step = position.best_step
            finish(state, outcome, step_folder(state.store.root, step))
        dist.barrier(group=state.world.checkpoint)
        return outcome


def agree_on_units(batch: StepBatch, world: World) -> StepBatch:
    """The batch with counts over all ranks, if each rank knows those of its micro-batches only."""
    counts = torch.zeros(len(batch.by_source), dtype=torch.int64)
    for micro in batch.micro_batches:
        if micro.counts and world.leads:  # count a micro-batch on one of its ranks only
            counts += micro.units
    dist.all_reduce(counts, group=world.control)
    return replace(batch, supervised=int(counts.sum()), by_source=tuple(counts.tolist()))


def early_stopping_of(state: TrainState) -> EarlyStopping:
    """Returns the run's early stopping, which continues from the run's position."""
    sources = state.eval_loader.names if state.eval_loader else []
    figures = list(state.objective.figures)
    if state.objective.of_tokens:
        figures.append("perplexity")
    return EarlyStopping(state.job.run, state.position, state.store.root, sources, figures)


def save(state: TrainState) -> None:
    """Starts a checkpoint of the current position."""
    tensors, position, run_json = _contents(state)
    state.store.save(
        state.position.step,
        tensors,
        position,
        run_json,
        lambda folder: write_model(folder, state.sharded.model, state.job),
        state.position.best_step,
    )
    state.sharded.saved()


def copy(state: TrainState) -> None:
    """Starts a copy of the current position in memory."""
    tensors, position, run_json = _contents(state)
    state.copies.save(state.position.step, tensors, position, run_json)
    state.sharded.saved()


def _contents(state: TrainState) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Contents of a checkpoint: tensors, trainer.json and run.json."""
    job = state.job
    position = state.position
    position.seconds = state.meter.seconds
    position.scaler = state.scaler.state_dict()
    position.fp32 = state.context.biases
    tensors = tensors_of(state.sharded, state.optimizer)
    return tensors, position.to_json(job.data.fingerprint), job.run.model_dump_json(indent=1)


def finish(state: TrainState, outcome: Outcome, checkpoint: Path) -> None:
    """On the main rank: exports the Hugging Face folder; writes the loss curve and a summary."""
    job = state.job
    label = job.source.label
    target = job.output / "model"
    write_data(job)
    export = job.run.export
    trust = job.run.model.trust_remote_code
    options = ExportOptions(
        export.dtype, export.shard_size, overwrite=True, verified=True, trust=trust
    )
    exported = export_folder(checkpoint, target, options, check=export.check, most=SOON)
    if export.merged:
        options = replace(options, merged=True)
        merged = job.output / "merged"
        exported = export_folder(checkpoint, merged, options, check=export.check, most=SOON)
    records = read_metrics(job.output / "metrics.jsonl")
    write_curve_html(job.output / "loss.html", records, f"{label}: loss", str(job.output))
    # From the records, not the outcome: a run that was finished before has no losses of its own.
    losses = {record["kind"]: record["loss"] for record in records if "loss" in record}
    summary = {
        "step": outcome.step,
        "loss": losses.get("train"),
        "eval_loss": losses.get("eval"),
        "model": str(target),
        "check": exported.checked,
        "notes": list(exported.notes),
        "foresight": beside_prediction(job.output, label, records, job.run.train.batch_size),
        "seconds": round(state.meter.seconds, 1),
        "tokens": state.position.tokens,
        "ended": outcome.early or "all steps done",
        "exported": checkpoint.name,
    }
    (job.output / "result.json").write_text(json.dumps(summary, indent=1))


def _seconds(every: Any) -> float | None:
    return every.seconds if every else None


def _due(every: Any, step: int) -> bool:
    return every is not None and every.steps is not None and step % every.steps == 0
