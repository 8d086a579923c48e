"""The secret that a run's hosts share, and how they prove that they know it without ever sending it.

Whoever can reach the port where hosts meet could otherwise end the run, or join it and be handed the addresses of all.
Each side draws a number, and signs both numbers and what it says (HMAC-SHA256): a stranger can neither speak for a host
nor for the keeper, change what they say, or repeat what it has heard. What is said is not hidden: no secret is in it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Literal

from shardwise.core.errors import UserError

VARIABLE = "SHARDWISE_MEETING_TOKEN"
LEAST = 16  # characters: a word would be guessed
HOW = f"e.g. export {VARIABLE}=$(openssl rand -hex 32), the same on all hosts"


def make_token() -> str:
    """A new secret."""
    return secrets.token_hex(32)


def take_token(file: Path | None) -> str | None:
    """The secret from a file, else from the environment, where it does not stay: ranks have no use for it."""
    from_environment = os.environ.pop(VARIABLE, "").strip()
    if file is not None:
        return _fit(_read(file), "--token-file", str(file))
    return _fit(from_environment, VARIABLE, None) if from_environment else None


def _fit(token: str, field: str, value: str | None) -> str:
    if len(token) < LEAST or not token.isascii() or not token.isprintable():
        raise UserError(field, value, f"holds no token of {LEAST} or more plain characters", HOW)
    return token


def _read(file: Path) -> str:
    try:
        with file.expanduser().open("rb") as stream:
            if os.fstat(stream.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UserError("--token-file", str(file), "can be read by other users", f"chmod 600 {file}")
            return stream.read(4096).decode("ascii", "replace").strip()
    except OSError as error:
        raise UserError("--token-file", str(file), f"cannot be read ({error.strerror})", "check the path") from None


def proof(token: str | None, side: Literal["host", "keeper"], numbers: tuple[str, str], words: bytes) -> str:
    """What shows that `words` come from one who knows the token; nothing where there is no token."""
    if token is None:
        return ""
    signed = b"\0".join([side.encode(), *(number.encode() for number in numbers), words])
    return hmac.new(token.encode(), signed, "sha256").hexdigest()


def same(given: object, wanted: str) -> bool:
    """Compares proofs in constant time."""
    return isinstance(given, str) and hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())
