"""Slow ranks: who is named, after how long, and that a busy machine alone names nobody."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import cli, faults, paces
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder

from shardwise.observe.pace import FEWEST, IN_A_ROW, SLOWER, Slow, WaitSampler, describe_slow_rank
from shardwise.observe.ranks import rank_file
from shardwise.watch.ranks import rank_rows


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_slow_rank_is_named_once(ranks: int) -> None:
    slow, busy = Slow(), [0.4] * ranks
    busy[1] = 0.6
    heard = [slow.hear(0.65, busy) for _ in range(2 * IN_A_ROW)]
    assert [len(found) for found in heard] == [0] * (IN_A_ROW - 1) + [1] + [0] * IN_A_ROW
    assert heard[IN_A_ROW - 1] == [(1, 0.6, 0.4)]


def test_what_is_slow_now_and_then_is_not() -> None:
    slow = Slow()
    for number in range(30):
        busy = [0.4, 0.4, 0.4, 0.4]
        busy[number // (IN_A_ROW - 1) % 4] = 0.8  # in turn, as a busy machine would have it
        assert slow.hear(0.9, busy) == []
    for _ in range(IN_A_ROW):
        assert slow.hear(0.9, [0.001, 0.004, 0.001]) == [], "a few milliseconds are noise"
        assert slow.hear(0.9, [0.1, 0.15, 0.1]) == [], "of a step of 0.9 s it costs 0.05"


@pytest.mark.parametrize("ranks", [2, 8])
def test_noise_names_nobody(ranks: int) -> None:
    """A quarter up or down, independently, in 200 runs of 50 comparisons."""
    draw, alarms = random.Random(0), 0
    for _ in range(200):
        slow = Slow()
        for _ in range(50):
            alarms += len(slow.hear(0.5, [0.4 * draw.lognormvariate(0.0, 0.1) for _ in range(ranks)]))
    assert alarms <= 2


def test_looks_tell_waiting_from_working() -> None:
    """In this thread: a nap is work, a wait for what another makes is none, and outside of a step nobody looks."""
    looks, future = WaitSampler(), torch.futures.Future[int]()
    looks.start()
    looks.inside = True
    while looks._looked < FEWEST:
        time.sleep(0.05)
    looks.inside = False
    worked = looks.share()
    time.sleep(0.3)
    assert looks.share() is None, "nothing was seen"

    def until_seen() -> None:
        while looks._looked < FEWEST:
            time.sleep(0.01)
        future.set_result(1)

    threading.Thread(target=until_seen).start()
    looks.inside = True
    future.wait()
    looks.inside = False
    waited = looks.share()
    looks.stop()
    assert worked is not None and worked < 0.2 and waited is not None and waited > 0.8


def test_a_frame_between_two_lines_is_work() -> None:
    """Python has no line for it; a look that fails would end all of them."""
    frame: Any = SimpleNamespace(f_code=SimpleNamespace(co_filename="a.py"), f_lineno=None)
    assert WaitSampler()._waits(frame) is False


def run_of(folder: Path, name: str, fault: str, steps: int, until: str = "") -> tuple[Path, str]:
    """Trains to the end, or stops once metrics.jsonl has the words; the output folder, and what was said."""
    tokenizer_folder(folder / "tokenizer")
    run = tiny_run(folder, train__steps=steps, ranks=2, parallel__zero=2, output=str(folder / name), log__every=5)
    env = faults.environment(folder / f"{name}-site", fault, 1, 1) | {"SHARDWISE_PROGRESS": "plain"}
    process, metrics = cli.start(cli.write_run(folder / f"{name}-run", run), env=env), folder / name / "metrics.jsonl"
    while until and process.poll() is None and not (metrics.exists() and until in metrics.read_text()):
        time.sleep(0.1)
    if until:
        process.send_signal(signal.SIGTERM)
    code, out, err = cli.finish(process)
    assert code == (128 + signal.SIGTERM if until else 0), err
    return folder / name, " ".join(out.split())  # as a terminal's width breaks lines anywhere


def test_a_rank_that_naps_in_every_step(tmp_path: Path) -> None:
    output, out = run_of(tmp_path, "slow", "slow", 100_000, until='"slow"')
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    (found,) = [record for record in records if record["kind"] == "slow"]
    assert found["rank"] == 1 and found["busy_seconds"] > SLOWER * found["others_seconds"]
    assert out.count("is slow: it works") == 1 and describe_slow_rank(found) in out
    last = json.loads(rank_file(output / "logs", 0).read_text().splitlines()[-2])
    assert last["kind"] == "rank" and last["waiting"] > 0.05, "without log.breakdown"
    rows = rank_rows(output / "logs", [0, 1])
    assert rows[1]["amiss"].startswith("slow: busy") and not rows[0]["amiss"].startswith("slow")


@pytest.mark.slow
def test_an_even_run_on_a_busy_machine(tmp_path: Path) -> None:
    """Twice as many hungry processes as cores beside it."""
    hungry = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 2))]
    try:
        output, out = run_of(tmp_path, "even", "even", 150)
    finally:
        for process in hungry:
            process.kill()
            process.wait()
    assert "is slow" not in out and '"slow"' not in (output / "metrics.jsonl").read_text()


@pytest.mark.parametrize("kind", ["sampled", "every step"])
def test_by_a_timer_as_on_gpus(kind: str) -> None:
    """The late rank is waited for where the norm is added up; all ranks hear the same."""
    assert run_ranks(paces.slow_ranks, 3, kind, 1) == [[1]] * 3
    assert run_ranks(paces.slow_ranks, 3, kind, None) == [[]] * 3
