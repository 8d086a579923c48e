"""However a run on local ranks ends: one message that says why, the right exit code, and no process left behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support import cli
from support.tiny import tiny_run, tokenizer_folder

from shardwise.launch.local import _explain, _Signals
from shardwise.train.status import Status


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of this file share a tokenizer and, in the end, their outputs."""
    tmp = tmp_path_factory.mktemp("local")
    tokenizer_folder(tmp / "tokenizer")
    return tmp


@pytest.fixture
def start() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """`cli.start`, for runs that do not end by themselves: a test that fails leaves none behind."""
    started: list[subprocess.Popen[str]] = []

    def begin(file: Path) -> subprocess.Popen[str]:
        started.append(cli.start(file))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


Start = Callable[[Path], "subprocess.Popen[str]"]


def long_run(folder: Path, name: str, **changes: Any) -> tuple[Path, Path]:
    """RUN.yaml of a run on two ranks that does not end by itself, and its output folder."""
    run = tiny_run(folder, train__steps=5000, ranks=2, parallel__zero=3, output=str(folder / name),
                   **{"restarts": 0} | changes)  # fmt: skip
    return cli.write_run(folder / f"{name}-run", run), folder / name


def test_a_rank_that_raises_and_the_run_after_it(folder: Path, start: Start) -> None:
    """The disk of rank 1 is full, as far as that rank can tell; then, in the same folder, rank 0 crashes."""
    file, output = long_run(folder, "raises", checkpoint__every=4)
    process = start(file)
    cli.wait_for_step(process, output, 1)
    ranks = cli.rank_processes(process)
    # 64 KiB are enough for its log and its status, not for its half of a checkpoint. Python turns SIGXFSZ into OSError.
    cli.rank_process(process, 1).rlimit(psutil.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    code, out, err = cli.finish(process)
    assert code == 1 and len(ranks) == 2 and cli.all_gone(ranks), err
    log = output / "logs/rank-1.log"
    # It is noticed in the steps after the save, which goes on in the background, and at the latest by the next save.
    assert re.search(r"^error: rank 1 failed at step [4-8] while \w+: a checkpoint could not be written", err, re.M), (
        err
    )
    assert "File too large" in err and f"log: {log}" in err
    assert "→ no checkpoint was written yet: the same command starts afresh" in err
    assert err.count("rank ") == 1 and "Traceback" not in out + err, "one message, and the details in the log"
    assert "Traceback" in log.read_text() and "File too large" in log.read_text()

    (output / "metrics.jsonl").unlink()  # we wait for its steps
    process = start(file)
    cli.wait_for_step(process, output, 5)
    while not (output / "checkpoints/step-00000004").is_dir():
        time.sleep(0.02)
    ranks = cli.rank_processes(process)
    cli.rank_process(process, 0).send_signal(signal.SIGSEGV)
    code, out, err = cli.finish(process)
    assert code == 1 and cli.all_gone(ranks), err
    assert "error: rank 0 failed at step" in err and "killed by SIGSEGV" in err and "rank-0.log" in err
    assert "→ the same command goes on from step-0000000" in err
    assert "File too large" not in err and "rank 1" not in err, "that was the run before"
    assert "Traceback" not in out + err and "Fatal Python error" not in out + err
    assert "Fatal Python error: Segmentation fault" in (output / "logs/rank-0.log").read_text(), "where it crashed"


def test_killing_the_command_leaves_no_rank_behind(folder: Path, start: Start) -> None:
    file, output = long_run(folder, "orphans")
    process = start(file)
    cli.wait_for_step(process, output, 1)
    ranks = cli.rank_processes(process)
    assert len(ranks) == 2
    process.kill()
    assert cli.all_gone(ranks, within=60)
    process.communicate(timeout=60)  # nobody holds its output open


def test_the_second_ctrl_c_ends_at_once(folder: Path, start: Start) -> None:
    """Even where the first cannot be obeyed, because a rank does not react."""
    file, output = long_run(folder, "twice")
    process = start(file)
    cli.wait_for_step(process, output, 1)
    ranks = cli.rank_processes(process)
    cli.rank_process(process, 1).send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None, "it waits for the step to end"
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, out, err = cli.finish(process)
    assert time.monotonic() - began < 60, "the step itself would not end"
    assert code == 130 and cli.all_gone(ranks), err
    assert "this step or the next, and saving; Ctrl-C again ends at once" in err
    assert "ended at once" in err and "the same command starts afresh" in err
    assert "failed" not in err and "SIGKILL" not in err and "Traceback" not in out + err, "it is what the user wanted"


def test_each_signal_is_told_by_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    for number, words in {signal.SIGINT: "Ctrl-C again", signal.SIGTERM: "a second SIGTERM"}.items():
        _Signals()._pass_on(number, None)
        assert capfd.readouterr().err.strip().endswith(f"; {words} ends at once")


def test_ctrl_c_before_training(folder: Path, start: Start) -> None:
    file, output = long_run(folder, "early")
    process = start(file)
    while not (output / "logs/rank-1.status").exists():
        assert process.poll() is None
        time.sleep(0.02)
    ranks = cli.rank_processes(process)
    process.send_signal(signal.SIGINT)
    code, out, err = cli.finish(process)
    assert code == 130 and cli.all_gone(ranks), err
    assert "stopped; no checkpoint was written yet: the same command starts afresh" in err
    assert "failed" not in err and "Traceback" not in out + err


def test_a_rank_that_hangs(folder: Path, start: Start) -> None:
    """The other rank gives up after `timeout`; the message names the one that did not answer, not the one that did."""
    file, output = long_run(folder, "hangs", timeout="5s", restarts=0)
    process = start(file)
    cli.wait_for_step(process, output, 2)
    ranks = cli.rank_processes(process)
    cli.rank_process(process, 1).send_signal(signal.SIGSTOP)
    began = time.monotonic()
    code, out, err = cli.finish(process)
    assert time.monotonic() - began < 120, "without a timeout of its own it would be 600"
    assert code == 1 and cli.all_gone(ranks), err
    assert "error: rank 1 kept the others waiting for 5 s (timeout) at step" in err
    assert json.loads((output / "logs/failure.json").read_text())["reason"].startswith("rank 1 kept the others")
    assert re.search(r"rank 1 \(process \d+ on \S+\) does not answer: stopped; it was last seen at step", err), err
    assert "rank 0 waits in" in err and "kill -CONT" in err and "stacks.txt" in err
    assert "Traceback" not in out + err and "rank 0, step" in (output / "logs/stacks.txt").read_text()


def explanation(tmp: Path, codes: list[int | None], notes: dict[int, tuple[str, str]]) -> Exception:
    """The supervisor's verdict on exit codes and on notes (kind, reason) that were written in that order."""
    for rank in range(len(codes)):
        Status(tmp / f"rank-{rank}.status").set("computing", rank + 10)
    for at, (rank, (kind, reason)) in enumerate(notes.items()):
        note = {"rank": rank, "step": rank + 10, "doing": "saving", "kind": kind, "reason": reason, "time": at}
        (tmp / f"rank-{rank}.error.json").write_text(json.dumps(note))
    job: Any = SimpleNamespace(output=tmp, run=SimpleNamespace(timeout=600.0))
    return _explain(codes, tmp, job)


LOST = ("bug", "RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:4242")
LATE = ("bug", "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete")
ODD, EVEN = ("bug", "ValueError: odd"), ("bug", "ValueError: even")
MISTAKE = ("user", "data = 7: is no path\n  → give one")


@pytest.mark.parametrize(
    ("codes", "notes", "words"),
    [
        ([1, 1, 1], {0: LOST, 1: ODD, 2: LOST}, "rank 1 failed at step 11 while saving: ValueError: odd"),
        ([1, 1], {1: ODD, 0: EVEN}, "rank 1 failed at step 11 while saving: ValueError: odd"),
        ([1, -9, 1], {0: LOST, 2: ODD}, "rank 1 failed at step 11 while computing: it was killed by SIGKILL"),
        ([2, 2], {0: LOST, 1: MISTAKE}, "data = 7: is no path\n  → give one"),
        ([1, None, 1], {0: LATE, 2: LOST}, "rank 1 failed at step 11 while computing: the others waited 600 s"),
        ([1, None], {0: EVEN}, "rank 0 failed at step 10 while saving: ValueError: even"),
        ([0, 3], {}, "rank 1 failed at step 11 while computing: it ended with exit code 3"),
        ([1, 1], {0: LOST, 1: LOST}, "rank 0 failed at step 10 while saving: RuntimeError: [pair.cc:534] Connection"),
    ],
    ids=["not-who-lost-it", "the-first", "killed", "mistake", "silent", "not-silent", "no-note", "all-lost"],
)
def test_which_rank_is_to_blame(
    tmp_path: Path, codes: list[int | None], notes: dict[int, tuple[str, str]], words: str
) -> None:
    assert str(explanation(tmp_path, codes, notes)).startswith(words)
