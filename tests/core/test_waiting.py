"""What hosts say while they wait for others: soon, not often, and with what one needs to mend it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from shardwise.config.units import in_words
from shardwise.core.waiting import FIRST, LONGEST, WaitReporter
from shardwise.launch.rendezvous import HostReport, Rendezvous, RoundOrder, Rules
from shardwise.launch.rendezvous_link import Line, RendezvousAddress, free_port
from shardwise.launch.rendezvous_progress import for_others, gave_up, nobody, too_few

RULES, PLACE = Rules(2, 3), RendezvousAddress("192.0.2.1", 29400, "x")


def test_after_some_seconds_and_then_ever_more_seldom() -> None:
    waiting = WaitReporter()
    said = [second for second in range(3600) if waiting.due("nobody", float(second))]
    assert said[:6] == [5, 15, 35, 75, 155, 315] and len(said) < 20
    assert max(b - a for a, b in itertools.pairwise(said)) == LONGEST


def test_what_has_changed_is_told_soon_but_not_each_time() -> None:
    waiting = WaitReporter()
    assert not waiting.due(1, 0.0) and waiting.due(1, 5.0) and not waiting.due(1, 6.0)
    assert not waiting.due(2, 7.0) and not waiting.due(2, 7.0 + FIRST - 1) and waiting.due(2, 7.0 + FIRST)
    waiting.over()
    assert not waiting.due(2, 100.0), "a new wait"
    changing = WaitReporter()  # hosts that come one by one put nothing off
    assert sum(changing.due(second // 2, float(second)) for second in range(60)) >= 5


def test_words() -> None:
    told = nobody(PLACE, "Connection refused", 5.2, 1800)
    assert "192.0.2.1:29400 (Connection refused)" in told and "5 s so far, giving up after 30min (--wait)" in told
    told = for_others(RoundOrder("wait", there=("b",)), RULES, PLACE, 40.0, 600)
    assert told.startswith("waiting for 1 more host to start the same command: 1 of 2 is there (b); 40 s so far")
    assert told.endswith("giving up after 10min (--wait)")
    told = for_others(RoundOrder("wait", there=("b",)), replace(RULES, least=3), PLACE, 40.0, None)
    assert "waiting for 2 more hosts" in told and "as long as 192.0.2.1 does" in told
    here = RendezvousAddress("127.0.0.1", 29400, "x")
    assert "no other host can reach 127.0.0.1" in for_others(RoundOrder("wait", there=("b",)), RULES, here, 1.0, 600)
    assert "the place of one that is lost" in for_others(RoundOrder("wait", training=3), RULES, PLACE, 9.0, None)
    assert "have saved" in for_others(RoundOrder("wait", training=2), RULES, PLACE, 9.0, None)
    many = tuple(f"n{number}" for number in range(10, 30))
    assert "n17 and 12 more" in too_few(RoundOrder("wait", there=many), Rules(64, 64), 1800)
    assert "within 30min (--wait): no answer" in gave_up(PLACE, "no answer", 1800)


def test_the_book_tells_those_who_wait_who_is_there() -> None:
    book = Rendezvous(Rules(2, 2), "a")
    first = book.hear(HostReport("a", "host-a", 1, 1000, "waiting"), "10.0.0.1", 0.0)
    assert first.order == "wait" and first.there == ("host-a",) and first.training == 0
    book.hear(HostReport("b", "host-b", 1, 1000, "waiting"), "10.0.0.2", 1.0)
    spare = book.hear(HostReport("c", "host-c", 1, 1000, "waiting"), "10.0.0.3", 2.0)
    assert spare.order == "wait" and spare.training == 2 and "host-c" in spare.there


@pytest.mark.parametrize("host, said", [("no-such-host.invalid", "is not known here"), ("127.0.0.1", "refused")])
def test_the_last_error_is_kept(host: str, said: str) -> None:
    line = Line(RendezvousAddress(host, free_port(), "x"))
    assert line.ask(HostReport("a", "a", 1, 1, "waiting")) is None and said in line.trouble


def test_durations_in_words() -> None:
    words = {0.2: "200ms", 5: "5s", 45: "45s", 90: "1.5min", 1800: "30min", 7200: "2h", 86400: "1d", 100: "100s"}
    assert {seconds: in_words(seconds) for seconds in words} == words
