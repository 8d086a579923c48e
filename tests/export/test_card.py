"""Cards: true figures, valid YAML and Markdown whatever the names are, and nothing private in them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as Tree
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.tiny import tiny_run

from shardwise.config.load import load_run
from shardwise.export.card import loss_svg, make_card
from shardwise.export.facts import gather
from shardwise.export.markdown import table, text
from shardwise.observe.metrics import read_metrics

HOSTILE = "a|b`c*d_e\n# not a heading\n---\n[x](javascript:y) <script>alert(1)</script> 'q\" {{z}} \u202e: &"


def front(card: str) -> dict[str, Any]:
    assert card.startswith("---\n")
    values = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(values, dict)
    return values


def test_the_card_of_a_run(output: Path) -> None:
    card = (output / "model/README.md").read_text()
    assert front(card) == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["shardwise"]}
    records = read_metrics(output / "metrics.jsonl")
    last = {record["kind"]: record["loss"] for record in records}
    assert f"| training, all | {last['train']:.4f} |" in card and f"| held out, all | {last['eval']:.4f} |" in card
    (source,) = json.loads((output / "data.json").read_text())["train"]
    row = f"| pairs | chat | {source['rows']:,} | {source['tokens']:,} | {source['learned_share']:.1%} | 0 | "
    assert row + f"{source['held_out']:,} |" in card and source["held_out"] > 0
    assert "| train.learning\\_rate | 0.003 |" in card and "| data.eval" not in card
    assert "checked against the trained model" in card and "transformers" in card.split("## Environment")[1]
    assert "![loss by step](loss.svg)" in card
    Tree.parse(output / "model/loss.svg")


def test_no_paths_and_no_secrets(output: Path, tmp_path: Path) -> None:
    card = (output / "model/README.md").read_text()
    assert str(output) not in card and str(output.parent) not in card and "/tmp" not in card
    run = load_run(tiny_run(tmp_path, model="~/private/models/base")).run.model_dump(mode="json")
    run["judge"] = {"api_key": "hunter2", "token": "hf_secret", "password": "hunter2", "max_tokens": 7}
    run["data"]["train"] = [{"path": "hf:owner/set"}, {"path": "/home/me/salaries.jsonl"}]
    run["model"]["tokenizer"] = "C:\\Users\\me\\tok"
    facts = gather(run, None)
    card = make_card(facts, "name", "causal", "bf16")
    for word in ("hunter2", "hf_secret", "/home", "private", "Users"):
        assert word not in card
    assert "| judge.max\\_tokens | 7 |" in card and "| model.tokenizer | tok |" in card
    assert front(card)["datasets"] == ["owner/set"] and "base_model" not in front(card) and "base" in card


@pytest.mark.parametrize(("changes", "told"), [
    ({"method": {"type": "lora", "rank": 4}, "objective": "dpo"},
     ["method.type", "method.rank", "objective.type"]),
    ({"method": "full", "objective": {"type": "distill", "teacher": "big", "weight": 0.7}},
     ["objective.type", "objective.teacher", "objective.weight"]),
])  # fmt: skip
def test_settings_of_a_kind_are_held_against_its_own_defaults(
    tmp_path: Path, changes: dict[str, Any], told: list[str]
) -> None:
    run = load_run(tiny_run(tmp_path, **changes)).run.model_dump(mode="json")
    settings = [key for key, _ in gather(run, None).settings]
    assert [key for key in settings if key.startswith(("method", "objective"))] == told


def test_the_base_and_its_license(tmp_path: Path) -> None:
    run = {"model": {"name": "smollm2-135m-instruct"}, "data": {"train": []}}
    head = front(make_card(gather(run, None), "m", "causal", "bf16"))
    assert head["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct" and head["license"] == "apache-2.0"
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# x\n")
    head = front(make_card(gather({"model": {"name": str(tmp_path)}}, None), "m", "masked", "bf16"))
    assert head["license"] == "mit" and "base_model" not in head and head["pipeline_tag"] == "fill-mask"
    assert (
        front(make_card(gather({"model": {"name": "owner/name"}}, None), "m", "causal", "f"))["base_model"]
        == "owner/name"
    )


def test_hostile_names(tmp_path: Path) -> None:
    """Neither the head nor any table or heading breaks."""
    (tmp_path / "eval").mkdir()
    source = {"name": HOSTILE, "format": HOSTILE, "rows": 1, "tokens": 2, "learned_share": 0.5, "left_out": 1,
              "held_out": 0, "fates": {HOSTILE: 3}}  # fmt: skip
    (tmp_path / "data.json").write_text(json.dumps({"train": [source]}))
    results = [{"task": HOSTILE, "accuracy": 0.5, "stored_file": "/home/me/x", "judge": "/opt/secret/judge"}]
    (tmp_path / "eval/results.json").write_text(json.dumps({"results": results}))
    records = [{"kind": "train", "step": i, "loss": 2.0 / i, "losses": {HOSTILE: 1.0}, "tokens": 5} for i in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    run = {"model": {"name": HOSTILE}, "data": {"train": [{"path": f"hf:{HOSTILE}"}]}, "note": HOSTILE}
    card = make_card(gather(run, tmp_path, 2), HOSTILE, "causal", "bf16", checked=[HOSTILE])
    assert set(front(card)) == {"library_name", "pipeline_tag", "tags"}
    body = card.split("---\n", 2)[2]
    assert "<script>" not in body and "\n# not" not in body and "/home" not in body and "/opt" not in body
    headings = [line for line in body.splitlines() if line.startswith("#")]
    assert [h for h in headings if h.startswith("## ")] == [
        "## Use", "## Data", "## Training", "## Evaluation", "## Check of the export", "## Environment",
    ]  # fmt: skip
    assert len(headings) == 7
    for block in body.split("\n\n"):
        if block.startswith("| "):
            bars = {
                len([c for i, c in enumerate(line) if c == "|" and line[i - 1] != "\\"]) for line in block.splitlines()
            }
            assert len(bars) == 1, block


@pytest.mark.parametrize("content", ["", "[]", '{"results": 5}', '{"results": [3, {"a": [1]}, {}]}', "{"])
def test_evaluations_of_any_shape(tmp_path: Path, content: str) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval/results.json").write_text(content)
    assert make_card(gather({}, tmp_path), "m", "causal", "bf16").startswith("---\n")


def test_evaluation_results_are_shown(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    results = {"results": [{"task": "openbookqa", "metric": "accuracy", "value": 0.4123456, "rows": 500}]}
    (tmp_path / "eval/results.json").write_text(json.dumps(results))
    card = make_card(gather({}, tmp_path), "m", "causal", "bf16")
    assert "| task | metric | value | rows |" in card and "| openbookqa | accuracy | 0.4123 | 500 |" in card


def test_text_and_tables() -> None:
    assert text("a\nb\t|c") == "a b \\|c" and text("<b>&") == "&lt;b&gt;&amp;" and len(text("x" * 999)) == 200
    assert table(("a", "b"), [("x|y", 1)]) == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |"


def test_curves_with_gaps() -> None:
    records = [{"kind": "train", "step": s, "loss": v} for s, v in ((1, 3.0), (2, float("nan")), (3, None), (4, 1.0))]
    picture = loss_svg(records)
    assert picture is not None and Tree.fromstring(picture) is not None and "nan" not in picture
    assert loss_svg([]) is None and loss_svg(records[:1]) is None
