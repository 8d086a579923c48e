"""Tells failures that are the echo of another rank's from those that have a cause of their own."""

from __future__ import annotations

TIMED_OUT = ("Timed out", "timeout")
LOST_PEER = (
    "Connection closed by peer", "Connection reset", "Broken pipe", *TIMED_OUT, "NCCL", "recvValue", "Socket",
    "process group", "gloo/transport",
)  # fmt: skip


def is_echo(reason: str) -> bool:
    """Whether a failure only says that another rank is gone."""
    return any(word in reason for word in LOST_PEER)
