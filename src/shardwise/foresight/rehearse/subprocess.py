"""Runs functions in processes of their own.

Process groups and DTensor's caches of them outlive a rehearsal: the next world would be taken for the last.

[Note: beside a GPU] CUDA does not survive a fork, and much of torch queries a GPU that is present. So where there is
one, processes are forked by a helper that was started fresh and sees none: a rehearsal is then the same everywhere. The
helper lives as long as its parent process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from shardwise.core.errors import RunFailed, UserError

T = TypeVar("T")


def run_isolated(function: Callable[..., T], *args: Any) -> T:
    """Runs the function in a process of its own and returns its result.

    A UserError is raised again here; any other failure is raised as RunFailed with its traceback.
    """
    result = run_all_isolated(function, [args], 1)[0]
    if isinstance(result, BaseException):
        raise result
    return result


def run_all_isolated(function: Callable[..., T], calls: Sequence[Sequence[Any]], at_once: int) -> list[T | Exception]:
    """Runs many calls, `at_once` at a time; a call that failed has its exception in place of a result.

    All are forked from the calling thread: a fork beside another thread at work can inherit a lock that nobody frees.
    """
    if (helper := ready_helper()) is not None:
        return helper.ask(function, calls, at_once)
    results: list[Any] = [None] * len(calls)
    waiting = list(range(len(calls)))
    running: dict[Any, tuple[int, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number = waiting.pop(0)
                receiver, process = _start(function, calls[number])
                running[receiver] = number, process
            for ready in wait(list(running)):
                number, process = running.pop(ready)
                results[number] = _outcome(ready, process)
    except BaseException:
        for _, process in running.values():
            process.terminate()
            process.join()
        raise
    return results


def beside_gpu() -> bool:
    """Whether this process may have initialised CUDA (see the note above)."""
    return torch.cuda.is_available()


class Helper:
    """A process that sees no GPU and forks rehearsals for this one."""

    def __init__(self) -> None:
        our_socket, helper_socket = socket.socketpair()
        with helper_socket:
            environment = os.environ | {
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            }
            command = [sys.executable, "-m", "shardwise.foresight.rehearse.subprocess", str(helper_socket.fileno())]
            self.process = subprocess.Popen(
                command, env=environment, pass_fds=[helper_socket.fileno()], start_new_session=True
            )  # fmt: skip
        self.owner = os.getpid()
        self.connection = Connection(our_socket.detach())

    def ask(self, function: Callable[..., T], calls: Sequence[Sequence[Any]], at_once: int) -> list[T | Exception]:
        """Runs the calls in the helper; see `run_all_isolated`."""
        try:
            self.connection.send((function, [tuple(call) for call in calls], at_once))
            return self.connection.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):
            code = self.process.wait()
            end_helper()
            return [RunFailed(f"the process that rehearses ended without a word (exit code {code})") for _ in calls]
        except BaseException:
            end_helper()
            raise

    def end(self) -> None:
        """Terminates the helper and its children."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait()


_helper: Helper | None = None


def end_helper() -> None:
    """Terminates this process's helper, if there is one; the next rehearsal starts another."""
    global _helper
    if _helper is not None and _helper.owner == os.getpid():
        _helper.end()
    _helper = None


def ready_helper() -> Helper | None:
    """Returns this process's helper, if it needs one; started ahead, it imports while its parent goes on."""
    global _helper
    if not beside_gpu():
        return None
    if _helper is None or _helper.owner != os.getpid() or _helper.process.poll() is not None:
        _helper = Helper()
        atexit.register(end_helper)
    return _helper


def _serve(descriptor: int) -> None:
    """Main loop of the helper, until its parent exits."""
    import shardwise.foresight.plan.sketch
    import shardwise.foresight.rehearse.step  # noqa: F401  what is imported here, each rehearsal has
    from shardwise.core.effective_device import ready_compiler

    ready_compiler()
    connection = Connection(descriptor)
    while True:
        try:
            function, calls, at_once = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(run_all_isolated(function, calls, at_once))


def _start(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Connection, Any]:
    context = multiprocessing.get_context("fork")  # what is imported stays imported: seconds for each rank
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, function, tuple(args)))
    process.start()
    sender.close()
    return receiver, process


def _outcome(connection: Any, process: Any) -> Any:
    try:
        kind, value = connection.recv()
    except EOFError:
        process.join()
        return RunFailed(f"the rehearsal ended without a word (exit code {process.exitcode})")
    process.join()
    connection.close()
    if kind == "mistake":
        return UserError(*value)
    if kind == "failure":
        return RunFailed(f"the rehearsal failed, and so would the run:\n{value}")
    return value


def _call(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # those of the parent are not here
    warnings.simplefilter("ignore")  # of torch and transformers, about models that are not there
    gc.disable()  # a tenth of the time, and a process of seconds has little to collect
    try:
        connection.send(("result", function(*args)))
    except UserError as error:
        connection.send(("mistake", (error.field, error.value, error.problem, error.remedy)))
    except Exception:
        connection.send(("failure", traceback.format_exc()))


if __name__ == "__main__":
    from shardwise.foresight.rehearse import (
        subprocess as imported,  # functions come by their module's name, which is not __main__
    )

    imported._serve(int(sys.argv[1]))
