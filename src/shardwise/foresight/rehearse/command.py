"""`shardwise rehearse`: rehearses one rank of each kind of a world that does not exist, and reports on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.config.load import load_run
from shardwise.config.units import human
from shardwise.core.errors import UserError
from shardwise.foresight.rehearse.batch import check_division
from shardwise.foresight.rehearse.ledger import CATEGORIES, WORKSPACE, MemoryLedger, ledger_of, replayed, wire
from shardwise.foresight.rehearse.step import Alike, Rehearsal, rehearse
from shardwise.foresight.rehearse.subprocess import run_isolated
from shardwise.foresight.rehearse.tally import head_of
from shardwise.foresight.rehearse.target import Target, aim

LARGEST = ("category", "module", "operator", "bytes")


def run_rehearsal(
    file: Path, overrides: list[str], nodes: int, gpus: int, rank: int | None, documents: int, as_json: bool
) -> None:
    """Rehearses the ranks and prints the report."""
    target = aim(load_run(file, overrides), nodes, gpus)
    if rank is not None and not 0 <= rank < target.ranks:
        raise UserError("--rank", rank, f"there are {target.ranks} ranks", f"give one from 0 to {target.ranks - 1}")
    width = target.run.data.sequence_length
    check_division(target.run, documents)
    console = Console(highlight=False, stderr=as_json)
    reports: list[dict[str, Any]] = []
    cache = Alike()
    ranks = target.stages if rank is None else sorted({0, rank} if target.run.parallel.pipeline > 1 else {rank})
    with console.status("") as status:
        for number in ranks:
            status.update(f"rehearsing rank {number} of {target.ranks}")
            report, cache = run_isolated(_rehearse_rank, target, number, documents, cache)
            reports.append(report)
    if as_json:
        print(json.dumps({"ranks": target.ranks, "reasons": target.reasons, "rehearsed": reports}, indent=1))
        return
    run = target.run
    console.print(
        f"{target.source.label}: micro-batches of {run.train.micro_batch_size} × {width:,} tokens, {run.computes_in}"
    )
    for rank_report in reports:
        _show(rank_report, target, console)


def _rehearse_rank(target: Target, rank: int, documents: int, cache: Alike) -> tuple[dict[str, Any], Alike]:
    result = rehearse(target.source, target.run, rank, target.ranks, documents=documents, known=cache)
    return report_of(result, target), cache


def report_of(result: Rehearsal, target: Target) -> dict[str, Any]:
    """Returns the report of a rank as plain values."""
    head = head_of(result.tracker)
    ledger = ledger_of(result.tracker, head)
    on_gpu = target.run.device == "cuda"
    allocator = replayed(result.tracker) if on_gpu else None
    return {
        "rank": result.rank,
        "place": result.place,
        "micro_batches": result.micro_batches,
        "micro_batches_of": target.micro_batches,
        "micro_batch_size": target.run.train.micro_batch_size,
        "held": result.held,
        "peak": allocator.most_allocated + WORKSPACE if allocator else ledger.peak,
        "at_peak": ledger.at_peak() | ({"workspace": WORKSPACE} if on_gpu else {}),
        "reserved": allocator.most_reserved + WORKSPACE if allocator else None,
        "peak_phase": _phase_at(ledger),
        "largest": [dict(zip(LARGEST, entry, strict=True)) for entry in ledger.largest()],
        "collectives": wire(result.tracker),
        "flops": sum(work.flops * count for work, count in result.tracker.work.items()),
        "seconds": round(result.seconds, 1),
    }


def _phase_at(ledger: MemoryLedger) -> str:
    block = max((b for b, _ in ledger.blocks if b.born < ledger.peak_time), key=lambda b: b.born)
    return f"{block.phase}, {block.module or 'outside of the modules'}"


def _show(report: dict[str, Any], target: Target, console: Console) -> None:
    place = ", ".join(f"{axis} {index}" for axis, index in report["place"].items())
    console.print(f"\n[bold]rank {report['rank']} of {target.ranks}[/bold] ({place})")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("memory at the peak", ""):
        table.add_column(title, justify="right" if not title else "left")
    for category in (*CATEGORIES, "workspace"):
        if size := report["at_peak"].get(category):
            table.add_row(category, human(size))
    table.add_row("[bold]peak[/bold]", f"[bold]{human(report['peak'])}[/bold]")
    if report["reserved"]:
        table.add_row("reserved by the allocator", human(report["reserved"]))
    console.print(table)
    console.print(f"most is there in {report['peak_phase']}; between steps {human(sum(report['held'].values()))}")
    if report["collectives"]:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for title in ("collective", "in", "among", "calls", "bytes"):
            table.add_column(title, justify="right" if title in ("calls", "bytes") else "left")
        for call in report["collectives"]:
            among = f"{call['ranks']} ranks ({call['group']})"
            table.add_row(call["kind"], call["phase"], among, str(call["calls"]), human(call["bytes"]))
        console.print(table)
    flops = f"{report['flops'] / 1e12:,.1f} TFLOP"
    console.print(
        f"rehearsed: {report['micro_batches']} of the {report['micro_batches_of']} micro-batches of a step, "
        f"{flops} on this rank ({report['seconds']} s)"
    )
