"""`shardwise rehearse`: one rank of each kind of a world that is not there, and what it would have said."""

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
from shardwise.foresight.rehearse.subprocess import apart
from shardwise.foresight.rehearse.tally import head_of
from shardwise.foresight.rehearse.target import Target, aim

LARGEST = ("category", "module", "operator", "bytes")


def run_rehearsal(
    file: Path, overrides: list[str], nodes: int, gpus: int, rank: int | None, documents: int, as_json: bool
) -> None:
    """Rehearses and prints."""
    loaded = load_run(file, overrides)
    loaded.print_notes()
    target = aim(loaded, nodes, gpus)
    if rank is not None and not 0 <= rank < target.ranks:
        raise UserError("--rank", rank, f"there are {target.ranks} ranks", f"give one from 0 to {target.ranks - 1}")
    width = target.run.data.sequence_length
    check_division(target.run, documents)
    console = Console(highlight=False, stderr=as_json)
    found: list[dict[str, Any]] = []
    known = Alike()
    ranks = target.stages if rank is None else sorted({0, rank} if target.run.parallel.pipeline > 1 else {rank})
    with console.status("") as status:
        for number in ranks:
            status.update(f"rehearsing rank {number} of {target.ranks}")
            report, known = apart(_one, target, number, documents, known)
            found.append(report)
    if as_json:
        print(json.dumps({"ranks": target.ranks, "reasons": target.reasons, "rehearsed": found}, indent=1))
        return
    run = target.run
    console.print(
        f"{target.source.label}: micro-batches of {run.train.micro_batch_size} × {width:,} tokens, {run.computes_in}"
    )
    for one in found:
        _show(one, target, console)


def _one(target: Target, rank: int, documents: int, known: Alike) -> tuple[dict[str, Any], Alike]:
    result = rehearse(target.source, target.run, rank, target.ranks, documents=documents, known=known)
    return report_of(result, target), known


def report_of(result: Rehearsal, target: Target) -> dict[str, Any]:
    """What is told of a rank, in plain values."""
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
        "largest": [dict(zip(LARGEST, one, strict=True)) for one in ledger.largest()],
        "collectives": wire(result.tracker),
        "flops": sum(work.flops * count for work, count in result.tracker.work.items()),
        "seconds": round(result.seconds, 1),
    }


def _phase_at(ledger: MemoryLedger) -> str:
    block = max((b for b, _ in ledger.blocks if b.born < ledger.peak_time), key=lambda b: b.born)
    return f"{block.phase}, {block.module or 'outside of the modules'}"


def _show(one: dict[str, Any], target: Target, console: Console) -> None:
    place = ", ".join(f"{axis} {at}" for axis, at in one["place"].items())
    console.print(f"\n[bold]rank {one['rank']} of {target.ranks}[/bold] ({place})")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("memory at the peak", ""):
        table.add_column(title, justify="right" if not title else "left")
    for category in (*CATEGORIES, "workspace"):
        if size := one["at_peak"].get(category):
            table.add_row(category, human(size))
    table.add_row("[bold]peak[/bold]", f"[bold]{human(one['peak'])}[/bold]")
    if one["reserved"]:
        table.add_row("reserved by the allocator", human(one["reserved"]))
    console.print(table)
    console.print(f"most is there in {one['peak_phase']}; between steps {human(sum(one['held'].values()))}")
    if one["collectives"]:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for title in ("collective", "in", "among", "calls", "bytes"):
            table.add_column(title, justify="right" if title in ("calls", "bytes") else "left")
        for call in one["collectives"]:
            among = f"{call['ranks']} ranks ({call['group']})"
            table.add_row(call["kind"], call["phase"], among, str(call["calls"]), human(call["bytes"]))
        console.print(table)
    flops = f"{one['flops'] / 1e12:,.1f} TFLOP"
    console.print(
        f"rehearsed: {one['micro_batches']} of the {one['micro_batches_of']} micro-batches of a step, {flops} on this "
        f"rank ({one['seconds']} s)"
    )
