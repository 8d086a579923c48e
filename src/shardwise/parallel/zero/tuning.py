"""Measures link and device to choose how much is gathered at once, and how far ahead.

Where `parallel.bucket` or `prefetch` is `auto`, the ranks of a shard group time a few all-gathers
and a matrix product at the start (about a second), and rank 0 decides for all:
  together  blocks of a unit: doubled until latency is at most a tenth of a gather, as long as four
            units remain
  prefetch  units ahead: their compute takes as long as a gather; 1 to 3, in a twentieth of memory
Neither changes a value. The number of blocks in a unit changes the rank whose part a ring starts a
sum with, so that on more than two ranks the last bits may differ; a resumed run uses the first
run's choice (`sending.json`).
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
from shardwise.parallel.zero.overlap import CommSettings, requested_comm
from shardwise.parallel.zero.stages import unmanaged

SMALL = 16 << 20  # bytes of a model below which measuring costs more than it gains
LATENCY = 0.1  # of a gather's transfer, at most
LEAST_UNITS = 4
MOST_AHEAD = 3
ROOM = 0.05  # of the device's memory, for units gathered ahead
SMALLEST = 4 << 10  # bytes of the first gather that is timed; then from MIDDLE up
MIDDLE = 256 << 10
LARGEST = 64 << 20
LONG = 0.025  # seconds of a gather after which no larger one is timed
FILE = "sending.json"


@dataclass(frozen=True)
class MeasuredLink:
    """A shard group's gathers: bytes/s of a rank, seconds of a hop."""

    ranks: int
    bandwidth: float
    latency: float

    def seconds(self, gathered: float) -> float:
        """Seconds of a gather of `gathered` bytes in total."""
        return (self.ranks - 1) * (self.latency + gathered / self.ranks / self.bandwidth)

    def waits(self, gathered: float) -> float:
        """A gather's latency as a share of its transfer time."""
        return self.latency * self.ranks * self.bandwidth / gathered


@dataclass(frozen=True)
class Blocks:
    """A model's blocks: their count, and a typical one's gathered bytes and forward FLOPs."""

    count: int
    bytes: float
    flops: float


