"""The dashboard in a terminal: it fits whatever size there is, and leaves cleanly on Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from support.watched import make_run

from shardwise.watch.finder import Finder
from shardwise.watch.terminal import NONE, _Screen, show


@pytest.mark.parametrize(("width", "height"), [(60, 20), (80, 24), (100, 30), (200, 60)])
def test_it_fits(tmp_path: Path, width: int, height: int) -> None:
    run = make_run(tmp_path / "a", ranks=6)
    make_run(tmp_path / "b", pid=2**22 + 1)
    (run / "logs/rank-0.log").write_text(
        "a line that is much longer than any terminal " * 9 + "\n[bold]no markup[/bold]\n"
    )
    (run / "logs/rank-4.status").write_text("3\tcomputing".ljust(80))
    out = io.StringIO()
    Console(file=out, width=width, height=height, force_terminal=True, color_system=None).print(
        _Screen(Finder([tmp_path]))
    )
    lines = out.getvalue().rstrip("\n").split("\n")
    assert len(lines) <= height and max(map(cell_len, lines)) <= width, out.getvalue()
    assert lines[0].startswith("a  running") and "17 steps behind" in out.getvalue()
    assert "[bold]no markup[/bold]" in out.getvalue() or height < 24


def test_a_failure_and_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(Finder([tmp_path]))
    assert NONE in capsys.readouterr().out
    run = make_run(tmp_path / "a")
    note = {"rank": 1, "step": 7, "doing": "computing", "reason": "out of memory", "time": time.time() + 1}
    (run / "logs/rank-1.error.json").write_text(json.dumps(note))
    show(Finder([tmp_path / "a"]))
    assert "rank 1 at step 7 while computing: out of memory" in capsys.readouterr().out


@pytest.mark.timeout(120)
def test_ctrl_c_gives_the_terminal_back(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "shardwise", "watch", str(tmp_path), "--terminal"]
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"})
    os.close(theirs)
    seen, asked, deadline = b"", False, time.monotonic() + 90
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    seen += os.read(ours, 1 << 16)
                except OSError:  # the other end has left
                    break
            if not asked and b"evaluation loss" in seen:
                process.send_signal(signal.SIGINT)
                asked = True
        assert process.wait(timeout=60) == 0, seen
    finally:
        process.kill()
        os.close(ours)
    assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1 and b"Traceback" not in seen
