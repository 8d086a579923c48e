"""`shardwise diloco-server`: validates the options, listens, and runs the sync server until it is stopped."""

from __future__ import annotations

import signal
import socket
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from shardwise.core.errors import RunFailed, UserError
from shardwise.core.network import bind, find_key, is_loopback
from shardwise.core.stop_requested import StopRequested


@dataclass(frozen=True)
class SyncServerOptions:
    """Command-line options; None = the method's default."""

    host: str = "127.0.0.1"
    port: int = 29400
    state: Path = Path("out/diloco")
    method: str = "diloco"
    outer: str | None = None
    rate: float | None = None
    momentum: float | None = None
    weight: str | None = None
    dtype: str = "fp32"
    wait: str = "60s"
    least: int = 1
    token_env: str | None = None
    open: bool = False


def meet(options: SyncServerOptions) -> None:
    """Runs the sync server until Ctrl-C or SIGTERM."""
    from shardwise.diloco.ledger import RoundLedger
    from shardwise.diloco.rounds import Rounds
    from shardwise.diloco.server import MeetServer

    rule = rule_of(options)
    token = find_key(options.token_env, "--token-env")
    if not is_loopback(options.host) and token is None and not options.open:
        problem = "would let anyone on the network change the model"
        remedy = "set a token (--token-env NAME), or pass --open if that is what you want"
        raise UserError("--host", options.host, problem, remedy)
    if options.open and (token is not None or is_loopback(options.host)):
        problem = "is for listening elsewhere than here without a token, and "
        problem += "there is one (--token-env)" if token is not None else f"--host {options.host} is here"
        raise UserError("--open", None, problem, "leave it out")
    lock = _only_one(options.state.expanduser())
    listener = bind(options.host, options.port)
    try:
        ledger = RoundLedger(options.state.expanduser())
        rounds = Rounds(ledger, rule, lambda text: print(f"{time.strftime('%H:%M:%S')} {text}", flush=True))
    except (OSError, ValueError, KeyError) as error:
        listener.close()
        problem = f"cannot be used ({error})"
        raise UserError("--state", str(options.state), problem, "name another folder, or mend this one") from None
    server = MeetServer(listener, rounds, token)
    print(banner(options, listener), flush=True)
    _serve(server)
    lock.release()
    if rounds.failure is not None:
        raise RunFailed(f"the round could not be ended ({type(rounds.failure).__name__}: {rounds.failure})\n"
                        "  → the same command goes on at the last whole round") from rounds.failure  # fmt: skip


def _only_one(folder: Path) -> FileLock:
    """Locks the state folder: two sync servers in it would overwrite each other's rounds."""
    lock = FileLock(folder / ".lock", timeout=0, thread_local=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        remedy = "wait for it to end, or name another folder"
        raise UserError("--state", str(folder), "another sync server is using this folder", remedy) from None
    except FileExistsError:
        raise UserError("--state", str(folder), "is a file", "name a folder") from None
    except OSError as error:
        problem = f"cannot be used ({error})"
        raise UserError("--state", str(folder), problem, "name another folder, or mend this one") from None
    return lock


def _serve(server: Any) -> None:
    ended = StopRequested()
    before = {kind: signal.signal(kind, ended) for kind in (signal.SIGINT, signal.SIGTERM)}
    clock = threading.Thread(target=server.rounds.run, name="clock", daemon=True)
    door = threading.Thread(target=server.serve_forever, name="door", daemon=True)
    clock.start()
    door.start()
    try:
        while not ended.wait(0.2) and clock.is_alive():
            pass
    finally:
        server.rounds.stop()
        server.shutdown()
        clock.join()  # a round that is being written is written to its end
        server.server_close()
        for kind, handler in before.items():
            signal.signal(kind, handler)


def rule_of(options: SyncServerOptions) -> Any:
    """The outer rule; raises UserError for invalid options."""
    from shardwise.config.units import parse_duration
    from shardwise.diloco.codec import DTYPES
    from shardwise.diloco.outer_step import METHODS

    choices = {"--method": (options.method, METHODS), "--outer-optimizer": (options.outer, ("nesterov", "sgd")),
               "--weight": (options.weight, ("equal", "tokens")), "--dtype": (options.dtype, DTYPES)}  # fmt: skip
    for name, (value, known) in choices.items():
        if value is not None and value not in known:
            raise UserError(name, value, "is not known", f"use {', '.join(known)}")
    overrides: dict[str, Any] = {
        "optimizer": options.outer,
        "rate": options.rate,
        "momentum": options.momentum,
        "weight": options.weight,
    }
    if options.outer == "nesterov" and not (options.momentum or METHODS[options.method].momentum):
        remedy = "add e.g. --outer-momentum 0.9, or leave --outer-optimizer out"
        raise UserError("--outer-optimizer", options.outer, "is the same as sgd without momentum", remedy)
    rule = replace(METHODS[options.method], **{name: value for name, value in overrides.items() if value is not None})
    if not 0 < rule.rate < float("inf"):
        raise UserError("--outer-lr", rule.rate, "must be above 0", "use e.g. 0.7; FedAvg has 1")
    if not 0 <= rule.momentum < 1:
        raise UserError(
            "--outer-momentum", rule.momentum, "must be at least 0 and below 1", "use e.g. 0.9; FedAvg has 0"
        )
    try:
        wait = float(parse_duration(options.wait))
        if wait <= 0:
            raise ValueError("must be above 0")
    except ValueError as error:
        raise UserError("--wait", options.wait, str(error), "write e.g. 60s or 10min") from None
    dtype: Any = options.dtype
    return replace(rule, dtype=dtype, wait=wait, least=options.least)


def banner(options: SyncServerOptions, listener: socket.socket) -> str:
    """Startup message: address, outer rule, and the settings for workers."""
    rule = rule_of(options)
    host, port = listener.getsockname()[:2]
    hostname = f"[{host}]" if ":" in host else host
    step = f"{rule.optimizer}, rate {rule.rate:g}, momentum {rule.momentum:g}"
    token = f", token_env: {options.token_env}" if options.token_env else ""
    return "\n".join([
        f"sync server at {hostname}:{port} (Ctrl-C stops; the same command goes on)",
        f"  outer step: {step}; workers count {'alike' if rule.weight == 'equal' else 'by their tokens'}; "
        f"{rule.dtype} on the wire; a round waits {rule.wait:g} s for the slow, and for {rule.least} at least",
        f"  state in {options.state}",
        f"  in each worker's RUN.yaml:  diloco: {{server: '{hostname}:{port}', sync_every: 50{token}}}",
    ])  # fmt: skip
