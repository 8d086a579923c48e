"""Every entry of the table is executed: refusals through the real loading, combinations by training.

Nothing here names a pair: a rule or a feature that is added to the table is tried with all that it meets.
"""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support import combos
from support.each import check_each
from support.ranks import run_ranks
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.config.advanced import as_written, written
from shardwise.config.combinations import (
    FEATURES,
    RULES,
    CombinationRule,
    Feature,
    clashes,
    combines,
    feature,
    first_clash,
    remarks,
)
from shardwise.config.combinations import features as f
from shardwise.config.combinations.check import nested, run_with, settings_of
from shardwise.config.combinations.page import page
from shardwise.config.load import load_run
from shardwise.config.resolve import resolve_machine
from shardwise.core.errors import UserError
from shardwise.train.engine import EngineConfig

ROOT = Path(__file__).parents[2]
REFUSALS = [rule for rule in RULES if rule.verdict == "refused"]
MOST_RANKS = {"device": "cpu", "ranks": 8, "model.name": "./model", "data.train": "rows.jsonl"}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def rule_name(rule: CombinationRule) -> str:
    return "+".join(side[0].name + "…" * (len(side) > 1) for side in rule.sides).replace(" ", "")


def refused(settings: dict[str, Any], folder: Path) -> UserError | None:
    """What the real loading says of settings, written to a file."""
    file = folder / "run.yaml"
    values = MOST_RANKS | settings
    plain = {path: list(value) if isinstance(value, tuple) else value for path, value in values.items()}
    file.write_text(yaml.safe_dump(as_written(nested(plain))))
    try:
        resolve_machine(load_run(file).run)
    except UserError as error:
        return error
    return None


def test_each_refusal_is_told(tmp_path: Path) -> None:
    check_each(REFUSALS, lambda rule: check_refusal(rule, tmp_path), rule_name)


def check_refusal(rule: CombinationRule, tmp_path: Path) -> None:
    """Every choice of one feature per side, by the rule's own words, field and remedy."""
    words = re.sub(r"\\{[a-z_.\\]+\\}", ".+", re.escape(rule.why)) + (r" \(at .+\)" if rule.section else "")
    for features in product(*rule.sides):
        # What a feature needs may be refused before the feature is: then it is tried without.
        said: list[str] = []
        for settings in (settings_of(*features), *(_without_company(features, one) for one in features)):
            error = refused(settings, tmp_path)
            said.append(str(error))
            if (
                error
                and (error.field, error.remedy) == (written(rule.field), rule.remedy)
                and re.fullmatch(words, error.problem)
            ):
                break
        else:
            pytest.fail(f"{' + '.join(one.name for one in features)}: {said}")


def _without_company(features: tuple[Feature, ...], bare: Feature) -> dict[str, Any]:
    return settings_of(*(one for one in features if one is not bare)) | {bare.field: bare.value}


def test_each_feature_is_possible_and_on() -> None:
    def check(one: Feature) -> None:
        run = run_with(one)
        assert one.on(run) and not clashes(run)
        assert not any(other.on(run) for other in FEATURES if other.of == one.of and other is not one)

    check_each(FEATURES, check, lambda one: one.name)


def test_pairs() -> None:
    muon = combines("offload.optimizer: cpu", "optimizer: muon")
    assert muon == combines(feature("optimizer: muon"), feature("offload.optimizer: cpu"))
    assert muon.kind == "refused" and muon.field == "offload.optimizer" and "whole matrices" in muon.why
    # By what it needs: parameters off the device need the optimizer off it.
    assert combines("offload.parameters: disk", "optimizer: muon").kind == "refused"
    assert combines("zero: 1", "zero: 2").kind == "either"
    assert combines("zero: 3", "method: qlora").kind == "allowed"
    # With a third alone.
    sgd = combines("optimizer_state: bf16", "optimizer: sgd")
    assert sgd.kind == "remark" and sgd.why.startswith("not with betas[0] = 0: ")


def test_clashes_are_all_told_and_the_first_is_raised() -> None:
    run = load_run({"model": "m", "data": {"train": "x"}, "offload": {"parameters": "cpu", "activations": "cpu"}}).run
    assert [c.field for c in clashes(run)] == ["offload.activations", "offload.parameters", "offload.parameters"]
    with pytest.raises(UserError, match="recompute is none"):
        first_clash(run)
    assert not remarks(run)  # the device is not known yet


