"""Where hostile inputs are tried: a folder for each, servers that all share, and what would show that one got through.

An attempt runs the real code and returns the words with which it was refused. Three things betray one that was not: no
refusal; the mark, a file that only a bomb's code would write; and the secret, a text that lies where nothing may reach.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.core.errors import RunFailed, UserError

SECRET = "swordfish-7319-lies-outside"
TOKEN = "a-token-that-is-long-enough"
EVIL = "<script>alert(1)</script>"


class GotThrough(AssertionError):
    """What was tried has worked."""


@dataclass(frozen=True)
class Attempt:
    """One hostile input."""

    area: str
    tried: str
    run: Callable[[Ground], str]


ATTEMPTS: list[Attempt] = []


def attempt(area: str, tried: str) -> Callable[[Callable[[Ground], str]], Callable[[Ground], str]]:
    """Adds a function to the collection."""

    def add(run: Callable[[Ground], str]) -> Callable[[Ground], str]:
        ATTEMPTS.append(Attempt(area, tried, run))
        return run

    return add


class Bomb:
    """Writes the mark when it is read as a pickle."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def refused(call: Callable[[], Any]) -> str:
    """The words of a refusal that a user would read."""
    try:
        found = call()
    except (UserError, RunFailed) as error:
        return str(error)
    raise GotThrough(f"nobody objected; the outcome is {str(found)[:200]!r}")


@dataclass
class Reply:
    """What a server answered; 0 if it hung up."""

    status: int
    headers: dict[str, str]
    body: str
    seconds: float = 0.0

    def refusal(self, *statuses: int) -> str:
        """Its words, if it is one of these refusals."""
        if self.status not in statuses:
            raise GotThrough(f"answered with {self.status}: {self.body[:200]!r}")
        return f"{self.status} {' '.join(self.body.split())}" if self.status else "the connection is closed"


def say(port: int, data: bytes, pause: float = 0.0, within: float = 10.0) -> Reply:
    """Sends bytes as they are, one by one where there is a pause, and reads until the server hangs up."""
    began, heard = time.monotonic(), b""
    with socket.create_connection(("127.0.0.1", port), within) as connection, contextlib.suppress(ConnectionError):
        for piece in [bytes([one]) for one in data] if pause else [data]:
            connection.sendall(piece)
            time.sleep(pause)
            if time.monotonic() - began > within:
                raise GotThrough(f"it listened for {within:g} s")
        while block := connection.recv(65536):
            heard += block
            if b"\r\n\r\n" in heard and b"connection: close" not in data.lower() + heard.lower():
                break
    head, _, body = heard.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    status = int(first.split()[1]) if first.startswith("HTTP/") else 0
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Reply(status, headers, body.decode(errors="replace"), time.monotonic() - began)


def request(method: str, path: str, host: str = "127.0.0.1", body: bytes = b"", **headers: str) -> bytes:
    """An HTTP request as it stands, without a client that would tidy the path."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body and "Content_Length" not in headers:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """For as long as it lasts."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Variables, for as long as it lasts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@dataclass
