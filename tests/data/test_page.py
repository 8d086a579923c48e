"""The page shows the bill to anyone, and nothing that a data file holds can act in it or burst it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bills import HOSTILE, bill, source
from support.chat import chat_tokenizer
from support.tiny import CHATML

from shardwise.core.errors import UserError
from shardwise.data.statistics import DataStatistics
from shardwise.foresight.data_report.advice import Notice, problems, warnings
from shardwise.foresight.data_report.page import render_page, write_page
from shardwise.foresight.data_report.preview import Sample

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
VOID = {"meta"}
ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "p", "div", "span", "strong", "small",
    "section", "ul", "ol", "li", "b", "i", "bdi", "table", "thead", "tbody", "tr", "th", "td", "dl", "dt", "dd",
    "figure", "figcaption", "svg", "rect", "line", "text", "details", "summary", "article", "pre",
}  # fmt: skip


class Page(HTMLParser):
    """Collects elements and text, and insists that elements nest and are of those that the page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED and not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text[self.open[-1]] = self.text.get(self.open[-1], "") + data

    @property
    def words(self) -> str:
        return " ".join(text for tag, text in self.text.items() if tag != "style")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer(CHATML)


def example(tokenizer: Any, text: str, learned_from: int = 3, **names: str) -> Sample:
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False))
    values = {"name": "chat.jsonl", "where": "/data/chat.jsonl:7"} | names
    return Sample(tokens=tokens, learned=np.arange(len(tokens)) >= learned_from, **values)


def hostile(tmp_path: Path, tokenizer: Any) -> str:
    """Everything that can come from a data file or a name is hostile."""
    fates = tmp_path / "fates.jsonl"
    rows = [{"fate": fate, "where": HOSTILE, "reason": HOSTILE} for fate in ["dropped"] * 150 + [HOSTILE]]
    fates.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bad = {"name": HOSTILE, "path": HOSTILE, "reason": HOSTILE, "format": HOSTILE, "fates_file": str(fates)}
    shown = bill(
        source(share=0.5, fates={"dropped": 150, HOSTILE: 1}, **bad),
        source("short", share=0.5, longest=90_000),
        evaluation=(source(**bad),),
        tokenizer=HOSTILE,
        template=HOSTILE,
    )
    text = HOSTILE.replace("\ud83d", "") + "<|im_end|>\nشكرا جزيلا <|im_end|> end"
    samples = [example(tokenizer, text * times, name=HOSTILE, where=HOSTILE, note=HOSTILE) for times in (1, 9)]
    notices = [*warnings(shown), Notice("x", HOSTILE, HOSTILE)]
    return render_page(HOSTILE, shown, samples, tokenizer, notices, [UserError(HOSTILE, HOSTILE, HOSTILE, HOSTILE)])


def simple(tokenizer: Any, shown: DataStatistics | None = None, *samples: Sample) -> Page:
    shown = shown or bill()
    return Page(render_page("Data of run.yaml", shown, samples, tokenizer, warnings(shown), problems(shown)))


def test_the_page_says_what_the_bill_says(tokenizer: Any) -> None:
    shown = bill(
        source("a", share=0.75), source("b", share=0.25, weight=2.0, passes=1.5), evaluation=(source("e", rows=12),)
    )
    page = simple(tokenizer, shown)
    cells = [attrs.get("data-label") for tag, attrs in page.tags if tag == "td"]
    assert {"rows", "tokens", "learned", "mixture", "left out", "median", "longest", "tokens/s"} <= set(cells)
    for words in ("600,000", "40.0%", "75.0%", "weight 2, each row 1.5 × in an epoch", "only 12 rows to evaluate on"):
        assert words in page.words
    assert sum(tag == "svg" for tag, _ in page.tags) == 3 and not any(tag == "details" for tag, _ in page.tags)


