"""How much travels at once and how far ahead, from what this link and this device do: `parallel.bucket` and `prefetch`.

Where either is `auto`, the ranks of a shard group time a few all-gathers and a matrix product at the start (about a
second), and rank 0 decides for all:
  together  blocks of a unit: doubled until latency is at most a tenth of a gather, as long as four units stay
  prefetch  units ahead: what computes meanwhile lasts as long as a gather; 1 to 3, in a twentieth of the memory
Neither changes a value. The number of blocks in a unit changes which rank's part a ring begins a sum with, so that on
more than two ranks the last bits may differ; a run that goes on keeps what it began with (`sending.json`).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.config.schema import Run
from shardwise.core.dtypes import COMPUTE
from shardwise.distributed.link_bench import call_of, fit, time_of
from shardwise.distributed.mesh import World
from shardwise.parallel.zero.overlap import CommSettings, given
from shardwise.parallel.zero.stages import unmanaged

SMALL = 16 << 20  # bytes of a model below which a step has nothing to gain that is worth a second
LATENCY = 0.1  # of a gather's transfer, at most
LEAST_UNITS, MOST_AHEAD = 4, 3
ROOM = 0.05  # of the device's memory, for what is gathered ahead
SMALLEST, MIDDLE, LARGEST = (
    4 << 10,
    256 << 10,
    64 << 20,
)  # bytes of gathers that are timed, until one takes
LONG = 0.025  # seconds
FILE = "sending.json"


@dataclass(frozen=True)
class MeasuredLink:
    """What a shard group's gathers do: bytes/s of a rank, seconds of a hop."""

    ranks: int
    bandwidth: float
    latency: float

    def seconds(self, gathered: float) -> float:
        """A gather of so many bytes in all."""
        return (self.ranks - 1) * (self.latency + gathered / self.ranks / self.bandwidth)

    def waits(self, gathered: float) -> float:
        """Latency as a share of the transfer."""
        return self.latency * self.ranks * self.bandwidth / gathered


@dataclass(frozen=True)
class Blocks:
    """A model's blocks: how many, and of a usual one the bytes that are gathered and the FLOPs of its forward."""

    count: int
    bytes: float
    flops: float


def choose(
    link: MeasuredLink, speed: float, blocks: Blocks, memory: float, frees: bool
) -> tuple[CommSettings, str]:
    """What suits a link and a device of `speed` FLOP/s, and why; `frees`: blocks are gathered anew and freed."""
    together = 1
    while (
        link.waits(together * blocks.bytes) > LATENCY and 2 * together * LEAST_UNITS <= blocks.count
    ):
        together *= 2
    sent, computed = link.seconds(together * blocks.bytes), together * blocks.flops / speed
    ahead = min(MOST_AHEAD, max(1, math.ceil(sent / computed)))
    while frees and ahead > 1 and ahead * together * blocks.bytes > ROOM * memory:
        ahead -= 1
    units = f"{together} blocks a unit" if together > 1 else "one block a unit"
    why = (
        f"{units}, {ahead} gathered ahead: {_told(sent)} to gather one ({link.bandwidth / 1e9:.3g} GB/s, "
        f"{link.latency * 1e6:.0f} µs a hop: {link.waits(together * blocks.bytes):.0%} of it), "
        f"{_told(computed)} to compute it at {speed / 1e12:.2g} TFLOP/s"
    )
    return CommSettings(together=together, prefetch=ahead), why


