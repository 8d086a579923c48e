"""The hardware table: `hardware.yaml` beside this file, extended or overridden by the user's own.

The user's file is $SHARDWISE_HARDWARE, or `hardware.yaml` in the config folder. It has the same sections and units. An
entry with a known name changes the fields it names; a new one is complete, or says `like: <known entry>`.
"""

from __future__ import annotations

import copy
import os
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.core.bounded_yaml import read_yaml
from shardwise.core.cache import config_root
from shardwise.core.errors import UserError

SECTIONS = ("nodes", "links", "networks", "devices")
VARIABLE = "SHARDWISE_HARDWARE"

Above0 = Annotated[float, Field(gt=0)]
ShareOfPeak = Annotated[float, Field(gt=0, le=1)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Peaks(_Entry):
    """Dense TFLOP/s; None if a device lacks the format or no figure is published."""

    fp32: Above0 | None = None
    tf32: Above0 | None = None
    bf16: Above0 | None = None
    fp16: Above0 | None = None
    fp8: Above0 | None = None


class NodeEntry(_Entry):
    """Everything around the devices of one node."""

    per_node: Annotated[int, Field(ge=1)]
    host_memory: Above0
    disk_read: Above0
    disk_write: Above0
    host_adam: Above0


class LinkEntry(_Entry):
    """A link within a node, or a network between nodes."""

    bandwidth: Above0
    latency: Annotated[float, Field(ge=0)]
    per: Literal["device", "node"] = "device"
    aliases: tuple[str, ...] = ()


class DeviceEntry(_Entry):
    """One kind of device and its usual node."""

    torch: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    kind: Literal["cuda", "rocm", "cpu"]
    memory: Above0
    peak: Peaks
    bandwidth: Above0
    matmul: ShareOfPeak
    stream: ShareOfPeak = 0.9
    attention: tuple[ShareOfPeak, ShareOfPeak]
    launch: Above0 = 5.0  # an eager operator of torch on a fast host
    host_link: Above0
    node: NodeEntry
    within: str
    across: str
    price: Annotated[float, Field(ge=0)] | None = None


class Catalogue(_Entry):
    """All entries by name; `source` is the last file that contributed."""

    source: str
    links: dict[str, LinkEntry]
    networks: dict[str, LinkEntry]
    devices: dict[str, DeviceEntry]


def catalogue() -> Catalogue:
    """The shipped table merged with the user's file; reloaded when that file changes."""
    path = os.environ.get(VARIABLE)
    file = Path(path).expanduser() if path else config_root() / "hardware.yaml"
    try:
        changed = file.stat().st_mtime_ns
    except OSError:
        if path:
            raise UserError(f"${VARIABLE}", path, "no such file", "correct the path, or unset the variable") from None
        return _read(None, 0)
    return _read(str(file), changed)


@lru_cache(maxsize=4)
def _read(own: str | None, _changed: int) -> Catalogue:
    shipped = yaml.safe_load(Path(__file__).with_name("hardware.yaml").read_text())
    if own is None:
        return _validated(shipped, "hardware.yaml")
    try:
        extra = read_yaml(Path(own).read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UserError(own, None, f"cannot be read: {' '.join(str(error).split())}", "correct the file") from None
    return _validated(_merged(shipped, extra, own), own)


def _merged(known: dict[str, Any], extra: Any, file: str) -> dict[str, Any]:
    """The shipped table with the user's entries merged over it."""
    if not isinstance(extra, dict) or any(not isinstance(part, dict) for part in extra.values()):
        raise UserError(
            file, None, "is not a table of sections", f"write {', '.join(SECTIONS)}, each with named entries"
        )
    for section, entries in extra.items():
        if section not in SECTIONS:
            raise UserError(f"{file}: {section}", None, "unknown section", f"known here: {', '.join(SECTIONS)}")
        for name, fields in entries.items():
            if not isinstance(fields, dict):
                raise UserError(f"{file}: {section}.{name}", fields, "is not a table of fields", "see docs/hardware.md")
            start = _start(known[section], str(name), fields, f"{file}: {section}.{name}")
            known[section][str(name)] = _over(start, {key: v for key, v in fields.items() if key != "like"})
    return known


def _start(entries: dict[str, Any], name: str, fields: dict[str, Any], where: str) -> dict[str, Any]:
    """The base that an entry's fields are merged over: its `like` entry, itself, or nothing."""
    like = fields.get("like")
    if like is None:
        return dict(entries.get(name, {}))
    if like not in entries:
        raise UserError(f"{where}.like", like, "there is no such entry", f"known: {', '.join(entries)}")
    # Names by which torch and people know the model stay with the model.
    return {key: copy.deepcopy(v) for key, v in entries[like].items() if key not in ("torch", "aliases")}


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = dict(below)
    for key, value in above.items():
        nested = isinstance(value, dict) and isinstance(both.get(key), dict) and "like" not in value
        both[key] = _over(both[key], value) if nested else value
    return both


def _validated(table: dict[str, Any], file: str) -> Catalogue:
    """Validated entries, with the nodes that devices refer to resolved."""
    for name, device in table["devices"].items():
        device["node"] = _node(table["nodes"], device.get("node"), f"{file}: devices.{name}.node")
        for field, section in (("within", "links"), ("across", "networks")):
            if device.get(field) not in table[section]:
                where = f"{file}: devices.{name}.{field}"
                raise UserError(where, device.get(field), f"is none of the {section}", _known(table[section]))
    try:
        return Catalogue(source=file, **{section: table[section] for section in SECTIONS if section != "nodes"})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        value = None if first["type"] == "missing" else first["input"]
        raise UserError(f"{file}: {where}", value, first["msg"].lower(), "units and fields: docs/hardware.md") from None


def _node(nodes: dict[str, Any], node: Any, where: str) -> Any:
    if not isinstance(node, dict):
        if node not in nodes:
            raise UserError(where, node, "is none of the nodes", _known(nodes))
        return nodes[node]
    like = node.get("like")
    if like is not None and like not in nodes:
        raise UserError(f"{where}.like", like, "is none of the nodes", _known(nodes))
    return {**(nodes[like] if like else {}), **{key: value for key, value in node.items() if key != "like"}}


def _known(entries: dict[str, Any]) -> str:
    return f"known: {', '.join(map(str, entries))}"
