"""Bounded buffers: the units that a bucket gives, the largest collective that is really made, and training alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import cli, zeror
from support.ranks import run_ranks
from support.tiny import GPT2, LLAMA, TIED, tiny_run, tokenizer_folder
from torch import nn

from shardwise.nn.models.build import find_blocks
from shardwise.parallel.zero.units import choose_units, describe_units

ROWS = 515 + 1  # the vocabulary on two ranks, filled up to an even number of rows
HEAD = 4 * ROWS * 48
BLOCK = 4 * (48 * 48 + 2 * 24 * 48 + 48 * 48 + 3 * 48 * 96 + 2 * 48)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("units")
    tokenizer_folder(folder / "tokenizer")
    return folder


def units_of(config: dict[str, Any], bucket: int | None, shard: int = 2) -> list[Any]:
    model = zeror.tiny_model(config)
    units = choose_units(model, find_blocks(model), bucket, shard)
    taken = [id(p) for unit in units for m in unit.modules for p in m.parameters()]
    assert {id(p) for p in model.parameters()} <= set(taken), "every parameter is in a unit"
    return units


def names(units: list[Any]) -> list[tuple[str, ...]]:
    return [unit.names for unit in units]


def test_without_a_bucket_a_unit_is_a_block() -> None:
    units = units_of(LLAMA, None)
    assert names(units) == [("model.layers.0",), ("model.layers.1",), ("model.layers.2",), ("",)]
    assert [u.bytes for u in units] == [BLOCK] * 3 + [2 * HEAD + 4 * 48]


def test_small_blocks_are_joined() -> None:
    units = units_of(LLAMA, 2 * HEAD + 1000)
    assert names(units) == [("model.layers.0", "model.layers.1"), ("model.layers.2",), ("",)]
    assert all(u.bytes <= 2 * HEAD + 1000 for u in units)


def test_large_blocks_are_divided() -> None:
    """Half a block: the MLP goes, the attention and the norms stay; the embeddings cannot be divided."""
    units = units_of(LLAMA, BLOCK - 1)
    block = [("model.layers.0.mlp",), ("model.layers.0",)]
    assert names(units)[:2] == block and len(units) == 3 * 2 + 2 + 1
    over = [u for u in units if u.bytes > BLOCK - 1]
    assert [u.names for u in over] == [("model.embed_tokens",), ("lm_head",)] or over[0].bytes == HEAD
    said = describe_units(units, BLOCK - 1)
    assert "9 units" in said and "cannot be divided: model.embed_tokens 0.1 MB, lm_head 0.1 MB" in said


def test_down_to_single_modules() -> None:
    units = units_of(LLAMA, 1)
    leaves = [m for m in zeror.tiny_model(LLAMA).modules() if list(m.parameters(recurse=False))]
    assert len([u for u in units if u.bytes]) == len(leaves)


def test_tied_weights_stay_above_both_users() -> None:
    for bucket in (1, 10_000, 10**9):
        *others, root = units_of(TIED, bucket)
        assert root.names == ("",) and root.bytes >= HEAD
        assert not any(n.endswith(("embed_tokens", "lm_head")) for unit in others for n in unit.names)


def test_lists_are_seen_through() -> None:
    """Experts in a list: the list itself is never called, so its members become units."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    model = nn.ModuleDict({"layers": nn.ModuleList([Experts()])})
    units = choose_units(model, [("layers.0", model["layers"][0])], 2 * 8 * 8 * 4)
    assert names(units) == [("layers.0.experts.0",), ("layers.0.experts.1",), ("layers.0",), ("",)]


BUCKETS = {"none": None, "tiny": 20_000, "block": BLOCK, "joined": 300_000}


@pytest.mark.parametrize(
    ("zero", "config"), [(3, LLAMA), pytest.param(2, GPT2, marks=pytest.mark.slow)], ids=["3-llama", "2-gpt2-tied"]
)
def test_buffers_and_parity(zero: int, config: dict[str, Any], shared: Path) -> None:
    """Under recomputation, with accumulation: no buffer is larger than the unit said, and training is the same."""
    model = {"config": config, "tokenizer": str(shared / "tokenizer")}
    results = {}
    for name, bucket in BUCKETS.items():
        recompute = "full" if name != "block" else "none"
        run = tiny_run(shared, model, parallel__zero=zero, parallel__bucket=bucket, recompute=recompute,
                       train__micro_batch_size=3)  # fmt: skip
        results[name] = run_ranks(zeror.bucket_run, 2, run)
    for name, bucket in BUCKETS.items():
        units = units_of(config, bucket)
        for mine, reference in zip(results[name], results["none"], strict=True):
            largest = max(u.bytes for u in units)
            assert max(mine["largest"].values()) == largest, f"{name}: {mine['largest']}"
            assert len(mine["largest"]) == 2, "both gathers and reductions were seen"
            if bucket is not None:
                undivided = max((u.bytes for u in units if len(u.names) == 1), default=0)
                assert largest <= max(bucket, undivided)
            assert mine["losses"] == pytest.approx(reference["losses"], abs=1e-5, rel=1e-7)
            drift = max((mine["final"][n] - reference["final"][n]).abs().max().item() for n in mine["final"])
            assert drift <= 1e-6, name
    assert results["joined"][0]["units"] < results["none"][0]["units"] < results["tiny"][0]["units"]


@pytest.mark.slow
def test_the_plan_says_it(shared: Path, tmp_path: Path) -> None:
    run = tiny_run(shared, train__steps=1, parallel__bucket="20kB", parallel__zero=3, output=str(tmp_path / "out"))
    code, out, err = cli.train(cli.write_run(tmp_path, run))
    assert code == 0, err
    assert "buckets" in out and "cannot be divided: model.embed_tokens" in " ".join(out.split())


@pytest.mark.slow
def test_a_model_that_cannot_be_divided_so_far(shared: Path, tmp_path: Path) -> None:
    """Mamba reads the weights of its convolution without calling it."""
    config = dict(model_type="mamba", hidden_size=48, num_hidden_layers=2, vocab_size=515, state_size=4)
    model = {"config": config, "tokenizer": str(shared / "tokenizer")}
    run = tiny_run(
        shared, model, train__steps=1, data__packing=False, parallel__bucket=1024, output=str(tmp_path / "out")
    )
    code, out, err = cli.train(cli.write_run(tmp_path, run))
    assert code == 2 and "Traceback" not in out + err, err
    assert "advanced.bucket = 1024" in err and "use a larger bucket" in err
