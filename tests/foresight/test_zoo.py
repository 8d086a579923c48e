"""A sample of the zoo, through the command; all of it: `shardwise zoo`, whose table is docs/architectures.md."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shardwise.foresight.zoo.run import ZooResult, architectures
from shardwise.foresight.zoo.table import as_markdown, summary

SAMPLE: dict[tuple[str, str], str] = {  # axis and task → architectures that are right
    ("tensor", "causal"): "llama gpt2 falcon gemma2 deepseek_v3 mixtral phi3",
    ("tensor", "masked"): "bert deberta-v2",
    ("tensor", "seq2seq"): "t5 bart",
    ("pipeline", "causal"): "llama gpt2 qwen3_next bloom",
    ("pipeline", "masked"): "roberta",
    ("pipeline", "seq2seq"): "t5 marian",
    ("context", "causal"): "llama gpt2 gpt_oss gemma2 opt",
    ("expert", "causal"): "mixtral gpt_oss qwen3_moe",
}
REFUSED = {("expert", "causal", "llama"): "has no experts", ("expert", "causal", "gpt2"): "has no experts"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], ZooResult]:
    """One process that imports once."""
    folder = tmp_path_factory.mktemp("zoo")
    wanted = [(axis, task, name) for (axis, task), names in SAMPLE.items() for name in names.split()]
    (folder / "wanted.json").write_text(json.dumps([*wanted, *REFUSED]))
    code = (
        "import json, sys, warnings; warnings.filterwarnings('ignore')\n"
        "from shardwise.foresight.zoo.run import as_json, trials\n"
        "wanted = json.load(open(sys.argv[1]))\n"
        "found = [next(trials(axis, task, [name])) for axis, task, name in wanted]\n"
        "open(sys.argv[2], 'w').write(as_json(found))\n"
    )
    file = folder / "found.json"
    subprocess.run([sys.executable, "-c", code, str(folder / "wanted.json"), str(file)], check=True, timeout=600)
    return {(r.axis, r.task, r.model_type): r for r in (ZooResult(**one) for one in json.loads(file.read_text()))}


@pytest.mark.timeout(660)
def test_the_sample_is_right(results: dict[tuple[str, str, str], ZooResult]) -> None:
    bad = [one for key, one in results.items() if key not in REFUSED and one.outcome != "pass"]
    assert not bad, bad
    assert all(one.loss is not None and one.gradient is not None for key, one in results.items() if key not in REFUSED)


def test_refusals_say_why(results: dict[tuple[str, str, str], ZooResult]) -> None:
    for key, words in REFUSED.items():
        assert results[key].outcome == "refused" and words in results[key].why


def test_the_table(results: dict[tuple[str, str, str], ZooResult]) -> None:
    table = as_markdown([one for one in results.values() if one.task == "causal"], "shardwise zoo")
    assert "| llama | ✓ | ✓ | ✓ |  |  |" in table, table
    assert any(line.startswith("causal, tensor: 7 of 7 right") for line in summary(list(results.values())))
    assert results["tensor", "causal", "llama"].plain == 1


def test_every_architecture_is_tried() -> None:
    assert len(architectures("causal")) > 150 and {"bert", "roberta"} <= set(architectures("masked"))
