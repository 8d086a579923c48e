"""Ctrl-C before training begins: one line, whatever it meets, imports included."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cli import start, write_run
from support.tiny import tiny_run, tokenizer_folder

WORDS = ("interrupted before training began; nothing was written\n", "interrupted\n")  # the first second knows no more


@pytest.mark.parametrize("seconds", [0.7, 1.7])
def test_it_is_told_in_one_line(seconds: float, tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    process = start(write_run(tmp_path, tiny_run(tmp_path, ranks=2, output=str(tmp_path / "out"))))
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err in WORDS, (process.returncode, err)
    assert not (tmp_path / "out/model").exists()


@pytest.mark.parametrize("made", ["KeyboardInterrupt", "RecursionError", "RuntimeError", "SystemExit(130)"])
def test_whatever_comes_of_it(made: str) -> None:
    """Met half-way through an import it comes as another error; another command has nothing to do with training."""
    code = f"""
import os, signal
import shardwise.cli as c
def stop(**_):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise {made} from None
c.app = stop
c.main(['recipes'])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130 and done.stderr == "interrupted\n", done.stderr


def test_a_failure_of_another_kind_is_itself() -> None:
    code = "import shardwise.cli as c\ndef fail(**_): raise RuntimeError('its own')\nc.app = fail\nc.main(['recipes'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "its own" in done.stderr
