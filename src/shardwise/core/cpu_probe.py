"""Probes what this CPU supports by running it, as its flags are unreliable.

Some virtual machines advertise AMX or bf16, and the first bf16 matmul then dies with SIGILL. So a small training step
runs in a separate process, under ever lower caps of oneDNN's instruction sets (ONEDNN_MAX_CPU_ISA), until one survives.
This file is also the program of that process (see `_main`), so above the functions it imports nothing of the project.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

Precision = Literal["bf16", "fp16", "fp32"]

CAP = "ONEDNN_MAX_CPU_ISA"
CAPS = ("AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
# oneDNN takes every name it does not know for "no cap", but this is the documented one.
NO_CAP = "DEFAULT"
TIMEOUT = 30.0
TRIAL = "1"  # raise it when the trial changes, so that older answers are not taken for its own
REFUSED = 3  # exit code of a trial whose operator raised or gave wrong numbers
# Other ends (a timeout, SIGKILL for memory, a broken import) may go away, so they are not remembered.
LASTING = frozenset({REFUSED, *(-number for number in (signal.SIGILL, signal.SIGSEGV, signal.SIGFPE, signal.SIGBUS))})


@dataclass(frozen=True)
class CpuProbe:
    """Result of a training step in `dtype` on this CPU: the cap it needed, and matmul speeds on one core."""

    dtype: str
    isa: str | None  # the value of ONEDNN_MAX_CPU_ISA that works; None = no cap needed
    works: bool
    gflops: float
    fp32_gflops: float


@dataclass(frozen=True)
class _Trial:
    code: int | None  # exit code, negative for a signal; None = no answer
    speeds: dict[str, float] = field(default_factory=dict)


def probe_cpu(dtype: Precision, cache_dir: Path | None = None) -> CpuProbe:
    """Probes whether this CPU trains in `dtype`, under which cap and how fast; cached between runs."""
    assert dtype in get_args(Precision), dtype
    if cache_dir is None:
        from shardwise.core.cache import cache_root

        cache_dir = cache_root() / "probes"
    key = _key(dtype)
    file = cache_dir / f"cpu-{dtype}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
    known = _read(file, key)
    if known is not None:
        return known
    probe, lasting = _search(dtype)
    if lasting:
        _write(file, {"key": key, "probe": asdict(probe)})
    return probe


def cpu_env(precision: str) -> dict[str, str]:
    """Environment variables that workers need to train in `precision` on this CPU; raises UserError if none works."""
    assert precision in get_args(Precision), f"precision {precision!r} should have been resolved by now"
    probe = probe_cpu(precision)  # type: ignore[arg-type]  # narrowed by the assertion
    if not probe.works:
        from shardwise.core.errors import UserError

        problem = "a small training step in it fails on this CPU under every instruction-set cap"
        raise UserError("precision", precision, problem, "set precision: fp32, or see: shardwise doctor")
    return {} if probe.isa is None else {CAP: probe.isa}


def gain_of_bf16() -> float:
    """Speedup of bf16 over fp32 matmuls on this CPU; 0 if bf16 does not work."""
    probe = probe_cpu("bf16")
    return probe.gflops / probe.fp32_gflops if probe.works and probe.fp32_gflops else 0.0


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may use: its affinity, bounded by the cgroup's CPU quota; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    for group in _cgroups(root, "cpu"):
        quota, period = _numbers(group / "cpu.max", 2) or (
            *(_numbers(group / "cpu.cfs_quota_us", 1) or (-1,)),
            *(_numbers(group / "cpu.cfs_period_us", 1) or (0,)),
        )
        if quota > 0 and period > 0:
            cores = min(cores, quota // period)
    return max(1, cores)


def threads_for(ranks: int) -> int:
    """Number of threads for each of a host's ranks."""
    return max(1, usable_cores() // ranks)


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes of memory this process may use: the machine's, or the cgroup's limit if that is less."""
    import psutil  # type: ignore[import-untyped, unused-ignore]

    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _memory_limits(root))])


def free_memory(root: Path = Path("/")) -> int:
    """Bytes still free for this process, in the machine and under the cgroup's limit."""
    import psutil

    free = [int(psutil.virtual_memory().available), *(limit - used for limit, used in _memory_limits(root))]
    return max(0, min(free))


def cpu_identity() -> tuple[str, frozenset[str]]:
    """The CPU's name and the flags it advertises."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, frozenset((fields.get("flags") or fields.get("features") or "").split())


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of each cgroup above us; files the kernel can drop do not count as used."""
    for group in _cgroups(root, "memory"):
        limit = _numbers(group / "memory.max", 1) or _numbers(group / "memory.limit_in_bytes", 1)
        if not limit:
            continue
        used = _numbers(group / "memory.current", 1) or _numbers(group / "memory.usage_in_bytes", 1) or (0,)
        yield limit[0], max(0, used[0] - _droppable(group / "memory.stat"))


def _droppable(stat: Path) -> int:
    try:
        values = dict(line.split() for line in stat.read_text().splitlines())
        return int(values.get("total_inactive_file") or values.get("inactive_file") or 0)
    except (OSError, ValueError):
        return 0


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of our cgroup and its parents for a controller, v1 or v2; limits hold at every level.

    In a container the path in /proc can be the host's, which does not exist here; the mount's root is then ours.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        bases = [mount / controller, mount / controllers] if controllers else [mount / "unified", mount]
        base = next((place for place in bases if place.is_dir()), None)
        if base is None:
            continue
        inner = Path(path.lstrip("/"))
        yield from (base / part for part in (inner, *inner.parents) if ".." not in part.parts)


def _numbers(file: Path, count: int) -> tuple[int, ...] | None:
    """The first `count` integers of a cgroup file; None if it is not there or says "max"."""
    try:
        values = tuple(int(word) for word in file.read_text().split()[:count])
    except (OSError, ValueError):
        return None
    return values if len(values) == count else None


def _search(dtype: str) -> tuple[CpuProbe, bool]:
    """Tries one cap after another; the second value says whether the result may be cached."""
    user_cap = os.environ.get(CAP) or None
    # Once the user's own cap has failed, no cap must be spelled out, or workers would inherit the bad one.
    candidates: list[str | None] = [None] if user_cap is None else [user_cap, NO_CAP]
    if platform.machine().lower() in ("x86_64", "amd64"):
        candidates += [cap for cap in CAPS if cap != user_cap]
    lasting = True
    for isa in candidates:
        trial = _try(dtype, isa)
        if trial.code == 0:
            return CpuProbe(dtype, isa, True, trial.speeds[dtype], trial.speeds["fp32"]), lasting
        lasting = lasting and trial.code in LASTING
    return CpuProbe(dtype, None, False, 0.0, 0.0), lasting


def _try(dtype: str, isa: str | None, timeout: float = TIMEOUT) -> _Trial:
    """Runs one training step in a separate process."""
    environment = {name: value for name, value in os.environ.items() if name != CAP}
    environment |= {} if isa is None else {CAP: isa}
    # -P: this file's folder must not come first on the path, where a sibling could hide a standard module.
    command = [sys.executable, "-P", __file__, dtype]
    null = subprocess.DEVNULL
    pipe = subprocess.PIPE
    try:
        done = subprocess.run(
            command, env=environment, timeout=timeout, stdin=null, stdout=pipe, stderr=null, text=True, check=False
        )
        return _Trial(done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {})
    except (subprocess.TimeoutExpired, OSError, ValueError, IndexError):
        return _Trial(None)


def _key(dtype: str) -> dict[str, str]:
    """Cache key: everything the result depends on; the kernel's release decides whether AMX may be used."""
    name, flags = cpu_identity()
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    caps = {cap: os.environ.get(cap, "") for cap in (CAP, "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")}
    digest = hashlib.sha256(" ".join(sorted(flags)).encode()).hexdigest()
    key = {"trial": TRIAL, "cpu": name, "flags": digest, "kernel": platform.release(), "torch": torch, "dtype": dtype}
    return key | caps


def _read(file: Path, key: dict[str, str]) -> CpuProbe | None:
    try:
        entry = json.loads(file.read_text())
        probe = CpuProbe(**entry["probe"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    sound = (
        entry.get("key") == key
        and probe.dtype == key["dtype"]
        and isinstance(probe.works, bool)
        and (probe.isa is None or isinstance(probe.isa, str))
        and all(isinstance(speed, float) for speed in (probe.gflops, probe.fp32_gflops))
    )
    return probe if sound else None


def _write(file: Path, entry: dict[str, Any]) -> None:
    """Writes atomically; a cache that cannot be written only costs the next run a probe."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial_file = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with os.fdopen(descriptor, "w") as stream:
                json.dump(entry, stream, indent=1)
            os.replace(partial_file, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial_file)
            raise


def _step(dtype: Any) -> list[Any]:
    """A transformer block's operators, forward and backward; 1024 tokens reach the packed attention kernels."""
    import torch
    from torch.nn import functional as F

    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    x = draw(1, 1024, 128).to(dtype).requires_grad_()
    weight = (draw(384, 128) / 128**0.5).to(dtype).requires_grad_()
    q, k, v = F.linear(x, weight).view(1, 1024, 3, 2, 64).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, 1024, 128)
    out = F.softmax(F.layer_norm(x + mixed, (128,)), dim=-1)
    scores = torch.bmm(out, out.transpose(1, 2))
    gradients = torch.autograd.grad(scores.float().square().sum(), [x, weight])
    return [part.detach().float() for part in (out, *gradients)]


def _close_enough(actual: list[Any], expected: list[Any]) -> bool:
    """Whether the numbers are right: bf16 rounding was 2% at most in these norms, garbage and NaN are not."""
    pairs = zip(actual, expected, strict=True)
    return all(float((value - reference).norm()) < 0.1 * float(reference.norm()) for value, reference in pairs)


def _speeds(dtypes: dict[str, Any], size: int = 512, seconds: float = 0.6) -> dict[str, float]:
    """GFLOP/s of a matmul in each type on one core: the best of many, in turns.

    On one core, because threads that wait for each other on busy cores made fp32 read anything from 41 to 410.
    """
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    tensors = {name: torch.randn(2, size, size).to(dtype) for name, dtype in dtypes.items()}
    best = dict.fromkeys(dtypes, float("inf"))
    for left, right in tensors.values():
        F.linear(left, right)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, (left, right) in tensors.items():
            start = time.perf_counter()
            F.linear(left, right)
            best[name] = min(best[name], time.perf_counter() - start)
    return {name: 2 * size**3 / duration / 1e9 for name, duration in best.items()}


def _main(dtype_name: str) -> int:
    """The trial: exit code 0 and speeds as JSON, REFUSED, or death by the signal we are here to find."""
    import resource

    import torch

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an expected SIGILL must not litter core files
    torch.set_num_threads(usable_cores())
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype_name]
    try:
        if not _close_enough(_step(dtype), _step(torch.float64)):
            return REFUSED
        speeds = _speeds({"fp32": torch.float32, dtype_name: dtype})
    except RuntimeError:
        return REFUSED
    print(json.dumps(speeds))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
