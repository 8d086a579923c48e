"""What is said of a method: in the plan of a run, and when a checkpoint is of another one."""

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


def method_lines(job: ResolvedRun) -> list[tuple[str, str]]:
    """The plan's first rows: the model, and what of it is trained."""
    adapted, run = job.adapted, job.run
    model = f"{job.source.label}, {adapted.parameters / 1e6:,.1f}M parameters"
    if adapted.trainable == adapted.parameters and adapted.plan is None:
        return [("model", f"{model}, all trained")]
    states = (
        4 + state_bytes(run.train)
    ) * adapted.trainable  # the masters and what the optimizer keeps of them
    trained = f"{adapted.trainable:,} parameters are trained ({100 * adapted.share:.2g}%)"
    words = f"{trained}; their optimizer holds {states / 2**20:,.1f} MiB in all"
    rows = [("model", model), ("method", f"{_named(adapted, run)}: {words}")]
    if adapted.left_out:
        rows.append(("", f"left as they are: {', '.join(adapted.left_out)}"))
    return rows


def _named(adapted: Adapted, run: Run) -> str:
    plan = adapted.plan
    if plan is None:
        return f"full, but for what freeze names ({adapted.frozen:,} parameters)"
    whole = f", {', '.join(plan.fully_trained)} whole" if plan.fully_trained else ""
    before = getattr(run.method, "adapter", None)
    onward = f", going on from {before}" if before else ""
    base = f" over a base in {run.method.bits}" if hasattr(run.method, "bits") else ""
    base += {"fp8": ", multiplied in fp8", "plain": ", unpacked to multiply"}.get(
        getattr(run.method, "multiply", ""), ""
    )
    return f"{run.method.type}{_ranks(plan)} on {len(plan.targets)} modules{base}{whole}{onward}"


def _ranks(plan: AdapterPlan) -> str:
    if plan.kind != "lora":
        return ""
    ranks = sorted(set(plan.ranks.values()))
    told = f" of rank {ranks[0]}" if len(ranks) == 1 else f" of ranks {ranks[0]}–{ranks[-1]}"
    return told + (" with magnitudes (DoRA)" if plan.dora else "")


def check_same_method(folder: Path, run: Run) -> None:
    """A checkpoint holds what its method trains: for another method something would be missing, or left unread."""
    saved = read_saved(folder / "run.json")
    before, now = saved.get("method", {"type": "full"}), run.method.model_dump(mode="json")
    ignored = ("dropout", "adapter")
    differs = [k for k in now if k not in ignored and before.get(k) != now[k]]
    if (
        before["type"] != now["type"]
        or differs
        or list(saved.get("freeze", [])) != list(run.freeze)
    ):
        what = (
            f"method {before['type']}"
            if before["type"] != now["type"]
            else ", ".join(differs) or "another freeze"
        )
        problem = f"was saved by a run with {'other ' if differs and before['type'] == now['type'] else ''}{what}"
        remedy = (
            "use the same method, choose another output folder, or start afresh with resume=never"
        )
        raise UserError("resume", str(folder), problem, remedy)
