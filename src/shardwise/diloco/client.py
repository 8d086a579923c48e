"""A worker's side of the network: joins, sends its difference, waits for the round to end, fetches what came of it.

Every request can be made twice without harm, so whatever goes wrong on the way is tried again until the worker's
patience is at its end: a meeting point that is started anew is met as if nothing had been. What is sent and fetched
lies in files, so that trying again costs no computing.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from shardwise.config.units import in_words
from shardwise.core.errors import RunFailed, UserError
from shardwise.core.waiting import WaitReporter
from shardwise.diloco.codec import VectorPlan
from shardwise.diloco.server import LONG_POLL, WORKER

SLOWEST = 120.0  # seconds without a byte after which a connection is given up


class SyncRefused(Exception):
    """The meeting point refused: its code, and its words."""

    def __init__(self, code: str, words: str) -> None:
        self.code, self.words = code, words
        super().__init__(words)


@dataclass(frozen=True)
class RoundEnded:
    """A round that ended: the number of the next, and how its parameters came (`global` or `update`)."""

    round: int
    kind: str
    late: bool
    lost: bool  # what this worker sent was too old to count
    seconds: float
    figures: dict[str, Any]


class _Counting(http.client.HTTPConnection):
    """Counts what it sends, headers included."""

    sent = 0

    def send(self, data: Any) -> None:
        super().send(data)
        self.sent += len(data)


class Client:
    """One worker's way to the meeting point."""

    def __init__(
        self, host: str, port: int, name: str, token: str | None, patience: float,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.host, self.port, self.name, self.patience = host, port, name, patience
        self._tell, self._waiting = tell, WaitReporter()
        self._headers = {WORKER: quote(name)} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._open: _Counting | None = None
        self.bytes_sent = self.bytes_received = 0

    def join(self, plan: VectorPlan, base: dict[str, str], digest: str) -> dict[str, Any]:
        """What the meeting point says to a worker that comes: `give` your parameters, or `go` from round so-and-so."""
        tensors = [[name, list(shape)] for name, shape in plan.tensors]
        while True:
            answer = self._json("POST", "join", {"tensors": tensors, "base": base, "digest": digest})
            if answer["state"] != "wait":
                return answer
            time.sleep(0.2)  # another worker is giving the parameters

    def give(self, plan: VectorPlan, base: dict[str, str], files: Path) -> bool:
        """Hands over the first parameters; False if another worker did."""
        try:
            for index in range(plan.parts):
                self._ask("PUT", f"give/{index}", (files / f"{index:05d}").read_bytes())
            self._json("POST", "given", {"tensors": [[n, list(s)] for n, s in plan.tensors], "base": base})
        except SyncRefused as no:
            if no.code == "again":
                return False
            raise
        return True

    def exchange(
        self,
        plan: VectorPlan,
        files: Path,
        word: dict[str, Any],
        target: Path,
        updates: bool,
        stopping: Callable[[], bool],
    ) -> RoundEnded | None:
        """Sends the parts in `files`, waits, and fetches into `target`; None if it was told to stop while waiting."""
        began = time.monotonic()
        late = False
        while True:
            try:
                for index in range(plan.parts):
                    self._ask("PUT", f"difference/{index}", (files / f"{index:05d}").read_bytes())
                counted = self._json("POST", "sent", word)
            except SyncRefused as no:
                if no.code == "again":
                    time.sleep(0.2)
                    continue
                if no.code == "old":
                    number = self.fetch_global(plan, target)
                    return RoundEnded(number, "global", True, True, time.monotonic() - began, {})
                raise
            late = bool(counted["late"])
            answer: dict[str, Any] = {"state": "open"}
            while answer["state"] == "open":
                if stopping():
                    return None
                answer = self._json("GET", f"wait/{counted['round']}")
            if answer["state"] == "closed":
                break
        seconds = time.monotonic() - began
        kind = "update" if updates and not late and answer["round"] == word["round"] + 1 else "global"
        try:
            self.fetch(plan, answer["round"], kind, target)
            number = answer["round"]
        except SyncRefused as no:
            if no.code != "gone":
                raise
            kind, number = "global", self.fetch_global(plan, target)
        return RoundEnded(number, kind, late, False, seconds, {k: v for k, v in answer.items() if k not in _OWN})

    def fetch(self, plan: VectorPlan, number: int, kind: str, target: Path) -> None:
        """The parts of a round into files."""
        target.mkdir(parents=True, exist_ok=True)
        for index in range(plan.parts):
            (target / f"{index:05d}").write_bytes(self._ask("GET", f"round/{number}/{kind}/{index}"))

    def fetch_global(self, plan: VectorPlan, target: Path) -> int:
        """The present parameters into files, and the number of their round."""
        while True:
            number = int(self._json("GET", "status")["round"])
            try:
                self.fetch(plan, number, "global", target)
                return number
            except SyncRefused as no:
                if no.code != "gone":  # two rounds ended meanwhile
                    raise

    def leave(self) -> None:
        """Says goodbye, once: if nobody hears it, the others wait a little longer."""
        self.patience = 0.0
        try:
            self._json("POST", "leave", {})
        except (SyncRefused, RunFailed):
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Hangs up."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _json(self, method: str, path: str, values: dict[str, Any] | None = None) -> dict[str, Any]:
        return dict(json.loads(self._ask(method, path, None if values is None else json.dumps(values).encode())))

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        began, pause = time.monotonic(), 0.1
        while True:
            try:
                answer = self._once(method, path, body)
                self._waiting.over()
                return answer
            except (OSError, http.client.HTTPException) as error:
                self.close()
                waited = time.monotonic() - began
                if self._waiting.due("an answer"):
                    self._tell(
                        f"diloco.server: nobody answers at {self.host}:{self.port} ({error or type(error).__name__}); "
                        f"{waited:.0f} s so far, giving up after {in_words(self.patience)} (diloco.connect_timeout)"
                    )
                if waited > self.patience:
                    raise RunFailed(
                        f"the sync server at {self.host}:{self.port} could not be reached for {self.patience:g} s "
                        f"({error or type(error).__name__})\n"
                        "  → start it (shardwise diloco-server), or raise diloco.connect_timeout"
                    ) from None
                time.sleep(pause)
                pause = min(pause * 2, 5.0)

    def _once(self, method: str, path: str, body: bytes | None) -> bytes:
        if self._open is None:
            self._open = _Counting(self.host, self.port, timeout=max(SLOWEST, 3 * LONG_POLL))
        before = self._open.sent
        try:
            self._open.request(method, f"/{path}", body, self._headers)
            answer = self._open.getresponse()
            content = answer.read()
        finally:
            self.bytes_sent += self._open.sent - before
        self.bytes_received += len(content) + sum(len(k) + len(v) + 4 for k, v in answer.getheaders()) + 19
        if answer.will_close:
            self.close()
        if answer.status == 200:
            return content
        try:
            said = json.loads(content)
            code, words = str(said["code"]), str(said["error"])
        except (ValueError, KeyError, TypeError):
            code, words = "stranger", f"what listens there is no sync server (status {answer.status})"
        if code in _MISTAKES or code == "stranger":
            field, remedy = _MISTAKES.get(code, ("diloco.server", "check host and port"))
            raise UserError(field, None if field == "diloco.token_env" else f"{self.host}:{self.port}", words, remedy)
        if code in ("values", "ahead", "form", "size", "path"):
            raise RunFailed(f"the sync server refused what this worker sent: {words}")
        raise SyncRefused(code, words)


_OWN = ("state", "round")
_MISTAKES = {
    "token": (
        "diloco.token_env",
        "set it to the variable with the token that `shardwise diloco-server --token-env` has",
    ),
    "other": ("diloco.server", "give all workers the same model, tokenizer and method, or another sync server"),
}
