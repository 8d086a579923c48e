"""`shardwise watch`: validates the options; serves the dashboard, draws in the terminal, or writes one page."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.core.errors import UserError
from shardwise.watch.finder import Finder, check_roots

INSTALL = "pip install 'shardwise[watch]'; or use --terminal or --html, which need nothing else"
PORT = 8765
MOST_AT_ONCE = 64  # connections: a browser keeps six


@dataclass(frozen=True)
class WatchOptions:
    """Command-line options of `shardwise watch`."""

    folders: Sequence[Path]
    host: str = "127.0.0.1"
    port: int | None = None  # None: the usual one, or a free one where that is taken
    token_env: str | None = None
    terminal: bool = False
    html: Path | None = None


def watch(options: WatchOptions) -> None:
    """Shows the runs until Ctrl-C, or writes the page and returns."""
    finder = Finder(check_roots(options.folders))
    if options.html is not None:
        from shardwise.watch.snapshot import write_snapshot

        write_snapshot(finder, options.html)
        print(f"written to {options.html}")
        return
    if options.terminal:
        from shardwise.watch.terminal import show

        show(finder)
        return
    token = find_token(options.host, options.token_env)
    need_server()
    with listen(options.host, options.port) as listener:
        print(banner(finder, listener, token), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server(finder, listener, options.host, token).run(sockets=[listener])


@contextlib.contextmanager
def beside(output: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Serves the dashboard of one run in a thread, on this machine only, while the run lasts."""
    need_server()
    finder = Finder([output])
    with listen("127.0.0.1", None) as listener:
        web = server(finder, listener, "127.0.0.1", None)
        thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]}, name="watch", daemon=True)
        thread.start()
        say(f"watch it at {address(listener, None)}")
        try:
            yield
        finally:
            web.should_exit = True
            thread.join(timeout=3)


def server(finder: Finder, listener: socket.socket, host: str, token: str | None) -> Any:
    """The HTTP server on a socket that already listens."""
    import uvicorn

    from shardwise.core.network import is_loopback
    from shardwise.serve.request_timeout import HeadTimeoutProtocol
    from shardwise.watch.app import AccessControl, Pages

    door = AccessControl(token, is_loopback(host), f"shardwise_watch_{listener.getsockname()[1]}")
    threading.Thread(target=_read_ahead, args=(finder,), name="first look", daemon=True).start()
    return uvicorn.Server(
        uvicorn.Config(
            Pages(finder, door).app(), log_level="error", access_log=False, server_header=False, lifespan="off",
            ws="none", limit_concurrency=MOST_AT_ONCE, timeout_keep_alive=15, timeout_graceful_shutdown=1,
            http=HeadTimeoutProtocol, h11_max_incomplete_event_size=16 << 10,
        )
    )  # fmt: skip


def _read_ahead(finder: Finder) -> None:
    """Reads the runs in advance, before the browser connects."""
    for run in finder.runs():
        run.refresh()
        time.sleep(0)


def find_token(host: str, variable: str | None) -> str | None:
    """The token from the environment; generated if the network can reach us, none on this machine only."""
    from shardwise.core.network import is_loopback

    if variable is not None:
        token = os.environ.get(variable, "").strip()
        if len(token) < 16 or not token.isascii() or not token.replace("-", "").replace("_", "").isalnum():
            remedy = f"export {variable}=… with 16 or more letters, digits, - or _; or leave --token-env out"
            raise UserError("--token-env", variable, "holds no token that is fit for use", remedy)
        return token
    return None if is_loopback(host) else secrets.token_urlsafe(24)


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket on the default port, or any free one if another dashboard has it."""
    from shardwise.core.network import bind

    if port is not None:
        return bind(host, port)
    try:
        return bind(host, PORT)
    except UserError:
        return bind(host, 0)


def address(listener: socket.socket, token: str | None) -> str:
    """URL of the dashboard."""
    host, port = listener.getsockname()[:2]
    hostname = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(
        host, f"[{host}]" if ":" in host else host
    )
    return f"http://{hostname}:{port}/" + (f"?token={token}" if token else "")


def banner(finder: Finder, listener: socket.socket, token: str | None) -> str:
    """Startup message with the runs and the URL."""
    runs = finder.runs()
    names = ", ".join(run.name for run in runs[:3]) + (", …" if len(runs) > 3 else "")
    found_runs = (
        f"{len(runs)} run{'s' * (len(runs) != 1)} ({names})" if runs else "no run yet: they come up as they begin"
    )
    lines = [f"watching {found_runs}", f"  {address(listener, token)}   (Ctrl-C stops)"]
    if token:
        lines.append(
            "  whoever has this address can see the runs; it is not encrypted: trust the network, or use ssh -L"
        )
    return "\n".join(lines)


def need_server() -> None:
    """Raises UserError if the server's packages are not installed."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError("watch", None, f"needs {' and '.join(missing)}, which the base install leaves out", INSTALL)
