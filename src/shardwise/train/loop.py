"""The training loop: read it from top to bottom, nothing is hidden in callbacks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwise.data.loader import StepBatch
from shardwise.nn.attention.varlen import fast_attention
from shardwise.optim.schedules import set_rates
from shardwise.train.evaluation import Evaluation, HeldoutBatching, evaluation_of, summed_losses
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
        while session.has_steps:
            step = position.step
            session.begin_step(step)
            seed_step(train.seed, step, state.world.rank // state.world.layout.tensor)
            batch = session.next_batch()
            rate = set_rates(state.optimizer, train, step, session.total)

            with session.profiling.step(step + 1, batch.tokens):
                loss = accumulate(state, batch)
                if not state.context.counts:
                    # Another rank has the same loss, or this pipeline stage has none.
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
            if due.sync:  # before evaluating and saving, which use the synchronised parameters
                due = session.synchronise(due)
            if due.evaluate:
                with session.evaluating():
                    held_out = evaluate(state)
                due = session.take_evaluation(due, held_out)
            write_samples(state, due.last and not session.stop)
            session.save(due)
        return session.finish()


def accumulate(state: TrainState, batch: StepBatch) -> torch.Tensor:
    """Forward and backward over the micro-batches; returns this rank's summed loss on the device.

    Its further elements are the objective's figures and the loss by source. The gradient is that of
    (sum of losses over all ranks) / (loss tokens of the step): every token counts the same, in any
    micro-batch on any rank. FSDP averages over ranks, hence the factor of their number.
    """
    scale = state.sharded.data_parallel_size / max(1, batch.supervised)
    figures = 1 + len(state.objective.figures)
    if state.loader.source_count > 1:
        figures += state.loader.source_count
    summed = torch.zeros(figures, device=state.world.device)
    if state.context.pipeline is not None:
        with fast_attention(state.world.device), state.timer.region("pipeline"):
            losses = state.context.learn(
                state.sharded.model,
                state.objective,
                batch.micro_batches,
                lambda loss: state.scaler.scale(loss.total * scale),
                state.sharded.prepare_micro_batch,
            )
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
    loader = state.eval_loader
    assert loader is not None
    world = state.world
    model = state.sharded.model
    objective = state.objective
    context = state.context
    micro = int(state.job.run.train.micro_batch_size)
    rounds = HeldoutBatching(micro, world.place.data, world.layout.data, context.together)
    with state.sharded.evaluation():
        sums = summed_losses(
            model,
            objective,
            loader,
            rounds,
            world.device,
            several=lambda batches: context.losses(model, objective, batches),
        )
    sums *= context.counts  # 0 where another rank has the same losses, or this stage has none
    dist.all_reduce(sums, group=world.control)
    return evaluation_of(sums, objective, loader.names)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds dropout for each step and rank anew, so that resuming needs no saved state."""
    torch.manual_seed((seed * 1_000_003 + step) * 65_537 + rank)
