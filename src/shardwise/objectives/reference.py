"""Reference models: the model as it was before training, for preference objectives.

With adapters, the reference is the base with adapters disabled, which takes no memory. Where the
weights themselves are trained, it is a frozen copy (parallel/frozen_model.py) from the run's
initial files, also in a resumed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardwise.config.schema import Run
from shardwise.objectives.answer_log_probs import Reference
from shardwise.parallel.frozen_model import build_frozen
from shardwise.parallel.parallel_context import ParallelContext

if TYPE_CHECKING:
    from shardwise.distributed.mesh import World
    from shardwise.resolved_run import ResolvedRun


def needs_copy(run: Run) -> bool:
    """Whether training changes the base itself, so that the reference must be a copy."""
    return run.method.type == "full" or bool(run.method.modules_to_save)


def make_reference(
    job: ResolvedRun, world: World, model: Any, context: ParallelContext
) -> Reference:
    """The reference of a model, sharded along the same axes."""
    if needs_copy(job.run):
        return build_frozen(job.source, job.run, world).answers

    def base(
        batches: list[Any], compute: Callable[[Any, Any], Any], absent: Callable[[Any], Any]
    ) -> list[Any]:
        with without_adapters(model):
            return context.answers(model, batches, compute, absent)

    return base


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """The context in which a model with adapters is its base, in evaluation mode."""
    from shardwise.nn.adapters.layers import adapter_disabled

    training = model.training
    model.eval()
    try:
        with adapter_disabled(model):
            yield
    finally:
        model.train(training)
