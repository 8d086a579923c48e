"""How hosts' agents reach the book of the meeting: one line of JSON there and one back, a connection each time.

A connection that lasts would outlive a cut link and hang; one per second that is given two seconds cannot.

On the wire: the keeper sends a number that it drew; the host sends one of its own, its report and the proof that it
knows the run's token (token.py); the keeper sends its answer with a proof of its own. Lines of bounded length and
time, JSON and nothing that could run; what a report says is checked before it gets into the book.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwise.config.diloco import split_address
from shardwise.core.bounded_threads import BoundedThreads
from shardwise.core.errors import UserError
from shardwise.launch import token as tokens
from shardwise.launch.rendezvous import HostReport, Rendezvous, RoundOrder, Seat

LONGEST = 65536  # bytes of a report: whoever sends more is none of ours
LONGEST_ANSWER = 4 << 20  # it names every host
WAIT = 2.0  # seconds for one question and its answer
CONNECTIONS = 1024  # at once; more are turned away
NO_TOKEN = "this host's token is missing or not the others'"
STRANGER = "what answers there does not know this run's token"


@dataclass(frozen=True)
class RendezvousAddress:
    """Where hosts meet, and the run's name there: agents of another run are turned away."""

    host: str
    port: int
    run: str
    token: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, text: str, run: str, token: str | None = None) -> RendezvousAddress:
        try:
            return cls(*split_address(text), run, token)
        except ValueError:
            problem = "is no address of a host and port"
            raise UserError("--rendezvous", text, problem, "write e.g. --rendezvous node-1:29400") from None

    def is_loopback(self) -> bool:
        """Whether only this host can reach it."""
        from shardwise.core.network import is_loopback

        return is_loopback(self.host)

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

    def __init__(self, place: RendezvousAddress) -> None:
        self._place = place
        self._address: str | None = None
        self._known = False  # whether a keeper of this run has answered
        self.trouble = ""  # why nobody could be asked the last time

    def ask(self, report: HostReport) -> RoundOrder | None:
        """Reports to the keeper; None if it cannot be reached."""
        try:
            if self._address is None or report.state != "running":
                found = socket.getaddrinfo(self._place.host, self._place.port, type=socket.SOCK_STREAM)
                self._address = str(found[0][4][0])
            values = self._exchange(self._address, {"run": self._place.run, "report": asdict(report)})
            if values is None:
                self.trouble = STRANGER
                return None
            self._known = True
            if "refused" in values:
                raise self._mistake(str(values["refused"]), "use a port of its own for each run")
            seats = tuple(Seat(**seat) for seat in values["seats"])
            return RoundOrder(**values | {"seats": seats, "there": tuple(str(name) for name in values["there"])})
        except socket.gaierror as error:
            self.trouble = f"{self._place.host} is not known here: {error.strerror}"
        except OSError as error:
            self.trouble = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        except (ValueError, KeyError, TypeError, RecursionError):
            self.trouble = "what answers there is no meeting of hosts"
        return None

    def _exchange(self, address: str, message: dict[str, Any]) -> dict[str, Any] | None:
        token, deadline = self._place.token, time.monotonic() + WAIT
        with socket.create_connection((address, self._place.port), WAIT) as connection:
            theirs, ours = str(_object(_line(connection, LONGEST, deadline))["number"]), secrets.token_hex(16)
            words = json.dumps(message)
            shown = tokens.proof(token, "host", (theirs, ours), words.encode())
            _send(connection, {"number": ours, "words": words, "proof": shown}, deadline)
            said = _object(_line(connection, LONGEST_ANSWER, deadline))
        if "words" not in said:  # it does not take us for one of the run's, and so signs nothing
            self._turned_away(str(said["refused"])[:200])
            return None
        words = str(said["words"])
        if not tokens.same(said["proof"], tokens.proof(token, "keeper", (theirs, ours), words.encode())):
            self._turned_away(STRANGER)
            return None
        return _object(words.encode())

    def _turned_away(self, why: str) -> None:
        """A mistake if it was so from the beginning; later a stranger has taken the place, and is not listened to."""
        if not self._known:
            raise self._mistake(why, f"give all hosts of the run one token: {tokens.HOW}")

    def _mistake(self, problem: str, remedy: str) -> UserError:
        return UserError("--rendezvous", f"{self._place.host}:{self._place.port}", problem, remedy)


def _line(connection: socket.socket, most: int, deadline: float) -> bytes:
    """A line of so many bytes at most; OSError if it is not there in time, however slowly it trickles in."""
    found = bytearray()
    while not found.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(min(65536, most + 1 - len(found)))
        if not data or len(found) + len(data) > most or time.monotonic() > deadline:
            raise OSError("no answer")
        found += data
    return bytes(found)


def _send(connection: socket.socket, values: dict[str, Any], deadline: float) -> None:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    connection.sendall(json.dumps(values).encode() + b"\n")


def _object(text: bytes) -> dict[str, Any]:
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("an object is expected")
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

    def __init__(
        self, place: RendezvousAddress, meeting: Rendezvous, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self.meeting, self._place, self._lock = meeting, place, threading.Lock()
        self._tell, self._refused = tell, set[str]()
        keeper = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                    keeper._converse(self.request, self.client_address[0])

        # All interfaces: the host's name is often an address of loopback on the host itself.
        everywhere = "::" if ":" in place.host else ""
        where = place.host if place.is_loopback() else everywhere
        server = _Server((where, place.port), Handler, bind_and_activate=False)
        server.allow_reuse_address = True
        try:
            server.server_bind()
            server.server_activate()
        except OSError:
            server.server_close()
            raise
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def _converse(self, connection: socket.socket, address: str) -> None:
        """One host's report and the answer."""
        token, ours, deadline = self._place.token, secrets.token_hex(16), time.monotonic() + WAIT
        _send(connection, {"number": ours}, deadline)
        said = _object(_line(connection, LONGEST, deadline))
        numbers, words = (ours, str(said["number"])), str(said["words"])
        if not tokens.same(said["proof"], tokens.proof(token, "host", numbers, words.encode())):
            if address not in self._refused:
                self._refused.add(address)
                why = "without this run's token" if token is not None else "with a token, and this host has none"
                self._tell(f"a host at {address} came {why}, and was refused")
            _send(connection, {"refused": NO_TOKEN if token is not None else "the others have no token"}, deadline)
            return
        answer = json.dumps(self._reply(_object(words.encode()), address))
        shown = tokens.proof(token, "keeper", numbers, answer.encode())
        _send(connection, {"words": answer, "proof": shown}, deadline)

    def _reply(self, values: dict[str, Any], address: str) -> dict[str, Any]:
        if values["run"] != self._place.run:
            return {"refused": "another run meets there"}
        if address.startswith("127.") or address == "::1":
            address = self._place.host  # the keeper's own agent: others know it by the name that they were given
        report = HostReport.read(values["report"])
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


class _Server(BoundedThreads, socketserver.TCPServer):
    def __init__(self, address: tuple[str, int], *args: Any, **kwargs: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, *args, connections=CONNECTIONS, **kwargs)


def lead(place: RendezvousAddress, meeting: Rendezvous, tell: Callable[[str], None] = lambda _: None) -> Keeper | None:
    """Keeps the book if the place is on this host and nobody else here does."""
    if not place.is_here():
        return None
    try:
        return Keeper(place, meeting, tell)
    except OSError:
        return None
