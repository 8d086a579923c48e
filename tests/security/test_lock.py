"""The lock names the versions of constraints.txt, each with its hashes, and no place to fetch them from."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pinned(text: str) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)", text, re.M)
    return {re.sub(r"[-_.]+", "-", name.lower()): version for name, version in found}


def test_lock_and_constraints_agree() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert pinned(text) == pinned((ROOT / "constraints.txt").read_text()), "make lock"
    for block in re.split(r"\n(?=[A-Za-z0-9])", text.partition("\n")[2]):
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), block[:80]
    assert "://" not in text and "--index" not in text
