"""The port where the hosts of a run meet."""

from __future__ import annotations

import json
import pickle
import socket
import threading
import time
from dataclasses import asdict, replace
from typing import Any

from security.ground import TOKEN, Bomb, GotThrough, Ground, attempt, environment, patched, refused

from shardwise.launch.rendezvous import HostReport
from shardwise.launch.rendezvous_link import LONGEST, Line, RendezvousAddress

HOSTS = "hosts"
REPORT = HostReport("evil-1", "evil", 1, 4242, "waiting")


def _stranger(ground: Ground, token: str | None) -> str:
    keeper, place = ground.hosts
    words = refused(lambda: Line(replace(place, token=token)).ask(REPORT))
    _unknown(keeper)
    return words


def _unknown(keeper: Any) -> None:
    if any("evil" in host for host in keeper.meeting._hosts):
        raise GotThrough("the stranger is in the book")


def _converse(place: RendezvousAddress, *lines: bytes) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Sends lines behind the keeper's greeting; its number and its answer, if it gives one."""
    with socket.create_connection((place.host, place.port), 5) as connection, connection.makefile("rb") as stream:
        greeting = json.loads(stream.readline())
        try:
            for line in lines:
                connection.sendall(line)
            said = stream.readline()
        except ConnectionError:
            said = b""
    return greeting, json.loads(said) if said else None


def _unheard(ground: Ground, *lines: bytes) -> str:
    keeper, place = ground.hosts
    _, said = _converse(place, *lines)
    _unknown(keeper)
    if said is not None and "refused" not in said:
        raise GotThrough(str(said))
    return str(said["refused"]) if said else "the connection is closed without an answer"


@attempt(HOSTS, "a host without the token")
def _(ground: Ground) -> str:
    return _stranger(ground, None)


@attempt(HOSTS, "a host with a wrong token")
def _(ground: Ground) -> str:
    return _stranger(ground, TOKEN + "x")


@attempt(HOSTS, "a report that was overheard, sent once more")
def _(ground: Ground) -> str:
    """A listener between an honest host and the keeper writes down what goes by."""
    _, place = ground.hosts
    overheard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as between:

        def listen() -> None:
            ours, _ = between.accept()
            with ours, socket.create_connection((place.host, place.port), 5) as theirs:
                ours.sendall(theirs.makefile("rb").readline())
                overheard.append(ours.makefile("rb").readline())
                theirs.sendall(overheard[0])
                ours.sendall(theirs.makefile("rb").readline())

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        honest = HostReport("honest-1", "honest", 1, 4242, "waiting")
        answer = Line(replace(place, port=between.getsockname()[1])).ask(honest)
        thread.join(5)
    assert answer is not None and TOKEN.encode() not in overheard[0], "the honest host was heard, its token was not"
    return _unheard(ground, overheard[0])


@attempt(HOSTS, "an honest host's report, changed on its way")
def _(ground: Ground) -> str:
    from shardwise.launch import token as tokens

    _, place = ground.hosts
    with socket.create_connection((place.host, place.port), 5) as connection, connection.makefile("rb") as stream:
        number = json.loads(stream.readline())["number"]
        words = json.dumps({"run": "ours", "report": asdict(replace(REPORT, host="honest-2"))})
        shown = tokens.proof(TOKEN, "host", (number, "1"), words.encode())
        changed = words.replace("waiting", "leaving")
        connection.sendall(json.dumps({"number": "1", "words": changed, "proof": shown}).encode() + b"\n")
        said = json.loads(stream.readline())
    if "refused" not in said:
        raise GotThrough(str(said))
    return str(said["refused"])


@attempt(HOSTS, "a stranger in the keeper's place, who orders hosts about")
def _(ground: Ground) -> str:
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def order() -> None:
            connection, _ = stranger.accept()
            with connection, connection.makefile("rb") as stream:
                connection.sendall(b'{"number": "1"}\n')
                stream.readline()
                words = json.dumps({"order": "end", "seats": []})
                connection.sendall(json.dumps({"words": words, "proof": ""}).encode() + b"\n")

        threading.Thread(target=order, daemon=True).start()
        place = RendezvousAddress("127.0.0.1", stranger.getsockname()[1], "ours", TOKEN)
        return refused(lambda: Line(place).ask(REPORT))


def _signed(ground: Ground, report: dict[str, Any]) -> str:
    """A report of one who has the token, and means harm all the same."""
    from shardwise.launch import token as tokens

    keeper, place = ground.hosts
    with socket.create_connection((place.host, place.port), 5) as connection, connection.makefile("rb") as stream:
        number = json.loads(stream.readline())["number"]
        words = json.dumps({"run": "ours", "report": asdict(REPORT) | report})
        shown = tokens.proof(TOKEN, "host", (number, "1"), words.encode())
        connection.sendall(json.dumps({"number": "1", "words": words, "proof": shown}).encode() + b"\n")
        said = stream.readline()
    if said:
        raise GotThrough(said.decode())
    _unknown(keeper)
    return "the connection is closed without an answer; the report is not in the book"


@attempt(HOSTS, "a host that is called ../../secret.txt")
def _(ground: Ground) -> str:
    return _signed(ground, {"host": "../../evil", "name": "evil"})


@attempt(HOSTS, "a host with escape codes for a name")
def _(ground: Ground) -> str:
    return _signed(ground, {"name": "evil\x1b[2J"})


@attempt(HOSTS, "a host with -5 ranks")
def _(ground: Ground) -> str:
    return _signed(ground, {"ranks": -5})


@attempt(HOSTS, "a line of 1 MB")
def _(ground: Ground) -> str:
    assert LONGEST < 1 << 20
    return _unheard(ground, b"x" * (1 << 20))


@attempt(HOSTS, "a pickle bomb")
def _(ground: Ground) -> str:
    return _unheard(ground, pickle.dumps(Bomb(ground.mark)) + b"\n")


@attempt(HOSTS, "60,000 brackets")
def _(ground: Ground) -> str:
    return _unheard(ground, b"[" * 60_000 + b"\n")


@attempt(HOSTS, "a report that comes byte by byte and never ends")
def _(ground: Ground) -> str:
    from shardwise.launch import rendezvous_link as link

    _, place = ground.hosts
    began = time.monotonic()
    with patched(link, "WAIT", 0.4), socket.create_connection((place.host, place.port), 5) as connection:
        try:
            while time.monotonic() - began < 6:
                connection.sendall(b"x")
                time.sleep(0.05)
        except ConnectionError:
            return "the connection is closed after the 0.4 s allowed here (2 as installed)"
    raise GotThrough("it listened for 6 s")


@attempt(HOSTS, "a token file that other users can read")
def _(ground: Ground) -> str:
    from shardwise.launch.token import take_token

    file = ground.folder / "token"
    file.write_text(TOKEN)
    file.chmod(0o644)
    return refused(lambda: take_token(file))


@attempt(HOSTS, "a token that could be guessed")
def _(ground: Ground) -> str:
    from shardwise.launch.token import take_token

    with environment(SHARDWISE_MEETING_TOKEN="sesame"):
        return refused(lambda: take_token(None))
