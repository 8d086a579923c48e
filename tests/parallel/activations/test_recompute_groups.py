"""Of recomputed blocks one input in several is kept: the same gradients, fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.groups import BASE, gradients
from support.ranks import run_ranks
from support.tiny import GPT2, LLAMA, QWEN3_MOE

from shardwise.config.resolve import check_parallel
from shardwise.config.schema import Run
from shardwise.core.errors import UserError
from shardwise.foresight.rehearse.step import rehearse
from shardwise.foresight.rehearse.tally import tally_of
from shardwise.nn.models.source import ModelSource, config_from

LONG = 1 << 15
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"num_hidden_layers": 5}, "experts": QWEN3_MOE,
    "dropout": GPT2 | {"n_layer": 5, "resid_pdrop": 0.2, "attn_pdrop": 0.1},
    "t5": {"model_type": "t5", "d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 3, "num_heads": 4,
           "vocab_size": 515, "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0},
}  # fmt: skip


def a_run(name: str, **more: Any) -> dict[str, Any]:
    objective = "seq2seq" if name == "t5" else "causal"
    return BASE | {"model": {"config": MODELS[name], "tokenizer": "none"}, "objective": objective} | more


def same(found: dict[str, Any], plain: dict[str, Any]) -> bool:
    equal = (torch.equal(found[key], plain[key]) for key in plain if key != "forwards")
    return found.keys() == plain.keys() and all(equal)


HOST = {"offload": {"activations": "cpu"}}
FROZEN = {"freeze": ["*embed*"]}  # the first block's input has no gradient
CASES = [*((name, more) for name in MODELS for more in ({}, HOST)), ("llama", FROZEN), ("llama", FROZEN | HOST)]


@pytest.mark.parametrize(("name", "more"), CASES, ids=[f"{name} {list(more)}" for name, more in CASES])
def test_the_same_gradients_to_the_bit(name: str, more: dict[str, Any]) -> None:
    plain, *grouped = run_ranks(gradients, 1, [a_run(name, **more, recompute_group=size) for size in (1, 2, 3, 8)])[0]
    for found in grouped:
        assert same(found, plain)
        assert found["forwards"] > plain["forwards"]


def test_compiled() -> None:
    plain, grouped = run_ranks(gradients, 1, [a_run("llama", compile=True, recompute_group=size) for size in (1, 2)])[0]
    assert same(grouped, plain)


def test_an_input_in_several_is_kept() -> None:
    config = LLAMA | {"num_hidden_layers": 8}
    source = ModelSource("m", config_from(dict(config)), None, "none", task="causal")
    long: dict[str, Any] = {"data": {"train": "x", "sequence_length": LONG}, "device": "cuda", "precision": "bf16"}
    peaks = {}
    for size in (1, 2, 4):
        values = a_run("llama", **long, recompute_group=size, train={"batch_size": 1, "micro_batch_size": 1})
        run = Run.model_validate(values | {"model": {"config": config, "tokenizer": "none"}})
        peaks[size] = tally_of(rehearse(source, run, 0, 1), 8).peak
    one = LONG * 48 * 2
    print({size: peak / one for size, peak in peaks.items()})
    assert peaks[1] - peaks[2] > 2.5 * one  # four inputs fewer, one more while a group is made again


def test_for_one_rank() -> None:
    with pytest.raises(UserError, match="one GPU"):
        check_parallel(Run.model_validate(a_run("llama", recompute_group=2)), 2)