def test_masks_and_special_tokens_have_classes_of_their_own(tokenizer: Any) -> None:
    one = example(tokenizer, "<|im_start|>user\nHi there \n<|im_end|>", 4)
    text = render_page("t", bill(), [one], tokenizer, [], [])
    body = re.search(r"<pre>(.*?)</pre>", text, re.S)
    assert body is not None
    found = re.findall(r'<span class="([a-z ]+)">(.*?)</span>', body[1], re.S)
    assert found[0] == ("m s", "&lt;|im_start|&gt;") and found[-1] == ("l s", "&lt;|im_end|&gt;")
    assert ("l k", "·⏎") in found, "the space before the newline, and the newline"
    assert html.unescape("".join(t for kinds, t in found if "k" not in kinds.split())).count("Hi there") == 1


def test_fates_are_listed_and_the_file_named(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "fates.jsonl"
    rows = [{"fate": "dropped", "where": f"/d/a.jsonl:{n}", "reason": "too long"} for n in range(250)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = simple(tokenizer, bill(source(fates={"dropped": 250, "truncated": 3}, fates_file=str(file))))
    assert sum(tag == "li" for tag, _ in page.tags) == 100 + 1, "rows, and a warning"
    for words in ("dropped: 250", "and 150 more", "truncated: 3", str(file), "/d/a.jsonl:99"):
        assert words in page.words
    assert "/d/a.jsonl:100" not in page.words


def test_long_examples_are_cut_in_their_middle(tokenizer: Any) -> None:
    page = simple(tokenizer, None, example(tokenizer, "x" * 5000))
    assert "3,800 tokens left out, 3,800 of them learned" in page.words


def test_hostile_content_is_text(tmp_path: Path, tokenizer: Any) -> None:
    text = hostile(tmp_path, tokenizer)
    page = Page(text)
    assert "<script>parent.hacked = 1</script>" in page.words and "[bold]x[/bold]" in page.words
    assert not {c for c in text if ord(c) < 32 and c != "\n"} and not {"\x9b", "\u202e", "\u2066"} & set(text)
    assert "default-src 'none'" in text
    assert not re.search(r"https?://", text), "nothing is fetched"
    write_page(tmp_path / "new" / "p.html", HOSTILE, bill(), [], tokenizer, [], [])
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["p.html"]


def test_empty_sources(tokenizer: Any) -> None:
    page = simple(tokenizer, bill(source(rows=0)))
    assert "holds no rows" in page.words


HARNESS = """<!doctype html><meta charset="utf-8"><body><script>
const widths = [360, 390, 768, 1280], results = [];
let left = widths.length;
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px; height:2000px; border:0`;
  frame.onload = () => {
    const page = frame.contentDocument;
    for (const one of page.querySelectorAll("details")) one.open = true;
    const cut = [...page.querySelectorAll("main *")].filter(e => !e.closest(".scroll") && !e.closest("svg") &&
      e.getBoundingClientRect().right > width + 1).map(e => e.tagName + "." + e.className);
    results.push({width, scroll: page.documentElement.scrollWidth, cut, title: page.title,
      pre: page.querySelector("pre") ? page.querySelector("pre").textContent : ""});
    if (--left === 0) setTimeout(() => {
      document.body.innerHTML = "<pre id=out></pre>";
      document.getElementById("out").textContent = JSON.stringify({results, hacked: window.hacked ?? null});
    }, 200);
  };
  frame.srcdoc = PAGE;
  document.body.append(frame);
}
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser(tmp_path: Path, tokenizer: Any) -> None:
    """Hostile content neither runs nor bursts the page, on a phone or a desk; even without the page's own policy."""
    page = re.sub(r"<meta http-equiv[^>]*>", "", hostile(tmp_path, tokenizer))
    assert "Content-Security-Policy" not in page
    file = tmp_path / "harness.html"
    file.write_text(HARNESS.replace("PAGE", json.dumps(page).replace("<", "\\u003c")))
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    outcome = json.loads(html.unescape(found[1]))
    assert outcome["hacked"] is None
    for one in outcome["results"]:
        assert one["scroll"] <= one["width"] and one["cut"] == [], one
        assert "<script>parent.hacked = 1</script>" in one["title"] and "[bold]x[/bold]" in one["pre"]
