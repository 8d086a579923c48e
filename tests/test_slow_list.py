"""tests/slow.txt names tests that exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_every_name_is_a_test() -> None:
    wanted = {line for line in (HERE / "slow.txt").read_text().splitlines() if line and not line.startswith("#")}
    files = sorted({line.partition("::")[0] for line in wanted})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    shown = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=True).stdout
    assert wanted <= set(shown.splitlines())
