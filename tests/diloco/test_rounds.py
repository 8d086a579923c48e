"""When rounds end and who counts, without a network; and what is left after a kill."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.diloco.codec import VectorPlan, decode, encode
from shardwise.diloco.ledger import RoundLedger
from shardwise.diloco.outer_step import METHODS, OuterRule
from shardwise.diloco.rounds import RequestRefused, Rounds

TENSORS: list[Any] = [["a", [2, 2]], ["b", [3]]]
START = torch.arange(7, dtype=torch.float32)
AVERAGE = replace(METHODS["fedavg"], wait=30.0)


@contextmanager
def open_rounds(folder: Path, rule: OuterRule = AVERAGE) -> Iterator[Rounds]:
    rounds = Rounds(RoundLedger(folder), rule)
    clock = threading.Thread(target=rounds.run)
    clock.start()
    try:
        yield rounds
    finally:
        rounds.stop()
        clock.join()
        assert rounds.failure is None


def join(rounds: Rounds, worker: str, tensors: Any = TENSORS) -> dict[str, Any]:
    answer = rounds.join(worker, {"tensors": tensors, "base": {"tokenizer": "t"}, "digest": "?"})
    if answer["state"] == "give":
        rounds.give(worker, 0, encode(START, "fp32"), None)
        rounds.give(worker, 0, b"", VectorPlan.read(tensors), {"tokenizer": "t"})
        answer = join(rounds, worker)
    return answer


def send(rounds: Rounds, worker: str, number: int, amount: float, tokens: int = 1, last: bool = False) -> Any:
    rounds.put(worker, 0, encode(torch.full((7,), amount), rounds.rule.dtype))
    return rounds.sent(worker, {"round": number, "tokens": tokens, "step": 1, "last": last})


def parameters(rounds: Rounds, number: int) -> torch.Tensor:
    return decode(rounds.file(number, "global", 0).read_bytes(), "fp32", 7)


def test_a_round_ends_when_all_have_sent(tmp_path: Path) -> None:
    with open_rounds(tmp_path) as rounds:
        assert join(rounds, "x")["round"] == 0 and join(rounds, "y")["state"] == "go"
        send(rounds, "x", 0, 1.0, tokens=3)
        assert rounds.wait("x", 0, 0.3)["state"] == "open"
        send(rounds, "y", 0, 2.0, tokens=1)
        told = rounds.wait("x", 0, 10)
        assert (told["state"], told["round"], told["workers"]) == ("closed", 1, ["x", "y"])
        assert torch.equal(parameters(rounds, 1), START - 1.25)
        assert told["mean_norm"] == pytest.approx(1.25 * 7**0.5) and told["distances"] == pytest.approx(0.25 * 7**0.5)


def test_who_does_not_come_is_dropped_and_may_return(tmp_path: Path) -> None:
    with open_rounds(tmp_path, replace(AVERAGE, wait=1.5)) as rounds:  # far longer than two lines of this test take
        for worker in ("x", "y"):
            join(rounds, worker)
        send(rounds, "x", 0, 1.0)
        assert rounds.wait("x", 0, 10)["workers"] == ["x"]
        assert rounds.status()["workers"] == ["x"]
        # Late by one round: counted in the one under way, and waited for again from then on.
        assert send(rounds, "y", 0, 3.0) == {"round": 1, "late": True}
        send(rounds, "x", 1, 1.0)
        assert rounds.wait("x", 1, 10)["workers"] == ["x", "y"]
        assert torch.equal(parameters(rounds, 2), START - 1 - 2)
        # Older than that: of no use.
        rounds.put("z", 0, encode(torch.zeros(7), "fp32"))
        with pytest.raises(RequestRefused) as told:
            rounds.sent("z", {"round": 0, "tokens": 1, "step": 1})
        assert told.value.code == "old"


def test_who_joins_late_is_expected_from_the_next_round_on(tmp_path: Path) -> None:
    with open_rounds(tmp_path) as rounds:
        join(rounds, "x")
        send(rounds, "x", 0, 1.0)
        rounds.wait("x", 0, 10)
        assert join(rounds, "y")["round"] == 1
        send(rounds, "x", 1, 1.0)
        assert rounds.wait("x", 1, 10)["workers"] == ["x"]
        send(rounds, "x", 2, 1.0)
        assert rounds.wait("x", 2, 0.3)["state"] == "open"  # y is waited for now
        rounds.leave("y")
        assert rounds.wait("x", 2, 10)["state"] == "closed"


def test_no_round_ends_with_too_few_but_for_those_that_are_done(tmp_path: Path) -> None:
    with open_rounds(tmp_path, replace(AVERAGE, least=2, wait=0.1)) as rounds:
        join(rounds, "x")
        send(rounds, "x", 0, 1.0)
        assert rounds.wait("x", 0, 0.5)["state"] == "open"
        join(rounds, "y")
        send(rounds, "y", 0, 1.0, last=True)
        assert rounds.wait("x", 0, 10)["state"] == "closed"
        send(rounds, "x", 1, 1.0)
        assert rounds.wait("x", 1, 10)["state"] == "closed"


def test_no_numbers_are_not_averaged(tmp_path: Path) -> None:
    with open_rounds(tmp_path) as rounds:
        for worker in ("x", "y"):
            join(rounds, worker)
        send(rounds, "x", 0, 1.0)
        with pytest.raises(RequestRefused, match="no numbers") as told:
            send(rounds, "y", 0, float("nan"))
        assert told.value.status == 422
        assert rounds.wait("x", 0, 10)["workers"] == ["x"]  # and nobody waits for it
        assert torch.equal(parameters(rounds, 1), START - 1)


def test_others_are_refused(tmp_path: Path) -> None:
    with open_rounds(tmp_path) as rounds:
        join(rounds, "x")
        with pytest.raises(RequestRefused, match=r"has b of shape \[4\], the others \[3\]"):
            join(rounds, "y", [["a", [2, 2]], ["b", [4]]])
        with pytest.raises(RequestRefused, match="another tokenizer"):
            rounds.join("y", {"tensors": TENSORS, "base": {"tokenizer": "u"}})
        with pytest.raises(RequestRefused, match="another worker gives"):  # nor can a late giver change what is there
            rounds.give("y", 0, b"", VectorPlan.read(TENSORS), {"tokenizer": "u"})
        assert join(rounds, "x")["state"] == "go" and rounds.status()["workers"] == ["x"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4", "int2"])
def test_going_on_after_a_kill_changes_nothing(tmp_path: Path, dtype: Any) -> None:
    """Momentum, what rounding lost and members are all there; the same differences give the same bits."""
    rule = replace(METHODS["diloco"], dtype=dtype, wait=30.0)
    amounts = [0.3, -1.7, 0.01, 2.0]
    with open_rounds(tmp_path / "whole", rule) as rounds:
        join(rounds, "x")
        for number, amount in enumerate(amounts):
            send(rounds, "x", number, amount)
            rounds.wait("x", number, 10)
        wanted = parameters(rounds, 4)
    for number, amount in enumerate(amounts):
        with open_rounds(tmp_path / "killed", rule) as rounds:
            assert join(rounds, "x")["round"] == number
            rounds.put("x", 0, encode(torch.ones(7), dtype))  # on its way when it was killed
        with open_rounds(tmp_path / "killed", rule) as rounds:
            assert rounds.status() == {"round": number, "workers": ["x"], "sent": []}
            assert rounds.wait("x", number, 0.1)["state"] == "again"
            before = parameters(rounds, number)
            send(rounds, "x", number, amount)
            rounds.wait("x", number, 10)
            if dtype != "fp32":  # workers that add up what they are sent have what the meeting point has
                update = decode(rounds.file(number + 1, "update", 0).read_bytes(), dtype, 7)
                assert torch.equal(before + update, parameters(rounds, number + 1))
    with open_rounds(tmp_path / "killed", rule) as rounds:
        assert torch.equal(parameters(rounds, 4), wanted)
        with pytest.raises(RequestRefused):
            rounds.file(1, "global", 0)  # long past
