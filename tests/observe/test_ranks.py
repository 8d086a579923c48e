"""What each rank and host writes of itself: cheap, without waiting for the device, and never the end of a run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support import scenarios
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder
from support.watched import train_record

from shardwise.observe import ranks
from shardwise.observe.ranks import HostFigures, RankFile, host_file, rank_file


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_real_run_on_two_ranks(tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    run_ranks(scenarios.train, 2, tiny_run(tmp_path, train__steps=6, log__every=2, log__breakdown=True))
    for rank in range(2):
        start, *reports, end = lines(rank_file(tmp_path / "out/logs", rank))
        assert (start["rank"], start["size"], start["device"], end["kind"]) == (rank, 2, "cpu", "end")
        assert [r["step"] for r in reports] == [2, 4, 6]
        for one in reports:
            assert 0 <= one["waiting"] <= one["seconds"] < 600 and one["rss_bytes"] > 1 << 20 and one["memory_bytes"]
            assert one["cpu_seconds"] >= 0


def test_what_a_report_says(tmp_path: Path) -> None:
    assert not hasattr(ranks, "torch"), "it cannot ask a device, let alone wait for one"
    own = RankFile(tmp_path, 3, 8, "cpu")
    own.report([])
    # Two steps of 1000 tokens at 5000 a second are 0.2 s each, on whatever device: nothing is asked of it.
    parts = {"whole": 0.2, "forward": 0.05, "gather": 0.03, "reduce": 0.02}
    own.report([train_record(1), train_record(2, breakdown=parts)])
    own.close("left")
    start, report, _ = lines(rank_file(tmp_path, 3))
    assert start["rank"] == 3 and report["seconds"] == 0.2 and report["waiting"] == 0.05 and report["step"] == 2


def test_no_room_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    own = RankFile(tmp_path / "logs", 0, 1, "cpu")
    own.report([train_record(1)])
    own.close("left")
    full = RankFile(tmp_path / "here", 0, 1, "cpu")
    full._lines._file.close()
    full._lines._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    full.report([train_record(1)])
    full.report([train_record(2)])
    assert full._lines._file is None, "not tried again"


def test_it_costs_next_to_nothing(tmp_path: Path) -> None:
    own = RankFile(tmp_path, 0, 1, "cpu")
    began = time.process_time()  # of this process: others do not count
    for step in range(1, 201):
        own.report([train_record(step)])
    assert (time.process_time() - began) / 200 < 0.05, "seconds per report"


def test_the_host(tmp_path: Path) -> None:
    with HostFigures(host_file(tmp_path, 0), tmp_path, seconds=0.05):
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and len(lines(host_file(tmp_path, 0))) < 2:
            time.sleep(0.02)
    told = lines(host_file(tmp_path, 0))[-1]
    assert told["kind"] == "host" and 0 < told["ram_used_bytes"] < told["ram_total_bytes"]
    assert told["disk_free_bytes"] >= 0 and told["cpu_percent"] == pytest.approx(50, abs=50.1)
