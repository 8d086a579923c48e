"""Runs a function in a process of its own.

Process groups and what DTensor remembers of them outlive a rehearsal: the next world would be taken for the last.
"""

from __future__ import annotations

import gc
import multiprocessing
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from shardwise.errors import RunFailed, UserError

T = TypeVar("T")


def apart(function: Callable[..., T], *args: Any) -> T:
    """What the function returns, or the mistake it found; a failure of another kind is shown with its traceback."""
    found = apart_all(function, [args], 1)[0]
    if isinstance(found, BaseException):
        raise found
    return found


def apart_all(function: Callable[..., T], calls: Sequence[Sequence[Any]], at_once: int) -> list[T | Exception]:
    """The same for many calls, so many at once; a call that failed has its exception in place of a result.

    All are forked from the calling thread: a fork beside another thread at work can inherit a lock that nobody frees.
    """
    found: list[Any] = [None] * len(calls)
    waiting = list(range(len(calls)))
    running: dict[Any, tuple[int, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number = waiting.pop(0)
                ours, process = _start(function, calls[number])
                running[ours] = number, process
            for ready in wait(list(running)):
                number, process = running.pop(ready)
                found[number] = _outcome(ready, process)
    except BaseException:
        for _, process in running.values():
            process.terminate()
            process.join()
        raise
    return found


def _start(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Connection, Any]:
    context = multiprocessing.get_context("fork")  # what is imported stays imported: seconds for each rank
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(theirs, function, tuple(args)))
    process.start()
    theirs.close()
    return ours, process


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
