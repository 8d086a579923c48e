"""How long a step takes on a cluster: a roofline over its operators, its collectives, and what of them is hidden.

[Note: kernels] Each operator takes the longer of its arithmetic and its traffic, at rates of the hardware table and
with what keeps kernels below them: matrix products with a short side or an odd one, attention with small heads, kernels
that compiling joins. The host has to ask for each of them; where it is slower than the device, the device waits. The
factors below were fitted to the odd-numbered runs of `benchmarks/foresight.py` on an H200, and are judged by the even
ones (docs/planning.md).

[Note: hidden] Gathers and reductions of ZeRO go on beside the computation: a pass takes the longer of the two, plus the
first gather (forward) or the last reduction (backward), for which there is nothing to do meanwhile, plus a part of what
is hidden, because it takes units and bandwidth from the computation. What passes between ranks along tensor, context
and expert axes is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from shardwise.config.schema import Run
from shardwise.core.hardware.specs import Cluster, Device
from shardwise.foresight.plan.network import KINDS
from shardwise.foresight.plan.network import seconds as wire_seconds
from shardwise.foresight.rehearse.flops import FLOAT8 as LORA_FLOAT8
from shardwise.foresight.rehearse.flops import GROUPED as GROUPED_PRODUCTS
from shardwise.foresight.rehearse.tally import Tally
from shardwise.foresight.rehearse.tracker import OperatorWork
from shardwise.optim.build import state_bytes
from shardwise.parallel.offload.policy import offloaded_share, split_in

MATMUL, MOST = 1.1, 0.85  # of the rate of a long row of equal products (in a step the device cools down); of the peak
SHORT = 70  # a product whose shortest side has this length runs at half the rate
FLOAT8 = 0.9  # of the rate of products of 8 bits
TURNED = 5.0  # times its traffic that a lone kernel takes which seeks a largest value, or turns a matrix of bytes
ODD = 0.35  # of the rate, where a side is no multiple of 8
HEAD = 0.29  # heads of 64 attend at 0.72 of the rate of heads of 128
ATTENTION = (1.05, 1.08)
VARLEN, ATTENTION_FP32, GROUPED = 0.6, 1.13, 0.18
OURS_GROUPED = 0.8  # of the best products; transformers' figure has what stands around them in it
STREAM, CACHED, CACHE = 0.86, 0.45, 30e6  # elementwise kernels; those whose data fit the cache take less of the time
COMPILED = 0.154  # of the elementwise traffic that is left where blocks are compiled
UNPACKED = 1.5  # weight of the traffic in products with adapters, which do not overlap it
HOST = {"forward": 25e-6, "backward": 14.5e-6, "update": 8e-6, "view": 12.5e-6, "module": 150e-6}
HOST_COMPILED = 0.49
BLEND = 2.55  # host and device wait for each other now and then: a norm between their sum and the longer of the two
OURS = (
    "copied_rows",
    "copied_again",
    "summed_rows",
    "round_both",
    "round_transposed",
)  # operators that nothing is fused with
COMMUNICATION = ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat", "copy_")
BLOCKING = ("all_to_all",)
CONTENTION = 0.15  # of hidden communication: its kernels take some of the device's units and bandwidth


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of a rank, by what they are spent on."""

    forward: float
    backward: float
    update: float
    waiting: float  # for the host, which asks for the kernels
    model_axes: float  # tensor, context, expert: waited for
    data_axis: float  # ZeRO's gathers and reductions that the computation does not hide
    offload: float
    bubble: float = 0.0
    hidden: float = 0.0  # communication beside the computation; not part of the sum
    host: float = 0.0  # what the host takes to ask for it all, beside the computation; not part of the sum
    wire: dict[str, float] = field(default_factory=dict)  # bytes per step by axis

    @property
    def seconds(self) -> float:
        """Total seconds of the step."""
        parts = (self.forward, self.backward, self.update, self.waiting, self.model_axes, self.data_axis)
        return sum(parts) + self.offload + self.bubble

    def parts(self) -> dict[str, float]:
        """Returns the seconds by part; they add up to `seconds`."""
        names = ("forward", "backward", "update", "waiting", "model_axes", "data_axis", "offload", "bubble")
        return {name: getattr(self, name) for name in names}


