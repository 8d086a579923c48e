"""The lock has the versions of constraints.txt and all that they need, with hashes, and no place to fetch them from."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

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


def test_nothing_that_is_needed_is_missing() -> None:
    """`pip install --require-hashes` refuses what has no hash, and with --no-deps nobody would notice until it runs."""
    held = pinned((ROOT / "constraints.txt").read_text())
    # Of the build of torch that one chooses; and what the package of the embedded model names and we do not use.
    left_out = re.compile(r"nvidia-|cuda-|triton$|llm$|llama-cpp-python$")
    missing = {}
    for name in held:
        try:
            needed = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # of another platform
        for one in map(Requirement, needed):
            wanted = re.sub(r"[-_.]+", "-", one.name.lower())
            applies = one.marker is None or one.marker.evaluate({"extra": ""})
            if applies and wanted not in held and not left_out.match(wanted):
                missing[wanted] = name
    assert not missing, "add to constraints.txt, then make lock"
