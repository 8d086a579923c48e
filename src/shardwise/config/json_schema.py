"""The JSON schema of RUN.yaml, as users write it: Run's own, with the settings of `advanced` in that section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.config.advanced import ADVANCED, DEEPSPEED_ONLY
from shardwise.config.paths import ABSENT, find, remove
from shardwise.config.schema import DEEPSPEED_SCHEDULES, Run

DESCRIPTION = "settings that hardly any run needs"


def json_schema() -> dict[str, Any]:
    """The schema that `shardwise config --schema` prints."""
    schema = Run.model_json_schema()
    advanced = _section(DESCRIPTION)
    for path, where in ADVANCED.items():
        section = advanced
        *parents, leaf = where.split(".")[1:]
        for name in parents:
            section = section["properties"].setdefault(name, _section(f"{name}: {DESCRIPTION}"))
        section["properties"][leaf] = _take(schema, path)
    schema["properties"]["advanced"] = advanced
    _take(schema, DEEPSPEED_ONLY[0])
    _leave_out_schedules(schema)
    return schema


def _section(description: str) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": {}, "description": description}


def _take(schema: dict[str, Any], path: str) -> Any:
    """Removes a setting from the sections that have it, and from their defaults; returns its schema."""
    *parents, leaf = path.split(".")
    sections = [schema]
    for depth, name in enumerate(parents):
        nodes = [section["properties"][name] for section in sections if name in section["properties"]]
        for node in nodes:
            below = ".".join([*parents[depth + 1 :], leaf])
            if find(node.get("default"), below) is not ABSENT:
                remove(node["default"], below)
        sections = [section for node in nodes for section in _sections(schema, node)]
    return next(section["properties"].pop(leaf) for section in sections if leaf in section["properties"])


def _sections(schema: dict[str, Any], node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The sections that a value may be, each once."""
    if "$ref" in node:
        yield from _sections(schema, schema["$defs"][node["$ref"].rpartition("/")[2]])
    elif "properties" in node:
        yield node
    for alternatives in ("anyOf", "oneOf", "allOf"):
        for one in node.get(alternatives, ()):
            yield from _sections(schema, one)


def _leave_out_schedules(schema: dict[str, Any]) -> None:
    for kind in DEEPSPEED_SCHEDULES.values():
        del schema["$defs"][kind.__name__]
    schedule = schema["$defs"]["Train"]["properties"]["schedule"]
    names = next(one for key in ("anyOf", "oneOf") for one in schedule.get(key, ()) if "enum" in one)
    schema["$defs"]["Train"]["properties"]["schedule"] = names | {
        key: schedule[key] for key in ("default", "description", "title") if key in schedule
    }
