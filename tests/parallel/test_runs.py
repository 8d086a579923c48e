"""Training along axes and combinations of them against one process: ten steps of AdamW, accumulated and clipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import scenarios
from support.families import config_of
from support.ranks import run_ranks
from support.tiny import PAIRS, rows_of_pairs, saved_model, tiny_run, tokenizer_folder

STEPS = 10
LOSS, NORM = 1e-5, 1e-4
STILL = {"bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, "t5": {"dropout_rate": 0.0}}
DEEP = {"gpt2": {"n_layer": 4}, "t5": {"num_layers": 2, "num_decoder_layers": 2}}
LORA = {"type": "lora", "rank": 4}
QLORA = {"type": "qlora", "rank": 4}

TP, PP, CP, EP = ({f"parallel__{axis}": 2} for axis in ("tensor", "pipeline", "context", "expert"))
ULYSSES = CP | {"parallel__context_kind": "ulysses"}


def zero(stage: int) -> dict[str, Any]:
    return {"parallel__zero": stage}


# family, ranks, settings; the quick ones run in every test, the others are slow.
QUICK: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3", 4, TP | zero(3)),
    ("gpt2", 4, TP | PP),
    ("bert", 2, TP),
    ("t5", 2, PP),
    ("llama", 4, CP | zero(3)),
    ("mixtral", 4, EP | TP),
    ("llama", 4, TP | PP | {"method": LORA}),
    ("llama", 2, TP | {"method": QLORA}),
]
SLOW: list[tuple[str, int, dict[str, Any]]] = [
    *((family, 4, TP | zero(3)) for family in ("llama", "gpt2", "mixtral", "bert", "t5")),
    *((family, 8, TP | zero(2) | {"parallel__dp_shard_size": 2}) for family in ("llama", "gpt2", "qwen3", "bert")),
    *((family, 4, PP | zero(1)) for family in ("llama", "gpt2", "qwen3", "mixtral", "bert", "t5")),
    *((family, 4, TP | PP) for family in ("llama", "qwen3", "mixtral", "bert", "t5")),
    *((family, 8, TP | PP | zero(1)) for family in ("llama", "gpt2", "qwen3", "mixtral", "bert", "t5")),
    *((family, 4, CP | zero(3)) for family in ("gpt2", "qwen3", "mixtral")),
    *((family, 4, ULYSSES | zero(3)) for family in ("llama", "gpt2", "qwen3", "mixtral")),
    *((family, 4, EP | zero(2)) for family in ("mixtral", "qwen3_moe")),
    ("qwen3_moe", 4, EP | TP),
    ("qwen3_moe", 4, {"parallel__expert": 4} | zero(3)),
    ("llama", 4, TP | CP),
    ("llama", 4, PP | CP),
    ("llama", 4, PP | zero(3) | {"recompute": "full"}),
    ("llama", 4, TP | zero(3) | {"recompute": "full"}),
    ("llama", 4, CP | zero(3) | {"recompute": "full"}),
    ("llama", 2, PP | {"parallel__pipeline_schedule": "gpipe"}),
    ("llama", 2, PP | {"parallel__pipeline_schedule": "interleaved"}),
    ("llama", 2, PP | {"parallel__pipeline_schedule": "zbv", "parallel__zero": 0}),
    ("llama", 2, PP | {"parallel__pipeline_schedule": "naive"}),
    ("mixtral", 8, TP | PP | CP | EP),
    ("qwen3_moe", 16, TP | PP | CP | EP | zero(2)),
    *((family, 4, axes | {"method": LORA}) for family in ("llama", "gpt2") for axes in (TP | zero(3), PP | zero(1))),
    ("llama", 4, CP | zero(3) | {"method": LORA}),
    ("mixtral", 4, EP | zero(2) | {"method": LORA}),
    *(("llama", 4, axes | {"method": QLORA}) for axes in (TP | zero(3), PP | zero(1), CP | zero(3), TP | PP)),
]


def named(case: tuple[str, int, dict[str, Any]]) -> str:
    family, ranks, settings = case
    words = [f"{k.rpartition('_')[2]}={v['type'] if isinstance(v, dict) else v}" for k, v in settings.items()]
    return f"{family}-{ranks}-{'-'.join(words)}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("axes")
    tokenizer_folder(folder / "tokenizer")
    rows_of_pairs(folder)
    return folder


def the_run(shared: Path, family: str, output: str, **changes: Any) -> dict[str, Any]:
    config = config_of(family) | DEEP.get(family, {"num_hidden_layers": 4}) | STILL.get(family, {})
    model: Any = {"config": config, "tokenizer": str(shared / "tokenizer")}
    if "method" in changes:
        model = str(shared / family)
        if not (shared / family).exists():
            saved_model(shared / family, config)
    own = {"bert": ("masked", "texts"), "t5": ("seq2seq", "pairs")}.get(family)
    data = {} if own is None else {"objective": own[0], "data__train": str(shared / f"{own[1]}.jsonl")}
    return tiny_run(
        shared, model, output=str(shared / output), train__steps=STEPS, train__batch_size=8, train__micro_batch_size=2,
        data__sequence_length=160, data__over_length="drop", **data, **changes,
    )  # fmt: skip


_ALONE: dict[str, Any] = {}


def alone(shared: Path, family: str, settings: dict[str, Any]) -> tuple[list[float], list[float]]:
    own = {k: v for k, v in settings.items() if k in ("method",)}
    key = f"{family}-{own.get('method', {}).get('type', 'full')}"
    if key not in _ALONE:
        _ALONE[key] = run_ranks(scenarios.train, 1, the_run(shared, family, f"alone-{key}", **own))[0][:2]
    losses, norms = _ALONE[key]
    return losses, norms


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)], ids=named)
def test_the_same_as_one_process(shared: Path, case: tuple[str, int, dict[str, Any]]) -> None:
    family, ranks, settings = case
    losses, norms = alone(shared, family, settings)
    # A step needs a micro-batch for each rank that sees other data.
    micro = {"train__micro_batch_size": 1} if ranks >= 8 else {}
    run = the_run(shared, family, named(case), ranks=ranks, **settings)
    run["train"]["micro_batch_size"] = 1 if micro else 2
    found, others, _ = run_ranks(scenarios.train, ranks, run, timeout=600)[0]
    loss = max(abs(a - b) for a, b in zip(found, losses, strict=True))
    norm = max(abs(a - b) / b for a, b in zip(others, norms, strict=True))
    print(f"\n| {family} | {ranks} | {named(case)} | {loss:.1e} | {norm:.1e} |")
    assert len(found) == STEPS and losses[-1] < losses[0]
    assert loss <= LOSS and norm <= NORM


@pytest.mark.parametrize("axes", [TP | PP, pytest.param(CP | PP, marks=pytest.mark.slow)], ids=["tp-pp", "cp-pp"])
def test_losses_of_sources_and_evaluations(shared: Path, axes: dict[str, Any]) -> None:
    """Each source's loss and units, and what is held out, as one process tells them."""
    lines = PAIRS.read_text().splitlines()
    sources = []
    for name, part in (("odd", lines[1::2]), ("even", lines[::2])):
        (shared / f"{name}.jsonl").write_text("\n".join(part) + "\n")
        sources.append({"path": str(shared / f"{name}.jsonl"), "name": name})
    told = []
    for name, ranks, settings in (("one", 1, {}), ("many", 4, axes)):
        run = the_run(shared, "llama", f"sources-{name}-{len(axes)}", ranks=ranks, **settings)
        run["data"] |= {"train": sources, "eval": "20%"}
        run["train"] |= {"steps": 3, "eval_every": 3}
        run_ranks(scenarios.train, ranks, run)
        told.append([json.loads(line) for line in (Path(run["output"]) / "metrics.jsonl").read_text().splitlines()])
    for ours, theirs in zip(*told, strict=True):
        assert ours["kind"] == theirs["kind"] and ours["losses"].keys() == theirs["losses"].keys() == {"odd", "even"}
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=LOSS)
        assert ours["supervised_by_source"] == theirs["supervised_by_source"]
    assert [one["kind"] for one in told[0]].count("eval") == 1
