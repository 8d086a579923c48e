"""The training loop: read it from top to bottom, nothing is hidden in callbacks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwise.checkpoint.folders import step_folder
from shardwise.checkpoint.hf import ExportOptions
from shardwise.core.errors import RunFailed
from shardwise.data.loader import StepBatch
from shardwise.nn.attention.varlen import fast_attention
from shardwise.optim.schedules import set_rates
from shardwise.train.heldout import Evaluation, evaluation_of, summed_losses
from shardwise.train.outer_sync import NoSync, no_sync
from shardwise.train.samples import write_samples
from shardwise.train.session import Outcome, Session
from shardwise.train.setup import TrainState


def fit(state: TrainState, join: Callable[[TrainState], NoSync] = no_sync) -> Outcome:
    """Trains from the state's position to the last step, saving and evaluating on the way.

    `join` enters the run into synchronisation with other workers (DiLoCo).
    """
    train = state.job.run.train
    position = state.position
    with Session(state, join) as session:
        while session.goes_on:
            step = position.step
            session.begin_step(step)
            seed_step(train.seed, step, state.world.rank // state.world.layout.tensor)
            batch = session.next_batch()
            rate = set_rates(state.optimizer, train, step, session.total)

            with session.profiling.step(step + 1, batch.tokens):
                loss = accumulate(state, batch)
                if not state.context.counts:  # another rank has the same loss, or this stage has none
                    loss = torch.zeros_like(loss)
                session.report.first_gradients(state)
                norm = session.update(step, batch, loss)

            position.advance(batch)
            state.meter.add(step, rate, loss, norm, batch)
            due = session.end_step()
            if due.report:
                session.report_figures()
            if due.compare_ranks:
                session.compare_ranks()
            if due.sync:  # before evaluating and saving: both are of what all workers came to
                due = session.synchronise(due)
            if due.evaluate:
                with session.evaluating():
                    held_out = evaluate(state)
                due = session.take_evaluation(due, held_out)
            write_samples(state, due.last and not session.stop)
            session.save(due)
        return session.finish()


def accumulate(state: TrainState, batch: StepBatch) -> torch.Tensor:
    """Forward and backward over the micro-batches; returns this rank's summed loss (and by source), on the device.

    The gradient is that of (sum of losses over all ranks) / (loss tokens of the whole step): every token counts the
    same, whatever micro-batch or rank it fell into. FSDP averages over ranks, hence the factor of their number.
    """
    scale = state.sharded.data_parallel_size / max(1, batch.supervised)
    sources = state.loader.source_count
    figures = 1 + len(state.objective.figures) + (sources if sources > 1 else 0)
    summed = torch.zeros(figures, device=state.world.device)
    if state.context.pipeline is not None:
        with fast_attention(state.world.device), state.timer.region("pipeline"):
            losses = state.context.learn(
                state.sharded.model, state.objective, batch.micro_batches,
                lambda loss: state.scaler.scale(loss.total * scale), state.sharded.prepare_micro_batch,
            )  # fmt: skip
        return sum((loss.sums() for loss in losses), summed)
    for index, micro in enumerate(batch.micro_batches):
        state.sharded.prepare_micro_batch(last=index == len(batch.micro_batches) - 1)
        with fast_attention(state.world.device), state.context.active():
            with state.timer.region("forward"):
                loss = state.context.loss(state.sharded.model, state.objective, micro)
            with state.timer.region("backward"):
                state.scaler.scale(loss.total * scale).backward()
        summed = summed + loss.sums()
    return summed


def evaluate(state: TrainState) -> Evaluation:
    """The loss over the held-out sequences, the same on every rank."""
    loader, world, objective, context = state.eval_loader, state.world, state.objective, state.context
    assert loader is not None
    model, micro = state.sharded.model, int(state.job.run.train.micro_batch_size)
    with state.sharded.evaluation():
        sums = summed_losses(
            model, objective, loader, micro, world.device, world.place.data, world.layout.data,
            several=lambda batches: context.losses(model, objective, batches), together=context.together,
        )  # fmt: skip
    sums *= context.counts  # the others' losses are nobody's, or another rank's too
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
