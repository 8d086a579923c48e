"""The page itself: as one file to pass on, and in a real Chromium where there is one."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.watched import make_run, train_record, write_lines

from shardwise.core.errors import UserError
from shardwise.watch.command import beside
from shardwise.watch.finder import Finder
from shardwise.watch.snapshot import render_snapshot, write_snapshot

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
EVIL = "<img src=x onerror=document.title=1>"


def dom(url: str, folder: Path, width: int = 1400) -> str:
    """What the page has become after some seconds of its own time."""
    words = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom",
        f"--user-data-dir={folder}", "--virtual-time-budget=6000", "--allow-file-access-from-files", url,
    ]  # fmt: skip
    return subprocess.run(words, capture_output=True, text=True, timeout=90, check=True).stdout


def test_one_page_holds_all_and_lets_nothing_else_in(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs/one")
    (run / "logs/rank-0.log").write_text("</script><script>alert(1)</script>")
    make_run(tmp_path / "runs/two", settings={"train": {"steps": 100, "learning_rate": 5.0}})
    page = render_snapshot(Finder([tmp_path / "runs"]).runs())
    found = re.search(r'<script type="application/json" id="snapshot">(.*?)</script>', page, re.S)
    assert found is not None
    data = json.loads(found[1])
    assert len(data["answers"]["/api/runs"]) == 2 and data["differences"][0]["name"] == "train.learning_rate"
    (log,) = [v for k, v in data["answers"].items() if k.endswith("/log/0") and "alert" in json.dumps(v)]
    assert log == ["</script><script>alert(1)</script>"]
    assert str(tmp_path) not in page, "where it lay is nobody's business"
    assert "/static/" not in page and not re.search(r'(?:src|href)="(?!data:,|#)', page), "nothing is fetched"
    policy = re.search(r'Security-Policy" content="([^"]*)"', page)
    assert policy is not None and "unsafe" not in policy[1] and "connect-src" not in policy[1]
    for kind in ("script", "style"):
        for text in re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.S):
            assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy[1]


def test_where_it_cannot_be_written(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    finder = Finder([tmp_path / "run"])
    for target in (tmp_path, tmp_path / "run/job.json/x.html"):
        with pytest.raises(UserError, match="--html"):
            write_snapshot(finder, target)


@needs_chromium
@pytest.mark.timeout(200)
def test_chromium_draws_the_page_and_runs_no_names(tmp_path: Path) -> None:
    run = make_run(tmp_path / EVIL, ranks=3)
    (run / "logs/rank-0.log").write_text(EVIL)
    write_lines(run / "samples.jsonl", [{"step": 5, "prompt": EVIL, "text": "and so on"}])
    write_lines(run / "metrics.jsonl", [train_record(21, losses={EVIL: 1.0})], "a")
    (run / "prediction.json").write_text(json.dumps(
        {"memory": {"parameters": 5 << 20, "optimizer": 9 << 20}, "foreseen_bytes": 14 << 20, "limit": 1 << 30}
    ))  # fmt: skip
    said: list[str] = []
    with beside(tmp_path, said.append):
        shown = dom(said[0].split()[-1], tmp_path / "profile")
    assert 'data-drawn="' in shown and "<title>&lt;img" in shown, "drawn, and its name is text"
    assert "<img" not in shown and "&lt;img src=x onerror" in shown
    for words in ("running", "Loss by source", "Ranks", "foreseen by category", "optimizer 9 MiB", "Checkpoints",
                  "best: loss 2.5", "Samples", "and so on", "CPU of the host"):  # fmt: skip
        assert words in shown, words
    assert shown.count('class="uplot') >= 6, "one for each figure there is"


@needs_chromium
@pytest.mark.timeout(200)
def test_chromium_opens_the_page_from_a_file(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/one")
    write_snapshot(Finder([tmp_path / "runs"]), tmp_path / "page.html")
    shown = dom((tmp_path / "page.html").as_uri(), tmp_path / "profile", width=500)
    assert 'data-drawn="' in shown and "as of " in shown and "rank 0 says hello" in shown
