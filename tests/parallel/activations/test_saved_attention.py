"""Attention that is kept of recomputed blocks: the same gradients to the bit, computed once, for its bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import cli
from support.groups import BASE, gradients
from support.ranks import run_ranks
from support.tiny import GPT2, LLAMA, tiny_run

from shardwise.config.combinations.check import first_clash
from shardwise.config.schema import Run
from shardwise.core.errors import UserError
from shardwise.foresight.rehearse.step import rehearse
from shardwise.foresight.rehearse.tally import tally_of
from shardwise.nn.models.source import ModelSource, config_from

LONG = 1 << 15
MODELS = {
    "llama": LLAMA | {"num_hidden_layers": 5, "hidden_size": 64},
    "gpt2": GPT2 | {"n_layer": 5, "n_embd": 64, "resid_pdrop": 0.2},
}
HOST = {"offload": {"activations": "cpu"}}


def a_run(name: str, **more: Any) -> dict[str, Any]:
    return BASE | {"model": {"config": MODELS[name], "tokenizer": "none"}} | more


def counted(runs: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """Gradients of each run, and how often attention was computed."""
    from shardwise.nn.attention import long_context as module

    attend, calls, found = module._attend, [0], []

    def call(*args: Any) -> Any:
        calls[0] += 1
        return attend(*args)

    module._attend = call
    for run in runs:
        calls[0] = 0
        found.append((gradients([run])[0], calls[0]))
    return found


SOME = {"recompute_blocks": 3}
SENT = {"offload": {"activations": "cpu", "activation_blocks": 2}}
CASES = [
    *((name, more) for name in MODELS for more in ({}, HOST)), ("llama", SOME), ("llama", SENT),
    ("llama", {"recompute_group": 2}), ("llama", {"recompute_group": 3} | HOST),
    ("llama", {"recompute_group": 2} | SENT), ("llama", {"compile": True}),
    ("llama", {"compile": True, "recompute_group": 2} | HOST),
]  # fmt: skip


@pytest.mark.parametrize(("name", "more"), CASES, ids=[f"{name} {list(more.items())}" for name, more in CASES])
def test_the_same_gradients_and_attention_once(name: str, more: dict[str, Any]) -> None:
    runs = [a_run(name, **more), a_run(name, **more, recompute_attention=False)]
    (plain, _), (kept, computed) = run_ranks(counted, 1, runs)[0]
    for key in plain:
        torch.testing.assert_close(kept[key], plain[key], rtol=2e-5, atol=1e-7)
    blocks, micro_batches = more.get("recompute_blocks", 5), 2
    assert computed == blocks * micro_batches


@pytest.mark.parametrize("more", [{}, HOST], ids=str)
def test_what_is_kept_is_what_was_computed(more: dict[str, Any]) -> None:
    """Beside a run whose memory is empty, so that attention is computed again by the same operator."""
    kept, again = run_ranks(with_and_without, 1, a_run("llama", **more, recompute_attention=False))[0]
    assert kept.keys() == again.keys() and all(torch.equal(kept[key], again[key]) for key in kept)


def with_and_without(run: dict[str, Any]) -> list[dict[str, Any]]:
    from shardwise.parallel.activations import saved_attention as module

    first = gradients([run])[0]
    module._Recording.keep = lambda *_: None  # type: ignore[method-assign, assignment, misc]
    return [first, gradients([run])[0]]


def peak_and_flops(**more: Any) -> tuple[int, int, int]:
    config = MODELS["llama"] | {"num_hidden_layers": 8}
    source = ModelSource("m", config_from(dict(config)), None, "none", task="causal")
    long: dict[str, Any] = {"data": {"train": "x", "sequence_length": LONG}, "device": "cuda", "precision": "bf16"}
    values = a_run("llama", **long, **more, train={"batch_size": 1, "micro_batch_size": 1})
    run = Run.model_validate(values | {"model": {"config": config, "tokenizer": "none"}})
    rehearsed = rehearse(source, run, 0, 1)
    flops = sum(work.flops * times for work, times in rehearsed.tracker.work.items() if "attention" in work.operator)
    return tally_of(rehearsed, 8).peak, flops, rehearsed.tracker.to_host


@pytest.mark.parametrize("compile", [False, True])
def test_rehearsed(compile: bool) -> None:
    """Eight outputs of attention more are held, on the host where inputs are, and its forward is counted once."""
    peak, flops, host = peak_and_flops(compile=compile)
    kept, fewer, _ = peak_and_flops(compile=compile, recompute_attention=False)
    one = LONG * 64 * 2
    assert 7 * one < kept - peak < 9.5 * one
    assert fewer / flops == pytest.approx((1 + 2.5) / (2 + 2.5))
    sent = {"offload": {"activations": "cpu"}}
    moved, fewer, both = peak_and_flops(compile=compile, recompute_attention=False, **sent)
    assert host == 0 and both >= 2 * peak_and_flops(compile=compile, **sent)[2] * 0.99
    assert moved < peak


@pytest.mark.parametrize(
    ("more", "said"),
    [({"recompute": "none"}, "no block is computed again"), ({"parallel": {"tensor": 2}}, "does not go with tensor"),
     ({"recompute": "auto"}, "answers by itself"), ({"attention": "plain"}, "attention is plain"),
     ({"objective": "masked"}, "causal models")],
)  # fmt: skip
def test_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        first_clash(Run.model_validate(a_run("llama", **({"recompute_attention": False} | more))))


def test_unpacked_rows_are_refused() -> None:
    data = BASE["data"] | {"packing": False}
    with pytest.raises(UserError, match="packed rows"):
        first_clash(Run.model_validate(a_run("llama", recompute_attention=False, data=data)))


@pytest.mark.parametrize(("rows", "said"), [("short", True), ("long", False)])
def test_a_run_says_if_nothing_was_kept(rows: str, said: bool, tmp_path: Path) -> None:
    """As with rows of many short documents."""
    texts = [f"word {n} " * (1 if rows == "short" else 400) for n in range(40)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run = tiny_run(
        tmp_path, recompute="full", recompute_attention=False, train__steps=1, train__batch_size=1,
        data__train=str(tmp_path / "text.jsonl"), data__sequence_length=64, export={"check": False},
    )  # fmt: skip
    code, out, err = cli.train(cli.write_run(tmp_path, run), env={"SHARDWISE_PROGRESS": "plain"})
    assert code == 0, err
    assert ("kept nothing" in " ".join(out.split())) is said, out
