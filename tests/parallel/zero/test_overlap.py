"""Gathers ahead, reductions left under way and blocks joined: what is begun when, and the same numbers bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import overlap, zeror
from support.ranks import run_ranks
from support.tiny import LLAMA, tiny_run, tokenizer_folder

from shardwise.config.load import load_run
from shardwise.config.resolve import check_parallel
from shardwise.core.errors import UserError
from shardwise.nn.models.build import find_blocks
from shardwise.parallel.zero import tuning
from shardwise.parallel.zero.overlap import CommSettings
from shardwise.parallel.zero.tuning import Blocks, MeasuredLink, choose
from shardwise.parallel.zero.units import choose_units


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overlap")
    tokenizer_folder(folder / "tokenizer")
    return folder


def trained(shared: Path, ranks: int, runs: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Steps of each run, as the first rank saw them."""
    model = {"config": LLAMA | {"num_hidden_layers": 4}, "tokenizer": str(shared / "tokenizer")}
    usual = {"parallel__zero": 3, "train__micro_batch_size": 12 // ranks}
    return run_ranks(overlap.each, ranks, {n: tiny_run(shared, model, **usual | one) for n, one in runs.items()})[0]


def before(events: list[str], block: str) -> int:
    """Gathers that were begun when a block's forward began."""
    return events[: events.index(block)].count("gather")


def test_units_are_gathered_ahead_and_nothing_else_changes(shared: Path) -> None:
    found = trained(shared, 2, {ahead: {"parallel__prefetch": ahead} for ahead in (0, 1, 2, 8)})
    plain = found.pop(0)
    assert [before(plain["events"], n) for n in "0123"] == [2, 3, 4, 5], "the rest of the model, then block by block"
    assert not plain["left"]
    for ahead, one in found.items():
        assert [before(one["events"], n) for n in "0123"] == [min(5, 2 + n + ahead) for n in range(4)]
        assert one["events"].count("gather") == plain["events"].count("gather"), "each as often as before"
        assert max(one["left"]) == min(5, ahead), "as many reductions are under way as units are ahead"
        assert overlap.same(one, plain), ahead


ACCUMULATED = {"train__micro_batch_size": 1}
PAIRS: dict[str, dict[str, Any]] = {
    "stage 2": {"parallel__zero": 2}, "stage 2, accumulated": {"parallel__zero": 2} | ACCUMULATED,
    "stage 1, accumulated": {"parallel__zero": 1} | ACCUMULATED, "recomputed": {"recompute": "full"},
    "divided": {"parallel__bucket": 20_000, "recompute": "full"}, "bf16": {"precision": "bf16"},
    "states elsewhere": {"offload__optimizer": "cpu"},
}  # fmt: skip
PAIRS_OF_FOUR: dict[str, dict[str, Any]] = {
    "stage 3": {}, "hybrid": {"parallel__dp_shard_size": 2},
    "hybrid, stage 2, accumulated": {"parallel__dp_shard_size": 2, "parallel__zero": 2} | ACCUMULATED,
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "names"), [
    (2, ("stage 2", "stage 2, accumulated", "recomputed")), (4, ("hybrid",)),
    pytest.param(2, ("stage 1, accumulated", "divided", "bf16", "states elsewhere"), marks=pytest.mark.slow),
    pytest.param(4, ("stage 3", "hybrid, stage 2, accumulated"), marks=pytest.mark.slow),
])  # fmt: skip
def test_ahead_is_the_same_bit_for_bit(ranks: int, names: tuple[str, ...], shared: Path) -> None:
    known = PAIRS if ranks == 2 else PAIRS_OF_FOUR
    runs = {(name, ahead): known[name] | {"parallel__prefetch": ahead} for name in names for ahead in (0, 2)}
    found = trained(shared, ranks, runs)
    for name in names:
        plain, one = found[name, 0], found[name, 2]
        assert overlap.same(one, plain), name
        assert one["events"].count("gather") == plain["events"].count("gather"), name
        assert bool(one["left"]) != name.startswith("hybrid"), f"{name}: an all-reduce uses a sum at once"


def test_joined_blocks_travel_together_and_sums_in_bf16_are_rounded(shared: Path) -> None:
    """Two blocks a unit: fewer collectives; two ranks add in one order only, so the numbers stay."""
    found = trained(shared, 2, {
        "plain": {"parallel__bucket": None}, "joined": {"parallel__bucket": 300_000, "parallel__prefetch": 1},
        "bf16": {"parallel__reduce_dtype": "bf16", "parallel__prefetch": 1},
    })  # fmt: skip
    plain, joined, rounded = found["plain"], found["joined"], found["bf16"]
    assert plain["events"].count("reduce") == 5 and joined["events"].count("reduce") == 3
    assert joined["events"].count("gather") < plain["events"].count("gather")
    assert overlap.same(joined, plain)
    assert not rounded["left"], "a sum that is turned into fp32 at once is waited for"
    assert rounded["losses"] != plain["losses"] and rounded["losses"] == pytest.approx(plain["losses"], rel=2e-3)


