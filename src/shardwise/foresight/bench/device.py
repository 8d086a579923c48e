"""Measured speed of one device and its host: matmuls, memory, attention, launches, host link, disk, AdamW.

Every figure is taken after a warm-up. On a GPU calls are timed by CUDA events and the median counts: it is what a long
run sees once the card is hot. On a CPU the fastest call counts, because others may be using the cores.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.core.compat.torch_private import scaled_mm
from shardwise.core.errors import UserError

MIB = 2**20
BACKWARD = 2.5  # FLOPs of attention's backward per FLOP of its forward: five matmuls to two
CHUNK = 8 * MIB  # of disk reads and writes
READERS = 4  # NVMe drives need several requests in flight
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    seconds: float  # of repeating per figure
    matmul: tuple[int, ...]  # sides of square matrices
    stream: int  # bytes of each tensor
    attention: tuple[int, int, int, int]  # batch, heads, sequence, head size
    disk: int  # bytes
    adam: int  # parameters
    messages: tuple[int, ...]  # bytes


EFFORTS = {  # by device and --quick
    ("cuda", False): Effort(
        1.0, (2048, 4096, 8192, 16384), 1024 * MIB, (4, 32, 4096, 128), 2048 * MIB, 2**26,
        (2**14, 2**17, 2**20, 2**23, 2**26, 2**28),
    ),
    ("cuda", True): Effort(
        0.2, (4096, 8192), 256 * MIB, (2, 16, 4096, 128), 256 * MIB, 2**24, (2**16, 2**20, 2**24, 2**27)
    ),
    ("cpu", False): Effort(
        0.5, (256, 512, 1024, 2048), 128 * MIB, (1, 8, 1024, 64), 512 * MIB, 2**24, (2**12, 2**15, 2**18, 2**21, 2**24)
    ),
    ("cpu", True): Effort(0.1, (256, 512), 32 * MIB, (1, 4, 256, 64), 32 * MIB, 2**20, (2**14, 2**20)),
}  # fmt: skip


def time_of(call: Callable[[], Any], device: torch.device, budget: float) -> float:
    """Returns the seconds of one call: median on a GPU, minimum on a CPU, of as many as fit the budget (at least 3)."""
    cuda = device.type == "cuda"
    call()  # the first one compiles, allocates and picks algorithms
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    repeats = max(3, min(500, int(budget / max(time.perf_counter() - start, 1e-6))))
    if not cuda:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)
    for _ in range(max(1, repeats // 4)):  # clocks rise under load, and fall once the card is warm
        call()
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    for first, last in zip(starts, ends, strict=True):
        first.record()  # type: ignore[no-untyped-call, unused-ignore]
        call()
        last.record()  # type: ignore[no-untyped-call, unused-ignore]
    _wait(device)
    return float(statistics.median(a.elapsed_time(b) for a, b in zip(starts, ends, strict=True))) / 1e3


def precisions(device: torch.device) -> tuple[str, ...]:
    """Returns the precisions worth trying on a device."""
    if device.type == "cuda":
        return ("fp32", "tf32", "bf16", "fp16", "fp8") if torch.cuda.get_device_capability(device)[0] >= 8 else (
            "fp32", "fp16"
        )  # fmt: skip
    from shardwise.core.cpu_probe import probe_cpu

    probe = probe_cpu("bf16")  # in a process of its own: on some virtual machines it dies
    return ("fp32", "bf16") if probe.works and probe.isa is None else ("fp32",)


def matmul(precision: str, size: int, device: torch.device, budget: float) -> float | None:
    """Returns the FLOP/s of a square matmul; None if the device or torch lacks the precision or memory for it."""
    try:
        with _tf32(precision == "tf32"):
            call = _scaled(size, device) if precision == "fp8" else _plain(precision, size, device)
            return float(2 * size**3 / time_of(call, device, budget))
    except (RuntimeError, NotImplementedError, ValueError):
        return None
    finally:
        _free(device)


def stream(nbytes: int, device: torch.device, budget: float) -> dict[str, float]:
    """Returns the bytes/s read and written by a copy and by an addition of large fp32 tensors."""
    a, b, c = (torch.ones(nbytes // 4, device=device) for _ in range(3))
    timings = {
        "copy": (2, time_of(lambda: c.copy_(a), device, budget)),
        "add": (3, time_of(lambda: torch.add(a, b, out=c), device, budget)),
    }
    return {name: tensors * nbytes / seconds for name, (tensors, seconds) in timings.items()}


def attention(shape: tuple[int, int, int, int], device: torch.device, budget: float) -> dict[str, tuple[float, float]]:
    """Returns the FLOP/s of causal attention, forward and backward, of each kernel that torch has here."""
    batch, heads, sequence, size = shape
    if device.type == "cuda":
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    else:
        dtype = torch.float32
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=device, dtype=dtype)
    work = 4 * batch * heads * sequence**2 * size / 2  # two matmuls, half of the square
    speeds = {}
    for backend in backends:
        with suppress(RuntimeError), warnings.catch_warnings(action="ignore"), sdpa_kernel([backend]):

            def forward() -> torch.Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            def both(forward: Callable[[], torch.Tensor] = forward) -> None:
                torch.autograd.grad(forward(), (q, k, v), gradient)

            forward_seconds = time_of(forward, device, budget)
            # noise must not make it free
            backward_seconds = max(time_of(both, device, budget) - forward_seconds, forward_seconds / 2)
            speeds[backend.name.removesuffix("_ATTENTION").lower()] = (
                work / forward_seconds,
                BACKWARD * work / backward_seconds,
            )
        if device.type == "cpu" and speeds:
            break
    _free(device)
    return speeds


def launch(device: torch.device, calls: int = 2000) -> float:
    """Returns the seconds from one small operator to the next."""
    x = torch.zeros(8, device=device)
    best = float("inf")
    for _ in range(5):
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            x.add_(1.0)
        _wait(device)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def host_link(nbytes: int, device: torch.device, budget: float) -> dict[str, float]:
    """Returns the bytes/s from pinned host memory to a GPU and back."""
    assert device.type == "cuda"
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return {
        "to_device": nbytes / time_of(lambda: card.copy_(host, non_blocking=True), device, budget),
        "to_host": nbytes / time_of(lambda: host.copy_(card, non_blocking=True), device, budget),
    }


def host_adam(parameters: int, budget: float) -> float:
    """Returns the parameters/s that torch's fused AdamW updates on the host's cores, states in fp32."""
    weight = torch.nn.Parameter(torch.zeros(parameters))
    weight.grad = torch.full((parameters,), 1e-3)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)
    return parameters / time_of(optimizer.step, torch.device("cpu"), budget)


def check_folder(folder: Path, nbytes: int) -> None:
    """Raises an error if a file of this size cannot be written to the folder."""
    remedy = "give another with --folder"
    if not folder.is_dir():
        raise UserError("--folder", str(folder), "there is no such folder", remedy)
    if not os.access(folder, os.W_OK):
        raise UserError("--folder", str(folder), "cannot be written to", remedy)
    if shutil.disk_usage(folder).free < 2 * nbytes:
        raise UserError("--folder", str(folder), f"has no room for a file of {nbytes // MIB} MiB", remedy)


def disk(folder: Path, nbytes: int) -> dict[str, float]:
    """Returns the bytes/s written to a file up to fsync, and read back past the page cache.

    The file has no name: nothing is left of it however the process ends.
    """
    offsets = range(0, nbytes, CHUNK)
    data = os.urandom(CHUNK)  # some drives compress
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file, ThreadPoolExecutor(READERS) as pool:
        descriptor = file.fileno()
        start = time.perf_counter()
        list(pool.map(lambda offset: os.pwrite(descriptor, data, offset), offsets))
        os.fsync(descriptor)
        write = nbytes / (time.perf_counter() - start)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with _direct(descriptor) as reading:
            start = time.perf_counter()
            list(pool.map(lambda offset: _read(reading, offset), offsets))
            read = nbytes / (time.perf_counter() - start)
    return {"read": read, "write": write}


def _read(descriptor: int, offset: int) -> None:
    with mmap.mmap(-1, CHUNK) as buffer:  # direct reads want whole pages
        os.preadv(descriptor, [buffer], offset)


@contextmanager
def _direct(number: int) -> Any:
    """The open file again, bypassing the page cache where the file system can."""
    try:
        direct = os.open(f"/proc/self/fd/{number}", os.O_RDONLY | os.O_DIRECT)
    except (OSError, AttributeError):
        yield number
        return
    try:
        yield direct
    finally:
        os.close(direct)


def _plain(precision: str, size: int, device: torch.device) -> Callable[[], Any]:
    # Random numbers: a card that multiplies zeros draws less power and runs faster than in training.
    left, right = (torch.randn(size, size, device=device).to(DTYPES[precision]) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _scaled(size: int, device: torch.device) -> Callable[[], Any]:
    """Float8 with one scale per tensor; the second operand is column-major, as the kernels require."""
    left, right = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    unit_scale = torch.ones((), device=device)
    return lambda: scaled_mm(left, right.t(), scale_a=unit_scale, scale_b=unit_scale, out_dtype=torch.bfloat16)


@contextmanager
def _tf32(allowed: bool) -> Any:
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
