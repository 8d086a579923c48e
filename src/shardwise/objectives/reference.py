"""The model as it was before training, for objectives that measure against it.

An adapter's base is that model already: with the adapters switched off nothing else is held. Where the weights
themselves are trained, it is a frozen copy (parallel/frozen_model.py), made from the run's first files also when the
run is resumed.
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
    """Whether training changes the base itself, so that the reference must be a model of its own."""
    return run.method.type == "full" or bool(run.method.modules_to_save)


def make_reference(job: ResolvedRun, world: World) -> Reference:
    """What gives the reference of a model, around a forward."""
    if not needs_copy(job.run):
        return without_adapters
    copy = build_frozen(job.source, job.run, world)

    @contextmanager
    def frozen(model: Any) -> Iterator[Any]:
        yield copy.model

    return frozen


@contextmanager
def without_adapters(model: Any) -> Iterator[Any]:
    """The base of a model with adapters; without dropout, whatever mode the model is in."""
    from shardwise.nn.adapters.layers import adapter_disabled

    training = model.training
    model.eval()
    try:
        with adapter_disabled(model):
            yield model
    finally:
        model.train(training)
