"""The certificate of a verification, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardwise.core.errors import UserError
from shardwise.foresight.verify.claims import Claim
from shardwise.foresight.verify.compare import ParityDifference, as_json

PASS, FAIL = "pass", "FAIL"
OPEN, UNTRIED = "not shown", "not tried"  # there is nothing to show; what it rests on failed


@dataclass(frozen=True)
class ClaimRow:
    """Verdict on a claim."""

    claim: Claim
    verdict: str
    difference: ParityDifference | None = None
    why: str = ""
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the row as plain values."""
        claim = self.claim
        values = {"claim": claim.name, "compared": claim.what, "ranks": claim.ranks, "verdict": self.verdict}
        values |= {"why": self.why, "lossy": claim.lossy, "bounds": asdict(claim.bounds)}
        difference = None if self.difference is None else as_json(self.difference)
        return values | {"difference": difference, "seconds": round(self.seconds, 2), "notes": list(self.notes)}


@dataclass
class Certificate:
    """Results of all claims, with what they were tried on."""

    run: str
    model: str
    parameters: int
    batch: str
    reference: str
    precision: str
    device: str
    notes: list[str] = field(default_factory=list)
    rows: list[ClaimRow] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether at least one claim passed and none failed."""
        verdicts = {row.verdict for row in self.rows}
        return PASS in verdicts and FAIL not in verdicts

    @property
    def failure(self) -> ClaimRow | None:
        """The first claim that failed: those after it hold, or depend on it."""
        return next((row for row in self.rows if row.verdict == FAIL), None)

    def to_json(self) -> dict[str, Any]:
        """Returns the certificate as plain values."""
        import torch
        import transformers

        import shardwise

        versions = {"shardwise": shardwise.__version__, "torch": torch.__version__}
        versions["transformers"] = transformers.__version__
        failure = self.failure
        values = {
            "passed": self.passed, "failed": failure.claim.name if failure else None, "run": self.run,
            "model": self.model, "parameters": self.parameters, "batch": self.batch, "reference": self.reference,
            "precision": self.precision, "device": self.device, "notes": self.notes,
        }  # fmt: skip
        return values | {"claims": [row.to_json() for row in self.rows], "versions": versions}


def check_target(file: Path) -> None:
    """Rejects an output path that cannot be written, before any work is done."""
    if file.is_dir():
        raise UserError("--output", str(file), "is a folder", "give the name of a file, e.g. certificate.json")
    folder = file.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        problem = "there is no such folder" if not folder.is_dir() else "cannot be written"
        raise UserError("--output", str(file), f"{folder}: {problem}", "choose a folder you may write to")


def write_certificate(certificate: Certificate, file: Path) -> None:
    """Writes the certificate atomically."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(certificate.to_json(), indent=1, ensure_ascii=False) + "\n")
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        problem = f"cannot be written ({error.strerror or error})"
        raise UserError("--output", str(file), problem, "choose another place") from None


def print_certificate(certificate: Certificate, console: Console) -> None:
    """Prints the certificate as a table."""
    console.print(f"[bold]{escape(certificate.run)}[/bold] against one plain process", highlight=False)
    facts = {
        "model": f"{certificate.model}, {certificate.parameters:,} parameters", "batch": certificate.batch,
        "reference": certificate.reference, "precision": f"{certificate.precision} on {certificate.device}",
    }  # fmt: skip
    for name, text in facts.items():
        _line(console, f"{name:10} {text}")
    for note in certificate.notes:
        _line(console, f"{'note':10} {note}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("claim, what is compared, gradient furthest off", overflow="fold")
    for name in ("loss", "norm", "gradients", "update", "loss after"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in certificate.rows:
        table.add_row(*_cells(row))
    console.print(table)
    for bounds in dict.fromkeys(row.claim.bounds for row in certificate.rows):
        claims = [row.claim for row in certificate.rows if row.claim.bounds == bounds]
        lossy_note = "" if not claims[0].lossy else f" (lossy: {', '.join(claim.name for claim in claims)})"
        update = "not compared" if bounds.update is None else f"{bounds.update:.0e}"
        text = f"loss {bounds.loss:.0e}, norm {bounds.norm:.0e}, gradients {bounds.gradient:.0e}, update {update}, "
        _line(console, f"bounds: {text}loss after {bounds.after:.0e}{lossy_note}")
    for row in certificate.rows:
        for note in (*([row.why] if row.why else []), *row.notes):
            _line(console, f"{row.claim.name}: {note}")


def _cells(row: ClaimRow) -> list[str]:
    difference = row.difference
    claim = row.claim
    lines = [f"[bold]{escape(claim.name)}[/bold]", f"[dim]{escape(claim.what)}[/dim]"]
    numbers: list[float | None] = []
    if difference is not None:
        numbers = [difference.loss, difference.norm, difference.gradient, difference.update, difference.after]
        lines += [f"[dim]{escape(difference.worst)}[/dim]"] if difference.worst else []
    style = {PASS: "green", FAIL: "bold red"}.get(row.verdict, "yellow")
    return ["\n".join(lines), *map(_format, numbers), *[""] * (5 - len(numbers)), f"[{style}]{row.verdict}[/{style}]"]


def _line(console: Console, text: str) -> None:
    console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)


def _format(value: float | None) -> str:
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:.1e}"
