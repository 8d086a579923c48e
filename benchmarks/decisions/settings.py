"""Who sets which setting of RUN.yaml: recipes, examples, the documentation's YAML and commands, DeepSpeed's table.

PYTHONPATH=src python benchmarks/decisions/settings.py              # a line per setting that nobody sets
PYTHONPATH=src python benchmarks/decisions/settings.py --all
"""

from __future__ import annotations

import re
import sys
import typing
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from shardwise.config.advanced import DEEPSPEED_ONLY, written
from shardwise.config.schema import Run

ROOT = Path(__file__).parents[2]
DEEPSPEED = ROOT / "src/shardwise/config/deepspeed"


def sections(kind: Any) -> list[type[BaseModel]]:
    """The sections that a setting may be."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [one for part in typing.get_args(kind) for one in sections(part)]


def leaves(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted names; of sections to choose from, all."""
    names: list[str] = []
    for name, field in section.model_fields.items():
        inner = [] if f"{prefix}{name}." in DEEPSPEED_ONLY else sections(field.annotation)
        for one in inner:
            names += leaves(one, f"{prefix}{name}.")
        if not inner:
            names.append(prefix + name)
    return names


def flat(value: Any, prefix: str = "") -> list[str]:
    """Dotted names of what a document sets; lists of sections as their items."""
    if isinstance(value, dict):
        return [name for key, item in value.items() for name in flat(item, f"{prefix}{key}.")]
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return [name for item in value for name in flat(item, prefix)]
    return [prefix.rstrip(".")]


def documents() -> dict[str, list[str]]:
    """YAML texts by where they are from."""
    pages = [page.read_text() for page in [*ROOT.glob("docs/*.md"), ROOT / "README.md"] if page.name != "log.md"]
    return {
        "recipes": [file.read_text() for file in (ROOT / "src/shardwise/recipes").glob("*.yaml")],
        "examples": [file.read_text() for file in ROOT.glob("examples/**/*.yaml")],
        "docs": [block for page in pages for block in re.findall(r"```ya?ml\n(.*?)```", page, re.S)],
    }


def main() -> None:
    """Prints the counts."""
    every = [name for name in leaves(Run) if name not in DEEPSPEED_ONLY]
    names = list(dict.fromkeys(every))
    set_by: dict[str, Counter[str]] = {}
    for where, texts in documents().items():
        counts: Counter[str] = Counter()
        for text in texts:
            try:
                counts.update(set(flat(yaml.safe_load(text) or {})))
            except yaml.YAMLError:
                continue
        set_by[where] = counts
    pages = "\n".join(
        page.read_text() for page in ROOT.glob("docs/*.md") if page.name not in ("log.md", "decisions.md")
    )
    table = "\n".join(file.read_text() for file in DEEPSPEED.glob("*.py"))
    print(f"{len(every)} settings, {len(names)} of different names")
    for path in names:
        name = written(path)
        counts = [set_by[where][name] for where in ("recipes", "examples", "docs")]
        command = len(re.findall(rf"(?<![\w.]){re.escape(name)}=", pages))
        deepspeed = len(re.findall(rf'["\']{re.escape(path)}["\']', table))
        if "--all" in sys.argv or not any((*counts, command)):
            recipes, examples, docs = counts
            print(f"{name:42} recipes {recipes:2} examples {examples:2} docs {docs + command:2} deepspeed {deepspeed}")


if __name__ == "__main__":
    main()
