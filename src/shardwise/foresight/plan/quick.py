"""A rough score of every strategy, in microseconds each, to decide which few are worth a sketch.

Figures per block come from a sketch on one rank with one sequence; how parallel axes divide them is a formula here.
Output that comes from rough scores is marked with ≈.
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
    """Parallelism, recomputation and offload of a run; other settings are those of the run."""

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
        """Returns the settings by dotted path, as in RUN.yaml."""
        settings: dict[str, object] = {"parallel.zero": self.zero}
        if self.shard is not None:
            settings["parallel.dp_shard_size"] = self.shard
        if self.secondary is not None:
            settings["parallel.hpz_size"] = self.secondary
        for axis in ("tensor", "context", "pipeline", "expert"):
            if getattr(self, axis) > 1:
                settings[f"parallel.{axis}"] = getattr(self, axis)
        if self.interleaved:
            settings["parallel.pipeline_schedule"] = "interleaved"
        settings["train.micro_batch_size"] = self.micro
        settings["recompute"] = "full" if self.recompute else "none"
        if self.offload != "none":
            settings["offload.optimizer"] = self.offload
        if self.offload_parameters != "none":
            settings["offload.parameters"] = self.offload_parameters
        return settings

    def family(self) -> tuple[object, ...]:
        """Returns what identifies strategies that differ in micro-batch and recomputation only."""
        axes = (self.tensor, self.context, self.pipeline, self.interleaved, self.expert)
        return (self.zero, self.shard, self.secondary, *axes, self.offload, self.offload_parameters)

    def name(self) -> str:
        """Returns a short name such as `ZeRO-3 × TP 8 × PP 2`."""
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
    """Numbers of parameters: of a block, of the rest, of a block's experts; and the trained share."""

    layers: int
    block: float
    rest: float
    experts: float  # of a block
    trained: float  # share of the parameters
    width: int


@dataclass(frozen=True)
class BlockProfile:
    """Seconds and bytes of a block and of the rest of the model, on one rank with one sequence."""

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
    """Returns the parameters by part, from two models of few layers on `meta`."""
    depths, total_layers = sketch_depths(source.config)
    counts = []
    for depth in depths:
        model = build_on_meta(replace(source, config=first_layers(source.config, depth)))
        total = sum(p.numel() for p in model.parameters())
        counts.append((total, sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)))
    width = int(source.config.get_text_config().hidden_size)
    if len(counts) == 1:
        return Sizes(total_layers, counts[0][0] / total_layers, 0.0, counts[0][1] / total_layers, 1.0, width)
    step = depths[1] - depths[0]
    block = (counts[1][0] - counts[0][0]) / step
    experts = (counts[1][1] - counts[0][1]) / step
    return Sizes(total_layers, block, counts[0][0] - depths[0] * block, experts, 1.0, width)


def profile(sizes: Sizes, sketched: Sketched, run: Run, cluster: Cluster) -> BlockProfile:
    """Returns a block's profile from a sketch on one rank, with one sequence, without recomputation."""
    full = sketched.at()
    no_layers = sketched.at(0)
    time = step_time(full, run, cluster, 1)
    rest = step_time(no_layers, run, cluster, 1)
    layers = sketched.layers
    per_layer = max(0.0, full.activations - no_layers.activations) / layers
    tokens = run.data.sequence_length
    states = sum(full.at_peak.get(name, 0.0) for name in ("parameters", "optimizer", "gradients", "gathered"))
    besides = max(0.0, full.peak - states - layers * per_layer)
    trained = full.trained / max(1.0, sizes.block * layers + sizes.rest)
    sizes = replace(sizes, trained=min(1.0, trained))
    return BlockProfile(
        sizes, (time.forward - rest.forward) / layers, (time.backward - rest.backward) / layers,
        rest.forward + rest.backward, (time.host - rest.host) / layers, rest.host,
        time.update / max(1.0, full.trained), per_layer, 2.0 * tokens * sizes.width, besides,
    )  # fmt: skip


