"""Core lines broken on purpose, each for the duration of one run in the ranks (see ranks.py)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from support import scenarios
from support.parity import Trained


def no_all_reduce_across_replicas() -> AbstractContextManager[Any]:
    """Hybrid sharding: gradients are summed within each replica alone."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    class Without:
        def __getattr__(self, name: str) -> Any:
            return (lambda *args, **kwargs: None) if name == "all_reduce" else getattr(torch.distributed, name)

    return mock.patch.object(_fsdp_collectives, "dist", Without())


def all_reduce_never_requested() -> AbstractContextManager[Any]:
    """Hybrid sharding: the last micro-batch does not ask for the sum across replicas."""
    from shardwise.parallel.zero.stages import ShardedModel

    plain = ShardedModel.prepare_micro_batch

    def prepare(self: Any, last: bool) -> None:
        plain(self, last)
        self.model.set_requires_all_reduce(False)

    return mock.patch.object(ShardedModel, "prepare_micro_batch", prepare)


def wrong_divide_factor() -> AbstractContextManager[Any]:
    """The factor of the ranks that FSDP averages over leaves the replicas out."""
    from shardwise.parallel.zero.stages import ShardedModel

    return mock.patch.object(ShardedModel, "data_parallel_size", property(lambda self: self.mesh.size(1)))


def lost_last_micro_batch() -> AbstractContextManager[Any]:
    """The last micro-batch of a step is never computed."""
    from shardwise.train import loop

    plain = loop.accumulate

    def accumulate(parts: Any, batch: Any) -> torch.Tensor:
        return plain(parts, replace(batch, micro_batches=batch.micro_batches[:-1]))

    return mock.patch.object(loop, "accumulate", accumulate)


@contextmanager
def stale_gather() -> Iterator[None]:
    """Stages 1 and 2 compute with the parameters that were gathered before the update."""
    from shardwise.parallel.zero.stages import ShardedModel
    from shardwise.train import session

    plain, plain_save = ShardedModel.prepare_micro_batch, session.save

    def prepare(self: Any, last: bool) -> None:
        plain(self, last)
        self.model.set_reshard_after_backward(False)

    def save(state: Any) -> None:
        state.sharded.reshard()  # a checkpoint of gathered parameters would crash
        plain_save(state)

    with mock.patch.object(ShardedModel, "prepare_micro_batch", prepare), mock.patch.object(session, "save", save):
        yield


def stale_secondary_shard() -> AbstractContextManager[Any]:
    """hpZ gathers from the secondary shard of the step before."""
    from shardwise.parallel.zero.stages import ShardedModel

    return mock.patch.object(ShardedModel, "updated", lambda self: None)


def norm_of_one_shard() -> AbstractContextManager[Any]:
    """Each rank clips by the norm of the gradients that it holds."""
    from shardwise.parallel.zero.stages import ShardedModel

    return mock.patch.object(ShardedModel, "sum_up", lambda self, figures, group=None: None)


def norm_counts_copies() -> AbstractContextManager[Any]:
    """Along axes beyond data, parts that several ranks hold count several times."""
    from shardwise.parallel.zero.stages import ShardedModel

    plain = ShardedModel.norm_of_squares

    def norm(self: Any, squares: Any) -> torch.Tensor:
        with mock.patch.object(self, "replication_factors", dict.fromkeys(self.replication_factors, 1)):
            return plain(self, squares)

    return mock.patch.object(ShardedModel, "norm_of_squares", norm)


def clipped_twice_as_far() -> AbstractContextManager[Any]:
    """The norm is right, and gradients are scaled to half of the bound."""
    from torch import nn

    plain = nn.utils.clip_grads_with_norm_

    def clip(parameters: Any, max_norm: float, norm: torch.Tensor) -> None:
        plain(parameters, max_norm / 2, norm)

    return mock.patch.object(nn.utils, "clip_grads_with_norm_", clip)


def wrong_loss_scale() -> AbstractContextManager[Any]:
    """fp16: losses are scaled by half of what gradients are divided by."""
    from shardwise.optim.scaler import LossScaler

    plain = LossScaler.scale

    return mock.patch.object(LossScaler, "scale", lambda self, loss: plain(self, loss) * 0.5)


