"""The shared secret of a run's hosts, and a challenge-response proof that never sends it.

Otherwise anyone who can reach the rendezvous port could end the run, or join it and receive the addresses of all hosts.
Each side sends a nonce, and signs both nonces and its message (HMAC-SHA256): a stranger can neither impersonate a host
or the keeper, nor alter or replay messages. Messages are not encrypted: they contain no secret.
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
    """Generates a new secret."""
    return secrets.token_hex(32)


def take_token(file: Path | None) -> str | None:
    """The secret from a file, else from the environment, from which it is removed: ranks do not need it."""
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
    """Signature that proves knowledge of the token; empty if there is no token."""
    if token is None:
        return ""
    signed = b"\0".join([side.encode(), *(number.encode() for number in numbers), words])
    return hmac.new(token.encode(), signed, "sha256").hexdigest()


def same(received: object, expected: str) -> bool:
    """Compares proofs in constant time."""
    return isinstance(received, str) and hmac.compare_digest(received.encode("utf-8", "replace"), expected.encode())
