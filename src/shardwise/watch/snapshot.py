"""The dashboard as one self-contained page: the same page with its data embedded, which works offline."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

from shardwise.core.atomic_file import check_page, write_page
from shardwise.core.errors import UserError
from shardwise.watch.files import page_file
from shardwise.watch.finder import Finder
from shardwise.watch.folder import RunFolder, differences

POINTS = 1500
MOST_LOGS = 16  # ranks whose logs go along
MOST_RUNS = 24  # of a page: each takes some hundred kilobytes
_LINK = re.compile(r'<link rel="stylesheet" href="/static/([^"]+)">')
_SCRIPT = re.compile(r'<script src="/static/([^"]+)"></script>')


def write_snapshot(finder: Finder, path: Path) -> None:
    """Writes the page atomically."""
    runs = finder.runs()
    if not runs:
        where = ", ".join(str(root) for root in finder.roots)
        raise UserError("FOLDER", where, "holds no run", "name a folder with a metrics.jsonl in it or below it")
    if len(runs) > MOST_RUNS:
        raise UserError("FOLDER", len(runs), f"holds more than {MOST_RUNS} runs, too many for one page", "name fewer")
    check_page(path, "run.html")
    page = render_snapshot(runs)
    write_page(page, path)


def render_snapshot(runs: list[RunFolder]) -> str:
    """Returns the full page. Its content security policy allows only these scripts and styles, by hash."""
    page = page_file("index.html")
    scripts = []
    styles = []

    def style(match: re.Match[str]) -> str:
        styles.append(text := page_file(match[1]))
        return f"<style>{text}</style>"

    def script(match: re.Match[str]) -> str:
        scripts.append(text := page_file(match[1]))
        assert "</script" not in text
        return f"<script>{text}</script>"

    page = _SCRIPT.sub(script, _LINK.sub(style, page))
    policy = (
        f"default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src {' '.join(map(_hash, scripts))}; style-src {' '.join(map(_hash, styles))}"
    )
    page = page.replace('<meta charset="utf-8">', _META.format(policy=policy), 1)
    # Nothing inside may end the element; these are the only characters that could.
    data = json.dumps(_answers(runs), ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")
    before, _, after = page.partition("<script>")
    return f'{before}<script type="application/json" id="snapshot">{data}</script>\n<script>{after}'


_META = '<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">'


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _answers(runs: list[RunFolder]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for run in runs:
        run.wait()
        place = f"/api/runs/{run.id}"
        # Where it lay on this machine is nobody else's business.
        answers[place] = run.detail() | {"folder": None}
        answers[f"{place}/series"] = run.series(POINTS)
        answers[f"{place}/hosts"] = run.hosts()
        answers[f"{place}/samples"] = run.samples()
        for rank in run.ranks()[:MOST_LOGS]:
            answers[f"{place}/log/{rank}"] = run.log(rank, 200)
    answers["/api/runs"] = [run.overview() for run in runs]
    return {"time": time.time(), "answers": answers, "differences": differences(runs)}
