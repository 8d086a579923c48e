"""The plan as a self-contained HTML page: nothing is fetched, charts are drawn here, sliders compute in the page.

[Note: rough] The header and the first bars come from rehearsals. Figures of strategies that were not rehearsed
(techniques one by one, the table, the sliders) come from rough scores (quick.py), and the page says so. The page has
those formulas in JavaScript (report.html) over the coefficients of `coefficients`;
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
from shardwise.foresight.plan.explain import describe, guidelines, long_time, money, per_second, reasons
from shardwise.foresight.plan.quick import SLOWER, Quick, Strategy
from shardwise.foresight.plan.search import NEARLY, Option, Plan
from shardwise.foresight.plan.step_memory import StepMemory, attention_shares, step_memory_of
from shardwise.foresight.plan.technique_steps import TechniqueStep, technique_steps, variants
from shardwise.foresight.plan.time import BLEND, CONTENTION
from shardwise.foresight.plan.timeline import lanes, pipeline
from shardwise.foresight.rehearse.ledger import WORKSPACE
from shardwise.optim.build import state_bytes


class _Page(Template):
    delimiter = "@@"  # the script and the style sheet have uses of their own for $


def write_report(plan: Plan, tokens: float | None, path: Path) -> None:
    """Writes the page atomically."""
    check_page(path, "plan.html")
    page = render_report(plan, tokens)
    write_page(page, path)


def render_report(plan: Plan, tokens: float | None) -> str:
    """Returns the page as HTML."""
    option = plan.best or max(plan.too_large, key=lambda candidate: candidate.estimate.spare, default=None)
    strategy = plan.rough[0] if plan.rough else None
    if option is not None:
        strategy = option.strategy
    moments = step_memory_of(plan.source, option.estimate) if option is not None else "no strategy was rehearsed"
    rehearsed = moments if isinstance(moments, StepMemory) else None
    data: dict[str, Any] | None = None
    if plan.quick is not None and strategy is not None:
        data = coefficients(plan, plan.quick, strategy, attention_shares(plan.quick, strategy, rehearsed))
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
    """Returns everything that the page's own formulas need; see [Note: rough]."""
    profile = quick.of
    cluster = plan.cluster
    run = plan.run
    best = plan.best.estimate if plan.best is not None else None
    text_config = plan.source.config.get_text_config(decoder=True)
    return {
        **{name: value for name, value in vars(profile).items() if name != "sizes"},
        "sizes": asdict(profile.sizes),
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
    run = plan.run
    cluster = plan.cluster
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
    return f'{head}<p class="choice">{text(describe(plan.best.strategy))}</p>{_tiles(plan, plan.best.estimate, tokens)}'


def _tiles(plan: Plan, estimate: Estimate, tokens: float | None) -> str:
    cluster = plan.cluster
    tiles = [
        ("a step", seconds(estimate.time.seconds), f"{estimate.tokens:,} tokens"),
        ("tokens/s per device", f"{estimate.rate:,.0f}", f"{estimate.rate * cluster.ranks:,.0f} in all"),
        ("MFU", f"{estimate.mfu:.0%}", "of the peak arithmetic"),
        (
            "memory",
            human(estimate.peak),
            f"of {human(cluster.device.memory)}, {estimate.peak / cluster.device.memory:.0%}",
        ),
    ]
    if tokens:
        hours = estimate.hours(tokens)
        cost = estimate.cost(tokens)
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
    reason_items = "".join(f"<li>{text(line)}</li>" for line in reasons(plan))
    rules = "".join(
        f'<li class="{"agree" if agrees else "differ"}"><b>{"agrees" if agrees else "the numbers say otherwise"}</b> '
        f"{text(rule)}: <i>{text(observed)}</i></li>"
        for rule, observed, agrees in guidelines(plan)
    )
    rules = f'<section class="card"><h2>Rules of thumb</h2><ul class="rules">{rules}</ul></section>' if rules else ""
    return f'<div class="pair"><section class="card"><h2>Why</h2><ul>{reason_items}</ul></section>{rules}</div>'


def _strategies(plan: Plan) -> str:
    options = [*plan.options, *plan.too_large]
    if not options:
        return '<p class="muted">No strategy was rehearsed.</p>'
    rows = [_row(plan, option) for option in options]
    note = '<p class="muted">From rehearsals of the real code. The red line is the memory of a device.</p>'
    return bars(rows, plan.cluster.device.memory) + note


def _row(plan: Plan, option: Option) -> BarRow:
    strategy = option.strategy
    estimate = option.estimate
    note = f"micro-batch {strategy.micro}, recompute {'full' if strategy.recompute else 'none'}"
    if estimate.fits:
        note += f" · {estimate.rate:,.0f} tokens/s/device, MFU {estimate.mfu:.0%}"
    elif estimate.spare >= 0:
        note += " · more than the host's memory"
    return BarRow(
        strategy.name(),
        estimate.memory,
        estimate.time.parts(),
        estimate.fits,
        note,
        "chosen" if option is plan.best else "",
    )


def _ladder(plan: Plan, strategy: Strategy | None) -> str:
    if plan.quick is None or strategy is None:
        return '<p class="muted">There is nothing to compare.</p>'
    quick = plan.quick
    limit = plan.cluster.device.memory
    rows: list[BarRow] = []
    before: tuple[float, float] | None = None
    for step in technique_steps(plan, strategy):
        parts = quick.parts(step.strategy)
        step_seconds = quick.seconds(step.strategy)
        total = sum(parts.values())
        changes = ("", "")
        if before is not None:
            changes = _signed(total - before[0]), _percent(step_seconds / before[1] - 1)
        mark = ""
        if step.strategy == strategy:
            mark = "chosen" if plan.best else "nearest"
        fits = _fits(plan, step.strategy, total)
        rows.append(BarRow(step.name, parts, {"step": step_seconds}, fits is not False, "", mark, *changes))
        before = total, step_seconds
    note = "Rough scores: formulas over one rehearsed block, to rank techniques and to show what each is for."
    best = plan.best
    if best is not None and rows:
        estimate = best.estimate
        note += (
            f" The chosen strategy as rehearsed: {human(estimate.peak)} and {seconds(estimate.time.seconds)} a step."
        )
    return bars(rows, limit, approximate=True) + f'<p class="muted">{text(note)}</p>'


def _signed(size: float) -> str:
    return f"{'+' if size > 0 else '−'}{gib(abs(size))} GiB"


def _table(plan: Plan, strategy: Strategy | None) -> str:
    if plan.quick is None or strategy is None:
        return '<p class="muted">There is nothing to compare.</p>'
    quick = plan.quick
    size = quick.memory(strategy)
    step_seconds = quick.seconds(strategy)
    first = (
        f'<tr class="chosen"><th scope="row">{text(describe(strategy))}</th><td>{gib(size)}</td><td></td>'
        f"<td>{seconds(step_seconds)}</td><td></td><td>{_verdict(plan, strategy, size)}</td></tr>"
    )
    lines = [first, *(_line(plan, quick, step, size, step_seconds) for step in variants(plan, strategy))]
    heads = ("instead", "≈ GiB", "GiB saved", "≈ step", "slower", "")
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
        '<p class="muted">Rough scores; each line changes one thing of the first. Saved and slower below 0 mean '
        "more memory and a faster step.</p>"
    )


