"""Decides which hosts train together: state kept by one host (the keeper), polled by every host's agent once a second.

A round is a list of hosts that run one world of ranks. The keeper alone forms rounds, so hosts that are cut off from it
never continue by themselves, and two halves of a cluster cannot both write checkpoints. It knows the hosts by their
reports, and drops those that have been silent for too long, by its own clock: clocks of hosts need not agree.

Torch's elastic agent and rendezvous are related. They are not used here because they restart after a user error like
after any other failure, notice a lost host only when a collective times out (10 minutes, where a missed report takes
seconds), and give ranks a fixed time to save when hosts change (30 s, or torch 2.13's --shutdown-timeout), whatever
they have to save.

No sockets and no clock in here: `rendezvous_link` delivers the reports, with the time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

State = Literal["waiting", "running", "done", "failed", "mistake", "leaving"]
Order = Literal["wait", "run", "stop", "kill", "end"]


@dataclass(frozen=True)
class Rules:
    """Allowed number of hosts, and the keeper's timeouts (seconds)."""

    least: int
    most: int
    patience: float = 15.0  # silence after which a host counts as lost
    last_call: float = 5.0  # wait for more hosts once there are enough
    restarts: int = 3  # failures in a row, without a new checkpoint between them, that are started anew


@dataclass(frozen=True)
class HostReport:
    """A host's report about itself."""

    host: str  # unique: a restarted agent is another one
    name: str
    ranks: int
    port: int  # free there: where its ranks would meet, were it the first
    state: State
    round: int = 0  # the last one it was part of
    code: int = 0
    words: str = ""
    step: int = -1  # of the newest checkpoint it sees

    @classmethod
    def read(cls, values: dict[str, Any]) -> HostReport:
        """Parses a report from the network; raises ValueError if it is invalid."""
        report = cls(**values)
        for name in (report.host, report.name):  # one becomes the name of a file, both are written to terminals
            if not isinstance(name, str) or not 0 < len(name) <= 300 or not name.isprintable() or "/" in name:
                raise ValueError("no name")
        for number, least, limit in ((report.ranks, 1, 1 << 16), (report.port, 1, 65535), (report.round, 0, 1 << 31),
                                    (report.code, -255, 255), (report.step, -1, 1 << 53)):  # fmt: skip
            if type(number) is not int or not least <= number <= limit:
                raise ValueError("no number")
        if report.state not in get_args(State) or not isinstance(report.words, str):
            raise ValueError("no state")
        words = "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in report.words)
        return replace(report, words=words)


@dataclass(frozen=True)
class Seat:
    """A host's place in a round."""

    host: str
    name: str
    address: str
    ranks: int
    port: int


@dataclass(frozen=True)
class RoundOrder:
    """The keeper's order to a host; `seats` of a round to run, `code` and `words` of the end."""

    order: Order
    round: int = 0
    seats: tuple[Seat, ...] = ()
    code: int = 0
    words: str = ""
    there: tuple[str, ...] = ()  # hosts that have come, by name, for those that wait
    training: int = 0  # hosts of the round that runs without the one that asks
    alone: bool = False  # the end is this host's, and the others go on

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _KnownHost:
    report: HostReport
    address: str
    since: float
    seen: float


