"""How hosts' agents reach the book of the meeting: one line of JSON there and one back, a connection each time.

A connection that lasts would outlive a cut link and hang; one per second that is given two seconds cannot.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.config.apart import split_address
from shardwise.errors import UserError
from shardwise.launch.meeting import Answer, Meeting, Report, Seat

LONGEST = 65536  # bytes of a report: whoever sends more is none of ours
WAIT = 2.0  # seconds for one question and its answer


@dataclass(frozen=True)
class Place:
    """Where hosts meet, and the run's name there: agents of another run are turned away."""

    host: str
    port: int
    run: str

    @classmethod
    def parse(cls, text: str, run: str) -> Place:
        try:
            return cls(*split_address(text), run)
        except ValueError:
            problem = "is no address of a host and port"
            raise UserError("--meet", text, problem, "write e.g. --meet node-1:29400") from None

    def is_here(self) -> bool:
        """Whether this host has that address: found by trying to take it."""
        try:
            found = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)
        except OSError:
            return False
        for family, kind, protocol, _, address in found:
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as trial:
                trial.bind(address)
                return True
        return False


class Line:
    """The way to the keeper. Its address is looked up while nothing runs: a name server may be cut off as well."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._address: str | None = None

    def ask(self, report: Report) -> Answer | None:
        """Reports to the keeper; None if it cannot be reached."""
        try:
            if self._address is None or report.state != "running":
                found = socket.getaddrinfo(self._place.host, self._place.port, type=socket.SOCK_STREAM)
                self._address = str(found[0][4][0])
            values = self._exchange(self._address, {"run": self._place.run, "report": asdict(report)})
            if "refused" in values:
                where = f"{self._place.host}:{self._place.port}"
                raise UserError("--meet", where, values["refused"], "use a port of its own for each run")
            return Answer(**values | {"seats": tuple(Seat(**seat) for seat in values["seats"])})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _exchange(self, address: str, message: dict[str, Any]) -> dict[str, Any]:
        with socket.create_connection((address, self._place.port), WAIT) as connection:
            connection.sendall(json.dumps(message).encode() + b"\n")
            with connection.makefile("rb") as stream:
                values = json.loads(stream.readline(LONGEST))
        assert isinstance(values, dict)
        return values


def interface_towards(address: str) -> str | None:
    """The network interface by which this host reaches an address."""
    import psutil

    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: it only chooses the way
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in addresses):
            return str(name)
    return None


def free_port() -> int:
    """A port that nobody listens at just now."""
    with socket.socket() as trial:
        trial.bind(("", 0))
        return int(trial.getsockname()[1])


class Keeper:
    """Serves the book of a meeting until it is closed."""

    def __init__(self, place: Place, meeting: Meeting) -> None:
        self.meeting, self._lock = meeting, threading.Lock()
        keeper = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = WAIT

            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    values = json.loads(self.rfile.readline(LONGEST))
                    self.wfile.write(json.dumps(keeper._reply(values, self.client_address[0], place)).encode() + b"\n")

        # All interfaces: the host's name is often an address of loopback on the host itself.
        server = _Server(("", place.port), Handler, bind_and_activate=False)
        server.allow_reuse_address, server.daemon_threads = True, True
        server.server_bind()
        server.server_activate()
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def _reply(self, values: dict[str, Any], address: str, place: Place) -> dict[str, Any]:
        if values["run"] != place.run:
            return {"refused": "another run meets there"}
        if address.startswith("127."):
            address = place.host  # the keeper's own agent: others know it by the name that they were given
        report = Report(**values["report"])
        with self._lock:
            return self.meeting.hear(report, address, time.monotonic()).as_json()

    def notes(self) -> list[str]:
        """What happened since they were last asked for."""
        with self._lock:
            notes, self.meeting.notes = self.meeting.notes, []
        return notes

    def finish(self, within: float) -> None:
        """Waits until every host has been told of the end, if there is one, then closes."""
        deadline = time.monotonic() + within
        while self.meeting.ending is not None and time.monotonic() < deadline:
            with self._lock:
                if self.meeting.all_told(time.monotonic()):
                    break
            time.sleep(0.1)
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    pass


def lead(place: Place, meeting: Meeting) -> Keeper | None:
    """Keeps the book if the place is on this host and nobody else here does."""
    if not place.is_here():
        return None
    try:
        return Keeper(place, meeting)
    except OSError:
        return None
