"""The process of one rank that a host's agent started: `shardwise train`, ended with the agent if that is killed."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from shardwise.core.process import die_with_parent as _die_with_parent
from shardwise.core.process import leave as _leave


def main(parent: int, arguments: list[str]) -> None:
    """Runs the command line `shardwise ARGUMENTS` in this process."""
    # Until the loop takes over there is nothing to save. Ctrl-C is the agent's to pass on.
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent(parent)
    from shardwise.cli.main import main as command_line

    code: Any = 0
    try:
        command_line(arguments)
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by the interpreter's own end: a thread that is within torch then would turn a good end into SIGABRT.
    os._exit(code if isinstance(code, int) else int(bool(code)))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
