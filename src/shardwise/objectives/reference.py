"""Reference models: the model as it was before training, for preference objectives.

With adapters, the reference is the base with adapters disabled, which takes no memory. Where the
weights themselves are trained, it is a frozen copy (parallel/frozen_model.py) from the run's
initial files, also in a resumed run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardwise.config.schema import Run
from shardwise.objectives.answer_log_probs import Reference
from shardwise.parallel.frozen_model import build_frozen

if TYPE_CHECKING:
    from shardwise.distributed.mesh import World
    from shardwise.resolved_run import ResolvedRun


def needs_copy(run: Run) -> bool:
    """Whether training changes the base itself, so that the reference must be a copy."""
    return run.method.type == "full" or bool(run.method.modules_to_save)


def make_reference(job: ResolvedRun, world: World) -> Reference:
    """A function that gives the reference of a model, as a context around a forward."""
    if not needs_copy(job.run):
        return without_adapters
    copy = build_frozen(job.source, job.run, world)

    @contextmanager
    def frozen(model: Any) -> Iterator[Any]:
        yield copy.model

    return frozen


@contextmanager
def without_adapters(model: Any) -> Iterator[Any]:
    """The base of a model with adapters, in evaluation mode."""
    from shardwise.nn.adapters.layers import adapter_disabled

    training = model.training
    model.eval()
    try:
        with adapter_disabled(model):
            yield model
    finally:
        model.train(training)
