"""Memory of the models that an objective needs besides the trained one, for a run's plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.config.objectives import Distill
from shardwise.distributed.mesh import MeshLayout, layout_of
from shardwise.objectives.reference import needs_copy
from shardwise.parallel.frozen_model import frozen_bytes

if TYPE_CHECKING:
    from shardwise.resolved_run import ResolvedRun


def extra_model_memory(job: ResolvedRun) -> Iterator[tuple[str, str, float, str]]:
    """Each model's name, description, bytes on each rank's device, and a remark."""
    run = job.run
    layout = layout_of(run.parallel, job.ranks)
    settings = run.objective
    if settings == "auto":
        return
    if settings.type in ("dpo", "kto"):
        if needs_copy(run):
            size = frozen_bytes(job.parameters, layout, run.precision)
            yield "reference", f"a frozen copy of the model in {run.precision}", size, ""
        else:
            yield "reference", "the base, its adapters switched off", 0.0, ""
    if isinstance(settings, Distill) and job.teacher is not None:
        teacher = job.teacher
        what = f"{teacher.source.label}, {teacher.parameters / 1e6:,.1f}M parameters"
        if teacher.answers is not None and run.parallel.uses_model_parallelism:
            layout = MeshLayout(1, job.ranks)
        size = frozen_bytes(teacher.parameters, layout, run.precision)
        if teacher.answers is None:
            yield "teacher", f"{what} in {run.precision}", size, ""
        else:
            answers = f"{8 * teacher.answers.k + 4} bytes per learned token"
            remark = f"asked once for {answers} in {teacher.answers.root}, then let go"
            yield "teacher", f"{what} in {run.precision}", size, remark