class Quick:
    """Scores strategies for a run on a cluster by formula."""

    def __init__(self, of: BlockProfile, run: Run, cluster: Cluster) -> None:
        self.of = of
        self.run = run
        self.cluster = cluster
        self.frozen = {"qlora": 0.6}.get(run.method.type, 2.0)
        # Times what compiled blocks take, where blocks cannot be compiled.
        self.eager = EAGER if run.compile == "auto" else 1.0
        # Whether weights that multiply in fp8 are gathered so, where data alone is divided.
        self.float8 = run.fp8.recipe == "tensorwise" and run.fp8.gather != "bf16" and not run.parallel.quantize_weights

    def ranks(self, strategy: Strategy) -> tuple[int, int]:
        """Returns the number of data-parallel ranks, and of ranks that shard the states."""
        shard_ranks = self.cluster.ranks // (strategy.pipeline * strategy.tensor)
        return shard_ranks // strategy.context, (strategy.shard or shard_ranks) if strategy.zero else 1

    def parameters(self, strategy: Strategy) -> tuple[float, float]:
        """Returns a rank's parameters before ZeRO: of one block, and of all."""
        sizes = self.of.sizes
        block = (sizes.block - sizes.experts) / strategy.tensor + sizes.experts / max(strategy.expert, 1)
        layers = math.ceil(sizes.layers / strategy.pipeline)
        rest = sizes.rest / strategy.tensor / (2 if strategy.pipeline > 1 else 1)
        return block, block * layers + rest

    def gathered(self, strategy: Strategy) -> float:
        """Bytes of one all-gather of all weights. In fp8, that is about everything in a block but its experts."""
        sizes, (_, rank_parameters) = self.of.sizes, self.parameters(strategy)
        data_only = (
            strategy.tensor * strategy.context * strategy.pipeline * strategy.expert == 1
            and strategy.offload_parameters == "none"
        )
        return 2 * rank_parameters - (
            sizes.layers * (sizes.block - sizes.experts) if self.float8 and data_only else 0.0
        )

    def count(self, strategy: Strategy) -> int:
        """Micro-batches per rank and step."""
        return self.run.train.batch_size // self.ranks(strategy)[0] // strategy.micro

    def memory(self, strategy: Strategy) -> float:
        """Bytes on the device."""
        return sum(self.parts(strategy).values())

    def parts(self, s: Strategy) -> dict[str, float]:
        """Bytes on the device by category.

        The report's page has the same formulas in JavaScript; a test compares them.
        """
        profile, (_, shard) = self.of, self.ranks(s)
        block, rank_parameters = self.parameters(s)
        trained = rank_parameters * profile.sizes.trained
        frozen = rank_parameters * (1 - profile.sizes.trained)
        trains_all = profile.sizes.trained > 0.5
        working = 2.0 if self.run.precision != "fp32" else 4.0
        masters = 4.0 if s.offload == "none" else 2.0
        states = 0.0 if s.offload != "none" else state_bytes(self.run.train)
        weights = (working * trained if s.zero < 3 else 0.0) + self.frozen * frozen / (shard if s.zero == 3 else 1)
        gradients = 4 * trained / (shard if s.zero >= 2 else 1)
        optimizer = (states + masters) * trained / (shard if s.zero else 1)
        if s.offload_parameters != "none":  # weights and gradients are elsewhere
            offloaded = (masters + 4) * trained / shard
            gradients, offloaded = max(0.0, gradients - offloaded), max(0.0, offloaded - gradients)
            optimizer, offloaded = max(0.0, optimizer - offloaded), max(0.0, offloaded - optimizer)
            weights = max(0.0, weights - offloaded)
        if s.secondary is not None:
            weights += 2 * rank_parameters / s.secondary
        gathered = 2 * block * (2 if s.zero == 3 else 0) + (4 * block * 2 if s.zero >= 2 and trains_all else 0)
        layers = math.ceil(profile.sizes.layers / s.pipeline)
        rows_per_rank = s.micro / (s.tensor * s.context)
        # gathered inputs of column layers
        gathered_inputs = 3 * profile.input * s.micro / s.context if s.tensor > 1 else 0.0
        block_activations = profile.kept * rows_per_rank + gathered_inputs
        in_flight = min(self.count(s), s.pipeline * (1.5 if s.interleaved else 1.0)) if s.pipeline > 1 else 1
        activations = layers * in_flight * (profile.input * rows_per_rank if s.recompute else block_activations) + (
            block_activations if s.recompute else 0.0
        )
        return {
            "parameters": weights,
            "optimizer": optimizer,
            "gradients": gradients,
            "gathered": gathered,
            "activations": activations,
            "temporary": profile.besides * max(0.25, rows_per_rank),
            "workspace": float(WORKSPACE),
        }

    def host(self, strategy: Strategy) -> float:
        """Bytes of a node's host memory."""
        _, shard = self.ranks(strategy)
        _, rank_parameters = self.parameters(strategy)
        shard_parameters = rank_parameters * self.of.sizes.trained / (shard if strategy.zero else 1)
        per_rank = (state_bytes(self.run.train) + 2) * shard_parameters if strategy.offload == "cpu" else 0.0
        per_rank += 6 * shard_parameters if strategy.offload_parameters == "cpu" else 0.0
        return (per_rank + PROCESS) * min(self.cluster.per_node, self.cluster.ranks)

    def seconds(self, s: Strategy) -> float:
        """Seconds of a step."""
        profile = self.of
        cluster = self.cluster
        sizes = self.of.sizes
        data, shard = self.ranks(s)
        _, rank_parameters = self.parameters(s)
        count = self.count(s)
        layers = sizes.layers / s.pipeline
        scale = s.micro / (s.tensor * s.context) * (1 + SLOWER * math.log2(s.tensor))
        if max(s.tensor, s.pipeline) > 1:
            scale *= self.eager
        forward = profile.forward * scale
        backward = (profile.backward + (profile.forward if s.recompute else 0.0)) * scale
        passes = 3 if s.recompute else 2
        if s.tensor > 1:
            size = 2.0 * s.micro * self.run.data.sequence_length / s.context * sizes.width
            exchange = self._wire("all_gather", size, s.tensor, min(s.tensor, cluster.per_node))
            forward = forward + 4 * exchange
            backward = backward + 4 * exchange * (passes - 1)
        if s.context > 1:
            size = 2.0 * s.micro * self.run.data.sequence_length * sizes.width / s.tensor / 4
            per_node = max(1, min(s.context, cluster.per_node // s.tensor))
            exchange = self._wire("all_gather", size, s.context, per_node)
            forward = forward + exchange
            backward = backward + exchange * passes
        if s.expert > 1 and sizes.experts:
            size = 2.0 * s.micro * self.run.data.sequence_length / s.context / s.tensor * sizes.width * 4
            exchange = self._wire("all_to_all", size, s.expert, max(1, min(s.expert, cluster.per_node)))
            forward = forward + 2 * exchange
            backward = backward + 2 * exchange * (passes - 1)
        host_seconds = (layers * profile.host + profile.host_rest / s.pipeline) * (1.3 if s.recompute else 1.0)
        per_micro_batch = blended(layers * (forward + backward) + profile.rest * scale / s.pipeline, host_seconds)
        if s.pipeline > 1:
            size = 2 * s.micro * self.run.data.sequence_length * sizes.width / (s.tensor * s.context)
            per_node = 2 if cluster.nodes < s.pipeline else 1
            per_micro_batch += 2 * (2 if s.interleaved else 1) * wire_seconds("send", size, 2, per_node, cluster)
        per_node = max(1, min(shard, cluster.per_node // s.tensor))
        size = self.gathered(s)
        first_gather = self._wire("all_gather", size, shard, per_node)
        later_gather = self._wire("all_gather", size, s.secondary, s.secondary) if s.secondary else first_gather
        reduction = self._wire("reduce_scatter", 4 * rank_parameters * sizes.trained, shard, per_node)
        replica_reduction = 0.0
        if s.shard is not None and data * s.context > shard:
            replica_reduction = self._wire(
                "all_reduce", 4 * rank_parameters * sizes.trained / shard, data * s.context // shard, 1
            )
        compute = count * per_micro_batch
        if s.zero == 3:
            communication = count * (first_gather + (passes - 1) * later_gather + reduction) + replica_reduction
        else:
            communication = first_gather + reduction * (count if s.zero == 2 else 1) + replica_reduction
        if s.zero == 0:
            per_node_data = max(1, min(data * s.context, cluster.per_node // s.tensor))
            communication = self._wire(
                "all_reduce", 4 * rank_parameters * sizes.trained, data * s.context, per_node_data
            )
        exposed = max(communication / (layers + 1) / count, communication - compute)
        exposed += CONTENTION * (communication - exposed)
        update = profile.update * rank_parameters * sizes.trained / (shard if s.zero else 1)
        bubble = (s.pipeline - 1) * per_micro_batch / (2 if s.interleaved else 1)
        offloaded = 0.0
        if s.offload != "none":
            size = (state_bytes(self.run.train) + 2) * rank_parameters * sizes.trained / (shard if s.zero else 1)
            offloaded += states_seconds(size, s.offload, cluster)
        if s.offload_parameters != "none":
            size = count * passes * 2 * rank_parameters / shard
            offloaded += max(0.0, weights_seconds(size, s.offload_parameters, cluster) - compute)
        return compute + exposed + update + bubble + offloaded

    @lru_cache(maxsize=4096)  # noqa: B019  lives as long as a search
    def _wire(self, kind: str, size: float, ranks: int, per_node: int) -> float:
        return wire_seconds(kind, size, ranks, per_node, self.cluster) if ranks > 1 else 0.0
