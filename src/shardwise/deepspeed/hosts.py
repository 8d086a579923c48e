"""Selects the hosts and devices of a run: the hostfile, and the launcher's filters."""

from __future__ import annotations

import re
from pathlib import Path

from shardwise.core.errors import UserError

Slots = dict[str, list[int]]  # host → the devices to use on it, in the order of the ranks

_LINE = re.compile(r"^(\S+)\s+slots\s*=\s*(\d+)\s*(?:#.*)?$")


def read_hostfile(path: Path) -> Slots:
    """Parses a file of lines `host slots=8`; empty lines and comments (#) are ignored."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        remedy = "check the path, or leave --hostfile out to use this host alone"
        raise UserError("--hostfile", str(path), f"cannot be read ({error.strerror})", remedy) from None
    hosts: Slots = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        match = _LINE.match(line.strip())
        if match is None or not int(match[2]):
            raise UserError(
                "--hostfile", f"{path}:{number}", f"{line.strip()!r} is no host", "write `worker-1 slots=8`"
            )
        if match[1] in hosts:
            raise UserError("--hostfile", f"{path}:{number}", f"{match[1]} is given twice", "remove one of the lines")
        hosts[match[1]] = list(range(int(match[2])))
    if not hosts:
        raise UserError("--hostfile", str(path), "names no host", "write lines such as `worker-1 slots=8`")
    return hosts


def choose(hosts: Slots, include: str, exclude: str, nodes: int, gpus: int) -> Slots:
    """Applies --include or --exclude, or --num_nodes and --num_gpus, to the hosts."""
    if include and exclude:
        raise UserError("--exclude", exclude, "is given besides --include", "give one of them")
    if (include or exclude) and (nodes > 0 or gpus > 0):
        name = "--include" if include else "--exclude"
        raise UserError(
            name, include or exclude, "does not go with --num_nodes and --num_gpus", "give one or the other"
        )
    if include:
        listed = parse_filter("--include", include, hosts)
        return {host: listed[host] for host in hosts if host in listed}
    if exclude:
        listed = parse_filter("--exclude", exclude, hosts)
        remaining = {}
        for host, slots in hosts.items():
            if left := [slot for slot in slots if slot not in listed.get(host, [])]:
                remaining[host] = left
        if not remaining:
            raise UserError("--exclude", exclude, "leaves no device", "exclude less")
        return remaining
    if nodes > len(hosts):
        raise UserError("--num_nodes", nodes, f"there are {len(hosts)} hosts", "lower it, or add hosts to the hostfile")
    selected = dict(list(hosts.items())[: nodes if nodes > 0 else None])
    if gpus > 0:
        for host, slots in selected.items():
            if gpus > len(slots):
                raise UserError("--num_gpus", gpus, f"{host} has {len(slots)} slots", "lower it, or raise the slots")
        selected = {host: slots[:gpus] for host, slots in selected.items()}
    return selected


def parse_filter(option: str, text: str, hosts: Slots) -> Slots:
    """Parses `worker-0@worker-1:0,2`: all of worker-0, and devices 0 and 2 of worker-1."""
    selected: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, devices = part.strip().partition(":")
        if host not in hosts:
            raise UserError(option, text, f"{host!r} is none of the hosts", f"use {', '.join(hosts)}")
        try:
            slots = [int(number) for number in devices.split(",")] if colon else hosts[host]
        except ValueError:
            raise UserError(option, text, f"{devices!r} is no list of devices", "write e.g. worker-1:0,2") from None
        unknown = [slot for slot in slots if slot not in hosts[host]]
        if unknown:
            raise UserError(option, text, f"{host} has no slot {unknown[0]}", f"it has {len(hosts[host])}, from 0")
        selected.setdefault(host, set()).update(slots)
    return {host: sorted(slots) for host, slots in selected.items()}


def as_filter(hosts: Slots) -> str:
    """Inverse of `parse_filter`, for a command line."""
    return "@".join(f"{host}:{','.join(map(str, slots))}" for host, slots in hosts.items())
