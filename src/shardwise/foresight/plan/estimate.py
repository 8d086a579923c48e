"""What a run would take of a cluster: memory by category, on the device, the host and the disk; time; money.

Memory and work come from a sketch (sketch.py): the real code, rehearsed. Put together here is what a sketch leaves out:
the stages of a pipeline, the batch as a whole, and the price.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

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
    """One way to run it, and what it takes."""

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
        """Bytes of the device."""
        return sum(self.memory.values())

    @property
    def spare(self) -> float:
        """Bytes that are left on the device, a margin for fragments kept; below 0 it does not fit."""
        return self.cluster.device.memory - self.peak * (1 + MARGIN)

    @property
    def fits(self) -> bool:
        return self.spare >= 0 and self.host <= self.cluster.host_memory

    @property
    def tokens(self) -> int:
        """Per step, over all ranks."""
        return self.run.train.batch_size * self.run.data.sequence_length

    @property
    def rate(self) -> float:
        """Tokens per second and device."""
        return self.tokens / self.time.seconds / self.cluster.ranks

    @property
    def mfu(self) -> float:
        """Share of the devices' peak that the model's own arithmetic takes up."""
        precision = self.cluster.device.computes(self.run.precision if self.run.precision != "auto" else "bf16")
        peak = self.cluster.device.peak[precision]
        return self.model_flops / self.time.seconds / (peak * self.cluster.ranks)

    def hours(self, tokens: float) -> float:
        """To train on so many tokens."""
        return tokens / (self.rate * self.cluster.ranks) / 3600

    def cost(self, tokens: float) -> float | None:
        """In the currency of the price per device and hour."""
        price = self.cluster.price
        return None if price is None else self.hours(tokens) * price * self.cluster.ranks


def estimate(
    source: ModelSource, run: Run, cluster: Cluster, sketcher: Sketcher = sketch, fp8: bool = False
) -> Estimate:
    """What a run takes that is resolved for the cluster's ranks; `fp8` is for linear layers, to compare with others."""
    parallel = run.parallel
    stages = parallel.pipeline
    flat = without_pipeline(run)
    sketched = sketcher(source, flat, cluster.ranks // stages)
    micro = int(run.train.micro_batch_size)
    count = max(1, run.train.batch_size // data_ranks(parallel, cluster.ranks) // micro)
    if stages == 1:
        tally = sketched.at()
        memory, reserved, peak_at = dict(tally.at_peak), tally.reserved, tally.peak_at
        time = step_time(tally, flat, cluster, count, fp8)
    else:
        memory, reserved, peak_at = _stage_memory(sketched, run, count)
        time = _pipelined(sketched, run, flat, cluster, count, fp8)
        tally = sketched.at(math.ceil(sketched.layers / stages))
    if cluster.device.kind != "cpu":
        memory["workspace"] = memory.get("workspace", 0.0) + WORKSPACE
        reserved += WORKSPACE
    host, disk = _elsewhere(tally, run, cluster)
    return Estimate(
        run, cluster, memory, peak_at, reserved, host, disk, time, count, _model_flops(sketched, run, cluster, count),
    )  # fmt: skip


def without_pipeline(run: Run) -> Run:
    """What one stage's ranks do, as far as a sketch knows."""
    if run.parallel.pipeline == 1:
        return run
    values = run.model_dump()
    values["parallel"] |= {"pipeline": 1, "pipeline_schedule": "1f1b", "virtual_stages": None}
    return Run.model_validate(values)


def in_flight(run: Run, count: int) -> float:
    """Micro-batches whose activations the first stage holds at once; a part of its blocks counts as a part."""
    stages, schedule = run.parallel.pipeline, run.parallel.pipeline_schedule
    if schedule == "gpipe":
        return count
    if schedule == "interleaved":
        chunks = run.parallel.virtual_stages or 2
        return min(count, stages + (stages - 1) / chunks)
    return 1.0 if schedule == "naive" else float(min(count, stages))


def _stage_memory(sketched: Sketched, run: Run, count: int) -> tuple[dict[str, float], float, str]:
    """The worst of the first stage (most micro-batches under way) and the last (loss and head)."""
    layers = math.ceil(sketched.layers / run.parallel.pipeline)
    stage, bare = sketched.at(layers), sketched.at(0)
    kept = max(0.0, stage.activations - bare.activations)
    worst: dict[str, float] = {}
    where = ""
    for first in (True, False):
        memory = dict(stage.at_peak)
        for name in ("parameters", "optimizer", "gradients"):  # of embedding and head, a stage has one at most
            memory[name] = max(0.0, memory.get(name, 0.0) - bare.at_peak.get(name, 0.0) / 2)
        under_way = in_flight(run, count) - 1 if first else 0.0
        memory["activations"] = memory.get("activations", 0.0) + under_way * kept
        if first:
            memory["logits and loss"] = 0.0
        if sum(memory.values()) > sum(worst.values()):
            worst, where = memory, f"{'first' if first else 'last'} stage, {stage.peak_at}"
    return worst, sum(worst.values()) + max(0.0, stage.reserved - stage.peak), where


def _pipelined(sketched: Sketched, run: Run, flat: Run, cluster: Cluster, count: int, fp8: bool) -> StepTime:
    """Stages of blocks that are alike; embedding, head and loss are spread by moving blocks between stages."""
    stages, whole = run.parallel.pipeline, sketched.layers
    stage = replace(cluster, nodes=max(1, cluster.nodes // stages)) if cluster.nodes >= stages else cluster
    layers = math.ceil(whole / stages)
    one = step_time(sketched.at(layers), flat, stage, count, fp8)
    rest = step_time(sketched.at(0), flat, stage, count, fp8)
    share = 1 - 1 / stages  # of what is not in blocks, the other stages' part
    even = (whole / stages) / layers  # a stage with the most blocks sets the pace; the mean is below it by this
    forward, backward = one.forward - share * rest.forward, one.backward - share * rest.backward
    axes = one.model_axes - share * rest.model_axes
    waiting = one.waiting - share * rest.waiting
    message = int(run.train.micro_batch_size) * run.data.sequence_length * sketched.width * 2
    message //= run.parallel.tensor * run.parallel.context
    near = 2 if cluster.nodes < stages else 1
    passes = (run.parallel.virtual_stages or 2) if run.parallel.pipeline_schedule in ("interleaved", "zbv") else 1
    sent = 2 * passes * count * wire_seconds("send", message, 2, near, cluster)
    each = (forward + backward + axes + waiting + sent) / count
    chunks = {"interleaved": run.parallel.virtual_stages or 2, "zbv": 3}.get(run.parallel.pipeline_schedule, 1)
    idle = stages - 1 if run.parallel.pipeline_schedule != "naive" else (stages - 1) * count
    bubble = idle * each / chunks
    return replace(
        one, forward=forward * even, backward=backward * even, waiting=waiting * even, model_axes=axes * even + sent,
        bubble=bubble + (1 - even) * (forward + backward + axes + waiting),
        wire=one.wire | {"pipeline": 2.0 * passes * count * message},
    )  # fmt: skip


def _elsewhere(tally: Tally, run: Run, cluster: Cluster) -> tuple[float, float]:
    """Bytes per node in the host's memory and on its disk."""
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
    """All arithmetic of a step but what is computed again."""
    whole, bare = sketched.at(), sketched.at(0)
    done = sum(work.flops * times for work, times in whole.work.items())
    if run.recompute == "full":
        share = min(1.0, (run.recompute_blocks or sketched.layers) / sketched.layers)
        done -= share * (_forward(whole, run) - _forward(bare, run))
    once = sum(work.flops * times for work, times in whole.work_once.items())
    return (done * count + once) * (cluster.ranks // run.parallel.pipeline)


def _forward(tally: Tally, run: Run) -> float:
    """Of what is computed again where blocks are."""
    kept = () if run.recompute_attention else ("long_attention",)
    found = tally.work.items()
    return sum(work.flops * n for work, n in found if work.phase == "forward" and work.operator not in kept)
