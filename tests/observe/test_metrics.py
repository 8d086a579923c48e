"""The metrics file must survive crashes and resumes without losing or inventing a record."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from shardwise.core.errors import UserError
from shardwise.observe.metrics import MetricsFile, read_metrics


def _write(path: Path, steps: int) -> None:
    metrics = MetricsFile(path)
    for step in range(1, steps + 1):
        metrics.append({"kind": "train", "step": step, "loss": 1.0 / step})
    metrics.close()


def _steps(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def test_a_record_is_on_disk_before_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.append({"kind": "train", "step": 1, "loss": 2.5})
    assert path.read_text() == '{"kind": "train", "step": 1, "loss": 2.5}\n'
    metrics.close()
    metrics.close()


def test_opening_again_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, 2)
    metrics = MetricsFile(path)
    metrics.append({"step": 3})
    metrics.close()
    assert _steps(path) == [1, 2, 3]


def test_nonfinite_numbers_become_null_and_are_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.append({"step": 1, "loss": math.nan, "grad_norm": math.inf, "groups": {"a": -math.inf, "b": 1.0}})
    metrics.append({"step": 2, "loss": 1.0})
    metrics.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    first, second = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert first["loss"] is None and first["grad_norm"] is None and first["groups"] == {"a": None, "b": 1.0}
    assert first["nonfinite"] == ["loss", "grad_norm", "groups.a"]
    assert "nonfinite" not in second


@pytest.mark.parametrize("torn", ['{"kind": "train", "st', '{"note": "\u00e9'], ids=["ascii", "cut character"])
def test_a_torn_last_line_is_skipped_and_not_built_upon(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, 2)
    with path.open("ab") as file:
        file.write(torn.encode()[:-1])
    assert _steps(path) == [1, 2]
    metrics = MetricsFile(path)
    metrics.append({"step": 3})
    metrics.close()
    assert _steps(path) == [1, 2, 3]


def test_a_whole_last_line_without_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    assert _steps(path) == [1, 2]
    metrics = MetricsFile(path)
    metrics.append({"step": 3})
    metrics.close()
    assert _steps(path) == [1, 2, 3]


def test_damage_before_the_end_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


def test_truncate_drops_later_steps_and_goes_on_appending(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, 5)
    metrics = MetricsFile(path)
    metrics.append({"kind": "eval", "step": 5, "loss": 1.0})
    metrics.append({"kind": "note", "text": "no step"})
    with path.open("ab") as file:
        file.write(b'{"kind": "tra')  # what a crashed writer left behind
    metrics.truncate_after(3)
    assert [record.get("step") for record in read_metrics(path)] == [1, 2, 3, None]
    metrics.append({"kind": "train", "step": 4})
    metrics.close()
    assert [record.get("step") for record in read_metrics(path)] == [1, 2, 3, None, 4]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_failed_truncate_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, 5)
    metrics = MetricsFile(path)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("shardwise.observe.metrics.os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        metrics.truncate_after(2)
    metrics.append({"step": 6})
    metrics.close()
    assert _steps(path) == [1, 2, 3, 4, 5, 6]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_csv_files_follow_the_records(tmp_path: Path) -> None:
    """One file per figure with step and value; after a cut they say what metrics.jsonl says, and go on from there."""
    from shardwise.observe.tables import Tables

    def column(name: str) -> list[list[str]]:
        return [line.split(",") for line in (tmp_path / "csv" / name).read_text().split()]

    file = MetricsFile(tmp_path / "metrics.jsonl", Tables(tmp_path / "csv"))
    for step in (1, 2, 3):
        file.append({"kind": "train", "step": step, "loss": step / 2, "grad_norm": math.inf if step == 2 else 1.0})
    file.append({"kind": "eval", "step": 3, "loss": 0.25})
    assert column("train_loss.csv") == [["step", "loss"], ["1", "0.5"], ["2", "1.0"], ["3", "1.5"]]
    assert column("train_grad_norm.csv")[2] == ["2", ""]
    file.truncate_after(2)
    assert column("train_loss.csv") == [["step", "loss"], ["1", "0.5"], ["2", "1.0"]]
    assert not (tmp_path / "csv/eval_loss.csv").exists()
    file.append({"kind": "train", "step": 3, "loss": 9.0})
    assert column("train_loss.csv")[-1] == ["3", "9.0"]
    file.close()
