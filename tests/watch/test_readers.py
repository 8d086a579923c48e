"""Runs are read as they grow: each byte once, thinned with their extremes, and told anew only where they changed."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.watched import eval_record, make_run, train_record, write_lines

from shardwise.watch import folder as folders
from shardwise.watch.columns import Columns, thin
from shardwise.watch.finder import Finder, find_runs
from shardwise.watch.folder import RunFolder, differences
from shardwise.watch.ranks import rank_rows
from shardwise.watch.state import state_of
from shardwise.watch.tail import Tail, last_lines, sampled


def fresh(folder: Path) -> RunFolder:
    return RunFolder(folder, folder.name)


def reread(run: RunFolder) -> None:
    run._read_at = -math.inf
    run.refresh()


def test_a_file_is_read_once_and_a_torn_line_waits(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = Tail(file)
    assert tail.read() == ([], False)
    file.write_bytes(b'{"a": 1}\n{"a": 2')
    assert tail.read() == ([{"a": 1}], False)
    with file.open("ab") as out:
        out.write(b'}\nrubbish\n[1]\n{"a": 3}\n')
    assert tail.unread() == len(b'}\nrubbish\n[1]\n{"a": 3}\n')
    assert tail.read() == ([{"a": 2}, {"a": 3}], False) and tail.read() == ([], False) and tail.unread() == 0
    other = tmp_path / "other"
    other.write_bytes(b'{"a": 9}\n' * 20)
    os.replace(other, file)
    assert tail.read() == ([{"a": 9}] * 20, True), "another file under the name"
    os.truncate(file, 9)
    assert tail.read() == ([{"a": 9}], True), "cut short"
    file.unlink()
    assert tail.read() == ([], True)


def test_thinning_keeps_what_stands_out() -> None:
    values = np.sin(np.arange(100_000) / 5000)
    values[[40_321, 77_777]] = 50, -50
    values[10:4000] = np.nan
    kept = thin(values, 1500)
    assert len(kept) <= 1502 and {0, 40_321, 77_777, 99_999} <= set(kept.tolist()) and (np.diff(kept) > 0).all()
    assert np.isnan(values[kept]).any(), "a gap stays a gap"
    assert thin(values[:5], 10).tolist() == [0, 1, 2, 3, 4]


def test_only_what_is_new_is_told(tmp_path: Path) -> None:
    run = fresh(make_run(tmp_path / "run"))
    whole = run.series(100)
    assert whole["whole"] and whole["ends"] == {"train": 20, "eval": 20}
    assert whole["kinds"]["train"]["loss"][0] == list(range(1, 21))
    assert whole["kinds"]["train"]["losses/web"][1][0] == pytest.approx(1.5 + 4 * math.exp(-1 / 50), 1e-5)
    assert whole["kinds"]["eval"]["loss"][0] == [10, 20]
    write_lines(run.path / "metrics.jsonl", [train_record(21), train_record(22), eval_record(22)], "a")
    reread(run)
    more = run.series(100, whole["generation"], whole["ends"])
    assert not more["whole"] and more["generation"] == whole["generation"]
    assert more["kinds"]["train"]["loss"][0] == [21, 22] and more["kinds"]["eval"]["loss"][0] == [22]
    nothing = run.series(100, more["generation"], more["ends"])
    assert nothing["kinds"] == {"train": {}, "eval": {}}
    part = run.series(100, first=5, last=7)
    assert part["kinds"]["train"]["loss"][0] == [5, 6, 7]


def test_a_resumed_run_is_told_anew(tmp_path: Path) -> None:
    run = fresh(make_run(tmp_path / "run"))
    before = run.series(100)
    lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    other = tmp_path / "other"
    other.write_text("".join(lines[:8]))  # as MetricsFile.truncate_after does
    os.replace(other, run.path / "metrics.jsonl")
    reread(run)
    after = run.series(100, before["generation"], before["ends"])
    assert after["whole"] and after["generation"] != before["generation"] and after["ends"] == {"train": 8}


def test_a_step_told_twice_voids_the_first() -> None:
    columns = Columns()
    for step in (1, 2, 3, 2):
        columns.add({"kind": "train", "step": step, "loss": float(step * 10)})
    part = columns.kinds["train"]["loss"].part(10)
    assert part == ([1, 2], [10, 20]) and columns.generation == 1


def test_a_loss_that_was_no_number_is_a_gap() -> None:
    columns = Columns()
    columns.add({"kind": "train", "step": 1, "loss": 1.0, "mfu": None})
    columns.add({"kind": "train", "step": 2, "loss": None, "nonfinite": ["loss"]})
    columns.add({"kind": "train", "step": True, "loss": 1.0})
    columns.add({"kind": ["x"], "step": 3})
    assert columns.kinds["train"]["loss"].part(10) == ([1, 2], [1.0, None]) and "mfu" not in columns.kinds["train"]


def test_a_long_file_has_a_first_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, add = [0], Columns.add

    def counting(columns: Columns, record: dict[str, Any], *rest: Any) -> Any:
        taken[0] += 1
        return add(columns, record, *rest)

    monkeypatch.setattr(Columns, "add", counting)
    monkeypatch.setattr(folders, "GIVE_WAY", 3600.0)  # until someone waits for the whole
    folder = tmp_path / "long"
    records = [train_record(step) for step in range(1, 30_001)]
    records[12_345]["loss"] = 99.0
    write_lines(folder / "metrics.jsonl", records)
    assert (folder / "metrics.jsonl").stat().st_size > folders.LARGE
    assert sampled(folder / "metrics.jsonl", 3)[0]["step"] == 1
    run = fresh(folder)
    first = run.series(1500)
    assert taken[0] <= folders.FIRST_LOOK and first["reading"] and len(first["kinds"]["train"]["loss"][0]) > 500
    run.wait()
    reread(run)
    whole = run.series(1500, first["generation"], first["ends"])
    assert whole["whole"] and not whole["reading"] and whole["ends"] == {"train": 30_000}
    assert max(whole["kinds"]["train"]["loss"][1]) == 99.0


def test_states(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = fresh(folder)
    assert run.overview()["state"]["word"] == "running" and run.overview()["total"] == 100
    (folder / "result.json").write_text(json.dumps({"ended": "all steps done"}))
    os.utime(folder / "result.json", (time.time() + 5, time.time() + 5))
    assert run.overview()["state"] | {"since": 0} == {"word": "finished", "since": 0, "why": "all steps done"}
    os.utime(folder / "result.json", (1, 1))  # of an earlier start
    assert run.overview()["state"]["word"] == "running"
    note = {"rank": 1, "step": 7, "doing": "computing", "reason": "the <b>loss</b> became nan", "time": time.time() + 1}
    (folder / "logs/rank-1.error.json").write_text(json.dumps(note))
    told = run.overview()["state"]
    assert told["word"] == "failed" and told["why"] == "rank 1 at step 7 while computing: the <b>loss</b> became nan"
    (folder / "logs/failure.json").write_text(json.dumps({"reason": "rank 0 was killed", "time": time.time() + 2}))
    assert run.overview()["state"]["why"] == "rank 0 was killed", "the supervisor knows more than a rank that was left"
    os.remove(folder / "logs/failure.json")
    gone = make_run(tmp_path / "gone", pid=2**22 + 1)
    assert fresh(gone).overview()["state"]["word"] == "stopped"
    assert state_of(tmp_path / "run2", [], None).word == "silent"
    away = {"host": "elsewhere", "time": time.time(), "pid": 1}
    os.remove(folder / "logs/rank-1.error.json")
    assert state_of(folder, [away], 0.2).word == "running"
    assert state_of(folder, [away], 0.2, now=time.time() + 1000).word == "silent"
    assert state_of(folder, [away], 100.0, now=time.time() + 1000).word == "running", "its steps are long"


def test_the_rank_that_keeps_others_waiting_is_marked(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ranks=4)
    logs = folder / "logs"
    slow = {"kind": "rank", "step": 20, "seconds": 0.2, "waiting": 0.01, "memory_bytes": 1, "time": time.time()}
    write_lines(logs / "rank-2.metrics.jsonl", [slow] * 30, "a")
    (logs / "rank-3.status").write_text("12\tcomputing".ljust(80))
    rows = rank_rows(logs, [0, 1, 2, 3])
    assert [bool(row["amiss"]) for row in rows] == [False, False, True, True]
    assert "1.9 times" in rows[2]["amiss"] and rows[3]["amiss"] == "8 steps behind"
    os.utime(logs / "rank-1.status", (time.time() - 100, time.time() - 100))
    assert "silent for 1" in rank_rows(logs, [0, 1, 2])[1]["amiss"]


def test_checkpoints_logs_hosts_and_settings(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run, told = fresh(folder), fresh(folder).detail()
    (best,) = told["checkpoints"]
    assert best["step"] == 20 and best["best"] and best["value"] == 2.5 and 1000 <= best["bytes"] < 2000
    assert run.log(1, 5) == ["rank 1 says hello"] and run.log(7, 5) is None
    (folder / "logs/rank-0.log").write_bytes(b"\x1b[31mred\x1b[0m\x00 \xff\n" * 900)
    assert len(run.log(0, 10_000) or []) == folders.MOST_LINES and "\x1b" not in (run.log(0, 1) or [""])[0]
    assert last_lines(tmp_path / "none", 3) == []
    assert run.hosts()["0"]["figures"]["cpu_percent"][1] == [50.0]
    other = fresh(make_run(tmp_path / "other", settings={"train": {"steps": 100, "learning_rate": 2e-3}}))
    assert differences([run, other]) == [
        {"name": "train.learning_rate", "values": {run.id: 1e-3, other.id: 2e-3}}
    ]  # fmt: skip


def test_runs_are_found_and_links_are_not_followed(tmp_path: Path) -> None:
    make_run(tmp_path / "root/a")
    make_run(tmp_path / "root/deep/b")
    make_run(tmp_path / "outside")
    make_run(tmp_path / "root/.hidden")
    (tmp_path / "root/link").symlink_to(tmp_path / "outside")
    (tmp_path / "root/circle").symlink_to(tmp_path / "root")
    finder = Finder([tmp_path / "root"])
    assert [run.name for run in finder.runs()] == ["a", "deep/b"]
    assert find_runs(tmp_path / "root/a") == [tmp_path / "root/a"] and find_runs(tmp_path / "nowhere") == []
    make_run(tmp_path / "root/new")
    finder._looked = -math.inf
    assert [run.name for run in finder.runs()] == ["a", "deep/b", "new"]
    assert finder.get("../outside") is None and finder.get(finder.runs()[0].id) is finder.runs()[0]
