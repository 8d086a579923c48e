"""`train --profile 10,500`: chosen steps of a real run under torch's profiler, told in words.

Each rank leaves a trace (chrome://tracing, Perfetto) and, on a GPU, a snapshot of its memory under `profile` in the
output folder; the main rank also what the step was made of, what of the communication was hidden, and what to change.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

from shardwise.core.compat.torch_private import dump_memory_snapshot, record_memory_history
from shardwise.distributed.mesh import World
from shardwise.observe.profile import UPDATE, StepProfile, recording

if TYPE_CHECKING:
    from shardwise.resolved_run import ResolvedRun

LONGEST = 100_000  # allocations that a snapshot remembers


class Profiling:
    """Records the steps that were asked for; nothing else costs anything."""

    def __init__(self, job: ResolvedRun, world: World, total: int) -> None:
        self._job, self._world, self._steps = job, world, frozenset(job.run.log.profile)
        self._folder, self._active = job.output / "profile", False
        late = sorted(step for step in self._steps if step > total)
        steps = ", ".join(map(str, late))
        self._told = (
            [
                f"not profiled, since the run ends after {total} steps: {steps} "
                "(advanced.log.profile)"
            ]
            if late
            else []
        )

    @contextmanager
    def step(self, number: int, tokens: int) -> Iterator[None]:
        """Around a step."""
        if number not in self._steps:
            yield
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        name, cuda = f"step-{number:08d}.rank-{self._world.rank}", self._world.device.type == "cuda"
        trace = self._folder / f"{name}.trace.json"
        if cuda:
            record_memory_history(LONGEST)
        self._active = True
        try:
            with recording(self._world.device, trace) as recorded:
                yield
        finally:
            self._active = False
            if cuda:
                dump_memory_snapshot(str(self._folder / f"{name}.memory.pickle"))
                record_memory_history(None)
        if self._world.is_main and recorded.profile is not None:
            summary = self._folder / f"step-{number:08d}.txt"
            text = in_words(self._job, recorded.profile, tokens, self._world)
            summary.write_text(text)
            self._told = [
                f"step {number} under the profiler: {summary}, {trace}",
                *text.splitlines(),
            ]

    def update(self) -> AbstractContextManager[Any]:
        """Around the update, within a step."""
        return record_function(UPDATE) if self._active else nullcontext()

    def told(self) -> list[str]:
        """What to tell of the last recorded step, once."""
        told, self._told = self._told, []
        return told


def in_words(job: ResolvedRun, found: StepProfile, tokens: int, world: World) -> str:
    """What the step was made of and what would make it faster."""
    from rich.console import Console

    from shardwise.observe.profile_advice import Speed, advise, show_profile

    cuda = world.device.type == "cuda"
    memory = torch.cuda.max_memory_allocated(world.device) if cuda else None
    room = torch.cuda.get_device_properties(world.device).total_memory if cuda else None
    device = torch.cuda.get_device_name(world.device) if cuda else "CPU"
    speed = Speed(
        found.whole or 1e-9, tokens, None, memory, room, device, world.size, world.rank, found
    )
    page = Console(file=io.StringIO(), width=110)
    show_profile(speed, advise(job.run, speed), page)
    text: str = page.file.getvalue()  # type: ignore[attr-defined]
    return text