def _line(plan: Plan, quick: Quick, step: TechniqueStep, chosen_bytes: float, chosen_seconds: float) -> str:
    name = f'<th scope="row">{text(step.name)}</th>'
    if step.problem is not None:
        return f'<tr class="cannot">{name}<td colspan="5">not here: {text(step.problem)}</td></tr>'
    memory = quick.memory(step.strategy)
    time = quick.seconds(step.strategy)
    saved = (chosen_bytes - memory) / GIB
    slower = time / chosen_seconds - 1
    return (
        f'<tr>{name}<td>{gib(memory)}</td><td class="{_better(saved, 0.05)}">{_figure(saved)}</td>'
        f'<td>{seconds(time)}</td><td class="{_better(-slower, 0.005)}">{_percent(slower)}</td>'
        f"<td>{_verdict(plan, step.strategy, memory)}</td></tr>"
    )


def _better(value: float, threshold: float) -> str:
    if value > threshold:
        return "good"
    return "worse" if value < -threshold else ""


def _figure(value: float) -> str:
    if abs(value) < 0.05:
        return "0"
    return (f"{value:+,.0f}" if abs(value) >= 100 else f"{value:+.1f}").replace("-", "−")


def _percent(share: float) -> str:
    return "0%" if abs(share) < 0.005 else f"{share:+.0%}".replace("-", "−")


def _fits(plan: Plan, strategy: Strategy, size: float) -> bool | None:
    """By the rough score, or the rehearsal where there was one; None where only a rehearsal can decide."""
    rehearsed = {option.strategy: option.estimate.fits for option in (*plan.options, *plan.too_large)}
    if strategy in rehearsed:
        return rehearsed[strategy]
    limit = plan.cluster.device.memory
    if size <= limit:
        return True
    return None if size <= NEARLY * limit else False


def _verdict(plan: Plan, strategy: Strategy, size: float) -> str:
    fits = _fits(plan, strategy, size)
    if fits is None:
        return "just about"
    return "fits" if fits else '<em class="bad">does not fit</em>'


def _moments(plan: Plan, option: Option | None, moments: StepMemory | str) -> str:
    if option is None or isinstance(moments, str):
        return f'<p class="muted">There is no picture: {text(moments)}</p>'
    estimate = option.estimate
    layers = plan.quick.of.sizes.layers if plan.quick is not None else moments.layers
    layer_note = f"{moments.layers} of {layers} layers" if moments.layers < layers else f"all {layers} layers"
    batches = f"{moments.micro_batches} of {estimate.micro_batches} micro-batches"
    caption = f"One device, {describe(option.strategy)}: rehearsed with {layer_note} and {batches}"
    caption += ", without the pipeline" if option.strategy.pipeline > 1 else ""
    peak_note = f" With all layers the peak is {human(estimate.peak)}." if moments.layers < layers else ""
    picture = area(moments.curve, moments.phases, plan.cluster.device.memory, "memory over a step")
    return f'{picture}<p class="muted">{text(caption)}.{peak_note}</p>'


def _timeline(plan: Plan, option: Option | None) -> str:
    if option is None:
        return '<p class="muted">No strategy was rehearsed.</p>'
    estimate = option.estimate
    layers = plan.quick.of.sizes.layers if plan.quick is not None else 1
    note = (
        f"{describe(option.strategy)}. Lengths are the estimate's; where in a pass exchange and waiting fall is drawn, "
        "not computed."
    )
    note += " More micro-batches than 32 are drawn as 32." if estimate.micro_batches > 32 else ""
    html = f'{lanes(estimate, layers)}<p class="muted">{text(note)}</p>'
    if option.strategy.pipeline > 1:
        svg, caption = pipeline(estimate)
        html += f'<h3>The stages</h3>{svg}<p class="muted">{text(caption)}</p>'
    return html
