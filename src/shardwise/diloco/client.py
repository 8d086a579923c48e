"""Client of the sync server: joins, sends its difference, waits for the round to end, fetches the result.

Every request is idempotent, so failures are retried until the worker's patience is exhausted: a restarted sync server
is transparent. What is sent and fetched is in files, so that a retry costs no computing.
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
    """The sync server rejected a request: its code and message."""

    def __init__(self, code: str, words: str) -> None:
        self.code, self.words = code, words
        super().__init__(words)


@dataclass(frozen=True)
class RoundEnded:
    """A completed round: the number of the next, and the form of its parameters (`global` or `update`)."""

    round: int
    kind: str
    late: bool
    lost: bool  # what this worker sent was too old to count
    seconds: float
    figures: dict[str, Any]


class _Counting(http.client.HTTPConnection):
    """HTTP connection that counts the bytes it sends, headers included."""

    sent = 0

    def send(self, data: Any) -> None:
        super().send(data)
        self.sent += len(data)


class Client:
    """Connection of one worker to the sync server."""

    def __init__(
        self, host: str, port: int, name: str, token: str | None, patience: float,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.host = host
        self.port = port
        self.name = name
        self.patience = patience
        self._log = log
        self._waiting = WaitReporter()
        self._headers = {WORKER: quote(name)} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._open: _Counting | None = None
        self.bytes_sent = self.bytes_received = 0

    def join(self, plan: VectorPlan, base: dict[str, str], digest: str) -> dict[str, Any]:
        """Joins the rounds; the reply asks to `give` the parameters, or to `go` from a given round."""
        tensors = [[name, list(shape)] for name, shape in plan.tensors]
        while True:
            answer = self._json("POST", "join", {"tensors": tensors, "base": base, "digest": digest})
            if answer["state"] != "wait":
                return answer
            time.sleep(0.2)  # another worker is giving the parameters

    def give(self, plan: VectorPlan, base: dict[str, str], files: Path) -> bool:
        """Uploads the initial parameters; False if another worker did."""
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
        """Sends the parts in `files`, waits, and fetches into `target`; None if asked to stop while waiting."""
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
            kind = "global"
            number = self.fetch_global(plan, target)
        return RoundEnded(number, kind, late, False, seconds, {k: v for k, v in answer.items() if k not in _OWN})

    def fetch(self, plan: VectorPlan, number: int, kind: str, target: Path) -> None:
        """Fetches the parts of a round into files."""
        target.mkdir(parents=True, exist_ok=True)
        for index in range(plan.parts):
            (target / f"{index:05d}").write_bytes(self._ask("GET", f"round/{number}/{kind}/{index}"))

    def fetch_global(self, plan: VectorPlan, target: Path) -> int:
        """Fetches the current parameters into files; returns the number of their round."""
        while True:
            number = int(self._json("GET", "status")["round"])
            try:
                self.fetch(plan, number, "global", target)
                return number
            except SyncRefused as no:
                if no.code != "gone":  # two rounds ended meanwhile
                    raise

    def leave(self) -> None:
        """Announces that this worker leaves, once and without retries."""
        self.patience = 0.0
        try:
            self._json("POST", "leave", {})
        except (SyncRefused, RunFailed):
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Closes the connection."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _json(self, method: str, path: str, values: dict[str, Any] | None = None) -> dict[str, Any]:
        return dict(json.loads(self._ask(method, path, None if values is None else json.dumps(values).encode())))

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        began = time.monotonic()
        pause = 0.1
        while True:
            try:
                answer = self._once(method, path, body)
                self._waiting.over()
                return answer
            except (OSError, http.client.HTTPException) as error:
                self.close()
                waited = time.monotonic() - began
                if self._waiting.due("an answer"):
                    self._log(
                        f"diloco.server: nobody answers at {self.host}:{self.port} ({error or type(error).__name__}); "
                        f"{waited:.0f} s so far, giving up after {in_words(self.patience)} "
                        "(advanced.diloco.connect_timeout)"
                    )
                if waited > self.patience:
                    raise RunFailed(
                        f"the sync server at {self.host}:{self.port} could not be reached for {self.patience:g} s "
                        f"({error or type(error).__name__})\n"
                        "  → start it (shardwise diloco-server), or raise advanced.diloco.connect_timeout"
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
            error = json.loads(content)
            code, words = str(error["code"]), str(error["error"])
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
