"""`train --profile 10,500`: profiles chosen steps of a run with torch's profiler.

Each rank writes a trace (chrome://tracing, Perfetto) and, on a GPU, a snapshot of its memory to
`profile` in the output folder. The main rank adds a summary: time by kind of work, how much of the
communication was hidden, and suggestions.
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

LONGEST = 100_000  # allocations in a memory snapshot


class Profiling:
    """Profiles the steps of `log.profile`; other steps cost nothing."""

    def __init__(self, job: ResolvedRun, world: World, total: int) -> None:
        self._job = job
        self._world = world
        self._steps = frozenset(job.run.log.profile)
        self._folder = job.output / "profile"
        self._active = False
        self._notes: list[str] = []
        late = ", ".join(str(step) for step in sorted(self._steps) if step > total)
        if late:
            note = f"not profiled, since the run ends after {total} steps: {late}"
            self._notes.append(f"{note} (advanced.log.profile)")

    @contextmanager
    def step(self, number: int, tokens: int) -> Iterator[None]:
        """Context of a step, which is profiled if `number` was configured."""
        if number not in self._steps:
            yield
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{number:08d}.rank-{self._world.rank}"
        cuda = self._world.device.type == "cuda"
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
            self._notes = [f"step {number} under the profiler: {summary}, {trace}"]
            self._notes += text.splitlines()

    def update(self) -> AbstractContextManager[Any]:
        """Context of the optimizer's update, within a step."""
        return record_function(UPDATE) if self._active else nullcontext()

    def take_notes(self) -> list[str]:
        """Returns the lines about the last profiled step, once."""
        notes = self._notes
        self._notes = []
        return notes


def in_words(job: ResolvedRun, profile: StepProfile, tokens: int, world: World) -> str:
    """A step's time by kind of work, and suggestions to make it faster, as text."""
    from rich.console import Console

    from shardwise.observe.profile_advice import Speed, advise, show_profile

    memory = None
    room = None
    device = "CPU"
    if world.device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(world.device)
        room = torch.cuda.get_device_properties(world.device).total_memory
        device = torch.cuda.get_device_name(world.device)
    speed = Speed(
        seconds=profile.whole or 1e-9,
        tokens=tokens,
        mfu=None,
        memory=memory,
        room=room,
        device=device,
        ranks=world.size,
        rank=world.rank,
        profile=profile,
    )
    page = Console(file=io.StringIO(), width=110)
    show_profile(speed, advise(job.run, speed), page)
    text: str = page.file.getvalue()  # type: ignore[attr-defined]
    return text
