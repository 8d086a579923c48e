"""Scripts in what runs, models and data are called and say; and escape codes for terminals."""

from __future__ import annotations

import contextlib
import io
import json
import re
from typing import Any

from security.ground import EVIL, SECRET, GotThrough, Ground, attempt

PAGES, TERMINAL = "pages", "terminal"


def _harmless(page: str, where: str) -> str:
    """The page shows the text, and has no element of it."""
    if EVIL in page or "<script>alert" in page or "onerror=" in page:
        raise GotThrough(f"the script is in {where}")
    if "alert(1)" not in page:
        raise GotThrough(f"{where} does not show the text at all, so nothing was tried")
    found = re.search(r".{0,14}alert\(1\)", page)
    return f"shown as text: {found[0] if found else ''}"


@attempt(PAGES, "a script as a run's name, in its log and in its samples: `watch --html`")
def _(ground: Ground) -> str:
    from shardwise.watch.finder import Finder
    from shardwise.watch.snapshot import render_snapshot

    page = render_snapshot(Finder([ground.runs]).runs())
    if SECRET in page:
        raise GotThrough("the linked file is in the page")
    return _harmless(page, "the page")


@attempt(PAGES, "the same in the page that `data --html` writes, as a source's name")
def _(ground: Ground) -> str:
    from support.bills import bill, source
    from transformers import AutoTokenizer

    from shardwise.foresight.data_report.page import render_page

    tokenizer = AutoTokenizer.from_pretrained(ground.tokenizer, trust_remote_code=False)
    return _harmless(render_page(EVIL, bill(source(EVIL)), [], tokenizer, [], []), "the page")


@attempt(PAGES, "the same in a page of curves, as its title")
def _(ground: Ground) -> str:
    from support.watched import eval_record, train_record

    from shardwise.observe.curve import write_curve_html

    file = ground.folder / "curve.html"
    write_curve_html(file, [train_record(1), train_record(2), eval_record(2)], EVIL, EVIL)
    return _harmless(file.read_text(), "the page")


@attempt(PAGES, "the same in the page that `plan --html` writes, as the model's name")
def _(ground: Ground) -> str:
    from support.tiny import LLAMA

    from shardwise.core.hardware.specs import cluster_of
    from shardwise.foresight.plan.command import _resolved
    from shardwise.foresight.plan.report import render_report
    from shardwise.foresight.plan.search import Plan

    folder = ground.folder / "<script>alert(1)<" / "script>"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["LlamaForCausalLM"]}))
    values: dict[str, Any] = {"model": {"name": str(folder)}, "data": {"train": "data.jsonl"}}
    cluster = cluster_of("h100", 1, 1)
    run, source = _resolved(values, None, cluster)
    return _harmless(render_report(Plan(source, run, cluster, [], [], 0), 1e9), "the report")


@attempt(PAGES, "the dashboard's scripts make HTML of what they are given")
def _(ground: Ground) -> str:
    from shardwise.watch.files import STATIC, page_file

    ours = "".join(page_file(name) for name in STATIC if name.endswith(".js") and "uplot" not in name.lower())
    doors = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc")
    if found := [door for door in doors if door in ours]:
        raise GotThrough(f"they use {found}")
    return f"none of {', '.join(doors)} is in them"


@attempt(PAGES, "a run's name that would be a line of Prometheus figures")
def _(ground: Ground) -> str:
    from shardwise.watch.finder import Finder
    from shardwise.watch.prometheus import exposition

    lines = exposition(Finder([ground.runs]).runs()).splitlines()
    if any(line.startswith("shardwise_forged") for line in lines):
        raise GotThrough("the line is there")
    return next(line for line in lines if "shardwise_forged" in line)


@attempt(TERMINAL, "escape codes in a log that `watch --terminal` shows")
def _(ground: Ground) -> str:
    from shardwise.watch.finder import Finder
    from shardwise.watch.terminal import show

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        show(Finder([ground.runs / EVIL.replace("/", "")]))
    text = said.getvalue()
    if "\x1b" in text or "\x07" in text:
        raise GotThrough("the codes are there")
    assert "alert(1)" in text, "the log is shown"
    return next(line.strip() for line in text.splitlines() if "title" in line)


@attempt(TERMINAL, "escape codes in rows that `data` shows")
def _(ground: Ground) -> str:
    from support.bills import HOSTILE

    from shardwise.core.printable import one_line

    shown = one_line(HOSTILE)
    if any(letter in shown for letter in "\x1b\x07\x00\x9b\u202e\r"):
        raise GotThrough("the codes are there")
    return f"shown as {shown[100:150]}"