def no_gradient_sum_over_context() -> AbstractContextManager[Any]:
    """Keys and values get no gradient from queries on other ranks of the ring."""
    from shardwise.parallel.context import ring

    plain = ring.RingWire.start

    def start(self: Any, buffer: torch.Tensor, kind: Any) -> Any:
        return plain(self, torch.zeros_like(buffer) if kind == ring.GRADIENTS else buffer, kind)

    return mock.patch.object(ring.RingWire, "start", start)


@contextmanager
def pipeline_drops_a_micro_batch() -> Iterator[None]:
    """The loss of the last micro-batch is reported, and its backward brings nothing."""
    from shardwise.parallel.parallel_context import ParallelContext

    plain = ParallelContext.learn

    def learn(self: Any, model: Any, objective: Any, batches: Any, to_backward: Any, prepare: Any) -> Any:
        seen = 0

        def backward(loss: Any) -> torch.Tensor:
            nonlocal seen
            seen += 1
            scaled: torch.Tensor = to_backward(loss)
            return scaled * 0 if seen == len(batches) else scaled

        return plain(self, model, objective, batches, backward, prepare)

    with mock.patch.object(ParallelContext, "learn", learn):
        yield


def experts_weighted_wrongly() -> AbstractContextManager[Any]:
    """A token's experts come back with each other's routing weights."""
    from shardwise.parallel.expert.modules import RoutedExperts

    plain = RoutedExperts._dispatch

    def dispatch(self: Any, hidden_states: Any, experts: Any, weights: Any) -> Any:
        return plain(self, hidden_states, experts, weights.flip(-1))

    return mock.patch.object(RoutedExperts, "_dispatch", dispatch)


def expert_gradients_not_averaged() -> AbstractContextManager[Any]:
    """Experts' gradients are summed over fewer ranks than others', and not scaled for it."""
    from shardwise.parallel.expert.apply import ExpertParallel

    def average(self: Any, *args: Any) -> None:
        for module in self.modules:
            module.gradient_scale = 1.0

    return mock.patch.object(ExpertParallel, "average_over", average)


def rate_of_the_next_step() -> AbstractContextManager[Any]:
    """The learning rate runs one step ahead."""
    from shardwise.train import loop

    plain = loop.set_rates

    def set_rates(optimizer: Any, train: Any, step: int, total: int) -> float:
        return plain(optimizer, train, step + 1, total)

    return mock.patch.object(loop, "set_rates", set_rates)


# Each mutation with the variants of tests/parallel/test_parity.py that must notice it.
MUTATIONS: dict[Callable[[], AbstractContextManager[Any]], tuple[str, ...]] = {
    no_all_reduce_across_replicas: ("hybrid-1 fp32", "hybrid-2 fp32", "hybrid-3 fp32", "hybrid-3 bf16"),
    all_reduce_never_requested: ("hybrid-3 fp32",),
    wrong_divide_factor: ("hybrid-3 fp32", "ring hybrid"),
    lost_last_micro_batch: ("zero-2 fp32",),
    stale_gather: ("zero-1 fp32", "zero-2 fp32"),
    stale_secondary_shard: ("hpZ",),
    norm_of_one_shard: ("zero-3 fp32", "pipeline"),
    norm_counts_copies: ("ring hybrid",),
    clipped_twice_as_far: ("sgd zero-2",),
    wrong_loss_scale: ("zero-3 fp16",),
    no_gradient_sum_over_context: ("ring",),
    pipeline_drops_a_micro_batch: ("pipeline",),
    experts_weighted_wrongly: ("expert",),
    expert_gradients_not_averaged: ("expert",),
    rate_of_the_next_step: ("zero-1 fp32",),
}


def train_mutated(runs: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Trained]]:
    """Each run of each mutation, by its name, while the mutation is in place."""
    planted = {mutation.__name__: mutation for mutation in MUTATIONS}
    results: dict[str, dict[str, Trained]] = {}
    for name, variants in runs.items():
        for variant, run in variants.items():
            with planted[name]():
                try:
                    results.setdefault(name, {})[variant] = scenarios.train(run)
                except BaseException as error:
                    error.add_note(f"with {name} in {variant}")
                    raise
            gc.collect()
    return results
