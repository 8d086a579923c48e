"""Runs a function in a process of its own.

Process groups and what DTensor remembers of them outlive a rehearsal: the next world would be taken for the last.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from shardwise.errors import RunFailed, UserError

T = TypeVar("T")


def apart(function: Callable[..., T], *args: Any) -> T:
    """What the function returns, or the mistake it found; a failure of another kind is shown with its traceback."""
    context = multiprocessing.get_context("fork")  # what is imported stays imported: seconds for each rank
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        kind, value = ours.recv()
    except EOFError:
        process.join()
        raise RunFailed(f"the rehearsal ended without a word (exit code {process.exitcode})") from None
    except BaseException:
        process.terminate()
        raise
    finally:
        process.join()
    if kind == "mistake":
        raise UserError(*value)
    if kind == "failure":
        raise RunFailed(f"the rehearsal failed, and so would the run:\n{value}")
    return value  # type: ignore[no-any-return]


def _call(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # those of the parent are not here
    try:
        connection.send(("result", function(*args)))
    except UserError as error:
        connection.send(("mistake", (error.field, error.value, error.problem, error.remedy)))
    except Exception:
        connection.send(("failure", traceback.format_exc()))
