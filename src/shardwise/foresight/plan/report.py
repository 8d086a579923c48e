"""A plan as one page to pass round and to show: nothing is fetched, charts are drawn here, sliders compute in the page.

[Note: rough] What the header and the first bars say is from rehearsals. What is said of strategies that were not
rehearsed (techniques one by one, the table, the sliders) is from rough scores (quick.py), and the page says so. The
page has those formulas in JavaScript (report.html) over the coefficients of `coefficients`;
tests/foresight/plan/test_report.py compares the two.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from shardwise.config.axes import HEADS, first_of
from shardwise.config.units import human
from shardwise.core.atomic_file import check_page, write_page
from shardwise.foresight.plan.charts import GIB, BarRow, area, bars, gib, seconds, text
from shardwise.foresight.plan.estimate import Estimate
from shardwise.foresight.plan.explain import guidelines, long_time, money, per_second, reasons, told
from shardwise.foresight.plan.ladder import Rung, ladder, variants
from shardwise.foresight.plan.moments import Moments, attention_shares, moments_of
from shardwise.foresight.plan.quick import SLOWER, Quick, Strategy
from shardwise.foresight.plan.search import NEARLY, Option, Plan
from shardwise.foresight.plan.time import BLEND, CONTENTION
from shardwise.foresight.plan.timeline import lanes, pipeline
from shardwise.foresight.rehearse.ledger import WORKSPACE
from shardwise.optim.build import state_bytes


class _Page(Template):
    delimiter = "@@"  # the script and the style sheet have uses of their own for $


def write_report(plan: Plan, tokens: float | None, path: Path) -> None:
    """Writes the page; whoever opens it sees the old one or the new one whole."""
    check_page(path, "plan.html")
    page = render_report(plan, tokens)
    write_page(page, path)


def render_report(plan: Plan, tokens: float | None) -> str:
    """The whole page as text."""
    option = plan.best or max(plan.too_large, key=lambda one: one.estimate.spare, default=None)
    strategy = option.strategy if option is not None else plan.rough[0] if plan.rough else None
    moments = moments_of(plan.source, option.estimate) if option is not None else "no strategy was rehearsed"
    seen = moments if isinstance(moments, Moments) else None
    data: dict[str, Any] | None = None
    if plan.quick is not None and strategy is not None:
        data = coefficients(plan, plan.quick, strategy, attention_shares(plan.quick, strategy, seen))
    template = files("shardwise.foresight.plan").joinpath("report.html").read_text(encoding="utf-8")
    return _Page(template).substitute(
        title=text(f"{plan.source.label} on {plan.cluster.label}"),
        header=_header(plan, tokens),
        reasons=_reasons(plan),
        strategies=_strategies(plan),
        ladder=_ladder(plan, strategy),
        table=_table(plan, strategy),
        moments=_moments(plan, option, moments),
        timeline=_timeline(plan, option),
        hidden="" if data else "hidden",
        data=json.dumps(data).replace("<", "\\u003c").replace("\u2028", "\\u2028"),
        foot=f"{plan.considered:,} strategies looked at, {len(plan.options) + len(plan.too_large)} of them rehearsed.",
    )


def coefficients(plan: Plan, quick: Quick, strategy: Strategy, attention: tuple[float, float]) -> dict[str, Any]:
    """All that the page's own formulas need; see [Note: rough]."""
    of, cluster, run = quick.of, plan.cluster, plan.run
    best = plan.best.estimate if plan.best is not None else None
    text_config = plan.source.config.get_text_config(decoder=True)
    return {
        **{name: value for name, value in vars(of).items() if name != "sizes"},
        "sizes": asdict(of.sizes),
        "attention": {"forward": attention[0], "backward": attention[1]},
        "frozen": quick.frozen, "float8": quick.float8,
        "working": 2.0 if run.precision != "fp32" else 4.0,
        "states": state_bytes(run.train),
        "workspace": WORKSPACE, "slower": SLOWER, "eager": quick.eager, "contention": CONTENTION, "blend": BLEND,
        "cluster": {
            "nodes": cluster.nodes, "per_node": cluster.per_node, "memory": cluster.device.memory,
            "launch": cluster.device.launch, "host_link": cluster.device.host_link, "disk_read": cluster.disk_read,
            "disk_write": cluster.disk_write,
            "within": asdict(cluster.within), "across": asdict(cluster.across),
        },
        "batch": run.train.batch_size, "length": run.data.sequence_length,
        "longest": int(getattr(text_config, "max_position_embeddings", 0) or 0),
        "heads": first_of(text_config, HEADS),
        "strategy": asdict(strategy), "nearly": NEARLY,
        "rehearsed": None if best is None else {"memory": best.peak, "seconds": best.time.seconds},
    }  # fmt: skip


