"""Listening sockets, the API keys that protect them, and whether they are reachable from outside."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from shardwise.core.errors import UserError


def find_key(variable: str | None, option: str = "--api-key-env") -> str | None:
    """The API key from the environment: command lines are visible to all users of a machine."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(option, variable, "holds no key", f"export {variable}=… before you start the server")
    return key


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OverflowError:
        raise UserError("--port", port, "is no port", "give 0 to 65535") from None
    except OSError as error:
        words = error.strerror or str(error)
        if (error.errno or 0) < 0 or error.errno == errno.EADDRNOTAVAIL:  # below 0: a name that nobody knows
            problem = "is no address of this machine"
            raise UserError("--host", host, problem, "give 127.0.0.1, 0.0.0.0 or one of its own") from None
        raise UserError("--port", f"{host}:{port}", words, "choose another --port, or --host") from None
