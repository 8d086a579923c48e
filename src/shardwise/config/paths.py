"""Access to nested values by dotted path, as overrides and tables of settings name them."""

from __future__ import annotations

from typing import Any

ABSENT: Any = object()


def find(values: Any, path: str) -> Any:
    """The value at a dotted path of nested dicts, or ABSENT."""
    for part in path.split("."):
        if not isinstance(values, dict) or part not in values:
            return ABSENT
        values = values[part]
    return values


def remove(values: dict[str, Any], path: str) -> None:
    """Removes the value at a dotted path, which is there."""
    *parents, leaf = path.split(".")
    for part in parents:
        values = values[part]
    del values[leaf]


def place(values: dict[str, Any], path: str, value: Any) -> None:
    """Sets a value at a dotted path, creating the dicts on the way."""
    *parents, leaf = path.split(".")
    for part in parents:
        inner = values.get(part)
        values[part] = inner if isinstance(inner, dict) else {}
        values = values[part]
    values[leaf] = value


def flatten(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted paths with their values; lists of sections are expanded, other lists are values."""
    if isinstance(value, dict) and value:
        return [item for key, inner in value.items() for item in flatten(inner, f"{prefix}.{key}" if prefix else key)]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [item for index, inner in enumerate(value) for item in flatten(inner, f"{prefix}.{index}")]
    return [(prefix, value)]
