"""`shardwise bench`: measures this machine, shows it beside the hardware table, and saves it for the planner.

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
    """Measures the requested parts, saves and prints them; nothing is saved on Ctrl-C."""
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
    words = [word for argument in only for word in argument.split(",")]
    for word in words:
        if word not in PARTS:
            raise UserError("--only", word, "is not a part of it", f"choose from {', '.join(PARTS)}")
    return [part for part in PARTS if not words or part in words]


def _measure(folder: Path, ranks: int | None, parts: list[str], quick: bool) -> tuple[MeasuredDevice, Path]:
    import torch

    from shardwise.foresight.bench import device as steps

    under_torchrun = "WORLD_SIZE" in os.environ and "LOCAL_RANK" in os.environ
    if under_torchrun and ranks is not None:
        raise UserError("--ranks", ranks, "torchrun has started the ranks already", "leave it out")
    local_rank = int(os.environ.get("LOCAL_RANK", 0)) if under_torchrun else 0
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    effort = steps.EFFORTS[device.type, quick]
    if "disk" in parts:
        steps.check_folder(folder, effort.disk)
    count = _ranks(ranks, under_torchrun, parts)
    todo = [part for part in parts if part != "network" or under_torchrun or count > 1]
    if device.type == "cpu":
        todo = [part for part in todo if part != "host-link"]
    name = torch.cuda.get_device_name(device) if cuda else "cpu"
    previous = read_measured(name)
    figures = BenchFigures()
    if local_rank == 0:
        _measure_device([part for part in todo if part != "network"], figures, folder, device, effort, quick)
    if "network" in todo:
        with _bar(1, local_rank == 0) as advance:
            advance("network")
            _network(figures, count, under_torchrun, effort, previous)
    base = previous or MeasuredDevice(name, socket.gethostname(), "", "")
    measured = replace(
        base,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        torch=torch.__version__,
        details={**base.details, **figures.details},
        **figures.figures,
    )
    return measured, write_measured(measured) if local_rank == 0 else Path()


def _ranks(ranks: int | None, launched: bool, parts: list[str]) -> int:
    """Ranks for the network part: as given, else one per GPU."""
    import torch

    if ranks is not None and "network" not in parts:
        raise UserError("--ranks", ranks, "has no effect without the network", "add --only network, or leave it out")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if launched else ranks or 1
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and local_ranks > gpus and "network" in parts:
        raise UserError("--ranks", local_ranks, f"this machine has {gpus} GPUs", "start at most one rank for each")
    return int(os.environ["WORLD_SIZE"]) if launched else ranks or gpus


def _measure_device(
    todo: list[str], figures: BenchFigures, folder: Path, device: Any, effort: Any, quick: bool
) -> None:
    """Measures everything that a single process can."""
    with _bar(len(todo), True) as advance:
        for part in todo:
            advance(TITLES.get(part, part))
            STEPS[part](figures, folder, device, effort, quick)


def _matmul(figures: BenchFigures, _folder: Path, device: Any, effort: Any, quick: bool) -> None:
    from shardwise.foresight.bench.device import matmul, precisions

    candidates = ("fp32",) if quick and device.type == "cpu" else precisions(device)
    for precision in candidates:
        speeds: dict[int, float] = {}
        for size in effort.matmul:
            speed = matmul(precision, size, device, effort.seconds)
            if speed is not None:
                speeds[size] = speed
            # Eight times the work next: a precision that this CPU only emulates is left at small sizes.
            if speed is None or 8 * 2 * size**3 / speed > 5 * effort.seconds + 1:
                break
        if speeds:
            figures.figures.setdefault("matmul", {})[precision] = max(speeds.values())
            figures.details.setdefault("matmul", {})[precision] = speeds


def _stream(figures: BenchFigures, _folder: Path, device: Any, effort: Any, _quick: bool) -> None:
    from shardwise.foresight.bench.device import stream

    speeds = stream(effort.stream, device, effort.seconds)
    figures.figures["stream"], figures.details["stream"] = min(speeds.values()), speeds


def _attention(figures: BenchFigures, _folder: Path, device: Any, effort: Any, _quick: bool) -> None:
    from shardwise.foresight.bench.device import BACKWARD, attention

    speeds = attention(effort.attention, device, effort.seconds)
    if speeds:
        best = min(speeds.values(), key=lambda rates: 1 / rates[0] + BACKWARD / rates[1])
        figures.figures["attention_forward"], figures.figures["attention_backward"] = best
        figures.details["attention"] = {name: Attention(*rates)._asdict() for name, rates in speeds.items()}


def _launch(figures: BenchFigures, _folder: Path, device: Any, _effort: Any, _quick: bool) -> None:
    from shardwise.foresight.bench.device import launch

    figures.figures["launch"] = launch(device)


def _host_link(figures: BenchFigures, _folder: Path, device: Any, effort: Any, _quick: bool) -> None:
    from shardwise.foresight.bench.device import host_link

    speeds = host_link(min(effort.stream, 2**28), device, effort.seconds)
    figures.figures["host_link"], figures.details["host_link"] = min(speeds.values()), speeds


def _disk(figures: BenchFigures, folder: Path, _device: Any, effort: Any, _quick: bool) -> None:
    from shardwise.foresight.bench.device import disk

    speeds = disk(folder, effort.disk)
    figures.figures["disk_read"], figures.figures["disk_write"] = speeds["read"], speeds["write"]


def _adam(figures: BenchFigures, _folder: Path, _device: Any, effort: Any, _quick: bool) -> None:
    from shardwise.foresight.bench.device import host_adam

    figures.figures["host_adam"] = host_adam(effort.adam, effort.seconds)


STEPS: dict[str, Callable[[BenchFigures, Path, Any, Any, bool], None]] = {
    "matmul": _matmul, "stream": _stream, "attention": _attention, "launch": _launch, "host-link": _host_link,
    "disk": _disk, "adam": _adam,
}  # fmt: skip


def _network(results: BenchFigures, ranks: int, launched: bool, effort: Any, previous: MeasuredDevice | None) -> None:
    from shardwise.distributed import link_bench as network

    launch = results.figures.get("launch") or (previous and previous.launch) or 0.0
    if launched:
        import torch.distributed as dist

        device = network.join()
        fits = network.measure(effort.messages, launch, effort.seconds / 4, device)
        dist.destroy_process_group()
    else:
        fits = network.measure_locally(ranks, effort.messages, launch, effort.seconds / 4)
    for name, fit in fits.items():
        results.figures[f"{name}_bandwidth"], results.figures[f"{name}_latency"] = fit.bandwidth, fit.latency
    results.details["network"] = network.as_json(fits)


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[str], None]]:
    """Progress bar on standard error; each call of the yielded function names the next part."""
    from shardwise.observe.progress import _mode

    console = Console(stderr=True, force_terminal=None if sys.stderr.isatty() else False)
    columns = (TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not shown or _mode(console) != "live") as progress:
        bar = progress.add_task("", total=total)
        started = 0

        def advance(title: str) -> None:
            nonlocal started
            progress.update(bar, description=title, completed=started)
            started += 1

        yield advance


def _show(measured: MeasuredDevice, file: Path) -> None:
    """Prints the measured figures beside those of the hardware table."""
    table_machine: Cluster | None = None
    with suppress(UserError):
        table_machine = this_machine(measured=False)
    table = Table(title=f"{measured.device} on {measured.host}", title_justify="left", box=None, pad_edge=False)
    for title, justify in (("", "left"), ("measured", "right"), ("table", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for title, value, table_value in _rows(measured, table_machine):
        table.add_row(title, value, table_value)
    console = Console()
    console.print(table)
    console.print(f"kept for the planner in {file}", soft_wrap=True, highlight=False)


def _rows(measured: MeasuredDevice, table_machine: Cluster | None) -> Iterator[tuple[str, str, str]]:
    table_values = {} if table_machine is None else _table_values(table_machine)
    for precision, speed in measured.matmul.items():
        yield f"matmul {precision}", _flops(speed), _flops(table_values.get(precision))
    for name, (title, format_value) in FIGURES.items():
        value = getattr(measured, name)
        if value is not None:
            yield title, format_value(value), format_value(table_values.get(name))


def _table_values(machine: Cluster) -> dict[str, float]:
    """Figures of the hardware table, under the names of the measured ones."""
    device = machine.device
    attention = machine.device.attention_flops()
    return {
        **{precision: device.matmul * peak for precision, peak in device.peak.items()},
        "stream": device.stream * device.bandwidth,
        "attention_forward": attention.forward,
        "attention_backward": attention.backward,
        "launch": device.launch,
        "host_link": device.host_link,
        "disk_read": machine.disk_read,
        "disk_write": machine.disk_write,
        "host_adam": machine.host_adam,
        "within_bandwidth": machine.within.bandwidth,
        "within_latency": machine.within.latency,
        "across_bandwidth": machine.across.bandwidth,
        "across_latency": machine.across.latency,
    }


def _flops(value: float | None) -> str:
    if not value:
        return "–"
    return f"{value / 1e12:.1f} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.1f} GFLOP/s"


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
