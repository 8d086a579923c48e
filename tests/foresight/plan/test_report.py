"""The report of a plan: it holds the plan's figures, fetches nothing, trusts no text, and computes as Python does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import asdict, replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.tiny import LLAMA

from shardwise.config.schema import Fp8
from shardwise.config.units import human
from shardwise.core.errors import UserError
from shardwise.core.hardware.specs import cluster_of
from shardwise.foresight.plan.charts import seconds, ticks
from shardwise.foresight.plan.command import _resolved
from shardwise.foresight.plan.explain import describe, long_time, money, reasons
from shardwise.foresight.plan.quick import Quick, Strategy
from shardwise.foresight.plan.report import render_report, write_report
from shardwise.foresight.plan.search import Plan, search
from shardwise.foresight.plan.strategies import enumerate_strategies
from shardwise.foresight.plan.technique_steps import technique_steps, variants
from shardwise.foresight.plan.timeline import passes
from shardwise.parallel.pipeline.schedule import Schedule

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NODE = shutil.which("node")
NASTY = '</script><img src=x onerror="alert(1)">@@data & \u202e'


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A tiny model on one node of eight, with one strategy or two rehearsed."""
    folder = tmp_path_factory.mktemp("tiny")
    config = LLAMA | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps(config))
    values: dict[str, Any] = {"model": {"name": str(folder)}, "data": {"train": "data.jsonl"}}
    cluster = cluster_of("h100", 1, 8)
    run, source = _resolved(values, None, cluster)
    return search(source, run, cluster, budget=0.0)


@pytest.fixture(scope="module")
def page(plan: Plan) -> str:
    return render_report(plan, 1e9)


def test_the_page_holds_the_plan(plan: Plan, page: str) -> None:
    assert plan.best is not None
    found = plan.best.estimate
    words = unescape(page)
    for expected in (
        describe(plan.best.strategy), seconds(found.time.seconds), f"{found.rate:,.0f}", f"{found.mfu:.0%}",
        human(found.peak), human(plan.cluster.device.memory), long_time(found.hours(1e9)),
        f"{money(found.cost(1e9) or 0.0)} USD", *reasons(plan), "4 of 8 layers", "Rough scores",
    ):  # fmt: skip
        assert expected in words, expected
    for option in (*plan.options, *plan.too_large):
        assert option.strategy.name() in words
    assert "@@" not in page, "something was left out of the template"
    assert page.count("<svg") == 2, "memory over a step, and the step"


def test_the_page_fetches_nothing(page: str) -> None:
    assert not re.search(r"https?://|//[a-z]|\bsrc=|@import|url\(|<link", page)
    assert "default-src 'none'" in page


def test_no_text_is_trusted(plan: Plan) -> None:
    page = render_report(replace(plan, source=replace(plan.source, label=NASTY)), None)
    assert "<img" not in page
    assert "\u202e" not in page
    assert page.count("</script>") == 2
    assert json.loads(page.split('id="data">')[1].split("</script>")[0])["batch"] == plan.run.train.batch_size


def test_gathers_in_fp8_move_less(plan: Plan) -> None:
    """By a byte for each parameter of a block, where data alone is divided."""
    assert plan.quick is not None
    of, sizes = plan.quick.of, plan.quick.of.sizes
    moved = {}
    for gather in ("auto", "bf16"):
        run = plan.run.model_copy(update={"fp8": Fp8(recipe="tensorwise", gather=gather)})
        quick = Quick(of, run, plan.cluster)
        moved[gather] = [quick.gathered(s) for s in (Strategy(3), Strategy(3, context=2))]
    assert moved["bf16"][0] - moved["auto"][0] == sizes.layers * (sizes.block - sizes.experts) > 0
    assert moved["bf16"][1] == moved["auto"][1]


def test_nothing_that_fits_is_told(plan: Plan) -> None:
    small = replace(plan.cluster, device=replace(plan.cluster.device, memory=1 << 20))
    options = [replace(one, estimate=replace(one.estimate, cluster=small)) for one in plan.options]
    assert plan.quick is not None
    none = replace(plan, cluster=small, options=[], too_large=options, quick=Quick(plan.quick.of, plan.run, small))
    page = render_report(none, 1e9)
    assert "nothing fits" in page
    assert "does not fit" in page
    bare = render_report(replace(none, too_large=[], rough=[]), None)
    assert "No strategy was rehearsed" in bare
    assert 'id="whatif" hidden' in bare


def test_a_page_is_written_whole(plan: Plan, tmp_path: Path) -> None:
    write_report(plan, None, tmp_path / "new" / "plan.html")
    assert [one.name for one in (tmp_path / "new").iterdir()] == ["plan.html"]
    with pytest.raises(UserError, match="is a folder"):
        write_report(plan, None, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_report(plan, None, tmp_path / "file" / "plan.html")


def test_techniques_one_by_one(plan: Plan) -> None:
    chosen = Strategy(3, micro=2, recompute=True, tensor=2)
    steps = technique_steps(plan, chosen)
    assert steps[0].strategy == Strategy(0)
    assert steps[-1].strategy == chosen
    assert [step.strategy.zero for step in steps] == [0, 1, 2, 3, 3, 3, 3]
    problems = {step.name: step.problem for step in variants(plan, replace(chosen, micro=4))}
    assert problems["ZeRO-1"] is None
    assert problems["micro-batch 8"] is None
    batch = replace(
        plan, run=plan.run.model_copy(update={"train": plan.run.train.model_copy(update={"batch_size": 12})})
    )
    batch = replace(batch, quick=Quick(plan.quick.of, batch.run, plan.cluster))  # type: ignore[union-attr]
    assert "cannot be divided among 8" in str({r.name: r.problem for r in variants(batch, chosen)}["without tensor"])
    assert all(step.strategy.tensor == 2 for step in technique_steps(batch, chosen)), (
        "12 sequences do not go to 8 ranks"
    )


@pytest.mark.parametrize(
    ("stages", "count", "chunks"), [(4, 8, 1), (4, 8, 2), (2, 4, 2), (8, 8, 1), (4, 6, 2), (1, 3, 1)]
)
def test_stages_are_drawn_as_they_run(stages: int, count: int, chunks: int) -> None:
    """Every pass once, none beside another of its stage; idle as the formula says."""
    boxes = passes(Schedule("interleaved" if chunks > 1 else "1f1b", chunks), stages, count, 1.0, 2.0)
    for stage in range(stages):
        mine = sorted((box.begin, box.end) for box in boxes if box.lane == stage)
        assert sum(end - begin for begin, end in mine) == pytest.approx(3.0 * count)
        assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(mine))
    if count % stages == 0:
        assert max(box.end for box in boxes) == pytest.approx(3.0 * count + 3.0 * (stages - 1) / chunks)