def step_time(tally: Tally, run: Run, cluster: Cluster, micro_batches: int, fp8: bool = False) -> StepTime:
    """Returns the time of a step of `micro_batches`, from a tally of fewer, without a pipeline."""
    device = cluster.device
    compute = {"forward": 0.0, "backward": 0.0, "update": 0.0}
    for counts, times in ((tally.work, micro_batches), (tally.work_once, 1)):
        for work, count in counts.items():
            phase = work.phase if work.phase in compute else "update"
            compute[phase] += count * times * kernel(work, device, run.compiled, fp8)
    fused = run.offload.optimizer == "none" and split_in(run)
    if fused:
        size = _resident(tally.trained, run, micro_batches)
        compute["update"] = size / _stream(device)
    host = _host(tally, run.compiled, micro_batches, fused) if device.kind != "cpu" else 0.0
    total = sum(compute.values())
    waiting = blended(total, host) - total
    axes, data, wire = _communication(tally, run, cluster, micro_batches)
    exposed = 0.0
    hidden = 0.0
    for phase, spent in data.items():
        overlappable = (compute[phase] + axes.get(phase, 0.0)) if phase != "update" else 0.0
        first = spent / max(1.0, (tally.layers + 1) * micro_batches) if overlappable else 0.0
        not_hidden = max(first, spent - overlappable) if overlappable else spent
        exposed = exposed + not_hidden + CONTENTION * (spent - not_hidden)
        hidden = hidden + spent - not_hidden
    offload = _offloaded(tally, run, cluster, micro_batches, sum(compute.values()))
    return StepTime(
        compute["forward"], compute["backward"], compute["update"], waiting, sum(axes.values()), exposed, offload,
        hidden=hidden, host=host, wire=wire,
    )  # fmt: skip


def _resident(trained: float, run: Run, micro_batches: int) -> float:
    """Bytes that the fused update of split weights moves; the rehearsal runs its plain reference instead."""
    gradient = 4 if micro_batches > 1 else 2
    return trained * (2 * gradient + 2 * (4 + state_bytes(run.train)))  # the gradient for its norm too


def blended(device: float, host: float) -> float:
    """Returns the seconds of work that device and host overlap in part."""
    return float((max(0.0, device) ** BLEND + max(0.0, host) ** BLEND) ** (1 / BLEND))


@lru_cache(maxsize=1 << 16)
def kernel(work: OperatorWork, device: Device, compiled: bool = False, fp8: bool = False) -> float:
    """Returns the seconds of one operator on a device."""
    half = work.dtype in ("bfloat16", "float16")
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(work.dtype, "fp32")
    traffic = work.bytes / _stream(device)
    name = work.operator
    if "attn" in name or "attention" in name:
        rate = device.flops("fp32") * ATTENTION_FP32 if not half else _attention(work, device)
        return max(work.flops / rate, traffic, device.launch)
    if work.flops:
        rate = _matmul(device, precision) if half else device.flops(precision)
        if name in GROUPED_PRODUCTS:
            share = OURS_GROUPED if name == GROUPED_PRODUCTS[1] else GROUPED
            rate = min(0.9, share * _wide(work.largest)) * device.flops(precision)
        elif name in ("_scaled_mm", LORA_FLOAT8):
            rate = _matmul(device, "fp8") * FLOAT8 * _shape(work.largest)
        elif half:
            if fp8 and min(work.largest, default=0) >= 1024 and not name.startswith("lora"):
                # Scaling reads and writes both operands once more.
                rate = _matmul(device, "fp8") * 0.75
                traffic = traffic * 1.5
            rate *= _shape(work.largest)
        if name.startswith("lora_linear"):
            return max(work.flops / rate + UNPACKED * traffic, device.launch)
        if name == LORA_FLOAT8:  # the product, then a pass over its result
            return max(work.flops / rate + traffic, device.launch)
        return max(work.flops / rate, traffic, device.launch)
    if device.kind != "cpu" and work.bytes < CACHE:
        traffic *= CACHED
    if not compiled and (name == "aminmax" or (name == "clone" and work.dtype.startswith("float8"))):
        traffic *= TURNED
    fused = compiled and work.phase != "update" and name not in (*COMMUNICATION, *OURS) and not name.startswith("_f")
    return max(traffic * (COMPILED if fused else 1.0), device.launch)


def _stream(device: Device) -> float:
    """Bytes per second that elementwise kernels move."""
    return STREAM * device.bandwidth * device.stream / 0.9


def _matmul(device: Device, precision: str) -> float:
    measured = device.flops(precision)
    return max(measured, min(MATMUL * measured, MOST * device.peak[device.computes(precision)]))


def _attention(work: OperatorWork, device: Device) -> float:
    forward, backward = device.attention_flops()
    head = (work.largest[2] if work.largest else 128) / 128
    rate = backward * ATTENTION[1] if "backward" in work.operator else forward * ATTENTION[0]
    return rate * min(1.0, head * (1 + HEAD) / (head + HEAD)) * (VARLEN if "varlen" in work.operator else 1.0)


