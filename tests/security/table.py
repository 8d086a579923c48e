"""Tries everything and writes the table into docs/security.md: `PYTHONPATH=src:tests python -m security.table`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from security.attempts import ATTEMPTS
from security.ground import GotThrough, ground, short

PAGE = Path(__file__).parents[2] / "docs/security.md"
BEGIN, END = "<!-- attempts: begin -->", "<!-- attempts: end -->"


def cell(text: str) -> str:
    """Text for a Markdown table, in which nothing is markup."""
    return re.sub(r"([\\`*_{}\[\]<>|$~!#])", r"\\\1", text)


def rows() -> list[str]:
    """A line for each attempt; raises GotThrough if one of them worked."""
    found = []
    with ground() as place:
        place.for_the_page = True
        for one in ATTEMPTS:
            words = short(place.run(one), place.root)
            found.append(f"| {one.area} | {cell(one.tried)} | {cell(words)} |")
    return found


def main() -> int:
    """Writes the table; an attempt that worked ends it, and leaves the page as it was."""
    try:
        table = rows()
    except GotThrough as error:
        print(f"got through: {error}", file=sys.stderr)
        return 1
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    head = "| where | tried | answer |\n| --- | --- | --- |"
    PAGE.write_text(f"{before}{BEGIN}\n{head}\n" + "\n".join(table) + f"\n{END}{after}")
    print(f"{len(table)} attempts, all refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
