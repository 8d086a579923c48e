"""Estimates what a run needs of a cluster: memory by category on device, host and disk; step time; cost.

Memory and work come from a sketch (sketch.py): the real code, rehearsed. This module adds what a sketch does not cover:
pipeline stages, the number of micro-batches, and the price.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import assert_never

from shardwise.checkpoint.host_copies import GENERATIONS
from shardwise.config.axes import data_ranks
from shardwise.config.schema import Run
from shardwise.core.hardware.specs import Cluster
from shardwise.distributed.mesh import layout_of
from shardwise.foresight.plan.network import seconds as wire_seconds
from shardwise.foresight.plan.quick import PROCESS
from shardwise.foresight.plan.sketch import Sketched, sketch
from shardwise.foresight.plan.time import StepTime, step_time
from shardwise.foresight.rehearse.ledger import WORKSPACE
from shardwise.foresight.rehearse.tally import Tally
from shardwise.nn.models.source import ModelSource
from shardwise.optim.build import state_bytes
from shardwise.parallel.offload.policy import held_by_place

MARGIN = 0.03  # of the memory, for what the allocator cannot put to use

Sketcher = Callable[[ModelSource, Run, int], Sketched]


@dataclass(frozen=True)
class Estimate:
    """A resolved run on a cluster, with its predicted memory, step time and cost."""

    run: Run
    cluster: Cluster
    memory: dict[str, float]  # of the device at the worst moment of the worst rank, by category
    peak_at: str
    reserved: float
    host: float  # bytes per node
    disk: float  # bytes per node, working files alone
    time: StepTime
    micro_batches: int
    model_flops: float  # of a step, over all ranks, without what is computed again

    @property
    def peak(self) -> float:
        """Peak bytes on the device."""
        return sum(self.memory.values())

    @property
    def spare(self) -> float:
        """Free bytes on the device, less a margin for fragmentation; negative if the run does not fit."""
        return self.cluster.device.memory - self.peak * (1 + MARGIN)

    @property
    def fits(self) -> bool:
        """Whether the run fits the memory of the device and of the host."""
        return self.spare >= 0 and self.host <= self.cluster.host_memory

    @property
    def tokens(self) -> int:
        """Tokens per step, over all ranks."""
        return self.run.train.batch_size * self.run.data.sequence_length

    @property
    def rate(self) -> float:
        """Tokens per second and device."""
        return self.tokens / self.time.seconds / self.cluster.ranks

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the share of the devices' peak that the model's own arithmetic takes up."""
        precision = self.cluster.device.computes(self.run.precision if self.run.precision != "auto" else "bf16")
        peak = self.cluster.device.peak[precision]
        return self.model_flops / self.time.seconds / (peak * self.cluster.ranks)

    def hours(self, tokens: float) -> float:
        """Hours to train on this many tokens."""
        return tokens / (self.rate * self.cluster.ranks) / 3600

    def cost(self, tokens: float) -> float | None:
        """Cost of training on this many tokens, in the currency of the price per device and hour."""
        price = self.cluster.price
        return None if price is None else self.hours(tokens) * price * self.cluster.ranks


