"""Describes a run's method in its plan; rejects checkpoints of another method."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.config.renamed import read_saved
from shardwise.config.schema import Run
from shardwise.core.errors import UserError
from shardwise.nn.adapters.apply import Adapted
from shardwise.nn.adapters.plan import AdapterPlan
from shardwise.optim.build import state_bytes

if TYPE_CHECKING:
    from shardwise.resolved_run import ResolvedRun

MULTIPLY = {"fp8": ", multiplied in fp8", "plain": ", unpacked to multiply"}
NOT_COMPARED = ("dropout", "adapter")  # settings that may change when a run resumes


def method_lines(job: ResolvedRun) -> list[tuple[str, str]]:
    """The plan's first rows: the model, and which part of it is trained."""
    adapted = job.adapted
    run = job.run
    model = f"{job.source.label}, {adapted.parameters / 1e6:,.1f}M parameters"
    if adapted.trainable == adapted.parameters and adapted.plan is None:
        return [("model", f"{model}, all trained")]
    states = (4 + state_bytes(run.train)) * adapted.trainable  # fp32 masters and optimizer states
    trained = f"{adapted.trainable:,} parameters are trained ({100 * adapted.share:.2g}%)"
    memory = f"their optimizer holds {states / 2**20:,.1f} MiB in all"
    rows = [("model", model), ("method", f"{_named(adapted, run)}: {trained}; {memory}")]
    if adapted.left_out:
        rows.append(("", f"left as they are: {', '.join(adapted.left_out)}"))
    return rows


def _named(adapted: Adapted, run: Run) -> str:
    plan = adapted.plan
    if plan is None:
        return f"full, but for what freeze names ({adapted.frozen:,} parameters)"
    text = f"{run.method.type}{_ranks(plan)} on {len(plan.targets)} modules"
    if hasattr(run.method, "bits"):
        text += f" over a base in {run.method.bits}"
    text += MULTIPLY.get(getattr(run.method, "multiply", ""), "")
    if plan.fully_trained:
        text += f", {', '.join(plan.fully_trained)} whole"
    if adapter := getattr(run.method, "adapter", None):
        text += f", going on from {adapter}"
    return text


def _ranks(plan: AdapterPlan) -> str:
    if plan.kind != "lora":
        return ""
    ranks = sorted(set(plan.ranks.values()))
    text = f" of rank {ranks[0]}" if len(ranks) == 1 else f" of ranks {ranks[0]}–{ranks[-1]}"
    if plan.dora:
        text += " with magnitudes (DoRA)"
    return text


def check_same_method(folder: Path, run: Run) -> None:
    """Raises UserError if a checkpoint was saved by a run with another method or freeze.

    A checkpoint holds what its method trains; another method would miss some of its tensors, or
    leave some unread.
    """
    saved = read_saved(folder / "run.json")
    before = saved.get("method", {"type": "full"})
    now = run.method.model_dump(mode="json")
    differing = [k for k in now if k not in NOT_COMPARED and before.get(k) != now[k]]
    if before["type"] != now["type"]:
        difference = f"method {before['type']}"
    elif differing:
        difference = f"other {', '.join(differing)}"
    elif list(saved.get("freeze", [])) != list(run.freeze):
        difference = "another freeze"
    else:
        return
    problem = f"was saved by a run with {difference}"
    remedy = "use the same method, choose another output folder, or start afresh with resume=never"
    raise UserError("resume", str(folder), problem, remedy)