def _header(plan: Plan, tokens: float | None) -> str:
    run, cluster = plan.run, plan.cluster
    sizes = plan.quick.of.sizes if plan.quick is not None else None
    count = f"{(sizes.block * sizes.layers + sizes.rest) / 1e9:.2f}B parameters · " if sizes else ""
    links = f" · {per_second(cluster.within.bandwidth)} within a node" if cluster.per_node > 1 else ""
    links += f", {per_second(cluster.across.bandwidth)} between nodes, per device" if cluster.nodes > 1 else ""
    method = "full fine-tuning" if run.method.type == "full" else run.method.type
    about = (
        f"{count}{method} · {run.train.batch_size} sequences of {run.data.sequence_length:,} tokens a step · "
        f"{run.computes_in} · {run.train.optimizer}{links}"
    )
    head = f"<h1><bdi>{text(plan.source.label)}</bdi> <span>on {text(plan.cluster.label)}</span></h1>"
    head += f'<p class="about">{text(about)}</p>'
    if plan.best is None:
        return f'{head}<p class="choice none">nothing fits</p>'
    return f'{head}<p class="choice">{text(told(plan.best.strategy))}</p>{_tiles(plan, plan.best.estimate, tokens)}'


def _tiles(plan: Plan, found: Estimate, tokens: float | None) -> str:
    cluster = plan.cluster
    tiles = [
        ("a step", seconds(found.time.seconds), f"{found.tokens:,} tokens"),
        ("tokens/s per device", f"{found.rate:,.0f}", f"{found.rate * cluster.ranks:,.0f} in all"),
        ("MFU", f"{found.mfu:.0%}", "of the peak arithmetic"),
        ("memory", human(found.peak), f"of {human(cluster.device.memory)}, {found.peak / cluster.device.memory:.0%}"),
    ]
    if tokens:
        hours, cost = found.hours(tokens), found.cost(tokens)
        tiles.append((f"{_amount(tokens)} tokens", long_time(hours), f"{money(hours * cluster.ranks)} device hours"))
        if cost is not None:
            tiles.append(("cost", f"{money(cost)} USD", f"at {cluster.price:g} per device and hour"))
    inner = "".join(f"<div class=tile><span>{text(a)}</span><strong>{text(b)}</strong><small>{text(c)}</small></div>"
                    for a, b, c in tiles)  # fmt: skip
    return f'<div class="tiles">{inner}</div>'


def _amount(tokens: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if tokens >= size:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:,.0f}"


def _reasons(plan: Plan) -> str:
    why = "".join(f"<li>{text(line)}</li>" for line in reasons(plan))
    rules = "".join(
        f'<li class="{"agree" if agrees else "differ"}"><b>{"agrees" if agrees else "the numbers say otherwise"}</b> '
        f"{text(rule)}: <i>{text(here)}</i></li>"
        for rule, here, agrees in guidelines(plan)
    )
    rules = f'<section class="card"><h2>Rules of thumb</h2><ul class="rules">{rules}</ul></section>' if rules else ""
    return f'<div class="pair"><section class="card"><h2>Why</h2><ul>{why}</ul></section>{rules}</div>'


def _strategies(plan: Plan) -> str:
    options = [*plan.options, *plan.too_large]
    if not options:
        return '<p class="muted">No strategy was rehearsed.</p>'
    rows = [_row(plan, option) for option in options]
    note = '<p class="muted">From rehearsals of the real code. The red line is the memory of a device.</p>'
    return bars(rows, plan.cluster.device.memory) + note


def _row(plan: Plan, option: Option) -> BarRow:
    s, found = option.strategy, option.estimate
    note = f"micro-batch {s.micro}, recompute {'full' if s.recompute else 'none'}"
    if found.fits:
        note += f" · {found.rate:,.0f} tokens/s/device, MFU {found.mfu:.0%}"
    elif found.spare >= 0:
        note += " · more than the host's memory"
    return BarRow(s.name(), found.memory, found.time.parts(), found.fits, note, "chosen" if option is plan.best else "")


def _ladder(plan: Plan, strategy: Strategy | None) -> str:
    if plan.quick is None or strategy is None:
        return '<p class="muted">There is nothing to compare.</p>'
    quick, limit = plan.quick, plan.cluster.device.memory
    rows: list[BarRow] = []
    before: tuple[float, float] | None = None
    for rung in ladder(plan, strategy):
        parts, spent = quick.parts(rung.strategy), quick.seconds(rung.strategy)
        total = sum(parts.values())
        changes = ("", "")
        if before is not None:
            changes = _signed(total - before[0]), _percent(spent / before[1] - 1)
        mark = ("chosen" if plan.best else "nearest") if rung.strategy == strategy else ""
        fits = _fits(plan, rung.strategy, total)
        rows.append(BarRow(rung.name, parts, {"step": spent}, fits is not False, "", mark, *changes))
        before = total, spent
    note = "Rough scores: formulas over one rehearsed block, to rank techniques and to show what each is for."
    best = plan.best
    if best is not None and rows:
        found = best.estimate
        note += f" The chosen strategy as rehearsed: {human(found.peak)} and {seconds(found.time.seconds)} a step."
    return bars(rows, limit, rough=True) + f'<p class="muted">{text(note)}</p>'


