"""`shardwise bench`: measures this machine, shows it beside the table, and keeps it for the planner.

Under torchrun the first rank of each node measures its device while the others wait, then all measure the network.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shardwise.core.errors import Interrupted, UserError
from shardwise.core.hardware.measured import MeasuredDevice, read_measured, write_measured
from shardwise.core.hardware.specs import Attention, Cluster, this_machine

PARTS = ("matmul", "stream", "attention", "launch", "host-link", "disk", "adam", "network")
TITLES = {"host-link": "host link", "adam": "AdamW on the host", "launch": "kernel launch"}


@dataclass
class BenchFigures:
    """The figures so far, and every measurement behind them."""

    figures: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


def bench(folder: Path, ranks: int | None, only: list[str], quick: bool, as_json: bool) -> None:
    """Measures what is asked for, keeps it, and prints it; Ctrl-C keeps nothing."""
    parts = _parts(only)
    try:
        measured, file = _measure(folder, ranks, parts, quick)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; earlier results are as they were", 130) from None
    if int(os.environ.get("RANK", 0)) != 0:
        return
    if as_json:
        print(json.dumps({"file": str(file), **asdict(measured)}, indent=1))
        return
    _show(measured, file)


def _parts(only: list[str]) -> list[str]:
    words = [word for given in only for word in given.split(",")]
    for word in words:
        if word not in PARTS:
            raise UserError("--only", word, "is not a part of it", f"choose from {', '.join(PARTS)}")
    return [part for part in PARTS if not words or part in words]


def _measure(folder: Path, ranks: int | None, parts: list[str], quick: bool) -> tuple[MeasuredDevice, Path]:
    import torch

    from shardwise.foresight.bench import device as steps

    launched = "WORLD_SIZE" in os.environ and "LOCAL_RANK" in os.environ
    if launched and ranks is not None:
        raise UserError("--ranks", ranks, "torchrun has started the ranks already", "leave it out")
    place = int(os.environ.get("LOCAL_RANK", 0)) if launched else 0
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", place % torch.cuda.device_count()) if cuda else torch.device("cpu")
    effort = steps.EFFORTS[device.type, quick]
    if "disk" in parts:
        steps.check_folder(folder, effort.disk)
    count = _ranks(ranks, launched, parts)
    todo = [part for part in parts if part != "network" or launched or count > 1]
    if device.type == "cpu":
        todo = [part for part in todo if part != "host-link"]
    name = torch.cuda.get_device_name(device) if cuda else "cpu"
    before = read_measured(name)
    found = BenchFigures()
    if place == 0:
        _alone([part for part in todo if part != "network"], found, folder, device, effort, quick)
    if "network" in todo:
        with _bar(1, place == 0) as tell:
            tell("network")
            _network(found, count, launched, effort, before)
    start = before or MeasuredDevice(name, socket.gethostname(), "", "")
    measured = replace(
        start,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        torch=torch.__version__,
        details={**start.details, **found.details},
        **found.figures,
    )
    return measured, write_measured(measured) if place == 0 else Path()


def _ranks(ranks: int | None, launched: bool, parts: list[str]) -> int:
    """Ranks for the network part: as asked for, else one per GPU."""
    import torch

    if ranks is not None and "network" not in parts:
        raise UserError("--ranks", ranks, "has no effect without the network", "add --only network, or leave it out")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if launched else ranks or 1
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and here > gpus and "network" in parts:
        raise UserError("--ranks", here, f"this machine has {gpus} GPUs", "start at most one rank for each")
    return int(os.environ["WORLD_SIZE"]) if launched else ranks or gpus


def _alone(todo: list[str], found: BenchFigures, folder: Path, device: Any, effort: Any, quick: bool) -> None:
    """Everything that one process measures by itself."""
    with _bar(len(todo), True) as tell:
        for part in todo:
            tell(TITLES.get(part, part))
            STEPS[part](found, folder, device, effort, quick)


def _matmul(found: BenchFigures, _folder: Path, device: Any, effort: Any, quick: bool) -> None:
    from shardwise.foresight.bench.device import matmul, precisions

    tried = ("fp32",) if quick and device.type == "cpu" else precisions(device)
    for precision in tried:
        speeds: dict[int, float] = {}
        for size in effort.matmul:
            speed = matmul(precision, size, device, effort.seconds)
            if speed is not None:
                speeds[size] = speed
            # Eight times the work next: a precision that this CPU only emulates is left at small sizes.
            if speed is None or 8 * 2 * size**3 / speed > 5 * effort.seconds + 1:
                break
        if speeds:
            found.figures.setdefault("matmul", {})[precision] = max(speeds.values())
            found.details.setdefault("matmul", {})[precision] = speeds


def _stream(found: BenchFigures, _folder: Path, device: Any, effort: Any, _quick: bool) -> None:
    from shardwise.foresight.bench.device import stream

    speeds = stream(effort.stream, device, effort.seconds)
    found.figures["stream"], found.details["stream"] = min(speeds.values()), speeds


def _attention(found: BenchFigures, _folder: Path, device: Any, effort: Any, _quick: bool) -> None:
    from shardwise.foresight.bench.device import BACKWARD, attention

    speeds = attention(effort.attention, device, effort.seconds)
    if speeds:
        best = min(speeds.values(), key=lambda one: 1 / one[0] + BACKWARD / one[1])
        found.figures["attention_forward"], found.figures["attention_backward"] = best
        found.details["attention"] = {name: Attention(*one)._asdict() for name, one in speeds.items()}


def _launch(found: BenchFigures, _folder: Path, device: Any, _effort: Any, _quick: bool) -> None:
    from shardwise.foresight.bench.device import launch

    found.figures["launch"] = launch(device)


def _host_link(found: BenchFigures, _folder: Path, device: Any, effort: Any, _quick: bool) -> None:
    from shardwise.foresight.bench.device import host_link

    speeds = host_link(min(effort.stream, 2**28), device, effort.seconds)
    found.figures["host_link"], found.details["host_link"] = min(speeds.values()), speeds


def _disk(found: BenchFigures, folder: Path, _device: Any, effort: Any, _quick: bool) -> None:
    from shardwise.foresight.bench.device import disk

    speeds = disk(folder, effort.disk)
    found.figures["disk_read"], found.figures["disk_write"] = speeds["read"], speeds["write"]


def _adam(found: BenchFigures, _folder: Path, _device: Any, effort: Any, _quick: bool) -> None:
    from shardwise.foresight.bench.device import host_adam

    found.figures["host_adam"] = host_adam(effort.adam, effort.seconds)


STEPS: dict[str, Callable[[BenchFigures, Path, Any, Any, bool], None]] = {
    "matmul": _matmul, "stream": _stream, "attention": _attention, "launch": _launch, "host-link": _host_link,
    "disk": _disk, "adam": _adam,
}  # fmt: skip


def _network(found: BenchFigures, ranks: int, launched: bool, effort: Any, before: MeasuredDevice | None) -> None:
    from shardwise.distributed import link_bench as network

    launch = found.figures.get("launch") or (before and before.launch) or 0.0
    if launched:
        import torch.distributed as dist

        device = network.join()
        fits = network.measure(effort.messages, launch, effort.seconds / 4, device)
        dist.destroy_process_group()
    else:
        fits = network.measure_locally(ranks, effort.messages, launch, effort.seconds / 4)
    for name, one in fits.items():
        found.figures[f"{name}_bandwidth"], found.figures[f"{name}_latency"] = one.bandwidth, one.latency
    found.details["network"] = network.as_json(fits)


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error; each call names what begins."""
    from shardwise.observe.progress import _mode

    console = Console(stderr=True, force_terminal=None if sys.stderr.isatty() else False)
    columns = (TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not shown or _mode(console) != "live") as progress:
        bar = progress.add_task("", total=total)
        begun = 0

        def tell(title: str) -> None:
            nonlocal begun
            progress.update(bar, description=title, completed=begun)
            begun += 1

        yield tell


