"""Whether a run is worth a prediction before it starts; asked of every run, so nothing heavy is imported here."""

from __future__ import annotations

from shardwise.config.schema import Run
from shardwise.core.cpu_probe import usable_memory
from shardwise.parallel.offload.policy import held_by_place

NEAR = 0.4  # of a CPU's memory, held by all ranks, from which it is worth a closer look
REHEARSED = ("causal", "seq2seq", "masked")


def worth_predicting(run: Run, ranks: int, trained: int, frozen: int) -> bool:
    """A GPU's run always; a CPU's, where a prediction takes as long as a small run, if its states may not fit."""
    if run.objective == "auto" or run.objective.type not in REHEARSED:
        return False
    if run.device != "cpu":
        return True
    pieces = run.parallel.pipeline * run.parallel.tensor
    held = held_by_place(run, trained // pieces, max(1, ranks // pieces), frozen // pieces)
    here = ranks if run.ranks == "auto" else int(run.ranks)
    return sum(held.get("device", {}).values()) * here > NEAR * usable_memory()