def test_what_was_measured_decides_and_is_said(shared: Path) -> None:
    """A model beyond the least size: real ranks measure, all take what rank 0 decided, and training goes on as ever."""
    settings = {"parallel__zero": 3, "parallel__bucket": "auto", "train__micro_batch_size": 6}
    found = run_ranks(overlap.tuned, 2, tiny_run(shared, **settings), 1000)
    assert found[0]["sending"] == found[1]["sending"] and found[0]["sending"].prefetch in (1, 2, 3)
    assert "gathered ahead" in found[0]["said"][0] and "GB/s" in found[0]["said"][0]
    assert found[0]["kept"] == found[0]["sending"], "a run that goes on takes what it began with"
    small = run_ranks(overlap.tuned, 2, tiny_run(shared, **settings), 1 << 40)
    assert small[0]["sending"] == CommSettings() and not small[0]["said"], "too small to measure"


def test_so_many_neighbours_make_a_unit() -> None:
    model = zeror.tiny_model(LLAMA)
    units = choose_units(model, find_blocks(model), None, 2, together=2)
    assert [unit.names for unit in units] == [("model.layers.0", "model.layers.1"), ("model.layers.2",), ("",)]


BLOCKS = Blocks(count=32, bytes=436e6, flops=2 * 218e6 * 4096)  # Llama 8B in bf16, 4096 tokens


def test_links_decide_what_travels_together_and_how_far_ahead() -> None:
    speed, room = 600e12, 141e9
    nvlink, fabric, thin = MeasuredLink(8, 300e9, 8e-6), MeasuredLink(16, 40e9, 15e-6), MeasuredLink(16, 1.2e9, 50e-6)
    assert choose(nvlink, speed, BLOCKS, room, True)[0] == CommSettings(together=1, prefetch=1)
    assert choose(fabric, speed, BLOCKS, room, True)[0].prefetch == 3
    assert choose(thin, speed, BLOCKS, room, True)[0] == CommSettings(together=1, prefetch=3)
    assert choose(thin, speed, BLOCKS, 10e9, True)[0].prefetch == 1, "no memory for more"
    assert choose(thin, speed, BLOCKS, 10e9, False)[0].prefetch == 3, "gathered for the whole step anyway"
    small = Blocks(count=30, bytes=7e6, flops=2 * 3.5e6 * 4096)  # SmolLM2-135M
    sending, why = choose(nvlink, speed, small, room, True)
    assert sending.together == 4, "more would leave fewer than four units"
    assert "4 blocks a unit" in why and "300 GB/s" in why and "8 µs" in why
    assert choose(thin, speed, small, room, True)[0].together == 2


@pytest.mark.parametrize(("settings", "field"), [
    ({"advanced": {"prefetch": -1}}, "advanced.prefetch"), ({"advanced": {"prefetch": 9}}, "advanced.prefetch"),
    ({"advanced": {"prefetch": "all"}}, "advanced.prefetch"),
    ({"parallel": {"reduce_dtype": "fp16"}}, "parallel.reduce_dtype"),
    ({"advanced": {"bucket": "one"}}, "advanced.bucket"),
])  # fmt: skip
def test_what_cannot_be(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as error:
        load_run({"model": "m", "data": {"train": "x"}, **settings})
    assert error.value.field.startswith(field)


@pytest.mark.parametrize(("ranks", "parallel"), [(1, {}), (2, {"tensor": 2})])
def test_sums_over_no_ranks_have_no_type(ranks: int, parallel: dict[str, Any]) -> None:
    run = load_run({"model": "m", "data": {"train": "x"}, "parallel": {"reduce_dtype": "bf16", **parallel}}).run
    with pytest.raises(UserError, match="over no ranks"):
        check_parallel(run, ranks)
    check_parallel(run, 2 * ranks)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", '{"of": [1]}', '{"of": [1], "sending": {"together": -3, "prefetch": 1}, "why": "x"}',
     '{"of": [1], "sending": {"together": 1, "prefetch": "x"}, "why": "x"}',
     '{"of": [2], "sending": {"together": 1, "prefetch": 1}, "why": "x"}'],
)  # fmt: skip
def test_a_choice_that_cannot_be_read_is_made_anew(text: str, tmp_path: Path) -> None:
    assert tuning._saved_choice(tmp_path, [1]) is None and tuning._saved_choice(None, [1]) is None
    (tmp_path / tuning.FILE).write_text(text)
    assert tuning._saved_choice(tmp_path, [1]) is None
    (tmp_path / tuning.FILE).write_text('{"of": [1], "sending": {"together": 2, "prefetch": 3}, "why": "x"}')
    assert tuning._saved_choice(tmp_path, [1]) == (CommSettings(None, 2, 3), "x (as before)")