def _signed(size: float) -> str:
    return f"{'+' if size > 0 else '−'}{gib(abs(size))} GiB"


def _table(plan: Plan, strategy: Strategy | None) -> str:
    if plan.quick is None or strategy is None:
        return '<p class="muted">There is nothing to compare.</p>'
    quick = plan.quick
    size, spent = quick.memory(strategy), quick.seconds(strategy)
    first = (
        f'<tr class="chosen"><th scope="row">{text(told(strategy))}</th><td>{gib(size)}</td><td></td>'
        f"<td>{seconds(spent)}</td><td></td><td>{_verdict(plan, strategy, size)}</td></tr>"
    )
    lines = [first, *(_line(plan, quick, rung, size, spent) for rung in variants(plan, strategy))]
    heads = ("instead", "≈ GiB", "GiB saved", "≈ step", "slower", "")
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
        '<p class="muted">Rough scores; each line changes one thing of the first. Saved and slower below 0 mean '
        "more memory and a faster step.</p>"
    )


def _line(plan: Plan, quick: Quick, rung: Rung, size: float, spent: float) -> str:
    name = f'<th scope="row">{text(rung.name)}</th>'
    if rung.problem is not None:
        return f'<tr class="cannot">{name}<td colspan="5">not here: {text(rung.problem)}</td></tr>'
    other, time = quick.memory(rung.strategy), quick.seconds(rung.strategy)
    saved, slower = (size - other) / GIB, time / spent - 1
    return (
        f'<tr>{name}<td>{gib(other)}</td><td class="{_better(saved, 0.05)}">{_figure(saved)}</td>'
        f'<td>{seconds(time)}</td><td class="{_better(-slower, 0.005)}">{_percent(slower)}</td>'
        f"<td>{_verdict(plan, rung.strategy, other)}</td></tr>"
    )


def _better(value: float, least: float) -> str:
    return "good" if value > least else "worse" if value < -least else ""


def _figure(value: float) -> str:
    if abs(value) < 0.05:
        return "0"
    return (f"{value:+,.0f}" if abs(value) >= 100 else f"{value:+.1f}").replace("-", "−")


def _percent(share: float) -> str:
    return "0%" if abs(share) < 0.005 else f"{share:+.0%}".replace("-", "−")


def _fits(plan: Plan, s: Strategy, size: float) -> bool | None:
    """By the rough score; None where only a rehearsal can tell, and by the rehearsal where there was one."""
    known = {option.strategy: option.estimate.fits for option in (*plan.options, *plan.too_large)}
    if s in known:
        return known[s]
    limit = plan.cluster.device.memory
    return True if size <= limit else None if size <= NEARLY * limit else False


def _verdict(plan: Plan, s: Strategy, size: float) -> str:
    fits = _fits(plan, s, size)
    return "fits" if fits else "just about" if fits is None else '<em class="bad">does not fit</em>'


def _moments(plan: Plan, option: Option | None, moments: Moments | str) -> str:
    if option is None or isinstance(moments, str):
        return f'<p class="muted">There is no picture: {text(moments)}</p>'
    found = option.estimate
    layers = plan.quick.of.sizes.layers if plan.quick is not None else moments.layers
    few = f"{moments.layers} of {layers} layers" if moments.layers < layers else f"all {layers} layers"
    batches = f"{moments.micro_batches} of {found.micro_batches} micro-batches"
    words = f"One device, {told(option.strategy)}: rehearsed with {few} and {batches}"
    words += ", without the pipeline" if option.strategy.pipeline > 1 else ""
    tail = f" With all layers the peak is {human(found.peak)}." if moments.layers < layers else ""
    picture = area(moments.curve, moments.phases, plan.cluster.device.memory, "memory over a step")
    return f'{picture}<p class="muted">{text(words)}.{tail}</p>'


def _timeline(plan: Plan, option: Option | None) -> str:
    if option is None:
        return '<p class="muted">No strategy was rehearsed.</p>'
    found = option.estimate
    layers = plan.quick.of.sizes.layers if plan.quick is not None else 1
    note = (
        f"{told(option.strategy)}. Lengths are the estimate's; where in a pass exchange and waiting fall is drawn, "
        "not computed."
    )
    note += " More micro-batches than 32 are drawn as 32." if found.micro_batches > 32 else ""
    shown = f'{lanes(found, layers)}<p class="muted">{text(note)}</p>'
    if option.strategy.pipeline > 1:
        svg, words = pipeline(found)
        shown += f'<h3>The stages</h3>{svg}<p class="muted">{text(words)}</p>'
    return shown
