"""Decides whether a run is worth a prediction before it starts; runs for every job, so nothing heavy is imported."""

from __future__ import annotations

from shardwise.config.schema import Run
from shardwise.core.cpu_probe import usable_memory
from shardwise.parallel.offload.policy import held_by_place

NEAR = 0.4  # of a CPU's memory, held by all ranks, from which it is worth a closer look
REHEARSED = ("causal", "seq2seq", "masked")


def worth_predicting(run: Run, ranks: int, trained: int, frozen: int) -> bool:
    """Whether to predict a run: always on GPU, on CPU only if its states may not fit.

    On CPU a prediction takes as long as a small run.
    """
    if run.objective == "auto" or run.objective.type not in REHEARSED:
        return False
    if run.device != "cpu":
        return True
    shards = run.parallel.pipeline * run.parallel.tensor
    held = held_by_place(run, trained // shards, max(1, ranks // shards), frozen // shards)
    local_ranks = ranks if run.ranks == "auto" else int(run.ranks)
    return sum(held.get("device", {}).values()) * local_ranks > NEAR * usable_memory()