def choose(
    link: MeasuredLink, speed: float, blocks: Blocks, memory: float, frees: bool
) -> tuple[CommSettings, str]:
    """The settings for a link and a device of `speed` FLOP/s, and the reason.

    `frees`: blocks are gathered again for each use and freed.
    """
    together = 1
    while 2 * together * LEAST_UNITS <= blocks.count:
        if link.waits(together * blocks.bytes) <= LATENCY:
            break
        together *= 2
    unit_bytes = together * blocks.bytes
    gather_time = link.seconds(unit_bytes)
    compute_time = together * blocks.flops / speed
    ahead = min(MOST_AHEAD, max(1, math.ceil(gather_time / compute_time)))
    while frees and ahead > 1 and ahead * unit_bytes > ROOM * memory:
        ahead -= 1
    units = f"{together} blocks a unit" if together > 1 else "one block a unit"
    why = (
        f"{units}, {ahead} gathered ahead: "
        f"{_duration(gather_time)} to gather one ({link.bandwidth / 1e9:.3g} GB/s, "
        f"{link.latency * 1e6:.0f} µs a hop: {link.waits(unit_bytes):.0%} of it), "
        f"{_duration(compute_time)} to compute it at {speed / 1e12:.2g} TFLOP/s"
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
    """The run's settings, with `auto` replaced by a measured choice; the same on every rank.

    A collective. `output`: the folder where a resumed run finds the first run's choice.
    """
    requested = requested_comm(run.parallel)
    parallel = run.parallel
    shard = world.mesh.size(1)
    if "auto" not in (parallel.bucket, parallel.prefetch) or shard == 1:
        return requested
    if parallel.hpz_size or parallel.quantize_weights:
        return requested
    if parallel.uses_model_parallelism or run.offload.parameters != "none":
        return requested
    sizes = _blocks(run, model, blocks)
    if sizes.count < 2 or sizes.count * sizes.bytes < SMALL:
        return requested
    key = [shard, world.size, sizes.count, sizes.bytes, sizes.flops]
    choice: list[Any] = [None]
    if world.is_main and run.resume != "never":
        choice = [_saved_choice(output, key)]
    dist.broadcast_object_list(choice, 0, group=world.control)
    if choice[0] is None:
        link = measure_link(world)
        speed = measure_speed(world.device, COMPUTE[run.precision])
        choice = [choose(link, speed, sizes, _memory(world), parallel.zero == 3)]
        dist.broadcast_object_list(choice, 0, group=world.control)
        if world.is_main and output is not None:
            output.mkdir(parents=True, exist_ok=True)
            record = {"of": key, "sending": asdict(choice[0][0]), "why": choice[0][1]}
            (output / FILE).write_text(json.dumps(record))
    comm: CommSettings = choice[0][0]
    say(f"communication: {choice[0][1]}")
    if parallel.bucket != "auto":
        comm = replace(comm, bucket=requested.bucket, together=1)
    if parallel.prefetch != "auto":
        comm = replace(comm, prefetch=requested.prefetch)
    return comm


def measure_link(world: World) -> MeasuredLink:
    """Times all-gathers in all shard groups at once, as steps run them; the slowest rank counts."""
    group = world.mesh["shard"].get_group()
    ranks = world.mesh.size(1)
    device = world.device

    def gather(size: int) -> tuple[int, float]:
        elements = max(1, size // 4 // ranks) * ranks
        call = call_of("all_gather", elements, ranks, group, device)
        return 4 * elements, time_of(call, LONG / 8, device)

    small = gather(SMALLEST)
    size = MIDDLE
    large = gather(size)
    while large[1] < LONG and size < LARGEST:  # step by step: the link may be slow
        size *= 4
        large = gather(size)
    # The ends alone: links that pass the first megabyte at once make sizes in between look fast.
    line = fit(ranks, {"all_gather": dict((small, large))})
    return MeasuredLink(ranks, line.bandwidth, line.latency)


def measure_speed(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product of a typical size."""
    cuda = device.type == "cuda"
    size = 4096 if cuda else 768
    rounds = 10 if cuda else 3
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    wait = torch.cuda.synchronize if cuda else lambda: None
    best = math.inf
    for _ in range(3):
        wait()
        start = time.perf_counter()
        for _ in range(rounds):
            matrix @ matrix
        wait()
        best = min(best, (time.perf_counter() - start) / rounds)
    return 2 * size**3 / best


def _blocks(run: Run, model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> Blocks:
    """Measures blocks on `meta`; the typical one is the middle one by size."""
    plain = unmanaged(model, run.parallel.zero, run.precision)
    itemsize = COMPUTE[run.precision].itemsize
    tokens = int(run.train.micro_batch_size) * run.data.sequence_length
    sizes = []
    for _, block in blocks:
        elements = 0
        gathered = 0
        for p in block.parameters():
            elements += p.numel()
            if p in plain:
                continue
            gathered += p.numel() * (itemsize if p.is_floating_point() else p.element_size())
        sizes.append((gathered, 2 * tokens * elements))
    gathered, flops = sorted(sizes)[len(sizes) // 2] if sizes else (0, 0)
    return Blocks(len(sizes), float(gathered), float(flops))


def _memory(world: World) -> float:
    if world.device.type == "cuda":
        return float(torch.cuda.get_device_properties(world.device).total_memory)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / local


def _saved_choice(output: Path | None, key: list[Any]) -> tuple[CommSettings, str] | None:
    """The choice of an earlier run in this folder for the same model and ranks, if readable."""
    if output is None:
        return None
    try:
        saved = json.loads((output / FILE).read_text())
        if saved["of"] != key:
            return None
        together = int(saved["sending"]["together"])
        prefetch = int(saved["sending"]["prefetch"])
        why = saved["why"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if together < 1 or not 0 <= prefetch <= MOST_AHEAD or not isinstance(why, str):
        return None
    return CommSettings(None, together, prefetch), f"{why} (as before)"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
