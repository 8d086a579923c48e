"""Labelled texts that every Debian machine has: what a package is for → its section.

    python debian_sections.py FOLDER [--rows 300]

Writes train.jsonl and eval.jsonl with rows {"text": …, "label": …}, the sections equally often. Packages of one source
(a game and its data) go to the same side, and only one of them is taken.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
from collections import defaultdict
from pathlib import Path

SECTIONS = ("admin", "fonts", "games", "graphics", "mail", "math", "net", "science", "sound", "text", "video", "web")


def packages() -> dict[str, list[tuple[str, str]]]:
    """(source, description) by section."""
    listing = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for entry in listing.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in entry.splitlines() if ": " in line and line[0] != " ")
        section, text = fields.get("Section", "").split("/")[-1], fields.get("Description", "")
        source = fields.get("Source", fields.get("Package", "")).split()[:1]
        if section in SECTIONS and source and len(text.split()) >= 3 and "transitional" not in text:
            found[section].setdefault(source[0], text)
    return {section: sorted(found[section].items()) for section in SECTIONS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=300, help="training rows per section, at most")
    arguments = parser.parse_args()
    rows: dict[str, list[dict[str, str]]] = {"train": [], "eval": []}
    for section, entries in packages().items():
        entries.sort(key=lambda entry: hashlib.sha256(entry[0].encode()).digest())
        held = len(entries) // 6
        sides = {"eval": entries[:held][:50], "train": entries[held:][: arguments.rows]}
        for side, chosen in sides.items():
            rows[side] += [{"text": text, "label": section} for _, text in chosen]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for side, lines in rows.items():
        (arguments.folder / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        print(f"{side}: {len(lines)} rows")


if __name__ == "__main__":
    main()