@dataclass
class Rendezvous:
    """The keeper's state: call `hear` with a report, get the order."""

    rules: Rules
    keeper: str = ""  # the host that keeps it: it has rank 0, whose output a user follows
    round: int = 0
    seats: tuple[Seat, ...] = ()  # of the round that runs; empty while hosts gather
    ending: tuple[int, str] | None = None
    failures: int = 0
    notes: list[str] = field(default_factory=list)  # what happened, for the keeper's log; it takes them out
    _hosts: dict[str, _KnownHost] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    _breaking: Order | None = None  # how the round's ranks are being ended
    _failed: tuple[frozenset[str], int, str] | None = None  # hosts, newest step and words of the last failure
    _step: int = -1  # newest checkpoint when a failure was last counted
    _last: tuple[str, ...] = ()  # the order of the last round's hosts

    def hear(self, report: HostReport, address: str, now: float) -> RoundOrder:
        """Records a report and returns the order for this host."""
        known = self._hosts.get(report.host)
        self._hosts[report.host] = _KnownHost(report, address, known.since if known else now, now)
        if known is None:
            self.notes.append(f"{report.name} ({address}) has come")
        if not self.seats:
            self.round = max(self.round, report.round)  # a keeper that was started anew counts on
        self._forget_silent(now)
        if self.ending is None:
            self._react(report)
            self._advance(now)
        return self._answer(report)

    def all_told(self, now: float) -> bool:
        """Whether every remaining host has been informed of the end."""
        self._forget_silent(now)
        return self.ending is not None and set(self._hosts) <= self._told

    def _forget_silent(self, now: float) -> None:
        for host, entry in list(self._hosts.items()):
            if now - entry.seen > self.rules.patience:
                del self._hosts[host]
                self.notes.append(f"{entry.report.name} ({entry.address}) has been silent for {now - entry.seen:.0f} s")
                if any(seat.host == host for seat in self.seats):
                    self._break("kill", "")  # without it the others' ranks wait for nothing

    def _break(self, how: Order, why: str) -> None:
        if self._breaking is None or (self._breaking == "stop" and how == "kill"):
            self._breaking = how
            if why:
                self.notes.append(why)

    def _react(self, report: HostReport) -> None:
        member = any(seat.host == report.host for seat in self.seats)
        current = member and report.round == self.round
        if report.state == "mistake" and (member or not self.seats):
            self._end(2, report.words)
        elif report.state == "leaving":
            self._end(report.code, report.words or f"{report.name} was asked to stop")
        elif report.state == "failed" and current and self._breaking is None:
            self._failed = (frozenset(seat.host for seat in self.seats), report.step, report.words)
            self._break("kill", f"a rank of {report.name} failed: {report.words}")
        elif report.state == "waiting" and current:  # its ranks were asked to stop, by whomever
            self._break("stop", "")
        elif report.state == "waiting" and not member and self.seats and len(self.seats) < self.rules.most:
            self._break("stop", f"{report.name} joins: the ranks save and start anew with it")

    def _advance(self, now: float) -> None:
        """Ends a round without remaining hosts, and begins one when enough hosts wait."""
        if self.seats:
            states = [self._state_in_round(seat) for seat in self.seats]
            over = self._breaking is not None and "running" not in states
            # Ranks leave with 0 after a last barrier, behind the export: one host's are enough if others' are gone.
            if all(state == "done" for state in states) or (over and "done" in states):
                self._end(0, "")
            elif over:
                self.seats = ()
                self._breaking = None
        if self.seats or self.ending is not None:
            return
        ready = [h for h in self._hosts.values() if h.report.state in ("waiting", "failed", "done")]
        if len(ready) < self.rules.least or any(h.report.state == "running" for h in self._hosts.values()):
            return
        if any(now - h.seen > self.rules.patience / 3 for h in ready):
            return  # whoever has just fallen silent is heard again or forgotten before the others count on it
        newest = max(h.since for h in ready)
        returning = self._last and set(self._last) <= {h.report.host for h in ready}
        if len(ready) >= self.rules.most or returning or now - newest >= self.rules.last_call:
            self._begin(self._choose(ready))

    def _state_in_round(self, seat: Seat) -> str:
        entry = self._hosts.get(seat.host)
        if entry is None:
            return "lost"
        report = entry.report
        # A host that was not told yet that the round began is as good as running: it may be starting.
        return report.state if report.round == self.round or self._breaking is not None else "running"

    def _choose(self, ready: list[_KnownHost]) -> list[_KnownHost]:
        """Selects hosts if there are too many: those of the last round, then in order of arrival."""
        return sorted(ready, key=lambda h: (h.report.host not in self._last, h.since))[: self.rules.most]

    def _begin(self, hosts: list[_KnownHost]) -> None:
        names = frozenset(h.report.host for h in hosts)
        if self._failed is not None:
            self._count_failure(names)
            if self.ending is not None:
                return
        order = {host: place for place, host in enumerate(self._last)}
        hosts = sorted(
            hosts, key=lambda h: (h.report.host != self.keeper, order.get(h.report.host, len(order)), h.since)
        )
        self.round += 1
        self.seats = tuple(Seat(h.report.host, h.report.name, h.address, h.report.ranks, h.report.port) for h in hosts)
        self._last = tuple(seat.host for seat in self.seats)
        self._breaking = None
        ranks = sum(seat.ranks for seat in self.seats)
        where = ", ".join(seat.name for seat in self.seats)
        self.notes.append(f"round {self.round}: {len(self.seats)} hosts, {ranks} ranks ({where})")

    def _count_failure(self, names: frozenset[str]) -> None:
        """Counts a failure if the same hosts meet again: a lost host is not the run's fault."""
        assert self._failed is not None
        hosts, step, words = self._failed
        self._failed = None
        if hosts != names:
            return
        self.failures = self.failures + 1 if step <= self._step else 1
        self._step = max(step, self._step)
        if self.failures > self.rules.restarts:
            remark = f"it failed {self.failures} times without a new checkpoint: not started again (--restarts)"
            self._end(1, f"{words}\n  → {remark}")
        else:
            self.notes.append(f"restart {self.failures} of {self.rules.restarts}")

    def _end(self, code: int, words: str) -> None:
        self.ending = (code, words)

    def _answer(self, report: HostReport) -> RoundOrder:
        if self.ending is not None:
            code, words = self.ending
            if report.state == "running":
                return RoundOrder("stop" if code != 2 else "kill", self.round)
            self._told.add(report.host)
            return RoundOrder("end", self.round, code=code, words=words)
        if report.state == "mistake":  # of a newcomer: the others go on without it
            return RoundOrder("end", self.round, code=2, words=report.words, alone=True)
        member = any(seat.host == report.host for seat in self.seats)
        if report.state == "running":
            if not member or report.round != self.round:
                return RoundOrder("kill", self.round)
            return RoundOrder(self._breaking or "run", self.round, self.seats)
        if member and self._breaking is None and report.round < self.round:
            return RoundOrder("run", self.round, self.seats)
        names = tuple(entry.report.name for entry in self._hosts.values())
        return RoundOrder("wait", self.round, there=names, training=0 if member else len(self.seats))