def estimate(
    source: ModelSource, run: Run, cluster: Cluster, sketcher: Sketcher = sketch, fp8: bool = False
) -> Estimate:
    """Estimates a run that is resolved for the cluster's ranks.

    `fp8` assumes linear layers in fp8, for comparisons.
    """
    parallel = run.parallel
    stages = parallel.pipeline
    flat = without_pipeline(run)
    sketched = sketcher(source, flat, cluster.ranks // stages)
    micro = int(run.train.micro_batch_size)
    count = max(1, run.train.batch_size // data_ranks(parallel, cluster.ranks) // micro)
    if stages == 1:
        tally = sketched.at()
        memory = dict(tally.at_peak)
        reserved = tally.reserved
        peak_at = tally.peak_at
        time = step_time(tally, flat, cluster, count, fp8)
    else:
        memory, reserved, peak_at = _stage_memory(sketched, run, count)
        time = _pipelined(sketched, run, flat, cluster, count, fp8)
        tally = sketched.at(math.ceil(sketched.layers / stages))
    if cluster.device.kind != "cpu":
        memory["workspace"] = memory.get("workspace", 0.0) + WORKSPACE
        reserved += WORKSPACE
    host, disk = _host_and_disk(tally, run, cluster)
    return Estimate(
        run, cluster, memory, peak_at, reserved, host, disk, time, count, _model_flops(sketched, run, cluster, count),
    )  # fmt: skip


def without_pipeline(run: Run) -> Run:
    """Returns the run of one stage's ranks, with the pipeline axis removed, as a sketch needs it."""
    if run.parallel.pipeline == 1:
        return run
    values = run.model_dump()
    values["parallel"] |= {"pipeline": 1, "pipeline_schedule": "1f1b", "virtual_stages": None}
    return Run.model_validate(values)


def in_flight(run: Run, count: int) -> float:
    """Micro-batches whose activations the first stage holds at once.

    Fractional where it holds those of some of its blocks only.
    """
    stages = run.parallel.pipeline
    match run.parallel.pipeline_schedule:
        case "gpipe":
            return count
        case "interleaved":
            return min(count, stages + (stages - 1) / run.parallel.chunks_per_rank)
        case "1f1b" | "zbv":
            return float(min(count, stages))
        case "naive":
            return 1.0
        case unknown:
            assert_never(unknown)


def idle_seconds(run: Run, count: int, micro_batch_seconds: float) -> float:
    """Seconds that a stage is idle in a step of `count` micro-batches."""
    stages = run.parallel.pipeline
    match run.parallel.pipeline_schedule:
        case "gpipe" | "1f1b":
            return (stages - 1) * micro_batch_seconds
        case "interleaved":
            return (stages - 1) * micro_batch_seconds / run.parallel.chunks_per_rank
        case "zbv":
            return (stages - 1) * micro_batch_seconds / 3
        case "naive":
            return (stages - 1) * count * micro_batch_seconds
        case unknown:
            assert_never(unknown)


def _stage_memory(sketched: Sketched, run: Run, count: int) -> tuple[dict[str, float], float, str]:
    """The worse of the first stage (most micro-batches in flight) and the last (head and loss)."""
    layers = math.ceil(sketched.layers / run.parallel.pipeline)
    stage = sketched.at(layers)
    bare = sketched.at(0)
    per_micro_batch = max(0.0, stage.activations - bare.activations)
    worst: dict[str, float] = {}
    where = ""
    for first in (True, False):
        memory = dict(stage.at_peak)
        for name in ("parameters", "optimizer", "gradients"):  # of embedding and head, a stage has one at most
            memory[name] = max(0.0, memory.get(name, 0.0) - bare.at_peak.get(name, 0.0) / 2)
        under_way = in_flight(run, count) - 1 if first else 0.0
        memory["activations"] = memory.get("activations", 0.0) + under_way * per_micro_batch
        if first:
            memory["logits and loss"] = 0.0
        if sum(memory.values()) > sum(worst.values()):
            worst = memory
            where = f"{'first' if first else 'last'} stage, {stage.peak_at}"
    return worst, sum(worst.values()) + max(0.0, stage.reserved - stage.peak), where


def _pipelined(sketched: Sketched, run: Run, flat: Run, cluster: Cluster, count: int, fp8: bool) -> StepTime:
    """Step time of equal stages; embedding, head and loss are balanced by moving blocks between stages."""
    stages = run.parallel.pipeline
    total_layers = sketched.layers
    stage_cluster = replace(cluster, nodes=max(1, cluster.nodes // stages)) if cluster.nodes >= stages else cluster
    layers = math.ceil(total_layers / stages)
    stage_time = step_time(sketched.at(layers), flat, stage_cluster, count, fp8)
    outside_blocks = step_time(sketched.at(0), flat, stage_cluster, count, fp8)
    other_stages = 1 - 1 / stages  # of what is not in blocks, the other stages' part
    # a stage with the most blocks sets the pace; the mean is below it by this
    mean_to_largest = (total_layers / stages) / layers
    forward = stage_time.forward - other_stages * outside_blocks.forward
    backward = stage_time.backward - other_stages * outside_blocks.backward
    axes = stage_time.model_axes - other_stages * outside_blocks.model_axes
    waiting = stage_time.waiting - other_stages * outside_blocks.waiting
    message_bytes = int(run.train.micro_batch_size) * run.data.sequence_length * sketched.width * 2
    message_bytes //= run.parallel.tensor * run.parallel.context
    ranks_per_node = 2 if cluster.nodes < stages else 1
    passes = run.parallel.chunks_per_rank
    send_seconds = 2 * passes * count * wire_seconds("send", message_bytes, 2, ranks_per_node, cluster)
    micro_batch_seconds = (forward + backward + axes + waiting + send_seconds) / count
    bubble = idle_seconds(run, count, micro_batch_seconds)
    return replace(
        stage_time,
        forward=forward * mean_to_largest,
        backward=backward * mean_to_largest,
        waiting=waiting * mean_to_largest,
        model_axes=axes * mean_to_largest + send_seconds,
        bubble=bubble + (1 - mean_to_largest) * (forward + backward + axes + waiting),
        wire=stage_time.wire | {"pipeline": 2.0 * passes * count * message_bytes},
    )


def _host_and_disk(tally: Tally, run: Run, cluster: Cluster) -> tuple[float, float]:
    """Bytes per node in host memory and on disk."""
    layout = layout_of(run.parallel, cluster.ranks)
    shard = max(1, layout.shard)
    trained = int(tally.trained * (shard if run.parallel.zero else 1))
    places = held_by_place(run, trained, shard)
    ranks = min(cluster.per_node, cluster.ranks)
    host = sum(places.get("cpu", {}).values()) * ranks + PROCESS * ranks
    if run.offload.activations != "none":
        host += tally.kept * ranks
    if run.checkpoint.memory is not None:  # two of this node's part and of another's, and one that is being made
        nodes = max(1, math.ceil(cluster.ranks / cluster.per_node))
        state = tally.trained * (4 + state_bytes(run.train)) * cluster.ranks / max(1, layout.replicate) / nodes
        host += state * (GENERATIONS * min(2, nodes) + 1)
    return host, sum(places.get("disk", {}).values()) * ranks


def _model_flops(sketched: Sketched, run: Run, cluster: Cluster, count: int) -> float:
    """FLOPs of a step without recomputation."""
    full = sketched.at()
    bare = sketched.at(0)
    per_micro_batch = sum(work.flops * times for work, times in full.work.items())
    if run.recompute == "full":
        share = min(1.0, (run.recompute_blocks or sketched.layers) / sketched.layers)
        per_micro_batch -= share * (_forward(full, run) - _forward(bare, run))
    once = sum(work.flops * times for work, times in full.work_once.items())
    return (per_micro_batch * count + once) * (cluster.ranks // run.parallel.pipeline)


def _forward(tally: Tally, run: Run) -> float:
    """Forward FLOPs that are recomputed in recomputed blocks."""
    saved = () if run.recompute_attention else ("long_attention",)
    work_items = tally.work.items()
    return sum(work.flops * n for work, n in work_items if work.phase == "forward" and work.operator not in saved)
