"""A rehearsed step against the same step on real processes: what is held, what moves, and the most there is at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import rehearsed
from support.families import config_of
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder

PEAK = 0.01  # how far a rehearsed peak may be from a real one

QUICK: dict[str, tuple[str, int, dict[str, Any]]] = {
    "zero-3": ("llama", 2, {"parallel__zero": 3}),
    "tensor": ("llama", 2, {"parallel__tensor": 2}),
    "fp8": (
        "llama",
        2,
        {"parallel__zero": 3, "precision": "bf16", "fp8": {"recipe": "tensorwise", "min_features": 16}},
    ),
}
SLOW: dict[str, tuple[str, int, dict[str, Any]]] = {
    "zero-0": ("llama", 2, {"parallel__zero": 0}),
    "zero-1": ("gpt2", 2, {"parallel__zero": 1}),
    "zero-2": ("qwen3", 2, {"parallel__zero": 2}),
    "hybrid": ("llama", 4, {"parallel__zero": 3, "parallel__dp_shard_size": 2}),
    "recompute": ("llama", 2, {"parallel__zero": 3, "recompute": "full"}),
    "tensor-pipeline": ("llama", 4, {"parallel__tensor": 2, "parallel__pipeline": 2, "parallel__zero": 1}),
    "ring": ("llama", 2, {"parallel__context": 2}),
    "ulysses": ("llama", 2, {"parallel__context": 2, "parallel__context_kind": "ulysses"}),
    "pipeline": ("gpt2", 2, {"parallel__pipeline": 2}),
    "interleaved": ("llama", 2, {"parallel__pipeline": 2, "parallel__pipeline_schedule": "interleaved"}),
    "expert": ("mixtral", 2, {"parallel__expert": 2}),
    "joined": ("llama", 2, {"parallel__zero": 3, "parallel__bucket": 300_000, "parallel__prefetch": 0}),
    "ahead": ("llama", 2, {"parallel__zero": 3, "parallel__prefetch": 2}),
    "tensor-zero-3": ("llama", 4, {"parallel__tensor": 2, "parallel__zero": 3}),
}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_a_rehearsal_is_the_step(name: str, tmp_path: Path) -> None:
    family, ranks, settings = (QUICK | SLOW)[name]
    layers = {"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}
    tokenizer_folder(tmp_path / "tokenizer")
    model = {"config": config_of(family) | layers, "tokenizer": str(tmp_path / "tokenizer")}
    run = tiny_run(
        tmp_path, model, objective="causal", ranks=ranks, train__batch_size=8, train__micro_batch_size=1,
        data__sequence_length=128, data__over_length="drop", **settings,
    )  # fmt: skip
    real, foreseen = run_ranks(rehearsed.for_real, ranks, run, ranks), rehearsed.rehearsed(run, ranks)
    for rank, (a, b) in enumerate(zip(real, foreseen, strict=True)):
        print(f"\n{name} rank {rank}: peak {a['peak']} foreseen {b['peak']} ({b['peak'] / a['peak'] - 1:+.2%})")
        assert b["held"] == a["held"]
        if name != "expert":
            assert b["moved"] == a["moved"]
            assert b["peak"] == pytest.approx(a["peak"], rel=PEAK)
    if name == "expert":
        _even_in_sum(real, foreseen)


def _even_in_sum(real: list[dict[str, Any]], foreseen: list[dict[str, Any]]) -> None:
    """Real routers are uneven: what one rank gets more, another gets less. Together they are as foreseen."""
    for a, b in zip(real, foreseen, strict=True):
        assert {k: v for k, v in b["moved"].items() if "all_to_all" not in k} == {
            k: v for k, v in a["moved"].items() if "all_to_all" not in k
        }
    names = [name for name in real[0]["moved"] if "all_to_all" in name]
    assert names
    for name in names:
        assert sum(one["moved"][name] for one in real) == sum(one["moved"][name] for one in foreseen)
    peaks, told = [one["peak"] for one in real], [one["peak"] for one in foreseen]
    assert min(peaks) * (1 - PEAK) <= min(told) and max(told) <= max(peaks) * (1 + PEAK)
    assert sum(told) == pytest.approx(sum(peaks), rel=PEAK)


def test_the_command_tells_memory_and_collectives(tmp_path: Path) -> None:
    import json

    from typer.testing import CliRunner

    from shardwise.cli.main import app

    tokenizer_folder(tmp_path / "tokenizer")
    model = {"config": config_of("llama"), "tokenizer": str(tmp_path / "tokenizer")}
    run = tiny_run(tmp_path, model, objective="causal", device="auto", precision="bf16", ranks="auto", parallel__zero=3)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(run))
    shown = CliRunner().invoke(app, ["rehearse", str(file), "--nodes", "2", "--gpus", "2", "--json"])
    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.stdout)
    (one,) = told["rehearsed"]
    assert told["ranks"] == 4 and one["peak"] > one["at_peak"]["parameters"] > 0
    assert {call["kind"] for call in one["collectives"]} >= {"all_gather", "reduce_scatter"}
    shown = CliRunner().invoke(app, ["rehearse", str(file), "--gpus", "4"])
    assert "memory at the peak" in shown.output and "reduce_scatter" in shown.output
    shown = CliRunner().invoke(app, ["rehearse", str(file), "--gpus", "0"])
    assert isinstance(shown.exception, Exception) and "at least one" in str(shown.exception)
