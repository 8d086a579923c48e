"""Starts one process per rank on this host, watches them, and ends all when one dies, with one message saying why."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise.core.cpu_probe import cpu_env, threads_for
from shardwise.core.errors import Interrupted, OutOfMemory, RunFailed, WordedUserError
from shardwise.core.lost_peer import TIMED_OUT, is_echo
from shardwise.core.redact import redact
from shardwise.foresight.prepare import write_resolved_run
from shardwise.launch.group import POLL, await_other_ranks
from shardwise.launch.heartbeat import Heartbeats
from shardwise.resolved_run import ResolvedRun
from shardwise.train.status import STACKS, logs_of, read_status

# Ranks vote as a step begins: a signal that meets them within one is acted on at the end of the next.
STOPPING = "stopping after this step or the next, and saving; {again} ends at once"
AGAIN = {signal.SIGINT: "Ctrl-C again", signal.SIGTERM: "a second SIGTERM"}
FAILURE = "failure.json"  # the supervisor's last word
PASSING = ("CUDA error", "Input/output error", "Stale file handle", "Resource temporarily unavailable")


def launch(resolved: ResolvedRun) -> None:
    """Runs local ranks to the end; raises RunFailed, UserError or Interrupted if they do not finish.

    A run that lost a rank is restarted from its last checkpoint, at most `restarts` times.
    """
    from shardwise.checkpoint.host_copies import freed
    from shardwise.launch.restarts import Lost, Restarts
    from shardwise.parallel.offload.disk import remove_left_overs

    logs_of(resolved.output).mkdir(parents=True, exist_ok=True)
    logs = logs_of(resolved.output)
    # Only ours: the folder may hold others' files too.
    for earlier in (*logs.glob("rank-*.*"), *logs.glob("start-*/rank-*.*"), *logs.glob(FAILURE)):
        earlier.unlink()
    restarts = Restarts(resolved)
    with freed(resolved.output, resumable=Lost), _Signals() as signals, _record_failure(logs / FAILURE):
        for number in itertools.count(1):
            try:
                return _attempt(resolved, signals)
            except Lost as failure:
                if signals.received:
                    raise
                resolved, message = restarts.after(failure)
                for name in ("rank-", STACKS):  # see _keep_logs
                    message = message.replace(f"{logs / name}", f"{logs / f'start-{number}' / name}")
                message = re.sub(r": kill -CONT \d+ lets it go on", "", message)  # it was ended with the others
                print(f"\n{message}", file=sys.stderr, flush=True)
                _move_logs(logs, number)
            finally:
                remove_left_overs(resolved.offload_folder)  # of ranks that could not do so themselves


@contextlib.contextmanager
def _record_failure(file: Path) -> Iterator[None]:
    """Writes the failure of the run to a file in its folder."""
    try:
        yield
    except RunFailed as failure:
        file.write_text(json.dumps({"time": time.time(), "reason": redact(str(failure))}))
        raise


def _attempt(resolved: ResolvedRun, signals: _Signals) -> None:
    import torch.distributed as dist

    logs = logs_of(resolved.output)
    job_file = resolved.output / "job.json"
    write_resolved_run(resolved, job_file)
    # The supervisor hosts the meeting point, so there is no race for a port and no rank is special.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    ranks = int(resolved.run.ranks)
    children = signals.children
    children.clear()
    try:
        for rank in range(ranks):
            if not signals.received:
                children.append(_start(resolved, job_file, rank, ranks, store.port, logs))
        _watch(children, signals, logs, resolved)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
        for child in children:
            child.wait()


def _move_logs(logs: Path, number: int) -> None:
    """Moves the logs of a failed start away, for those of the next one."""
    folder = logs / f"start-{number}"
    folder.mkdir(exist_ok=True)
    for file in (*logs.glob("rank-*.*"), *logs.glob(STACKS)):
        file.rename(folder / file.name)


def _start(
    resolved: ResolvedRun, job_file: Path, rank: int, ranks: int, port: int, logs: Path
) -> subprocess.Popen[bytes]:
    threads = threads_for(ranks)
    env = os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    env.setdefault("OMP_NUM_THREADS", str(threads))
    if resolved.run.device == "cpu":
        env |= cpu_env(resolved.run.precision)
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with (logs / f"rank-{rank}.log").open("wb") as log:
        # A session of its own keeps the terminal's Ctrl-C from reaching the ranks directly: we pass it on, once.
        return subprocess.Popen(
            [sys.executable, "-m", "shardwise.launch.worker", str(job_file), str(os.getpid())],
            env=env, stdin=subprocess.DEVNULL, stdout=None if rank == 0 else log, stderr=log, start_new_session=True,
        )  # fmt: skip


class _Signals:
    """Forwards Ctrl-C and SIGTERM to the ranks; a second one kills them."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen[bytes]] = []
        self.received, self.hurried = 0, False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        with contextlib.suppress(ValueError):  # not the main thread: leave signals alone
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.hurried = bool(self.received)
        self.received = self.received or number
        if not self.hurried:
            print("\n" + STOPPING.format(again=AGAIN[signal.Signals(number)]), file=sys.stderr, flush=True)
        for child in self.children:
            if child.poll() is None:
                child.send_signal(signal.SIGKILL if self.hurried else number)


