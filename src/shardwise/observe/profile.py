"""Profile of a step by kind of work, from one step under torch's profiler.

On a GPU kernels are classified by name. The time of a kind is that in which some kernel of it runs; the part that no
other kind covers is `exposed`: what the step would be shorter by. The rest of the step is `idle`: the GPU waits for the
host. On a CPU operators are classified by name, each with its self time; the rest is Python.

On a CPU collectives are gloo's, whose threads mark in the trace when they work on one (`gloo:all_gather`, …): from when
a thread starts it until it is done, including waiting for other ranks. The part that overlaps with operators of the
computing threads is hidden, the rest is exposed. Gloo implements reduce-scatter by an all-reduce.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

UPDATE = "shardwise::update"
# In this order: the first that fits. What fits none is elementwise.
KERNELS = (
    ("communication", r"nccl|AllReduce|AllGather|ReduceScatter|gloo"),
    ("copies", r"^Memcpy|^Memset"),
    ("optimizer", r"_split_adamw|_kernel_[48]bit|multi_tensor_apply|FusedOptimizer|FusedAdam|lpnorm"),
    ("attention", r"flash|fmha|sdpa|attention|cudnn::fusion|_ring_"),
    ("loss", r"cross_entropy|softmax"),
    ("adapters and few bits", r"low_rank|dequantize|_quantize|_transpose\b|_transpose$"),
    ("products", r"nvjet|gemm|GEMM|xmma|cublas|splitK|cutlass|grouped_mm|_mm_"),
)
OPERATORS = (
    # FSDP waits for a gather where it copies what came out of it.
    ("communication", r"^c10d::|^gloo|^record_param_comms|^_c10d|^FSDP::(all_gather|.*reduce)"),
    ("attention", r"scaled_dot_product|_flash_attention"),
    ("loss", r"cross_entropy|log_softmax|nll_loss"),
    ("adapters and few bits", r"^shardwise::(packed|lora)"),
    ("products", r"^aten::(mm|addmm|bmm|baddbmm|linear|_scaled_mm|_grouped_mm|mkldnn)|^mkldnn|^shardwise::add_product"),
    ("copies", r"^aten::(copy_|_to_copy|clone|contiguous)$"),
)
REST = "norms and elementwise"
REDUCTIONS = r"AllReduce|ReduceScatter|all_reduce|reduce_scatter"
COMPUTING = r"^(aten|mkldnn|shardwise|fsdp)::"
SHOWN = 12  # kernels that are told by name
Span = tuple[float, float]


@dataclass(frozen=True)
class StepProfile:
    """Seconds of one step by kind of work; `exposed` is the part not overlapped; the largest kernels by name."""

    whole: float
    kinds: dict[str, float]
    exposed: dict[str, float]
    idle: float
    largest: list[tuple[str, float, int]]
    sent: dict[str, list[float]] = field(default_factory=dict)  # gathers, reductions: seconds, and those exposed


@dataclass
class Recorded:
    """Result of a recording, set when it ends."""

    profile: StepProfile | None = None


@contextmanager
def recording(device: torch.device, trace: Path | None = None) -> Iterator[Recorded]:
    """Context that profiles a step, its update within `record_function(UPDATE)`; `trace`: file for the JSON trace."""
    cuda = device.type == "cuda"
    recorded = Recorded()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        with record_function("shardwise::step"):
            yield recorded
        if cuda:
            torch.cuda.synchronize(device)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    events: list[Any] = list(profiler.events())
    recorded.profile = of_kernels(_kernels(events)) if cuda else of_operators(_operators(events))


def profile_step(
    step: Callable[[], None], update: Callable[[], None], device: torch.device, trace: Path | None = None
) -> StepProfile:
    """Profiles a step (`step`, then `update`); `trace`: file for the profiler's JSON trace."""
    with recording(device, trace) as recorded:
        step()
        with record_function(UPDATE):
            update()
    assert recorded.profile is not None
    return recorded.profile


def _kernels(events: list[Any]) -> list[tuple[str, float, float]]:
    kind = DeviceType.CUDA
    annotations = {"shardwise::step", UPDATE}
    return [
        (e.name, e.time_range.start * 1e-6, e.time_range.end * 1e-6)
        for e in events if e.device_type == kind and e.name not in annotations and not e.name.startswith("Torch-")
    ]  # fmt: skip


def _operators(events: list[Any]) -> list[tuple[str, float, float, float, int]]:
    return [
        (e.name, e.time_range.start * 1e-6, e.time_range.end * 1e-6, e.self_cpu_time_total * 1e-6, e.thread)
        for e in events
    ]  # fmt: skip


