"""Transport of the rendezvous: one JSON line each way, over a new connection each time.

A persistent connection would outlive a cut link and hang; one per second with a timeout of two seconds cannot.

Protocol: the keeper sends a nonce; the host sends its own, its report and a proof that it knows the run's token
(token.py); the keeper replies with its order and its own proof. Lines have bounded length and time and contain JSON
only; reports are validated before they are used.
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
    """Address of the rendezvous, and the run's name there: agents of another run are rejected."""

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
        """Whether this host has that address, tested by binding to it."""
        try:
            candidates = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)
        except OSError:
            return False
        for family, kind, protocol, _, address in candidates:
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as trial:
                trial.bind(address)
                return True
        return False


class Line:
    """Client of the keeper. Its address is resolved while no ranks run: the name server may be cut off as well."""

    def __init__(self, place: RendezvousAddress) -> None:
        self._place = place
        self._address: str | None = None
        self._known = False  # whether a keeper of this run has answered
        self.trouble = ""  # why nobody could be asked the last time

    def ask(self, report: HostReport) -> RoundOrder | None:
        """Sends a report to the keeper; None if it cannot be reached."""
        try:
            if self._address is None or report.state != "running":
                resolved = socket.getaddrinfo(self._place.host, self._place.port, type=socket.SOCK_STREAM)
                self._address = str(resolved[0][4][0])
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
        token = self._place.token
        deadline = time.monotonic() + WAIT
        with socket.create_connection((address, self._place.port), WAIT) as connection:
            peer_nonce = str(_object(_line(connection, LONGEST, deadline))["number"])
            own_nonce = secrets.token_hex(16)
            words = json.dumps(message)
            proof = tokens.proof(token, "host", (peer_nonce, own_nonce), words.encode())
            _send(connection, {"number": own_nonce, "words": words, "proof": proof}, deadline)
            reply = _object(_line(connection, LONGEST_ANSWER, deadline))
        if "words" not in reply:  # it does not take us for one of the run's, and so signs nothing
            self._turned_away(str(reply["refused"])[:200])
            return None
        words = str(reply["words"])
        if not tokens.same(reply["proof"], tokens.proof(token, "keeper", (peer_nonce, own_nonce), words.encode())):
            self._turned_away(STRANGER)
            return None
        return _object(words.encode())

    def _turned_away(self, why: str) -> None:
        """Raises if we were rejected from the beginning; later on it is another process at that address."""
        if not self._known:
            raise self._mistake(why, f"give all hosts of the run one token: {tokens.HOW}")

    def _mistake(self, problem: str, remedy: str) -> UserError:
        return UserError("--rendezvous", f"{self._place.host}:{self._place.port}", problem, remedy)


def _line(connection: socket.socket, limit: int, deadline: float) -> bytes:
    """Reads a line of at most `limit` bytes; raises OSError after the deadline, however slowly data arrive."""
    line = bytearray()
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        received = connection.recv(min(65536, limit + 1 - len(line)))
        if not received or len(line) + len(received) > limit or time.monotonic() > deadline:
            raise OSError("no answer")
        line += received
    return bytes(line)


def _send(connection: socket.socket, values: dict[str, Any], deadline: float) -> None:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    connection.sendall(json.dumps(values).encode() + b"\n")


def _object(text: bytes) -> dict[str, Any]:
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("an object is expected")
    return values


def interface_towards(address: str) -> str | None:
    """The network interface through which this host reaches an address."""
    import psutil

    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: it only chooses the way
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in addresses):
            return str(name)
    return None


def free_port() -> int:
    """A port that is currently free."""
    with socket.socket() as trial:
        trial.bind(("", 0))
        return int(trial.getsockname()[1])


class Keeper:
    """Serves a rendezvous until it is closed."""

    def __init__(
        self, place: RendezvousAddress, meeting: Rendezvous, log: Callable[[str], None] = lambda _: None
    ) -> None:
        self.meeting = meeting
        self._place = place
        self._lock = threading.Lock()
        self._log = log
        self._refused = set[str]()
        keeper = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                    keeper._serve(self.request, self.client_address[0])

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

    def _serve(self, connection: socket.socket, address: str) -> None:
        """Handles one host's report."""
        token = self._place.token
        nonce = secrets.token_hex(16)
        deadline = time.monotonic() + WAIT
        _send(connection, {"number": nonce}, deadline)
        request = _object(_line(connection, LONGEST, deadline))
        numbers = (nonce, str(request["number"]))
        words = str(request["words"])
        if not tokens.same(request["proof"], tokens.proof(token, "host", numbers, words.encode())):
            if address not in self._refused:
                self._refused.add(address)
                reason = "without this run's token" if token is not None else "with a token, and this host has none"
                self._log(f"a host at {address} came {reason}, and was refused")
            _send(connection, {"refused": NO_TOKEN if token is not None else "the others have no token"}, deadline)
            return
        answer = json.dumps(self._reply(_object(words.encode()), address))
        proof = tokens.proof(token, "keeper", numbers, answer.encode())
        _send(connection, {"words": answer, "proof": proof}, deadline)

    def _reply(self, values: dict[str, Any], address: str) -> dict[str, Any]:
        if values["run"] != self._place.run:
            return {"refused": "another run meets there"}
        if address.startswith("127.") or address == "::1":
            address = self._place.host  # the keeper's own agent: others know it by the name that they were given
        report = HostReport.read(values["report"])
        with self._lock:
            return self.meeting.hear(report, address, time.monotonic()).as_json()

    def notes(self) -> list[str]:
        """Events since the last call."""
        with self._lock:
            notes = self.meeting.notes
            self.meeting.notes = []
        return notes

    def finish(self, within: float) -> None:
        """Waits until every host has been informed of the end, if there is one, then closes."""
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


def lead(place: RendezvousAddress, meeting: Rendezvous, log: Callable[[str], None] = lambda _: None) -> Keeper | None:
    """Starts a Keeper if the address belongs to this host and no other process here has it."""
    if not place.is_here():
        return None
    try:
        return Keeper(place, meeting, log)
    except OSError:
        return None
