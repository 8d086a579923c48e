"""Ctrl-C before training begins: one line, whatever it meets, imports included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cli import start, write_run
from support.tiny import tiny_run, tokenizer_folder

# Python's own start-up file: at the import of a module it leaves a mark and waits there to be interrupted.
SITE = """
import os, pathlib, sys, time
class Point:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["POINT"]:
            sys.meta_path.remove(self)
            pathlib.Path(os.environ["MARK"]).touch()
            time.sleep(120)
sys.meta_path.insert(0, Point())
"""
TOLD = "interrupted before training began; nothing was written\n"


@pytest.mark.parametrize(
    ("point", "words"), [("shardwise.cli.main", "interrupted\n"), ("torch", TOLD), ("transformers", TOLD)]
)  # at first it is not known what the command is
def test_it_is_told_in_one_line(point: str, words: str, tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": path, "POINT": point, "MARK": str(tmp_path / "mark")}
    process = start(write_run(tmp_path, tiny_run(tmp_path, ranks=2, output=str(tmp_path / "out"))), env=env)
    while not (tmp_path / "mark").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == words, (process.returncode, err)
    assert not (tmp_path / "out/model").exists()


@pytest.mark.parametrize("made", ["KeyboardInterrupt", "RecursionError", "RuntimeError", "SystemExit(130)"])
def test_whatever_comes_of_it(made: str) -> None:
    """Met half-way through an import it comes as another error; another command has nothing to do with training."""
    code = f"""
import os, signal
import shardwise.cli.main as c
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
    code = "import shardwise.cli.main as c\ndef fail(**_): raise RuntimeError('its own')\n"
    code += "c.app = fail\nc.main(['recipes'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "its own" in done.stderr
