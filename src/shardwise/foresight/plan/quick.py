"""A rough score of every strategy, in microseconds each, to decide which few are worth a sketch.

Figures per block come from a sketch on one rank with one sequence; how axes divide them is a formula here. What the
user is told of it is marked: ≈.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.config.schema import Run
from shardwise.core.hardware.specs import Cluster
from shardwise.foresight.plan.network import seconds as wire_seconds
from shardwise.foresight.plan.sketch import Sketched, sketch_depths
from shardwise.foresight.plan.time import CONTENTION, blended, states_seconds, step_time, weights_seconds
from shardwise.foresight.rehearse.ledger import WORKSPACE
from shardwise.nn.models.build import build_on_meta
from shardwise.nn.models.source import ModelSource
from shardwise.nn.tiny.shrink import first_layers
from shardwise.optim.build import state_bytes

PROCESS = 3 << 30  # bytes of host memory that a rank takes for itself: Python, libraries, pinned buffers
SLOWER = 0.04  # matmuls lose this much each time tensor parallelism halves them
EAGER = 1.2  # times what compiled blocks take, where blocks cannot be compiled


@dataclass(frozen=True)
class Strategy:
    """How a run is spread and what it keeps; what is not named here is the run's own."""

    zero: int
    shard: int | None = None
    secondary: int | None = None
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    interleaved: bool = False
    expert: int = 1
    micro: int = 1
    recompute: bool = False
    offload: str = "none"
    offload_parameters: str = "none"
    alone: bool = False  # on one device: there is nothing to divide

    def settings(self) -> dict[str, object]:
        """As RUN.yaml has them, by dotted path."""
        found: dict[str, object] = {"parallel.zero": self.zero}
        if self.shard is not None:
            found["parallel.dp_shard_size"] = self.shard
        if self.secondary is not None:
            found["parallel.hpz_size"] = self.secondary
        for axis in ("tensor", "context", "pipeline", "expert"):
            if getattr(self, axis) > 1:
                found[f"parallel.{axis}"] = getattr(self, axis)
        if self.interleaved:
            found["parallel.pipeline_schedule"] = "interleaved"
        found["train.micro_batch_size"] = self.micro
        found["recompute"] = "full" if self.recompute else "none"
        if self.offload != "none":
            found["offload.optimizer"] = self.offload
        if self.offload_parameters != "none":
            found["offload.parameters"] = self.offload_parameters
        return found

    def family(self) -> tuple[object, ...]:
        """Strategies that differ in micro-batch and recomputation alone are of one."""
        axes = (self.tensor, self.context, self.pipeline, self.interleaved, self.expert)
        return (self.zero, self.shard, self.secondary, *axes, self.offload, self.offload_parameters)

    def name(self) -> str:
        """In a few words."""
        words = [f"ZeRO-{self.zero}" if self.zero else "replicated"]
        if self.alone and self.zero < 3:
            words = ["one device"]
        if self.shard is not None:
            words[0] += f" in groups of {self.shard}"
        if self.secondary is not None:
            words.append(f"hpZ {self.secondary}")
        axes = {"tensor": "TP", "context": "CP", "pipeline": "PP", "expert": "EP"}
        words += [f"{short} {size}" for axis, short in axes.items() if (size := getattr(self, axis)) > 1]
        if self.interleaved:
            words[-1 if self.expert == 1 else -2] += " interleaved"
        if self.offload != "none":
            words.append(f"optimizer on {self.offload}")
        if self.offload_parameters != "none":
            words.append(f"weights on {self.offload_parameters}")
        return " × ".join(words)


@dataclass(frozen=True)
class Sizes:
    """What there is to divide: parameters of a block and of the rest, of them experts; frozen bytes per parameter."""

    layers: int
    block: float
    rest: float
    experts: float  # of a block
    trained: float  # share of the parameters
    width: int


@dataclass(frozen=True)
class BlockProfile:
    """Of one rank with one sequence: seconds and bytes of a block and of the rest."""

    sizes: Sizes
    forward: float
    backward: float
    rest: float  # seconds of embedding, head and loss
    host: float  # seconds that the host takes to ask for a block's work, whatever its size
    host_rest: float
    update: float  # seconds per trained parameter
    kept: float  # bytes that a block leaves for backward
    input: float  # of them its input
    besides: float  # bytes at the peak that are neither held nor kept


def sizes_of(source: ModelSource) -> Sizes:
    """Parameters by part, from two models of few layers on `meta`."""
    depths, whole = sketch_depths(source.config)
    counts = []
    for depth in depths:
        model = build_on_meta(replace(source, config=first_layers(source.config, depth)))
        total = sum(p.numel() for p in model.parameters())
        counts.append((total, sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)))
    width = int(source.config.get_text_config().hidden_size)
    if len(counts) == 1:
        return Sizes(whole, counts[0][0] / whole, 0.0, counts[0][1] / whole, 1.0, width)
    step = depths[1] - depths[0]
    block, experts = (counts[1][0] - counts[0][0]) / step, (counts[1][1] - counts[0][1]) / step
    return Sizes(whole, block, counts[0][0] - depths[0] * block, experts, 1.0, width)


