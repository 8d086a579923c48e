"""HTTP server of the sync server: plain threads, as workers are few and mostly wait.

Every request names its worker and, if there is a token, carries it (compared in constant time). Bodies have a known and
bounded length before they are read; they are JSON or safetensors, never code.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import unquote

from shardwise.core.bounded_threads import BoundedThreads
from shardwise.diloco.codec import PART, VectorPlan, most_bytes
from shardwise.diloco.rounds import RequestRefused, Rounds

WORKER, LONGEST_NAME = "X-Shardwise-Worker", 200
JSON_LIMIT = 16 << 20  # bytes: names and shapes of some hundred thousand tensors
LONG_POLL = 10.0  # seconds that an answer may be waited for
IDLE = 120.0  # seconds after which a silent connection is closed
STRANGER = 15.0  # seconds for a connection to show that it is a worker's, however slowly its first request comes
CONNECTIONS = 512


class MeetServer(BoundedThreads, HTTPServer):
    """HTTP server for workers."""

    request_queue_size = 128

    def __init__(self, listener: socket.socket, rounds: Rounds, token: str | None) -> None:
        super().__init__(
            listener.getsockname()[:2], SyncRequestHandler, bind_and_activate=False, connections=CONNECTIONS
        )
        self.socket.close()
        self.socket = listener
        self.rounds = rounds
        self.token = token

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect; other errors are bugs and print their traceback."""
        import sys

        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class SyncRequestHandler(BaseHTTPRequestHandler):
    """Handles one connection."""

    server: MeetServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "shardwise", ""
    timeout = IDLE
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._late = threading.Timer(STRANGER, self._give_up)
        self._late.daemon = True
        self._late.start()

    def finish(self) -> None:
        self._late.cancel()
        super().finish()

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        self._answer({"wait": self._wait, "round": self._part, "status": self._status})

    def do_POST(self) -> None:
        self._answer({"join": self._join, "given": self._given, "sent": self._sent, "leave": self._leave})

    def do_PUT(self) -> None:
        self._answer({"give": self._give, "difference": self._difference})

    def log_message(self, format: str, *args: Any) -> None:
        pass  # rounds are told, requests are not

    def _answer(self, routes: dict[str, Callable[..., Any]]) -> None:
        first, *words = self.path.partition("?")[0].strip("/").split("/")
        try:
            self._check_token()
            self.worker = self._name()
            self._late.cancel()
            if first not in routes:
                raise RequestRefused(404, "path", "there is nothing here")
            try:
                numbers = [word if word in ("global", "update") else int(word) for word in words]
                answer = routes[first](*numbers)
            except (TypeError, ValueError, RecursionError) as error:
                raise RequestRefused(400, "form", f"this is not understood ({str(error)[:120]})") from None
            body = answer if isinstance(answer, bytes) else json.dumps(answer or {}).encode()
            self._reply(200, body)
        except RequestRefused as no:
            self.close_connection = True  # its body may not have been read
            self._reply(no.status, json.dumps({"code": no.code, "error": no.words}).encode())

    def _reply(self, status: int, body: bytes) -> None:
        self.server.rounds.bytes_out += len(body)
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _check_token(self) -> None:
        token = self.server.token
        received = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token is not None and not hmac.compare_digest(received.encode("utf-8", "replace"), token.encode()):
            raise RequestRefused(401, "token", "the token is missing or wrong")

    def _name(self) -> str:
        # A page in someone's browser cannot set a header of its own for another site: this keeps such requests out.
        name = unquote(self.headers.get(WORKER, ""))
        if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
            raise RequestRefused(400, "form", f"{WORKER} must name the worker, in {LONGEST_NAME} characters at most")
        return name

    def _body(self, limit: int) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            raise RequestRefused(411, "form", "a Content-Length is needed")
        if int(length) > limit:
            raise RequestRefused(413, "size", f"{length} bytes are more than the {limit} that can be meant")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionError("the body ended early")
        self.server.rounds.bytes_in += len(body)
        return body

    def _json(self) -> dict[str, Any]:
        values = json.loads(self._body(JSON_LIMIT))
        if not isinstance(values, dict):
            raise ValueError("a JSON object is expected")
        return values

    def _join(self) -> Any:
        return self.server.rounds.join(self.worker, self._json())

    def _give(self, index: int) -> None:
        self.server.rounds.give(self.worker, index, self._body(most_bytes("fp32", PART)), None)

    def _given(self) -> None:
        values = self._json()
        base = {str(k): str(v) for k, v in dict(values["base"]).items()}
        self.server.rounds.give(self.worker, 0, b"", VectorPlan.read(values["tensors"]), base)

    def _difference(self, index: int) -> None:
        rounds = self.server.rounds
        rounds.put(self.worker, index, self._body(most_bytes(rounds.rule.dtype, PART)))

    def _sent(self) -> Any:
        return self.server.rounds.sent(self.worker, self._json())

    def _wait(self, number: int) -> Any:
        return self.server.rounds.wait(self.worker, number, LONG_POLL)

    def _leave(self) -> None:
        self._body(JSON_LIMIT)
        self.server.rounds.leave(self.worker)

    def _part(self, number: int, kind: str, index: int) -> bytes:
        return self.server.rounds.file(number, kind, index).read_bytes()

    def _status(self) -> Any:
        return self.server.rounds.status()
