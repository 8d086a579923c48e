"""Values by dotted path, as overrides and tables of settings name them."""

from __future__ import annotations

from typing import Any


def place(values: dict[str, Any], path: str, value: Any) -> None:
    """Puts a value at a dotted path, making the dicts on the way."""
    *parents, leaf = path.split(".")
    for part in parents:
        inner = values.get(part)
        values[part] = inner if isinstance(inner, dict) else {}
        values = values[part]
    values[leaf] = value