def _wide(sides: tuple[int, ...]) -> float:
    """Grouped products were measured with experts of 768; wider ones are assumed faster by the square root."""
    return min(2.5, max(1.0, (min(sides[1:]) / 768) ** 0.5)) if len(sides) == 3 else 1.0


def _shape(sides: tuple[int, ...]) -> float:
    if not sides:
        return 1.0
    shortest = min(sides)
    return shortest / (shortest + SHORT) * (ODD if any(side % 8 for side in sides) else 1.0)


def _host(tally: Tally, compiled: bool, micro_batches: int, fused: bool) -> float:
    seconds = 0.0
    for counts, times in ((tally.work, micro_batches), (tally.work_once, 1)):
        counted = {work: count for work, count in counts.items() if not fused or work.phase != "update"}
        seconds += times * sum(HOST.get(work.phase, HOST["update"]) * count for work, count in counted.items())
    seconds += micro_batches * sum(HOST[kind] * tally.calls.get(kind, 0.0) for kind in ("view", "module"))
    return max(0.0, seconds) * (HOST_COMPILED if compiled else 1.0)


def _communication(
    tally: Tally, run: Run, cluster: Cluster, micro_batches: int
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Seconds by phase along the model's axes and along the data's, and bytes per step by axis."""
    axes: dict[str, float] = {}
    data: dict[str, float] = {}
    wire: dict[str, float] = {}
    for counts, times in ((tally.wire, micro_batches), (tally.wire_once, 1)):
        for (phase, operator, ranks, size), count in counts.items():
            kind = operator if operator in KINDS else "send"
            if operator.startswith("recv"):
                continue  # the other end of somebody's send
            tensor = size / 2 if kind == "all_reduce" else size
            seconds = count * times * wire_seconds(kind, tensor, len(ranks), _per_node(ranks, cluster), cluster)
            axis = _axis(kind, ranks, run)
            wire[axis] = wire.get(axis, 0.0) + count * times * size
            by_phase = data if axis == "data" else axes
            by_phase[phase] = by_phase.get(phase, 0.0) + seconds
    return axes, data, wire


def _axis(kind: str, ranks: tuple[int, ...], run: Run) -> str:
    """Which mesh axis a group lies along: blocking and overlapped communication are counted separately."""
    parallel = run.parallel
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if parallel.tensor > 1 and len(ranks) == parallel.tensor and stride == 1:
        return "tensor"
    if parallel.context > 1 and len(ranks) == parallel.context and stride == parallel.tensor:
        return "context"
    return "expert" if kind in BLOCKING and not parallel.quantize_gradients else "data"


def _per_node(ranks: tuple[int, ...], cluster: Cluster) -> int:
    return sum(rank // cluster.per_node == ranks[0] // cluster.per_node for rank in ranks)


def states_seconds(size: float, place: str, cluster: Cluster) -> float:
    """Seconds to move states to the device and back: at once over the link, one after the other on disk."""
    over_link = size / cluster.device.host_link
    if place == "cpu":
        return over_link
    return max(over_link, size * cluster.per_node * (1 / cluster.disk_read + 1 / cluster.disk_write))


def weights_seconds(size: float, place: str, cluster: Cluster) -> float:
    """Seconds to move weights to the device."""
    over_link = size / cluster.device.host_link
    return over_link if place == "cpu" else max(over_link, size * cluster.per_node / cluster.disk_read)


def _offloaded(tally: Tally, run: Run, cluster: Cluster, micro_batches: int, compute: float) -> float:
    """Seconds of moving states, weights and activations that the computation does not hide."""
    offload = run.offload
    trained = tally.trained
    seconds = 0.0
    if offload.optimizer != "none":
        ratio = 1.0 if offload.ratio == "auto" else float(offload.ratio)
        size = trained * ratio * (state_bytes(run.train) + 2)  # and the low half of the masters, each way
        hidden = offloaded_share(offload, run.precision, run.train.max_grad_norm)
        seconds += states_seconds(size, offload.optimizer, cluster) * (1 - hidden)
    if offload.parameters != "none":
        passes = 3 if run.recompute == "full" else 2
        size = micro_batches * passes * 2 * trained  # this rank's shard, for each pass of each micro-batch
        seconds += max(0.0, weights_seconds(size, offload.parameters, cluster) - compute)
    if offload.activations != "none":
        seconds += max(0.0, 2 * tally.kept / cluster.device.host_link - compute)
    return seconds