def of_kernels(kernels: list[tuple[str, float, float]]) -> StepProfile:
    """Profile from (name, start, end) of every kernel of a step, in seconds, on any stream."""
    if not kernels:
        return StepProfile(0.0, {}, {}, 0.0, [])
    spans: dict[str, list[tuple[float, float]]] = {}
    for name, start, end in kernels:
        spans.setdefault(_kind(name, KERNELS), []).append((start, end))
    seconds = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
    busy = _covered(span for kind_spans in spans.values() for span in kind_spans)
    exposed = {}
    for kind in spans:
        others = (span for other, kind_spans in spans.items() if other != kind for span in kind_spans)
        exposed[kind] = busy - _covered(others)
    kinds = {kind: _covered(kind_spans) for kind, kind_spans in spans.items()}
    collectives = [(n, s, e) for n, s, e in kernels if _kind(n, KERNELS) == "communication"]
    sent = _collective_seconds(
        collectives, [span for kind, kind_spans in spans.items() if kind != "communication" for span in kind_spans]
    )
    return StepProfile(
        seconds, _sorted(kinds), exposed, seconds - busy, _largest((n, e - s) for n, s, e in kernels), sent
    )


def of_operators(operators: list[tuple[str, float, float, float, int]]) -> StepProfile:
    """Profile from (name, start, end, self seconds, thread) of every operator of a step."""
    begin, end = next((s, e) for name, s, e, _, _ in operators if name == "shardwise::step")
    updates = [(s, e) for name, s, e, _, _ in operators if name == UPDATE]
    senders = {thread for name, _, _, _, thread in operators if name.startswith("gloo:")}
    kinds: dict[str, float] = defaultdict(float)
    by_name: list[tuple[str, float]] = []
    collectives: list[tuple[str, float, float]] = []
    computing: list[Span] = []
    calling: list[Span] = []  # collectives, or waiting for them, on threads that compute
    for name, start, stop, own, thread in operators:
        if name in ("shardwise::step", UPDATE) or not (begin <= start and stop <= end):
            continue
        if thread in senders:
            collectives += [(name, start, stop)] if name.startswith("gloo:") else []
            by_name += [(name, stop - start)] if name.startswith("gloo:") else []
            continue
        inside = any(s <= start and stop <= e for s, e in updates)
        kind = "optimizer" if inside else _kind(name, OPERATORS)
        kinds[kind] += own
        calling += [(start, stop)] if kind == "communication" else []
        by_name.append((name, own))
        if re.search(COMPUTING, name):
            computing.append((start, stop))
    exposed = dict(kinds)
    seconds = end - begin
    if collectives:  # who waits for one does so while it runs: the time counts once
        spans = [(s, e) for _, s, e in collectives]
        exposed["communication"] = _exposed_seconds([*spans, *calling], computing)
        kinds["communication"] = _covered(spans) + exposed["communication"] - _exposed_seconds(spans, computing)
    idle = max(0.0, seconds - sum(exposed.values()))
    return StepProfile(
        seconds, _sorted(kinds), exposed, idle, _largest(by_name), _collective_seconds(collectives, computing)
    )


def _collective_seconds(collectives: list[tuple[str, float, float]], computing: list[Span]) -> dict[str, list[float]]:
    """Seconds of gathers, of reductions and of all collectives, and the exposed part of each."""
    kinds: dict[str, list[Span]] = {"gathers": [], "reductions": [], "all": []}
    for name, start, stop in collectives:
        kinds["reductions" if re.search(REDUCTIONS, name) else "gathers"].append((start, stop))
        kinds["all"].append((start, stop))
    return {
        kind: [_covered(kind_spans), _exposed_seconds(kind_spans, computing)]
        for kind, kind_spans in kinds.items()
        if kind_spans
    }


def _exposed_seconds(spans: list[Span], others: list[Span]) -> float:
    """Seconds of spans that no other span overlaps."""
    return _covered([*spans, *others]) - _covered(others)


def _kind(name: str, table: tuple[tuple[str, str], ...]) -> str:
    return next((kind for kind, pattern in table if re.search(pattern, name)), REST)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by at least one span."""
    total = 0.0
    until = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _largest(operations: Iterable[tuple[str, float]]) -> list[tuple[str, float, int]]:
    sums: dict[str, list[float]] = {}
    for name, seconds in operations:
        sums.setdefault(name, []).append(seconds)
    lines = sorted(((name, sum(times), len(times)) for name, times in sums.items()), key=lambda line: -line[1])
    return lines[:SHOWN]


def _sorted(kinds: dict[str, float]) -> dict[str, float]:
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))
