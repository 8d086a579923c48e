"""The book of the meeting: who trains together, when, and how it ends. No sockets, and time is a number."""

from __future__ import annotations

from dataclasses import replace

from shardwise.launch.rendezvous import HostReport, Rendezvous, RoundOrder, Rules

RULES = Rules(least=2, most=3, patience=15, last_call=5, restarts=1)


class Cluster:
    """Hosts that report to one book, and do at once as they are told."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.book, self.now = Rendezvous(rules, "a"), 0.0
        self.reports: dict[str, HostReport] = {}

    def come(self, *names: str) -> None:
        for name in names:
            self.reports[name] = HostReport(name, name, 2, 1000, "waiting")

    def say(self, name: str, **changes: object) -> RoundOrder:
        """One report of a host; it starts and ends ranks as it is told."""
        report = self.reports[name] = replace(self.reports[name], **changes)
        answer = self.book.hear(report, f"10.0.0.{name}", self.now)
        if answer.order == "run" and report.state != "running":
            self.reports[name] = replace(report, state="running", round=answer.round)
        if answer.order in ("stop", "kill") and report.state == "running":
            self.reports[name] = replace(report, state="waiting")
        return answer

    def pass_time(self, seconds: float, *silent: str) -> dict[str, RoundOrder]:
        answers: dict[str, RoundOrder] = {}
        for _ in range(int(seconds)):
            self.now += 1
            answers |= {name: self.say(name) for name in self.reports if name not in silent}
        return answers

    def running(self) -> list[str]:
        return [name for name, report in self.reports.items() if report.state == "running"]

    def order(self) -> list[str]:
        return [seat.host for seat in self.book.seats]


def three() -> Cluster:
    cluster = Cluster()
    cluster.come("b", "c", "a")
    cluster.pass_time(3)
    assert cluster.running() == ["b", "c", "a"]
    return cluster


def test_all_start_at_once_and_the_keeper_is_first() -> None:
    cluster = three()
    assert cluster.order()[0] == "a" and cluster.book.round == 1
    assert [seat.ranks for seat in cluster.book.seats] == [2, 2, 2]


def test_enough_hosts_wait_for_a_last_call() -> None:
    cluster = Cluster()
    cluster.come("a")
    cluster.pass_time(60)
    assert not cluster.running()
    cluster.come("b")
    cluster.pass_time(4)
    assert not cluster.running()
    cluster.pass_time(4)
    assert cluster.running() == ["a", "b"]


def test_a_silent_host_is_left_out_and_taken_back() -> None:
    cluster = three()
    cluster.pass_time(14, "c")
    assert cluster.book.round == 1
    cluster.pass_time(4, "c")
    assert cluster.book.round == 2 and cluster.order() == ["a", "b"]
    assert any("c (10.0.0.c) has been silent for 1" in note for note in cluster.book.notes)
    assert cluster.say("c").order == "kill", "its ranks are of a round that is over"
    cluster.pass_time(4)
    assert cluster.book.round == 3 and sorted(cluster.running()) == ["a", "b", "c"]
    assert cluster.book.failures == 0, "a lost host is no failure"


def test_a_newcomer_is_waited_for_by_saving_not_killing() -> None:
    cluster = Cluster()
    cluster.come("a", "b")
    cluster.pass_time(8)
    cluster.come("c")
    cluster.say("c")
    assert cluster.say("a").order == "stop"
    cluster.pass_time(3)
    assert cluster.book.round == 2 and len(cluster.running()) == 3


def test_hosts_beyond_the_most_wait_as_spares() -> None:
    cluster = three()
    cluster.come("d")
    cluster.pass_time(100)
    assert cluster.book.round == 1 and "d" not in cluster.running()
    cluster.pass_time(20, "b")
    assert cluster.order() == ["a", "c", "d"]


def test_too_few_hosts_wait() -> None:
    cluster = three()
    cluster.pass_time(30, "b", "c")
    assert not cluster.book.seats and cluster.reports["a"].state == "waiting"


def test_a_failure_is_started_anew_until_the_restarts_are_spent() -> None:
    cluster = three()
    cluster.say("b", state="failed", words="rank 3: out of luck", step=10)
    cluster.pass_time(3)
    assert cluster.book.round == 2 and len(cluster.running()) == 3
    cluster.say("b", state="failed", words="rank 3: out of luck", step=20)
    cluster.pass_time(3)
    assert cluster.book.round == 3, "it got further in between"
    cluster.say("b", state="failed", words="rank 3: out of luck", step=20)
    answers = cluster.pass_time(3)
    assert {answer.order for answer in answers.values()} == {"end"}
    assert answers["a"].code == 1 and "rank 3: out of luck" in answers["a"].words and "2 times" in answers["a"].words


def test_a_failure_because_a_host_died_is_not_counted() -> None:
    cluster = three()
    cluster.say("b", state="failed", words="connection closed by peer")
    cluster.pass_time(20, "c")
    assert cluster.order() == ["a", "b"] and cluster.book.failures == 0


def test_a_mistake_ends_all_with_its_message() -> None:
    cluster = three()
    cluster.say("c", state="mistake", code=2, words="data.train: no such file")
    assert cluster.say("a").order == "kill"
    answer = cluster.say("a")
    assert (answer.order, answer.code, answer.words) == ("end", 2, "data.train: no such file")


def test_a_newcomers_mistake_is_its_own() -> None:
    cluster = three()
    cluster.come("d")
    answer = cluster.say("d", state="mistake", words="output")
    assert answer.order == "end" and answer.alone
    assert cluster.say("a").order == "run"


def test_who_is_asked_to_stop_stops_all() -> None:
    cluster = three()
    assert cluster.say("b", state="leaving", code=143).order == "end"
    assert cluster.say("a").order == "stop" and cluster.say("c").order == "stop"
    assert not cluster.book.all_told(cluster.now)
    assert [cluster.say(name).code for name in "ac"] == [143, 143]
    assert cluster.book.all_told(cluster.now)


def test_the_end_comes_when_all_are_done() -> None:
    cluster = three()
    assert cluster.say("a", state="done").order == "wait"
    assert cluster.say("b", state="done").order == "wait"
    assert cluster.say("c", state="done").order == "end"
    assert cluster.say("a").order == "end" and cluster.say("b").code == 0
    assert cluster.book.all_told(cluster.now)


def test_a_host_lost_behind_the_last_barrier_does_not_matter() -> None:
    cluster = three()
    cluster.say("a", state="done")
    cluster.say("b", state="done")
    cluster.pass_time(20, "c")
    assert cluster.say("a").order == "end" and cluster.say("a").code == 0


def test_a_keeper_started_anew_counts_on() -> None:
    cluster = three()
    cluster.pass_time(3)
    cluster.book = Rendezvous(RULES, "e")
    del cluster.reports["a"]
    cluster.come("e")
    cluster.pass_time(4)
    assert cluster.book.round == 2 and cluster.order()[0] == "e" and len(cluster.running()) == 3
