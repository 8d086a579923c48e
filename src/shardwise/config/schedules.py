"""Pipeline schedules by name: what the config's checks, the planner and the pipeline need to know of each.

To add one: its name and row here, its order in parallel/pipeline/schedule.py, and its memory and idle time in
foresight/plan/estimate.py, which raises for a name that it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zbv", "naive"]


@dataclass(frozen=True)
class ScheduleTraits:
    """How a schedule cuts the model and its backwards."""

    chunks: int = 1  # of the model on each rank
    any_chunks: bool = False  # whether `virtual_stages` may change that
    splits_backward: bool = False  # into a part for the inputs and one for the weights


SCHEDULES: dict[ScheduleName, ScheduleTraits] = {
    "1f1b": ScheduleTraits(),
    "gpipe": ScheduleTraits(),
    "interleaved": ScheduleTraits(chunks=2, any_chunks=True),
    "zbv": ScheduleTraits(chunks=2, splits_backward=True),
    "naive": ScheduleTraits(),
}


def chunks_per_rank(name: ScheduleName, virtual_stages: int | None) -> int:
    """Chunks of the model on each rank, with the setting `virtual_stages`."""
    traits = SCHEDULES[name]
    if traits.any_chunks and virtual_stages is not None:
        return virtual_stages
    return traits.chunks