def test_ticks_are_round() -> None:
    assert [value / 2**30 for value in ticks(19 * 2**30)] == [0, 5, 10, 15]
    assert 3 <= len(ticks(0.003 * 2**30)) <= 6


@pytest.mark.skipif(not (CHROMIUM or NODE), reason="neither chromium nor node to run the page in")
@pytest.mark.parametrize("recipe", ["none", "tensorwise"])
def test_the_page_computes_as_python_does(recipe: Any, plan: Plan, tmp_path: Path) -> None:
    """Rough scores of many strategies, on other clusters and for other sizes, within a millionth."""
    assert plan.quick is not None
    of = plan.quick.of
    sizes = replace(of.sizes, experts=of.sizes.block * 0.6)  # as if it had experts, for their exchange
    run = plan.run.model_copy(update={"fp8": Fp8(recipe=recipe)})
    quick = Quick(replace(of, sizes=sizes), run, plan.cluster)
    assert quick.float8 is (recipe == "tensorwise")
    source = tmp_path / "plan.html"
    write_report(replace(plan, quick=quick), None, source)
    shares = json.loads(source.read_text().split('id="data">')[1].split("</script>")[0])["attention"]
    asked = _asked(plan)
    found = _in_chromium(source, asked, tmp_path / "profile") if CHROMIUM else _in_node(source, asked)
    assert len(found) == len(asked) > 100
    for one, got in zip(asked, found, strict=True):
        there = _scaled(quick, shares, one["nodes"], one["batch"], one["length"])
        strategy = Strategy(**one["strategy"])
        assert got["memory"] == pytest.approx(there.memory(strategy), rel=1e-6), one
        assert got["seconds"] == pytest.approx(there.seconds(strategy), rel=1e-6), one


def _in_chromium(source: Path, asked: list[dict[str, Any]], profile: Path) -> list[dict[str, float]]:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
               "--dump-dom", f"{source.as_uri()}#check={quote(json.dumps(asked))}"]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "as chosen" in shown, "the sliders are there"
    found: list[dict[str, float]] = json.loads(unescape(shown.split('id="checked" hidden="">')[1].split("</pre>")[0]))
    return found


def _in_node(source: Path, asked: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The page's own script, all but what draws it."""
    page = source.read_text()
    data, script = page.split('id="data">')[1].split("</script>")[0], page.split("<script>")[1].split("</script>")[0]
    assert NODE is not None and script.count("if (Q) build();") == 1
    around = f"""const parts = {{ data: {{ textContent: {json.dumps(data)} }}, checked: {{}} }};
        const document = {{ getElementById: name => parts[name] }};
        const location = {{ hash: "#check=" + encodeURIComponent({json.dumps(json.dumps(asked))}) }};
        {script.replace('"use strict";', "").replace("if (Q) build();", "")}
        console.log(parts.checked.textContent);"""
    describe = subprocess.run([NODE, "-"], input=around, capture_output=True, text=True, timeout=120, check=True)
    found: list[dict[str, float]] = json.loads(describe.stdout)
    return found


def _asked(plan: Plan) -> list[dict[str, Any]]:
    """Strategies of every kind, each with a cluster and sizes that it can be on."""
    asked = []
    for nodes, batch, length in ((1, 64, 512), (2, 64, 16384), (4, 128, 32768)):
        train = plan.run.train.model_copy(update={"batch_size": batch})
        data = plan.run.data.model_copy(update={"sequence_length": length})
        run = plan.run.model_copy(update={"train": train, "data": data})
        cluster = replace(plan.cluster, nodes=nodes)
        for offload in (False, True):
            several = list(enumerate_strategies(plan.source.config, run, cluster, offload))
            for strategy in several[:: max(1, len(several) // 24)]:
                more = replace(strategy, expert=(1, 2, 8)[len(asked) % 3])
                asked.append({"strategy": asdict(more), "nodes": nodes, "batch": batch, "length": length})
    return asked


def _scaled(quick: Quick, shares: dict[str, float], nodes: int, batch: int, length: int) -> Quick:
    """The same scores for another cluster, batch and length: attention grows with the square of the length."""
    ratio = length / quick.run.data.sequence_length
    grown = {name: getattr(quick.of, name) * ratio for name in ("kept", "input", "besides", "rest")}
    for name in ("forward", "backward"):
        grown[name] = getattr(quick.of, name) * ratio * (1 + shares[name] * (ratio - 1))
    train = quick.run.train.model_copy(update={"batch_size": batch})
    data = quick.run.data.model_copy(update={"sequence_length": length})
    run = quick.run.model_copy(update={"train": train, "data": data})
    return Quick(replace(quick.of, **grown), run, replace(quick.cluster, nodes=nodes))
