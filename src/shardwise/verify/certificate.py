"""What was shown, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from shardwise.errors import UserError
from shardwise.verify.claims import Claim
from shardwise.verify.compare import Difference, as_json

PASS, FAIL, OPEN = "pass", "FAIL", "not shown"


@dataclass(frozen=True)
class Row:
    """What became of a claim."""

    claim: Claim
    verdict: str
    difference: Difference | None = None
    why: str = ""
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        claim = self.claim
        told = {"claim": claim.name, "compared": claim.what, "ranks": claim.ranks, "verdict": self.verdict}
        told |= {"why": self.why, "lossy": claim.lossy, "bounds": asdict(claim.bounds)}
        found = None if self.difference is None else as_json(self.difference)
        return told | {"difference": found, "seconds": round(self.seconds, 2), "notes": list(self.notes)}


@dataclass
class Certificate:
    """Everything a proof says."""

    run: str
    model: str
    parameters: int
    batch: str
    reference: str
    precision: str
    device: str
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every claim was shown; one that could not be is none that failed."""
        return bool(self.rows) and not any(row.verdict == FAIL for row in self.rows)

    @property
    def failure(self) -> Row | None:
        """The first claim that failed: those after it were shown to hold, or rest on it."""
        return next((row for row in self.rows if row.verdict == FAIL), None)

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        import torch
        import transformers

        import shardwise

        versions = {"shardwise": shardwise.__version__, "torch": torch.__version__}
        versions["transformers"] = transformers.__version__
        failure = self.failure
        told = {
            "passed": self.passed, "failed": failure.claim.name if failure else None, "run": self.run,
            "model": self.model, "parameters": self.parameters, "batch": self.batch, "reference": self.reference,
            "precision": self.precision, "device": self.device, "notes": self.notes,
        }  # fmt: skip
        return told | {"claims": [row.to_json() for row in self.rows], "versions": versions}


def check_target(file: Path) -> None:
    """Refuses a place that cannot be written, before any work is done."""
    if file.is_dir():
        raise UserError("--output", str(file), "is a folder", "give the name of a file, e.g. certificate.json")
    folder = file.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        problem = "there is no such folder" if not folder.is_dir() else "cannot be written"
        raise UserError("--output", str(file), f"{folder}: {problem}", "choose a folder you may write to")


def write_certificate(certificate: Certificate, file: Path) -> None:
    """Whoever sees the file sees all of it."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(certificate.to_json(), indent=1, ensure_ascii=False) + "\n")
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        problem = f"cannot be written ({error.strerror or error})"
        raise UserError("--output", str(file), problem, "choose another place") from None


def print_certificate(certificate: Certificate, console: Console) -> None:
    """The certificate as a table."""
    console.print(f"[bold]{certificate.run}[/bold] against one plain process", highlight=False)
    facts = {
        "model": f"{certificate.model}, {certificate.parameters:,} parameters", "batch": certificate.batch,
        "reference": certificate.reference, "precision": f"{certificate.precision} on {certificate.device}",
    }  # fmt: skip
    for name, text in facts.items():
        console.print(f"  {name:10} {text}", highlight=False, markup=False, soft_wrap=True)
    for note in certificate.notes:
        console.print(f"  {'note':10} {note}", highlight=False, markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("claim", overflow="fold")
    for name in ("loss", "norm", "gradients", "bound", "update", "loss after"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in certificate.rows:
        found, bounds = row.difference, row.claim.bounds
        cells = [row.claim.name + (f" ({row.claim.lossy})" if row.claim.lossy else "")]
        if found is None:
            cells += ["", "", "", f"{bounds.gradient:.0e}", "", ""]
        else:
            numbers = (found.loss, found.norm, found.gradient)
            cells += [*map(_shown, numbers), f"{bounds.gradient:.0e}", _shown(found.update), _shown(found.after)]
        style = {PASS: "green", FAIL: "bold red", OPEN: "yellow"}[row.verdict]
        table.add_row(*cells, f"[{style}]{row.verdict}[/{style}]")
    console.print(table)
    for row in certificate.rows:
        if row.why:
            console.print(f"  {row.claim.name}: {row.why}", highlight=False, markup=False, soft_wrap=True)
        for note in row.notes:
            console.print(f"  {row.claim.name}: {note}", highlight=False, markup=False, soft_wrap=True)
    furthest = max(
        (row for row in certificate.rows if row.difference and row.difference.gradient is not None and not row.claim.lossy),
        key=lambda row: row.difference.gradient or 0.0 if row.difference else 0.0, default=None,
    )  # fmt: skip
    if certificate.passed and furthest is not None and furthest.difference is not None:
        worst = furthest.difference
        text = f"largest difference of a gradient: {_shown(worst.gradient)}, {worst.worst} ({furthest.claim.name})"
        console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)


def _shown(value: float | None) -> str:
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:.1e}"