class Ground:
    """What attempts share."""

    root: Path
    for_the_page: bool = False  # the words are to be shown: the limits are the real ones, which take longer to reach
    folder: Path = field(init=False)
    mark: Path = field(init=False)
    _closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _number: int = 0

    def __post_init__(self) -> None:
        (self.root / "secret.txt").write_text(SECRET)

    def run(self, one: Attempt) -> str:
        """The words with which an attempt is refused; GotThrough if it is not."""
        self._number += 1
        self.folder = self.root / f"attempt-{self._number}"
        self.folder.mkdir()
        self.mark = self.folder / "mark"
        words = one.run(self)
        if self.mark.exists():
            raise GotThrough("its code was run")
        if SECRET in words:
            raise GotThrough(f"the secret is in {words[:200]!r}")
        if len(words.strip()) < 12:
            raise GotThrough(f"no clear words: {words!r}")
        return words

    def command(self, *words: str) -> str:
        """What the command line says to the user's mistake."""
        from shardwise.cli import main as cli

        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                cli.main(list(words))
                code: object = 0
            except SystemExit as left:
                code = left.code
        text = said.getvalue()
        if code != 2 or "Traceback" in text:
            raise GotThrough(f"it ended with {code}: {text[-300:]!r}")
        return text.strip()

    def close(self) -> None:
        """Ends the servers."""
        self._closing.close()

    @cached_property
    def tokenizer(self) -> str:
        """A small tokenizer's folder."""
        from support.tiny import tokenizer_folder

        return tokenizer_folder(self.root / "tokenizer")

    @cached_property
    def model(self) -> Path:
        """A small model's folder."""
        from support.tiny import LLAMA, saved_model

        return Path(saved_model(self.root / "model", LLAMA))

    @cached_property
    def runs(self) -> Path:
        """A folder of runs; one has a script for a name, in its log and in its samples, and a link for a log."""
        from support.watched import make_run, write_lines

        folder = self.root / "runs"
        run = make_run(folder / EVIL.replace("/", ""))
        (run / "logs/rank-0.log").write_text(f"{EVIL}\n\x1b]0;title\x07\x1b[2J\n")
        (run / "logs/rank-1.log").unlink()
        (run / "logs/rank-1.log").symlink_to(self.root / "secret.txt")
        write_lines(run / "samples.jsonl", [{"step": 1, "prompt": EVIL, "text": EVIL}])
        make_run(folder / 'name"} 1\nshardwise_forged{run="x')
        return folder

    @cached_property
    def watch(self) -> int:
        """The port of a dashboard with a token."""
        from shardwise.watch.command import listen, server
        from shardwise.watch.finder import Finder

        listener = listen("127.0.0.1", 0)
        return self._serve(server(Finder([self.runs]), listener, "127.0.0.1", TOKEN), listener)

    @cached_property
    def serve(self) -> int:
        """The port of a model server on loopback, without a key."""
        return self._model_server(None)

    @cached_property
    def serve_with_key(self) -> int:
        """The port of one with a key."""
        return self._model_server(TOKEN)

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        return AutoModelForCausalLM.from_pretrained(self.model).eval(), AutoTokenizer.from_pretrained(self.model)

    def _model_server(self, key: str | None) -> int:
        import uvicorn

        from shardwise.core.network import bind
        from shardwise.serve.app import Api, Policy
        from shardwise.serve.command import web_config
        from shardwise.serve.engine import BatchingEngine, Limits
        from shardwise.serve.models import Models, Served

        models = Models([Served("tiny", *self._loaded)])
        engine = BatchingEngine(models, Limits(4, 4, 60.0, 512))
        listener = bind("127.0.0.1", 0)
        return self._serve(uvicorn.Server(web_config(Api(models, engine, Policy(key)).app())), listener)

    def _serve(self, web: Any, listener: socket.socket) -> int:
        thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not web.started:
            time.sleep(0.01)

        def end() -> None:
            web.should_exit = True
            thread.join(10)
            listener.close()

        self._closing.callback(end)
        return int(listener.getsockname()[1])

    @cached_property
    def apart(self) -> int:
        """The port of a meeting point of workers, with a token."""
        from shardwise.core.network import bind
        from shardwise.diloco.command import SyncServerOptions, rule_of
        from shardwise.diloco.ledger import RoundLedger
        from shardwise.diloco.rounds import Rounds
        from shardwise.diloco.server import MeetServer

        listener = bind("127.0.0.1", 0)
        rounds = Rounds(RoundLedger(self.root / "apart"), rule_of(SyncServerOptions()), lambda text: None)
        server = MeetServer(listener, rounds, TOKEN)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        self._closing.callback(lambda: (server.shutdown(), server.server_close()))
        return int(listener.getsockname()[1])

    @cached_property
    def hosts(self) -> Any:
        """The keeper of a meeting of hosts, with a token, and its place."""
        from shardwise.launch.rendezvous import Rendezvous, Rules
        from shardwise.launch.rendezvous_link import Keeper, RendezvousAddress, free_port

        place = RendezvousAddress("127.0.0.1", free_port(), "ours", TOKEN)
        keeper = Keeper(place, Rendezvous(Rules(2, 2), "a"))
        self._closing.callback(keeper.close)
        return keeper, place


@contextlib.contextmanager
def ground() -> Iterator[Ground]:
    """A ground of its own, with a cache of its own."""
    with tempfile.TemporaryDirectory(prefix="shardwise-security-") as folder:
        made = Ground(Path(folder))
        try:
            # No trial of this CPU's half precision, which takes long and has nothing to do with this.
            resolve = importlib.import_module("shardwise.config.resolve")
            own = environment(SHARDWISE_CACHE=str(made.root / "cache"), SHARDWISE_PROGRESS="off")
            with own, patched(resolve, "gain_of_bf16", lambda: 0.0):
                yield made
        finally:
            made.close()


def short(words: str, root: Path) -> str:
    """A refusal for a table: its first line, without what differs from one time to the next."""
    lines = [line for line in words.splitlines() if line.strip()]
    text = next((line for line in lines if line.startswith("error:")), lines[0]).replace(str(root), "…")
    text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:…", text)
    text = re.sub(r"…/attempt-\d+", "…", text)
    text = re.sub(r"[^\x20-\x7e…→×é–’]", "?", text).strip()
    return text if len(text) <= 160 else f"{text[:159]}…"
