"""The metrics of metrics.jsonl as CSV files, one per metric."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

_FIGURES = (
    "loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_bytes", "perplexity", "cross_entropy",
    "aux_loss", "z_loss",
)  # fmt: skip


class Tables:
    """Maintains `train_loss.csv`, `eval_loss.csv`, … in a folder: a header, then step and value per line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def rewrite(self, records: list[dict[str, Any]]) -> None:
        """Rewrites the files from these records, so that a resumed run does not report steps twice."""
        for kind in ("train", "eval"):
            for figure in _FIGURES:
                self._file(kind, figure).unlink(missing_ok=True)
        for record in records:
            self.append(record)

    def append(self, record: dict[str, Any]) -> None:
        """Appends a record of training or evaluation."""
        for figure in _FIGURES:
            if figure not in record:
                continue
            path = self._file(str(record["kind"]), figure)
            fresh = not path.exists()
            with path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if fresh:
                    writer.writerow(["step", figure])
                writer.writerow([record["step"], record[figure]])

    def _file(self, kind: str, figure: str) -> Path:
        return self.folder / f"{kind}_{figure}.csv"
