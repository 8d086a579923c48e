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

from shardwise.cli import _interrupted

WORDS = "interrupted before training began; nothing was written\n"


@pytest.mark.parametrize("seconds", [0.7, 1.7])
def test_it_is_told_in_one_line(seconds: float, tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    process = start(write_run(tmp_path, tiny_run(tmp_path, ranks=2, output=str(tmp_path / "out"))))
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == WORDS, err
    assert not (tmp_path / "out/model").exists()


def test_another_command_has_nothing_to_do_with_training() -> None:
    code = "import shardwise.cli as c\ndef stop(**_): raise KeyboardInterrupt\nc.app = stop\nc.main(['recipes'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130 and done.stderr == "interrupted\n", done.stderr


def test_what_python_makes_of_it() -> None:
    """Met within an import of a class, it comes as another error."""
    wrapped = RuntimeError("Error calling __set_name__")
    wrapped.__cause__ = KeyboardInterrupt()
    assert _interrupted(wrapped) and not _interrupted(RuntimeError("another")) and not _interrupted(SystemExit(2))
