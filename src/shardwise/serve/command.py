"""`shardwise serve`: checks the options, loads the models, and runs the server until it is stopped."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from shardwise.core.errors import Interrupted, UserError
from shardwise.core.network import bind, find_key, is_loopback
from shardwise.serve.rate import Rate, parse_rate

INSTALL = "pip install 'shardwise[serve]'"
MOST_AT_ONCE = 1024  # connections
GRACE = 10.0  # seconds that answers under way have after Ctrl-C or SIGTERM


@dataclass(frozen=True)
class ServeOptions:
    """Options of the command line."""

    words: list[str]
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_env: str | None = None
    max_tokens: int = 4096
    max_concurrent: int = 64
    queue: int = 256
    timeout: float = 600.0
    rate: str | None = None
    name: str | None = None
    open: bool = False
    engine: str = "auto"
    log_prompts: bool = False
    changed_tokenizer: bool = False


def serve(options: ServeOptions) -> None:
    """Serves the models until Ctrl-C or SIGTERM."""
    from shardwise.serve import vllm
    from shardwise.serve.models import split_names

    places = split_names(options.words, options.name)
    key = find_key(options.api_key_env)
    rate = None if options.rate is None else Rate(*parse_rate(options.rate))
    local = is_loopback(options.host)
    if not local and key is None and not options.open:
        problem = "would let anyone on the network use the model"
        remedy = "set a key (--api-key-env NAME), or pass --open if that is what you want"
        raise UserError("--host", options.host, problem, remedy)
    if vllm.wanted(options, places):
        vllm.run(options, places, key)
        return
    _need_server()
    listener = bind(options.host, options.port)
    with listener:
        try:
            _run(options, places, key, rate, local, listener)
        except KeyboardInterrupt:
            raise Interrupted("stopped before it was up", 130) from None


def _run(
    options: ServeOptions,
    places: dict[str, str],
    key: str | None,
    rate: Rate | None,
    local: bool,
    listener: socket.socket,
) -> None:
    import uvicorn

    from shardwise.export.inference import load_for_inference
    from shardwise.serve.app import Api, Policy
    from shardwise.serve.engine import BatchingEngine, Limits
    from shardwise.serve.models import load_models

    changed = options.changed_tokenizer
    models = load_models(places, changed, lambda place: load_for_inference(place, changed))
    on_gpu = any(served.model.device.type != "cpu" for served in models)
    limits = Limits(options.max_concurrent, options.queue, options.timeout, 4096 if on_gpu else 512)
    engine = BatchingEngine(models, limits)
    policy = Policy(key, options.max_tokens, rate, local, log_prompts=options.log_prompts)
    config = web_config(Api(models, engine, policy).app())

    class Server(uvicorn.Server):
        """Tells the engine to come to an end as soon as a signal comes."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """As uvicorn's, but a stop that was asked for is no failure: the signal is not raised again."""
            kinds = (signal.SIGINT, signal.SIGTERM)
            before = {kind: signal.signal(kind, self.handle_exit) for kind in kinds}
            try:
                yield
            finally:
                for kind, handler in before.items():
                    signal.signal(kind, handler)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Once: answers under way may end. Twice: no more waiting."""
            engine.drain(0 if self.should_exit else GRACE)
            super().handle_exit(sig, frame)

    _log_to_stderr()
    engine.start()
    print(banner(options, listener, [served.name for served in models], key is not None), flush=True)
    try:
        Server(config).run(sockets=[listener])
    finally:
        engine.close()


def web_config(app: Any) -> Any:
    """Returns uvicorn's configuration, with limits on connections and on slow clients."""
    import uvicorn

    from shardwise.serve.request_timeout import HeadTimeoutProtocol

    return uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=int(GRACE) + 5,
        timeout_keep_alive=30, lifespan="off", ws="none", http=HeadTimeoutProtocol,
        h11_max_incomplete_event_size=16 << 10, limit_concurrency=MOST_AT_ONCE,
    )  # fmt: skip


def banner(options: ServeOptions, listener: socket.socket, names: list[str], with_key: bool) -> str:
    """Returns what a user needs to know once the server is up: address, models, and a command to try."""
    host, port = listener.getsockname()[:2]
    shown_host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown_host}:{port}/v1"
    question = json.dumps({"model": names[0], "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64})
    header = f' -H "Authorization: Bearer ${options.api_key_env}"' if with_key else ""
    return "\n".join([
        f"serving {', '.join(names)} at {url} (Ctrl-C stops)",
        f"  {options.max_concurrent} at once, {options.queue} may wait, answers up to {options.max_tokens} tokens"
        + (f", {options.rate} per client" if options.rate else ""),
        f"  curl {url}/chat/completions -H 'Content-Type: application/json'{header} -d '{question}'",
    ])  # fmt: skip


def _need_server() -> None:
    import importlib.util

    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError("serve", None, f"needs {' and '.join(missing)}, which the base install leaves out", INSTALL)


def _log_to_stderr() -> None:
    handler: Any = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for name, level in (("shardwise.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