def tune(
    run: Run,
    world: World,
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    say: Callable[[str], None] = lambda _: None,
    output: Path | None = None,
) -> CommSettings:
    """What the run says, with `auto` answered by a measurement; collective, the same on every rank.

    `output`: where a run that goes on finds what it began with.
    """
    said, parallel = given(run.parallel), run.parallel
    shard, plus = world.mesh.size(1), parallel.hpz_size or parallel.quantize_weights
    if "auto" not in (parallel.bucket, parallel.prefetch) or shard == 1 or plus:
        return said
    if parallel.beyond_data or run.offload.parameters != "none":
        return said
    known = _blocks(run, model, blocks)
    if known.count < 2 or known.count * known.bytes < SMALL:
        return said
    of = [shard, world.size, known.count, known.bytes, known.flops]
    found: list[Any] = [_kept(output, of) if world.is_main and run.resume != "never" else None]
    dist.broadcast_object_list(found, 0, group=world.control)
    if found[0] is None:
        link = measure_link(world)
        speed = measure_speed(world.device, COMPUTE[run.precision])
        found = [choose(link, speed, known, _memory(world), parallel.zero == 3)]
        dist.broadcast_object_list(found, 0, group=world.control)
        if world.is_main and output is not None:
            output.mkdir(parents=True, exist_ok=True)
            (output / FILE).write_text(
                json.dumps({"of": of, "sending": asdict(found[0][0]), "why": found[0][1]})
            )
    sending: CommSettings = found[0][0]
    say(f"communication: {found[0][1]}")
    if parallel.bucket != "auto":
        sending = replace(sending, bucket=said.bucket, together=1)
    if parallel.prefetch != "auto":
        sending = replace(sending, prefetch=said.prefetch)
    return sending


def measure_link(world: World) -> MeasuredLink:
    """All-gathers in the shard groups, all groups at once, as steps make them; the slowest rank's times."""
    group, ranks, device = world.mesh["shard"].get_group(), world.mesh.size(1), world.device

    def gather(size: int) -> tuple[int, float]:
        elements = max(1, size // 4 // ranks) * ranks
        return 4 * elements, time_of(
            call_of("all_gather", elements, ranks, group, device), LONG / 8, device
        )

    small, size = gather(SMALLEST), MIDDLE
    while (large := gather(size))[
        1
    ] < LONG and size < LARGEST:  # a step at a time: nobody knows yet how slow it is
        size *= 4
    # The ends alone: links that let the first megabyte through at once make those between look fast.
    found = fit(ranks, {"all_gather": dict((small, large))})
    return MeasuredLink(ranks, found.bandwidth, found.latency)


def measure_speed(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product of a usual size."""
    size, rounds = (4096, 10) if device.type == "cuda" else (768, 3)
    one = torch.randn(size, size, device=device, dtype=dtype)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    best = math.inf
    for _ in range(3):
        wait()
        begun = time.perf_counter()
        for _ in range(rounds):
            one @ one
        wait()
        best = min(best, (time.perf_counter() - begun) / rounds)
    return 2 * size**3 / best


def _blocks(run: Run, model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> Blocks:
    """Of blocks as they are on `meta`; the usual one is the middle one by size."""
    alone, element = (
        unmanaged(model, run.parallel.zero, run.precision),
        COMPUTE[run.precision].itemsize,
    )
    tokens = int(run.train.micro_batch_size) * run.data.sequence_length
    sizes = []
    for _, block in blocks:
        moved = [p for p in block.parameters() if p not in alone]
        gathered = sum(
            p.numel() * (element if p.is_floating_point() else p.element_size()) for p in moved
        )
        sizes.append((gathered, 2 * tokens * sum(p.numel() for p in block.parameters())))
    middle = sorted(sizes)[len(sizes) // 2] if sizes else (0, 0)
    return Blocks(len(sizes), float(middle[0]), float(middle[1]))


def _memory(world: World) -> float:
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / local


def _kept(output: Path | None, of: list[Any]) -> tuple[CommSettings, str] | None:
    """What an earlier run of this folder chose for the same model and ranks; None where that is not to be read."""
    try:
        kept = json.loads((output / FILE).read_text()) if output is not None else {}
        if kept["of"] != of:
            return None
        sending, why = (
            CommSettings(None, int(kept["sending"]["together"]), int(kept["sending"]["prefetch"])),
            kept["why"],
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    usual = (
        sending.together >= 1
        and 0 <= (sending.prefetch or 0) <= MOST_AHEAD
        and isinstance(why, str)
    )
    return (sending, f"{why} (as before)") if usual else None


def _told(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