def _watch(children: list[subprocess.Popen[bytes]], signals: _Signals, logs: Path, resolved: ResolvedRun) -> None:
    from shardwise.launch.restarts import Lost

    processes = {rank: child.pid for rank, child in enumerate(children)}
    heartbeats = Heartbeats(logs, processes if len(processes) > 1 else {}, resolved.run.timeout)
    while True:
        if verdict := heartbeats.verdict():
            raise Lost(f"{verdict}\n  → {_how_to_resume(resolved)}")
        codes = [child.poll() for child in children]
        number = signals.received
        if children and all(code == 0 for code in codes):
            return
        if signals.hurried and None not in codes:
            raise Interrupted(f"ended at once; {_how_to_resume(resolved)}", 128 + number)
        # A rank that the signal met before it could handle it dies of it: there was nothing to save yet.
        stopped_codes = (0, 128 + number, -number) if number else (0,)
        if number and all(code in stopped_codes for code in codes):
            raise Interrupted(f"stopped; {_how_to_resume(resolved)}", 128 + number)
        if any(code not in (None, *stopped_codes) for code in codes) and not signals.hurried:
            await_other_ranks(children)
            raise _explain([child.poll() for child in children], logs, resolved)
        time.sleep(POLL)


def _explain(codes: list[int | None], logs: Path, resolved: ResolvedRun) -> Exception:
    """The root cause among the failed ranks: user errors first, then killed ranks, then lost connections."""
    from shardwise.launch.restarts import Lost, Wrong

    notes = {}
    for rank in range(len(codes)):
        with contextlib.suppress(OSError, ValueError):
            notes[rank] = json.loads((logs / f"rank-{rank}.error.json").read_text())
    mistakes = [note for note in notes.values() if note["kind"] == "user"]
    if mistakes:
        return WordedUserError(mistakes[0]["reason"])
    if stalls := [note for note in notes.values() if note["kind"] == "stall"]:
        return Lost(f"{stalls[0]['reason']}\n  → {_how_to_resume(resolved)}")
    if gone_wrong := [note for note in notes.values() if note["kind"] == "back"]:
        return Wrong(f"{gone_wrong[0]['reason']}\n  → {_how_to_resume(resolved)}")
    killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0 and rank not in notes]
    waited = any(word in note["reason"] for note in notes.values() for word in TIMED_OUT)
    silent = [rank for rank, code in enumerate(codes) if code is None]
    first = [note for note in notes.values() if not is_echo(note["reason"])] or list(notes.values())
    kind: type[RunFailed] = Lost
    if killed:
        rank = killed[0]
        number = -(codes[killed[0]] or 0)
        step, doing = read_status(logs / f"rank-{rank}.status")
        reason = f"it was killed by {signal.Signals(number).name}{_guess(number)}"
    elif silent and waited:
        rank = silent[0]
        step, doing = read_status(logs / f"rank-{rank}.status")
        reason = (
            f"the others waited {resolved.run.timeout:g} s for it in vain (timeout); raise timeout if it was only slow"
        )
    elif first:
        note = min(first, key=lambda n: n["time"])
        rank = note["rank"]
        step = note["step"]
        doing = note["doing"]
        reason = note["reason"]
        transient = is_echo(reason) or any(word in reason for word in PASSING)
        kind = Lost if transient else RunFailed
        if note.get("memory"):
            kind = OutOfMemory
    else:
        rank = next(r for r, code in enumerate(codes) if code not in (0, None))
        step, doing = read_status(logs / f"rank-{rank}.status")
        reason = f"it ended with exit code {codes[rank]}"
    return kind(
        f"rank {rank} failed at step {step} while {doing}: {reason}\n"
        f"  log: {logs / f'rank-{rank}.log'}\n"
        f"  → {_how_to_resume(resolved)}"
    )


def _guess(number: int) -> str:
    return {
        signal.SIGKILL: " (often for lack of memory: see `dmesg`, lower train.micro_batch_size or use recompute: full)",
        signal.SIGILL: " (an instruction this CPU does not have: see `shardwise doctor`, or use precision: fp32)",
        signal.SIGSEGV: " (a crash in native code)",
    }.get(signal.Signals(number), "")


def _how_to_resume(resolved: ResolvedRun) -> str:
    from shardwise.checkpoint.folders import list_checkpoints, newest_step
    from shardwise.checkpoint.host_copies import newest_copy

    root = resolved.output / "checkpoints"
    copied = newest_copy(resolved.output)
    checkpoints = list_checkpoints(root)
    if copied > newest_step(root):
        return f"the same command goes on from the copy of step {copied} in memory, while this host is up"
    if not checkpoints:
        return "no checkpoint was written yet: the same command starts afresh"
    return f"the same command goes on from {checkpoints[-1].name}"