def _show(measured: MeasuredDevice, file: Path) -> None:
    """A table: the figure, measured, and what the hardware table would have said."""
    known: Cluster | None = None
    with suppress(UserError):
        known = this_machine(measured=False)
    table = Table(title=f"{measured.device} on {measured.host}", title_justify="left", box=None, pad_edge=False)
    for title, justify in (("", "left"), ("measured", "right"), ("table", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for title, value, usual in _rows(measured, known):
        table.add_row(title, value, usual)
    console = Console()
    console.print(table)
    console.print(f"kept for the planner in {file}", soft_wrap=True, highlight=False)


def _rows(measured: MeasuredDevice, known: Cluster | None) -> Iterator[tuple[str, str, str]]:
    usual = {} if known is None else _usual(known)
    for precision, speed in measured.matmul.items():
        yield f"matmul {precision}", _flops(speed), _flops(usual.get(precision))
    for name, (title, shown) in FIGURES.items():
        value = getattr(measured, name)
        if value is not None:
            yield title, shown(value), shown(usual.get(name))


def _usual(known: Cluster) -> dict[str, float]:
    """What the table says, by the names of what is measured."""
    device, attended = known.device, known.device.attention_flops()
    return {
        **{precision: device.matmul * peak for precision, peak in device.peak.items()},
        "stream": device.stream * device.bandwidth,
        "attention_forward": attended.forward,
        "attention_backward": attended.backward,
        "launch": device.launch,
        "host_link": device.host_link,
        "disk_read": known.disk_read,
        "disk_write": known.disk_write,
        "host_adam": known.host_adam,
        "within_bandwidth": known.within.bandwidth,
        "within_latency": known.within.latency,
        "across_bandwidth": known.across.bandwidth,
        "across_latency": known.across.latency,
    }


def _flops(value: float | None) -> str:
    return "–" if not value else f"{value / 1e12:.1f} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.1f} GFLOP/s"


def _bytes(value: float | None) -> str:
    return "–" if not value else f"{value / 1e9:,.2f} GB/s"


def _micro(value: float | None) -> str:
    return "–" if not value else f"{value * 1e6:.1f} µs"


def _updates(value: float | None) -> str:
    return "–" if not value else f"{value / 1e9:.2f} G params/s"


FIGURES: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "attention_forward": ("attention forward", _flops),
    "attention_backward": ("attention backward", _flops),
    "stream": ("memory", _bytes),
    "launch": ("kernel launch", _micro),
    "host_link": ("host link", _bytes),
    "disk_read": ("disk read", _bytes),
    "disk_write": ("disk write", _bytes),
    "host_adam": ("AdamW on the host", _updates),
    "within_bandwidth": ("within a node", _bytes),
    "within_latency": ("  latency per hop", _micro),
    "across_bandwidth": ("across nodes", _bytes),
    "across_latency": ("  latency per hop", _micro),
}