def profile(sizes: Sizes, sketched: Sketched, run: Run, cluster: Cluster) -> BlockProfile:
    """From a sketch on one rank, with one sequence, without recomputation."""
    whole, bare = sketched.at(), sketched.at(0)
    time, rest = step_time(whole, run, cluster, 1), step_time(bare, run, cluster, 1)
    layers = sketched.layers
    kept = max(0.0, whole.activations - bare.activations) / layers
    tokens = run.data.sequence_length
    states = sum(whole.at_peak.get(name, 0.0) for name in ("parameters", "optimizer", "gradients", "gathered"))
    besides = max(0.0, whole.peak - states - layers * kept)
    trained = whole.trained / max(1.0, sizes.block * layers + sizes.rest)
    sizes = replace(sizes, trained=min(1.0, trained))
    return BlockProfile(
        sizes, (time.forward - rest.forward) / layers, (time.backward - rest.backward) / layers,
        rest.forward + rest.backward, (time.host - rest.host) / layers, rest.host,
        time.update / max(1.0, whole.trained), kept, 2.0 * tokens * sizes.width, besides,
    )  # fmt: skip


class Quick:
    """Scores strategies for a run on a cluster."""

    def __init__(self, of: BlockProfile, run: Run, cluster: Cluster) -> None:
        self.of, self.run, self.cluster = of, run, cluster
        self.frozen = {"qlora": 0.6}.get(run.method.type, 2.0)
        # Times what compiled blocks take, where blocks cannot be compiled.
        self.eager = EAGER if run.compile == "auto" else 1.0
        # Whether weights that multiply in fp8 are gathered so, where data alone is divided.
        self.float8 = run.fp8.recipe == "tensorwise" and run.fp8.gather != "bf16" and not run.parallel.quantize_weights

    def ranks(self, s: Strategy) -> tuple[int, int]:
        """Ranks that see other data, and ranks that divide the states."""
        spread = self.cluster.ranks // (s.pipeline * s.tensor)
        return spread // s.context, (s.shard or spread) if s.zero else 1

    def parameters(self, s: Strategy) -> tuple[float, float]:
        """Of a rank before ZeRO: its blocks' and all."""
        sizes = self.of.sizes
        block = (sizes.block - sizes.experts) / s.tensor + sizes.experts / max(s.expert, 1)
        layers = math.ceil(sizes.layers / s.pipeline)
        rest = sizes.rest / s.tensor / (2 if s.pipeline > 1 else 1)
        return block, block * layers + rest

    def gathered(self, s: Strategy) -> float:
        """Bytes of one gather of all weights; in fp8 is about all of a block but its experts."""
        sizes, (_, mine) = self.of.sizes, self.parameters(s)
        alone = s.tensor * s.context * s.pipeline * s.expert == 1 and s.offload_parameters == "none"
        return 2 * mine - (sizes.layers * (sizes.block - sizes.experts) if self.float8 and alone else 0.0)

    def count(self, s: Strategy) -> int:
        """Micro-batches of a rank in a step."""
        return self.run.train.batch_size // self.ranks(s)[0] // s.micro

    def memory(self, s: Strategy) -> float:
        """Bytes of the device."""
        return sum(self.parts(s).values())

    def parts(self, s: Strategy) -> dict[str, float]:
        """Those bytes by category; the report's page has the same formulas in JavaScript, and a test compares them."""
        of, (_, shard) = self.of, self.ranks(s)
        block, mine = self.parameters(s)
        trained, frozen = mine * of.sizes.trained, mine * (1 - of.sizes.trained)
        full = of.sizes.trained > 0.5
        working = 2.0 if self.run.precision != "fp32" else 4.0
        masters = 4.0 if s.offload == "none" else 2.0
        states = 0.0 if s.offload != "none" else state_bytes(self.run.train)
        weights = (working * trained if s.zero < 3 else 0.0) + self.frozen * frozen / (shard if s.zero == 3 else 1)
        gradients = 4 * trained / (shard if s.zero >= 2 else 1)
        optimizer = (states + masters) * trained / (shard if s.zero else 1)
        if s.offload_parameters != "none":  # weights and gradients are elsewhere
            left = (masters + 4) * trained / shard
            gradients, left = max(0.0, gradients - left), max(0.0, left - gradients)
            optimizer, left = max(0.0, optimizer - left), max(0.0, left - optimizer)
            weights = max(0.0, weights - left)
        if s.secondary is not None:
            weights += 2 * mine / s.secondary
        gathered = 2 * block * (2 if s.zero == 3 else 0) + (4 * block * 2 if s.zero >= 2 and full else 0)
        layers = math.ceil(of.sizes.layers / s.pipeline)
        part = s.micro / (s.tensor * s.context)
        extra = 3 * of.input * s.micro / s.context if s.tensor > 1 else 0.0  # gathered inputs of column layers
        kept = of.kept * part + extra
        flight = min(self.count(s), s.pipeline * (1.5 if s.interleaved else 1.0)) if s.pipeline > 1 else 1
        stored = layers * flight * (of.input * part if s.recompute else kept) + (kept if s.recompute else 0.0)
        return {
            "parameters": weights, "optimizer": optimizer, "gradients": gradients, "gathered": gathered,
            "activations": stored, "temporary": of.besides * max(0.25, part), "workspace": float(WORKSPACE),
        }  # fmt: skip

    def host(self, s: Strategy) -> float:
        """Bytes of a node's memory."""
        _, shard = self.ranks(s)
        _, mine = self.parameters(s)
        divided = mine * self.of.sizes.trained / (shard if s.zero else 1)
        each = (state_bytes(self.run.train) + 2) * divided if s.offload == "cpu" else 0.0
        each += 6 * divided if s.offload_parameters == "cpu" else 0.0
        return (each + PROCESS) * min(self.cluster.per_node, self.cluster.ranks)

    def seconds(self, s: Strategy) -> float:
        """Of a step."""
        of, cluster, sizes = self.of, self.cluster, self.of.sizes
        data, shard = self.ranks(s)
        _, mine = self.parameters(s)
        count, layers = self.count(s), sizes.layers / s.pipeline
        part = s.micro / (s.tensor * s.context) * (1 + SLOWER * math.log2(s.tensor))
        if max(s.tensor, s.pipeline) > 1:
            part *= self.eager
        forward = of.forward * part
        backward = (of.backward + (of.forward if s.recompute else 0.0)) * part
        passes = 3 if s.recompute else 2
        if s.tensor > 1:
            size = 2.0 * s.micro * self.run.data.sequence_length / s.context * sizes.width
            one = self._wire("all_gather", size, s.tensor, min(s.tensor, cluster.per_node))
            forward, backward = forward + 4 * one, backward + 4 * one * (passes - 1)
        if s.context > 1:
            size = 2.0 * s.micro * self.run.data.sequence_length * sizes.width / s.tensor / 4
            near = max(1, min(s.context, cluster.per_node // s.tensor))
            one = self._wire("all_gather", size, s.context, near)
            forward, backward = forward + one, backward + one * passes
        if s.expert > 1 and sizes.experts:
            size = 2.0 * s.micro * self.run.data.sequence_length / s.context / s.tensor * sizes.width * 4
            one = self._wire("all_to_all", size, s.expert, max(1, min(s.expert, cluster.per_node)))
            forward, backward = forward + 2 * one, backward + 2 * one * (passes - 1)
        asked = (layers * of.host + of.host_rest / s.pipeline) * (1.3 if s.recompute else 1.0)
        each = blended(layers * (forward + backward) + of.rest * part / s.pipeline, asked)
        if s.pipeline > 1:
            size = 2 * s.micro * self.run.data.sequence_length * sizes.width / (s.tensor * s.context)
            near = 2 if cluster.nodes < s.pipeline else 1
            each += 2 * (2 if s.interleaved else 1) * wire_seconds("send", size, 2, near, cluster)
        near = max(1, min(shard, cluster.per_node // s.tensor))
        size = self.gathered(s)
        gather = self._wire("all_gather", size, shard, near)
        again = self._wire("all_gather", size, s.secondary, s.secondary) if s.secondary else gather
        reduce = self._wire("reduce_scatter", 4 * mine * sizes.trained, shard, near)
        across = 0.0
        if s.shard is not None and data * s.context > shard:
            across = self._wire("all_reduce", 4 * mine * sizes.trained / shard, data * s.context // shard, 1)
        compute = count * each
        if s.zero == 3:
            moved = count * (gather + (passes - 1) * again + reduce) + across
        else:
            moved = gather + reduce * (count if s.zero == 2 else 1) + across
        if s.zero == 0:
            close = max(1, min(data * s.context, cluster.per_node // s.tensor))
            moved = self._wire("all_reduce", 4 * mine * sizes.trained, data * s.context, close)
        exposed = max(moved / (layers + 1) / count, moved - compute)
        exposed += CONTENTION * (moved - exposed)
        update = of.update * mine * sizes.trained / (shard if s.zero else 1)
        bubble = (s.pipeline - 1) * each / (2 if s.interleaved else 1)
        offloaded = 0.0
        if s.offload != "none":
            size = (state_bytes(self.run.train) + 2) * mine * sizes.trained / (shard if s.zero else 1)
            offloaded += states_seconds(size, s.offload, cluster)
        if s.offload_parameters != "none":
            size = count * passes * 2 * mine / shard
            offloaded += max(0.0, weights_seconds(size, s.offload_parameters, cluster) - compute)
        return compute + exposed + update + bubble + offloaded

    @lru_cache(maxsize=4096)  # noqa: B019  lives as long as a search
    def _wire(self, kind: str, size: float, ranks: int, near: int) -> float:
        return wire_seconds(kind, size, ranks, near, self.cluster) if ranks > 1 else 0.0