def test_a_loop_of_ones_own_is_asked_what_it_has() -> None:
    config = EngineConfig.model_validate({"offload": {"optimizer": "cpu", "activations": "cpu"}})
    assert not clashes(config)  # it recomputes by its own means
    config = EngineConfig.model_validate({"parallel": {"zero": 0, "quantize_weights": True}})
    assert [c.problem for c in clashes(config)] == ["stage 0 gathers no weights"]


def test_the_page_is_up_to_date() -> None:
    """If this fails: python -m shardwise.config.combinations > docs/combinations.md"""
    assert (ROOT / "docs/combinations.md").read_text() == page()


def test_the_command() -> None:
    shown = CliRunner().invoke(app, ["config", "--combinations"])
    assert shown.exit_code == 0 and "pipeline: zbv" in shown.output and "stage 0 shards nothing" in shown.output
    told = json.loads(CliRunner().invoke(app, ["config", "--combinations", "--json"]).output)
    assert told["features"] == [one.name for one in FEATURES] and len(told["rules"]) == len(RULES)
    assert {"a", "b", "verdict", "why", "remedy", "field"} == set(told["pairs"][0])


def test_config_tells_remarks(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{model: m, data: {train: x}, device: cpu, precision: fp16}")
    shown = CliRunner().invoke(app, ["config", str(tmp_path / "run.yaml")])
    assert shown.exit_code == 0 and "CPUs compute fp16 slower" in shown.output


# Training. A row of the cover is a set of features that executes all its pairs at once.
QUICK, TOGETHER = 4, 6  # rows in every test; rows of one start of processes
ROWS = combos.cover()
BATCHES = [ROWS[:QUICK], *(ROWS[n : n + TOGETHER] for n in range(QUICK, len(ROWS), TOGETHER))]
COMPILED = [(row,) for row in combos.cover(compiled=True)]


def bounds(features: tuple[Feature, ...]) -> tuple[float, float]:
    """How far losses and gradient norms may be from those of the plain run, relatively."""
    if set(f.FP8) & set(features):
        return 1e-2, 1e-1  # other scales where other rows are computed together
    if any(one.numbers == "rounded" for one in features):
        return 4e-3, 8e-2  # found: 1.3e-3 and 5.3e-2 (the norm of an adapter's gradients in 4 bits, after a step)
    if {*f.PRECISIONS[1:], f.SPLIT_MASTERS} & set(features):
        return 5e-4, 1e-2  # found: 1.6e-4 and 4e-3
    return 1e-5, 1e-4  # found: 2.2e-7 and 1.2e-7


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> combos.Shelf:
    return combos.Shelf(tmp_path_factory.mktemp("combos"))


def test_the_cover_has_every_pair() -> None:
    for compiled in (False, True):
        rows = combos.cover(compiled)
        assert set().union(*map(combos.pairs_of, rows)) >= set(combos.pairs_to_try(compiled))
        assert all(not clashes(run_with(*row)) for row in rows)


@pytest.mark.parametrize(
    "rows",
    [BATCHES[0], *(pytest.param(rows, marks=pytest.mark.slow) for rows in (*BATCHES[1:], *COMPILED))],
    ids=[*(f"batch-{n}" for n in range(len(BATCHES))), *(f"compiled-{n}" for n in range(len(COMPILED)))],
)
@pytest.mark.timeout(1800)
def test_what_combines_trains_the_same(
    shelf: combos.Shelf, rows: combos.Cover, cpu_precision_env: dict[str, str]
) -> None:
    """Two steps with everything on, against the same steps without what should change nothing."""
    runs: dict[str, Any] = {}
    for row in rows:
        runs[name := combos.name_of(row)] = shelf.run(row, f"run-{len(runs)}")
        runs[f"plain: {name}"] = shelf.run(combos.plain(row), f"run-{len(runs)}", row)
    found = run_ranks(combos.train_each, combos.RANKS, runs, timeout=1500, env=cpu_precision_env)[0]
    for row in rows:
        here, plain = found[name := combos.name_of(row)], found[f"plain: {name}"]
        loss, norm = bounds(row)
        assert [r[0] for r in here] == pytest.approx([r[0] for r in plain], rel=loss), name
        assert [r[1] for r in here] == pytest.approx([r[1] for r in plain], rel=norm), name
