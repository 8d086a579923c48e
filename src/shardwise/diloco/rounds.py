"""Membership, arrivals and the end of rounds: the sync server without its network.

[Note: rounds] Round k begins with the global parameters k and ends with k + 1. It ends when every expected worker has
sent its difference, or `wait` seconds after the first one did; never with fewer than `least` (less those that have
finished their runs).
  * A worker that was expected and did not send is dropped, and no longer waited for. If it sends later, or joins again,
    it is a member again.
  * A difference that is one round late counts in the current round: it still says where the worker's data pull. An
    older one is rejected: the worker takes the global parameters and continues from there.
  * A worker that joins during a round is expected from the next one on; in this one it may send, but is not waited for.
  * A worker's last difference is marked as such: it is not expected again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwise.diloco.codec import BadPart, VectorPlan, decode
from shardwise.diloco.ledger import Arrival, RoundLedger, write_atomically
from shardwise.diloco.outer_step import OuterRule, weights_of

TICK = 0.1  # seconds between looks at the clock


class RequestRefused(Exception):
    """A rejected request: an HTTP status, a code for programs, and a message."""

    def __init__(self, status: int, code: str, words: str) -> None:
        self.status = status
        self.code = code
        self.words = words
        super().__init__(words)


class Rounds:
    """The rounds of one sync server; thread-safe."""

    def __init__(self, ledger: RoundLedger, rule: OuterRule, log: Callable[[str], None] = lambda _: None) -> None:
        self.ledger = ledger
        self.rule = rule
        self._log = log
        self._changed = threading.Condition()
        self._plan: VectorPlan | None = None
        self._base: dict[str, str] = {}
        self._round = 0
        self._digest = ""
        self._finished = 0
        self._members: dict[str, int] = {}  # worker → the first round it is expected in
        self._arrivals: dict[str, Arrival] = {}
        self._first = 0.0  # when the first difference of this round came
        self._closing = self._stopping = False
        self._figures: dict[str, Any] = {}
        self._giver, self._giver_seen = "", 0.0
        self.bytes_in = self.bytes_out = 0
        self.failure: BaseException | None = None
        if (state := ledger.state()) is not None:
            self._plan = VectorPlan.read(state["tensors"])
            self._base = state["base"]
            self._round = state["round"]
            self._digest = state["digest"]
            self._finished = state["finished"]
            self._members, self._figures = state["members"], state["figures"]
            log(f"going on at round {self._round}, with {len(self._members)} workers known")

    # What workers ask

    def join(self, worker: str, values: dict[str, Any]) -> dict[str, Any]:
        """Adds a worker, which must train the same tensors of the same model. The first one gives the parameters."""
        try:
            plan = VectorPlan.read(values.get("tensors"))
        except ValueError as error:
            raise RequestRefused(400, "form", str(error)) from None
        base = {str(k): str(v) for k, v in dict(values.get("base") or {}).items()}
        with self._changed:
            if self._plan is not None:
                self._compare(worker, plan, base)
                if worker not in self._members:
                    expected = 0 if self._round == 0 else self._round + 1
                    self._members[worker] = expected
                    self._write()
                    self._log(f"{worker} joined at round {self._round} ({_count(len(self._members))})")
                same = values.get("digest") == self._digest
                return {"state": "go", "round": self._round, "same": same, "rule": asdict(self.rule)}
            silent = time.monotonic() - self._giver_seen > self.rule.wait
            if self._giver in ("", worker) or silent:
                self._giver = worker
                self._giver_seen = time.monotonic()
                return {"state": "give"}
            return {"state": "wait"}

    def _compare(self, worker: str, plan: VectorPlan, base: dict[str, str]) -> None:
        assert self._plan is not None
        if difference := plan.differs(self._plan):
            self._log(f"{worker} was refused: it {difference}")
            raise RequestRefused(409, "other", f"this worker {difference}")
        for name in sorted({*base, *self._base}):
            if base.get(name) != self._base.get(name):
                self._log(f"{worker} was refused: another {name}")
                raise RequestRefused(409, "other", f"this worker has another {name} than the others")

    def give(
        self, worker: str, index: int, body: bytes, plan: VectorPlan | None, base: dict[str, str] | None = None
    ) -> None:
        """Receives a part of the initial parameters (`plan` None), or the notice that all were sent, with the model."""
        with self._changed:
            if self._plan is not None or worker != self._giver:
                raise RequestRefused(409, "again", "another worker gives the parameters")
            self._giver_seen = time.monotonic()
        if plan is None:
            self._keep(worker, index, body)
            return
        self._check_parts(worker, plan.parts)
        try:
            digest = self.ledger.begin(worker, plan)
        except BadPart as error:
            raise RequestRefused(422, "values", f"the parameters given by {worker}: a part {error}") from None
        with self._changed:
            self._plan = plan
            self._digest = digest
            self._base = base or {}
            self._write()
            self._log(f"{worker} gave {plan.total:,} parameters")

    def put(self, worker: str, index: int, body: bytes) -> None:
        """Receives a part of a difference; validated now, counted when `sent` is called."""
        plan = self._need_plan()
        if not 0 <= index < plan.parts:
            raise RequestRefused(400, "form", f"there are {plan.parts} parts")
        with self._changed:
            self._changed.wait_for(lambda: not (self._closing and worker in self._arrivals))
            self._arrivals.pop(worker, None)  # it was started again within the round: what it sends now counts
        try:
            decode(body, self.rule.dtype, plan.size(index))
        except BadPart as error:
            if error.finite:
                raise RequestRefused(400, "form", f"part {index} {error}") from None
            with self._changed:
                self._drop(worker)
            self._log(f"{worker} was refused: its difference has values that are no numbers; it was not averaged")
            raise RequestRefused(
                422, "values", "the difference has values that are no numbers; it was not averaged"
            ) from None
        self._keep(worker, index, body)

    def sent(self, worker: str, values: dict[str, Any]) -> dict[str, Any]:
        """Counts a worker's complete difference in the current round; returns its number."""
        try:
            since, tokens, step = (int(values[name]) for name in ("round", "tokens", "step"))
            last = bool(values.get("last"))
        except (KeyError, TypeError, ValueError):
            raise RequestRefused(400, "form", "round, tokens and step are whole numbers") from None
        self._check_parts(worker, self._need_plan().parts)
        with self._changed:
            self._changed.wait_for(lambda: not self._closing)
            if since > self._round:
                words = f"the meeting point is at round {self._round} and knows nothing of round {since}"
                raise RequestRefused(409, "ahead", words)
            if since < self._round - 1:
                self.ledger.forget(worker)
                raise RequestRefused(409, "old", f"it is of round {since}, and round {self._round} is under way")
            late = since < self._round
            if not self._arrivals:
                self._first = time.monotonic()
            self._arrivals[worker] = Arrival(worker, max(0, tokens), step, last, late)
            self._members.setdefault(worker, self._round)
            self._changed.notify_all()
            return {"round": self._round, "late": late}

    def wait(self, worker: str, number: int, seconds: float) -> dict[str, Any]:
        """Whether a round has ended, after at most `seconds`; `again`: the difference has to be sent again."""
        with self._changed:
            self._changed.wait_for(lambda: self._round > number or self._stopping, seconds)
            if self._round > number:
                figures = self._figures if self._figures.get("round") == number else {}
                own = {k: figures[k].get(worker) for k in ("norms", "distances") if k in figures}
                return figures | own | {"state": "closed", "round": self._round}
            received = worker in self._arrivals
            return {"state": "open" if received else "again", "round": self._round, "sent": len(self._arrivals)}

    def leave(self, worker: str) -> None:
        """Removes a worker that stops before its last step, so that nobody waits for it."""
        with self._changed:
            if worker not in self._arrivals:
                self._drop(worker)
            self._log(f"{worker} left")

    def file(self, number: int, kind: str, index: int) -> Path:
        """Path of a file of a round, to be sent unchanged."""
        path = self.ledger.part(number, kind, index)
        if kind not in ("global", "update") or not path.is_file():
            raise RequestRefused(410, "gone", f"{kind} {index} of round {number} is not here (any more)")
        return path

    def status(self) -> dict[str, Any]:
        """Status for users and tests."""
        with self._changed:
            return {"round": self._round, "workers": sorted(self._members), "sent": sorted(self._arrivals)}

    # What the clock does

    def run(self) -> None:
        """Ends rounds when they are due, until `stop`."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping or self._due(), TICK)
                    if self._stopping:
                        return
                    if not self._due():
                        continue
                    self._closing = True
                    arrivals = sorted(self._arrivals.values(), key=lambda a: a.worker)
                self._close(arrivals)
        except BaseException as error:
            self.failure = error
            raise

    def stop(self) -> None:
        """Releases all waiting threads."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _due(self) -> bool:
        if len(self._arrivals) < max(1, self.rule.least - self._finished):
            return False
        expected = {worker for worker, first in self._members.items() if first <= self._round}
        return expected <= set(self._arrivals) or time.monotonic() - self._first >= self.rule.wait

    def _close(self, arrivals: list[Arrival]) -> None:
        assert self._plan is not None
        began = time.monotonic()
        weights = weights_of(self.rule, [a.tokens for a in arrivals])
        result = self.ledger.advance(self._round, self._plan, arrivals, weights, self.rule)
        with self._changed:
            expected = {worker for worker, first in self._members.items() if first <= self._round}
            dropped = sorted(expected - set(self._arrivals))
            done = [a.worker for a in arrivals if a.last]
            for worker in [*dropped, *done]:
                self._members.pop(worker, None)
            self._finished += len(done)
            self._figures = {
                "round": self._round, "workers": [a.worker for a in arrivals], "mean_norm": result.mean_norm,
                "norms": result.norms, "distances": result.distances, "weights": weights,
            }  # fmt: skip
            late = [a.worker for a in arrivals if a.late]
            record = {"time": time.time(), "seconds": round(time.monotonic() - began, 3), "dropped": dropped}
            record |= {"late": late, "done": done, "bytes_in": self.bytes_in, "bytes_out": self.bytes_out}
            record |= self._figures
            self._round += 1
            self._digest = result.digest
            for arrival in arrivals:
                self.ledger.forget(arrival.worker)
            self._arrivals, self._closing = {}, False
            self._write()
            self.ledger.note(record)
            self.ledger.prune(self._round)
            self._log(_words(record))
            self._changed.notify_all()

    # Helpers

    def _need_plan(self) -> VectorPlan:
        with self._changed:
            if self._plan is None:
                raise RequestRefused(409, "again", "nobody has given the parameters yet")
            return self._plan

    def _keep(self, worker: str, index: int, body: bytes) -> None:
        path = self.ledger.arriving(worker, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, body)

    def _check_parts(self, worker: str, count: int) -> None:
        missing = [i for i in range(count) if not self.ledger.arriving(worker, i).is_file()]
        if missing:
            raise RequestRefused(409, "again", f"{len(missing)} of {count} parts have not come")

    def _drop(self, worker: str) -> None:
        self._arrivals.pop(worker, None)
        if self._members.pop(worker, None) is not None and self._plan is not None:
            self._write()
        self._changed.notify_all()

    def _write(self) -> None:
        assert self._plan is not None
        self.ledger.write_state({
            "round": self._round, "digest": self._digest, "finished": self._finished, "members": self._members,
            "figures": self._figures, "base": self._base, "tensors": [[n, list(s)] for n, s in self._plan.tensors],
            "rule": asdict(self.rule),
        })  # fmt: skip


def _count(workers: int) -> str:
    return f"{workers} worker{'s' * (workers != 1)}"


def _words(record: dict[str, Any]) -> str:
    text = f"round {record['round']}: {_count(len(record['workers']))}, mean difference {record['mean_norm']:.4g}"
    text += f", dropped {', '.join(record['dropped'])}" if record["dropped"] else ""
    text += f", late {', '.join(record['late'])}" if record["late"] else ""
    return text + (f"; done: {', '.join(record['done'])}" if record["done"] else "")
