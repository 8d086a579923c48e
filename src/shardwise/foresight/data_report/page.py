"""The data report and the preview as one HTML page: no script, nothing fetched, readable on a phone and on paper.

Its content comes from data files, so nothing in it is trusted: text is made visible (see core/printable.py),
escaped, and the page's policy forbids it to run or load anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from shardwise.core.errors import UserError
from shardwise.core.printable import one_line, several_lines
from shardwise.data.statistics import DataStatistics, SourceStatistics, coarse, read_fates
from shardwise.foresight.data_report.advice import Notice
from shardwise.foresight.data_report.preview import Sample, TokenBytes, describe, shortened, shown
from shardwise.foresight.data_report.table import SourceTotals, clipped

LISTED = 100  # rows named per fate; the others are in the file
MOST_TOKENS = 1200  # of an example
_BARS = 28


def write_page(
    path: Path,
    title: str,
    statistics: DataStatistics,
    samples: Sequence[Sample],
    tokenizer: Any,
    notices: Sequence[Notice],
    problems: Sequence[UserError],
) -> None:
    """Writes the page atomically."""
    page = render_page(title, statistics, samples, tokenizer, notices, problems)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)


def render_page(
    title: str,
    statistics: DataStatistics,
    samples: Sequence[Sample],
    tokenizer: Any,
    notices: Sequence[Notice],
    problems: Sequence[UserError],
) -> str:
    """Returns the page as HTML."""
    template = f" · template {_text(statistics.template)}" if statistics.template else ""
    return _PAGE.substitute(
        title=_text(title),
        subtitle=f"tokenizer {_text(statistics.tokenizer)}{template} · loss on {_text(statistics.loss_on)}",
        tiles=_tiles(statistics),
        notices=_notices(notices, problems),
        tables=_table("Training data", statistics.train, True) + _table("Evaluation data", statistics.eval, False),
        mixture=_mixture(statistics.train),
        lengths="".join(_lengths(source, statistics.sequence_length) for source in statistics.sources),
        packing=_packing(statistics),
        fates=_fates(statistics.sources),
        samples=_samples(samples, TokenBytes(tokenizer)) if samples else "",
    )


def _text(value: object) -> str:
    return escape(one_line(value))


def _tiles(statistics: DataStatistics) -> str:
    total = SourceTotals(statistics.train)
    tiles = [
        ("Rows", f"{total.rows:,}", f"{len(statistics.train)} source{'s' if len(statistics.train) > 1 else ''}"),
        ("Tokens", f"{total.tokens:,}", f"{total.documents:,} documents"),
        ("Learned", f"{total.learned_share:.1%}", f"{total.supervised:,} tokens"),
        ("Sequences", f"{statistics.packing.sequences:,}", f"of {statistics.sequence_length:,} tokens"),
    ]
    if statistics.steps is not None:
        tiles.append(("Steps", f"{statistics.steps.steps:,}", statistics.steps.words))
    if statistics.packing.on:
        tiles.append(
            ("Full", f"{statistics.packing.efficiency:.1%}", f"{statistics.packing.padding:,} tokens of padding")
        )
    return "".join(
        f'<div class="tile"><span>{name}</span><strong>{value}</strong><small>{note}</small></div>'
        for name, value, note in tiles
    )


def _notices(notices: Sequence[Notice], problems: Sequence[UserError]) -> str:
    items = [f'<li class="error"><b>error</b> {escape(several_lines(error))}</li>' for error in problems]
    for notice in notices:
        name = f"<i>{_text(notice.source)}</i>: " if notice.source else ""
        items.append(f'<li class="warning"><b>warning</b> {name}{escape(several_lines(notice.text))}</li>')
    return f'<ul class="notices">{"".join(items)}</ul>' if items else ""


def _table(title: str, sources: Sequence[SourceStatistics], mixture: bool) -> str:
    if not sources:
        return ""
    mixture = mixture and len(sources) > 1
    any_held_out = any(source.held_out for source in sources)
    heads = ["rows", *(["held out"] if any_held_out else []), "documents", "tokens", "learned"]
    heads += [*(["mixture"] if mixture else []), "left out", "median", "99%", "longest", "tokens/s"]
    body = []
    for source in sources:
        speed = source.tokens_per_second
        cells = [f"{source.rows:,}", *([f"{source.held_out:,}"] if any_held_out else []), f"{source.documents:,}"]
        cells += [f"{source.tokens:,}", f"{source.learned_share:.1%}", *([f"{source.share:.1%}"] if mixture else [])]
        cells += [f"{source.left_out:,}", f"{source.percentile(0.5):,}", f"{source.percentile(0.99):,}"]
        cells += [f"{source.longest or source.percentile(1.0):,}"]
        cells += ["cached" if source.cached else _speed(speed)]
        labelled = [f'<td data-label="{head}">{cell}</td>' for head, cell in zip(heads, cells, strict=True)]
        name = f'<th scope="row"><bdi>{_text(source.name)}</bdi></th>'
        body.append(f"<tr>{name}{''.join(labelled)}</tr>")
    head = "".join(f'<th scope="col">{name}</th>' for name in ["source", *heads])
    about = "".join(
        f"<dt><bdi>{_text(source.name)}</bdi></dt><dd>{_text(source.understood)}"
        f'<span class="path"><bdi>{_text(source.path)}</bdi></span></dd>'
        for source in sources
    )
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    return f'<section class="card"><h2>{title}</h2>{table}<dl>{about}</dl></section>'


def _speed(tokens_per_second: float | None) -> str:
    return f"{tokens_per_second:,.0f}" if tokens_per_second else "–"


def _mixture(sources: Sequence[SourceStatistics]) -> str:
    if len(sources) < 2:
        return ""
    rows = []
    for source in sources:
        passes = f"each row {source.passes:.3g} × in an epoch"
        width = max(0.4, min(100.0, source.share * 100))
        rows.append(
            f'<div class="mix"><span class="name"><bdi>{_text(source.name)}</bdi></span>'
            f'<span class="bar"><i style="width:{width:.2f}%"></i></span>'
            f'<span class="figure">{source.share:.1%}</span><small>{source.mixed_by}, {passes}</small></div>'
        )
    return f'<section class="card"><h2>Mixture, by tokens</h2>{"".join(rows)}</section>'


def _lengths(source: SourceStatistics, limit: int) -> str:
    bars = coarse(source.lengths, _BARS)
    if not bars:
        return ""
    width = 320
    height = 130
    bottom = 108
    step = width / len(bars)
    largest = max(count for *_, count in bars)
    parts = []
    for index, (low, high, count) in enumerate(bars):
        bar_height = count / largest * (bottom - 12)
        bar_height = max(bar_height, 1.5) if count else 0
        kind = "bar over" if low > limit else "bar"
        label = f"{low:,} to {high:,} tokens: {count:,} rows"
        geometry = f'x="{index * step + 1:.1f}" y="{bottom - bar_height:.1f}" width="{max(1, step - 2):.1f}"'
        geometry += f' height="{bar_height:.1f}"'
        parts.append(f'<rect class="{kind}" {geometry}><title>{label}</title></rect>')
    longest = source.longest or source.percentile(1.0)
    limit_bar = next((index for index, (_, high, _) in enumerate(bars) if high > limit), None)
    if limit_bar is not None and bars[0][0] <= limit < longest:
        low, high, _ = bars[limit_bar]
        x = (limit_bar + (limit - low + 1) / (high - low + 1)) * step
        x = min(max(x, 0), width)
        anchor, offset = ("end", -5) if x > width / 2 else ("start", 5)
        parts.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{bottom}"></line>')
        parts.append(f'<text class="tick" x="{x + offset:.1f}" y="12" text-anchor="{anchor}">{limit:,}</text>')
    parts.append(f'<line class="axis" x1="0" x2="{width}" y1="{bottom}" y2="{bottom}"></line>')
    ends = ((0, "start", bars[0][0]), (width / 2, "middle", bars[len(bars) // 2][0]), (width, "end", longest))
    for x, anchor, value in ends if len(bars) > 4 else (ends[0], ends[2]):
        parts.append(f'<text class="tick" x="{x}" y="{height - 8}" text-anchor="{anchor}">{value:,}</text>')
    aria_label = f"{source.name}: from {bars[0][0]:,} to {longest:,} tokens, median {source.percentile(0.5):,}"
    svg = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{_text(aria_label)}">{"".join(parts)}</svg>'
    return f'<figure class="card"><figcaption><bdi>{_text(source.name)}</bdi></figcaption>{svg}</figure>'


def _packing(statistics: DataStatistics) -> str:
    packing = statistics.packing
    if not packing.on:
        return "Off: every document is a sequence of its own, padded to the longest of its batch."
    return (
        f"{packing.sequences:,} sequences of {packing.sequence_length:,} tokens, {packing.efficiency:.1%} full "
        f"({packing.padding:,} tokens of padding); {packing.documents_per_sequence:.1f} documents in each, none seeing "
        f"another, chosen from {packing.window:,} at a time."
    )


def _fates(sources: Iterable[SourceStatistics]) -> str:
    parts = []
    for source in sources:
        if not any(source.fates.values()):
            continue
        rows = read_fates(source.fates_file, LISTED, source.fates) if source.fates_file else {}
        lists = []
        for fate, count in source.fates.items():
            if not count:
                continue
            listed = "".join(
                f"<li><bdi>{_text(where)}</bdi>{' – ' if reason else ''}{escape(clipped(one_line(reason)))}</li>"
                for where, reason in rows.get(fate, [])
            )
            unlisted = count - len(rows.get(fate, []))
            more_note = f'<p class="muted">and {unlisted:,} more</p>' if unlisted > 0 and listed else ""
            share = f"{count / max(1, source.rows):.1%} of the rows"
            head = f"<summary>{_text(fate)}: {count:,} <small>({share})</small></summary>"
            lists.append(f"<details>{head}<ol>{listed}</ol>{more_note}</details>" if listed else
                         f"<p>{_text(fate)}: {count:,} <small>({share})</small></p>")  # fmt: skip
        where = (
            f'<p class="muted">all of them in <bdi>{_text(source.fates_file)}</bdi></p>' if source.fates_file else ""
        )
        parts.append(f"<h3><bdi>{_text(source.name)}</bdi></h3>{''.join(lists)}{where}")
    if not parts:
        return ""
    return f'<section class="card"><h2>Rows that did not go in as they are</h2>{"".join(parts)}</section>'


def _samples(samples: Sequence[Sample], pieces: TokenBytes) -> str:
    parts = []
    names = []
    for sample in samples:
        first = sample.name not in names
        if first:
            names.append(sample.name)
            parts.append(f"<h3><bdi>{_text(sample.name)}</bdi></h3>")
        head = f'<bdi class="where">{_text(sample.where)}</bdi> <small>{_text(describe(sample))}</small>'
        parts.append(f'<article><p class="head">{head}</p><pre>{_tokens(sample, pieces)}</pre></article>')
    legend = (
        '<p class="legend"><span class="l">learned</span> <span class="m">not learned</span> '
        '<span class="s">&lt;special&gt;</span> <span class="l s">&lt;special, learned&gt;</span> '
        '<span class="k">⏎ newline, ⇥ tab, · space at the end of a line</span></p>'
    )
    return f'<section class="card"><h2>What the model sees</h2>{legend}{"".join(parts)}</section>'


def _tokens(sample: Sample, pieces: TokenBytes) -> str:
    parts = []
    for text, span, mark in shown(shortened(pieces, sample, MOST_TOKENS)):
        if span.left_out:
            parts.append(f'</pre><p class="gap">… {_text(text)} …</p><pre>')
            continue
        kinds = ["l" if span.learned else "m", *(["s"] if span.special else [])]
        kinds += ["k"] if mark or span.broken else []
        parts.append(f'<span class="{" ".join(kinds)}">{escape(text)}</span>')
    return "".join(parts)


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --page:#f6f7f9; --card:#fff; --ink:#1b1f24; --muted:#5b6570; --grid:#e3e7ec; --axis:#b6bec7; --bar:#1f6feb;
  --over:#c2410c; --warn:#9a3412; --warnbg:#fff4e5; --bad:#b42318; --badbg:#fdecea; --learned:#d3f2dc; --edge:#1a7f37;
  --special:#8250df; --specialbg:#f1e9fd; --mark:#8593a3 }
@media (prefers-color-scheme: dark) { :root { --page:#0f1216; --card:#181c22; --ink:#e6e9ed; --muted:#9aa4af;
  --grid:#2a3038; --axis:#4a535e; --bar:#6ea8fe; --over:#fb923c; --warn:#fdba74; --warnbg:#2d2113; --bad:#ff9d94;
  --badbg:#331a18; --learned:#143d24; --edge:#4ac26b; --special:#c4a3fb; --specialbg:#2c2340; --mark:#75808c } }
* { box-sizing:border-box }
body { margin:0; background:var(--page); color:var(--ink); font:15px/1.45 system-ui,"Segoe UI",sans-serif;
  overflow-wrap:anywhere }
main { max-width:1040px; margin:0 auto; padding:28px 20px 48px }
h1 { font-size:22px; line-height:1.25; margin:0 }
h2 { font-size:15px; font-weight:600; margin:0 0 8px } h3 { font-size:14px; margin:14px 0 6px }
small, .muted, .subtitle { color:var(--muted) }
.subtitle { margin:4px 0 0 }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(140px,1fr)); gap:12px; margin:20px 0 12px }
.tile, .card { background:var(--card); border:1px solid var(--grid); border-radius:10px }
.tile { padding:10px 14px; display:flex; flex-direction:column; min-width:0 }
.tile span, .tile small { color:var(--muted); font-size:12.5px }
.tile strong { font-size:20px; font-variant-numeric:tabular-nums }
.card { padding:14px 16px; margin:0 0 12px; min-width:0 }
.notices { list-style:none; margin:0 0 12px; padding:0 }
.notices li { padding:9px 14px; margin-bottom:6px; border-radius:8px; border-left:4px solid;
  white-space:pre-line }
.notices b { margin-right:4px } .notices i { font-style:normal; font-weight:600 }
.notices .warning { background:var(--warnbg); border-color:var(--warn) } .warning b { color:var(--warn) }
.notices .error { background:var(--badbg); border-color:var(--bad) } .error b { color:var(--bad) }
.scroll { overflow-x:auto }
table { border-collapse:collapse; font-size:13.5px; font-variant-numeric:tabular-nums; width:100% }
th, td { text-align:right; padding:5px 0 5px 16px; border-bottom:1px solid var(--grid); white-space:nowrap }
th:first-child { text-align:left; padding-left:0; white-space:normal; min-width:8em; max-width:18em }
thead th { color:var(--muted); font-weight:500 } tbody th { font-weight:600 }
dl { margin:10px 0 0; font-size:13.5px; display:grid; grid-template-columns:minmax(0,14em) minmax(0,1fr);
  gap:4px 14px } dt { font-weight:600 } dd { margin:0 }
.path { display:block; color:var(--muted); font-size:12.5px }
.mix { display:grid; grid-template-columns:minmax(0,12em) minmax(60px,1fr) 4em minmax(0,15em); gap:4px 12px;
  align-items:center; font-size:13.5px; margin:5px 0 }
.mix .figure { text-align:right; font-variant-numeric:tabular-nums }
.mix .bar { background:var(--grid); border-radius:4px; height:11px; overflow:hidden }
.mix .bar i { display:block; height:100%; background:var(--bar) }
.lengths { display:grid; grid-template-columns:repeat(auto-fill,minmax(min(100%,320px),1fr)); gap:0 12px }
figcaption { font-size:13.5px; font-weight:600; margin-bottom:4px }
svg { display:block; width:100%; height:auto; max-width:520px }
rect.bar { fill:var(--bar) } rect.over { fill:var(--over) }
.axis { stroke:var(--axis) } .limit { stroke:var(--over); stroke-dasharray:4 3 }
.tick { fill:var(--muted); font-size:11.5px; font-variant-numeric:tabular-nums }
details { margin:4px 0 } summary { cursor:pointer }
ol { font-size:13px; margin:6px 0; padding-left:3em; max-height:22em; overflow:auto }
article { margin:0 0 14px } .head { margin:0 0 4px; font-size:13.5px }
pre { margin:0; padding:10px 12px; background:var(--page); border:1px solid var(--grid); border-radius:8px;
  font:13px/1.6 ui-monospace,"SFMono-Regular",Menlo,Consolas,"DejaVu Sans Mono",monospace;
  white-space:pre-wrap; overflow:hidden }
pre span { unicode-bidi:isolate } /* right-to-left text must not reorder the tokens around it */
pre .m { color:var(--muted) }
.l { background:var(--learned); border-bottom:2px solid var(--edge); color:var(--ink) }
.s { color:var(--special) !important; font-weight:600 } .s:not(.l) { background:var(--specialbg) }
.k { color:var(--mark) !important } .gap { margin:6px 0; color:var(--warn); font-size:13px; text-align:center }
.legend { display:flex; flex-wrap:wrap; gap:4px 14px; font-size:13px; margin:0 0 10px }
.legend .m { color:var(--muted) }
@media (max-width:640px) { main { padding:18px 12px 32px } .mix { grid-template-columns:minmax(0,1fr) 4em }
  .mix .bar, .mix small { grid-column:1 / -1; order:1 }
  dl { grid-template-columns:minmax(0,1fr) } dd { margin-bottom:4px }
  thead { display:none } tbody, tr { display:block } tr { border-bottom:1px solid var(--grid); padding:6px 0 }
  tbody th:first-child { display:block; max-width:none; border:0; padding:2px 0 }
  td { display:flex; justify-content:space-between; border:0; padding:1px 0 }
  td::before { content:attr(data-label); color:var(--muted) } }
@media print { body { background:#fff } .card, .tile { break-inside:avoid } }
</style>
</head>
<body>
<main>
<h1>$title</h1>
<p class="subtitle">$subtitle</p>
<div class="tiles">$tiles</div>
$notices
$tables
$mixture
<section><h2>Rows by length in tokens</h2><div class="lengths">$lengths</div></section>
<section class="card"><h2>Packing</h2><p style="margin:0">$packing</p></section>
$fates
$samples
</main>
</body>
</html>
""")
