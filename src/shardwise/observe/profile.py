"""Where a step's time goes, kernel by kernel: one step under torch's profiler, sorted into kinds of work.

On a GPU kernels are known by their names. What is counted for a kind is the time in which some kernel of it runs; what
of that no other kind covers is `exposed`: the part that the step would be shorter by. The rest of the step is `idle`:
the GPU waits for the host. On a CPU operators are known by their names, each with the time spent in itself; the rest is
Python.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
    ("communication", r"^c10d::|^gloo|^record_param_comms|^_c10d|^FSDP::(all_gather|.*reduce)"),
    ("attention", r"scaled_dot_product|_flash_attention"),
    ("loss", r"cross_entropy|log_softmax|nll_loss"),
    ("adapters and few bits", r"^shardwise::(packed|lora)"),
    ("products", r"^aten::(mm|addmm|bmm|baddbmm|linear|_scaled_mm|_grouped_mm|mkldnn)|^mkldnn|^shardwise::add_product"),
    ("copies", r"^aten::(copy_|_to_copy|clone|contiguous)$"),
)
REST = "norms and elementwise"
SHOWN = 12  # kernels that are told by name


@dataclass(frozen=True)
class Profile:
    """Seconds of one step by kind of work; `exposed` where others run beside it; the largest kernels by name."""

    whole: float
    kinds: dict[str, float]
    exposed: dict[str, float]
    idle: float
    largest: list[tuple[str, float, int]]


def profile_step(step: Callable[[], None], update: Callable[[], None], device: torch.device) -> Profile:
    """Takes a step (`step`, then `update`) and says what it was made of."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as found:
        with record_function("shardwise::step"):
            step()
            with record_function(UPDATE):
                update()
        if cuda:
            torch.cuda.synchronize(device)
    events: list[Any] = list(found.events())
    return of_kernels(_kernels(events)) if cuda else of_operators(_operators(events))


def _kernels(events: list[Any]) -> list[tuple[str, float, float]]:
    kind = DeviceType.CUDA
    annotations = {"shardwise::step", UPDATE}
    return [
        (e.name, e.time_range.start * 1e-6, e.time_range.end * 1e-6)
        for e in events if e.device_type == kind and e.name not in annotations and not e.name.startswith("Torch-")
    ]  # fmt: skip


def _operators(events: list[Any]) -> list[tuple[str, float, float, float]]:
    return [(e.name, e.time_range.start * 1e-6, e.time_range.end * 1e-6, e.self_cpu_time_total * 1e-6) for e in events]


def of_kernels(kernels: list[tuple[str, float, float]]) -> Profile:
    """From (name, start, end) of every kernel of a step, in seconds, on any stream."""
    if not kernels:
        return Profile(0.0, {}, {}, 0.0, [])
    spans: dict[str, list[tuple[float, float]]] = {}
    for name, start, end in kernels:
        spans.setdefault(_kind(name, KERNELS), []).append((start, end))
    whole = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
    busy = _covered(span for mine in spans.values() for span in mine)
    exposed = {
        kind: busy - _covered(span for other, mine in spans.items() if other != kind for span in mine)
        for kind in spans
    }  # fmt: skip
    kinds = {kind: _covered(mine) for kind, mine in spans.items()}
    return Profile(whole, _sorted(kinds), exposed, whole - busy, _largest((n, e - s) for n, s, e in kernels))


def of_operators(operators: list[tuple[str, float, float, float]]) -> Profile:
    """From (name, start, end, own seconds) of every operator of a step, within a range of its own."""
    begin, end = next((s, e) for name, s, e, _ in operators if name == "shardwise::step")
    updates = [(s, e) for name, s, e, _ in operators if name == UPDATE]
    kinds: dict[str, float] = defaultdict(float)
    named: list[tuple[str, float]] = []
    for name, start, stop, own in operators:
        if name in ("shardwise::step", UPDATE) or not (begin <= start and stop <= end):
            continue
        inside = any(s <= start and stop <= e for s, e in updates)
        kinds["optimizer" if inside else _kind(name, OPERATORS)] += own
        named.append((name, own))
    whole = end - begin
    return Profile(whole, _sorted(kinds), dict(kinds), max(0.0, whole - sum(kinds.values())), _largest(named))


def _kind(name: str, table: tuple[tuple[str, str], ...]) -> str:
    return next((kind for kind, pattern in table if re.search(pattern, name)), REST)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of them is."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _largest(named: Iterable[tuple[str, float]]) -> list[tuple[str, float, int]]:
    sums: dict[str, list[float]] = {}
    for name, seconds in named:
        sums.setdefault(name, []).append(seconds)
    lines = sorted(((name, sum(times), len(times)) for name, times in sums.items()), key=lambda line: -line[1])
    return lines[:SHOWN]


def _sorted(kinds: dict[str, float]) -> dict[str, float]:
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))
