"""Checks a value against a JSON schema: the keywords that our schema uses, and a refusal of any other keyword."""

from __future__ import annotations

from typing import Any

_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
_SILENT = {"$defs", "title", "description", "default"}


def complaints(value: Any, schema: dict[str, Any], root: dict[str, Any], path: str = "") -> list[str]:
    """What is wrong with a value, one line per place; an empty list means it is valid."""
    found: list[str] = []
    for keyword, wanted in schema.items():
        if keyword in _SILENT or (keyword == "items" and not isinstance(value, list)):
            continue
        found += _CHECKS[keyword](value, wanted, schema, root, path)
    return found


def _type(value: Any, wanted: str, schema: Any, root: Any, path: str) -> list[str]:
    if wanted in ("number", "integer"):
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        good = not isinstance(value, bool) and (whole if wanted == "integer" else isinstance(value, (int, float)))
    else:
        good = isinstance(value, _TYPES[wanted])
    return [] if good else [f"{path}: {value!r} is no {wanted}"]


def _properties(value: Any, wanted: dict[str, Any], schema: Any, root: Any, path: str) -> list[str]:
    keys = [k for k in wanted if isinstance(value, dict) and k in value]
    return [line for key in keys for line in complaints(value[key], wanted[key], root, f"{path}.{key}")]


def _additional(value: Any, wanted: bool, schema: Any, root: Any, path: str) -> list[str]:
    if wanted or not isinstance(value, dict):
        return []
    return [f"{path}.{key} is unknown" for key in value if key not in schema.get("properties", {})]


def _any_of(value: Any, wanted: list[Any], schema: Any, root: Any, path: str) -> list[str]:
    results = [complaints(value, one, root, path) for one in wanted]
    return [] if not all(results) else [line for result in results for line in result]


def _one_of(value: Any, wanted: list[Any], schema: Any, root: Any, path: str) -> list[str]:
    results = [complaints(value, one, root, path) for one in wanted]
    fits = sum(not result for result in results)
    many = [f"{path}: {value!r} fits {fits} alternatives"] if fits > 1 else []
    return many if fits else [line for result in results for line in result]


def _ref(value: Any, wanted: str, schema: Any, root: Any, path: str) -> list[str]:
    return complaints(value, root["$defs"][wanted.removeprefix("#/$defs/")], root, path)


def _items(value: Any, wanted: Any, schema: Any, root: Any, path: str) -> list[str]:
    return [line for i, item in enumerate(value) for line in complaints(item, wanted, root, f"{path}.{i}")]


def _prefix(value: Any, wanted: list[Any], schema: Any, root: Any, path: str) -> list[str]:
    pairs = zip(value, wanted, strict=False) if isinstance(value, list) else ()
    return [line for i, (item, one) in enumerate(pairs) for line in complaints(item, one, root, f"{path}.{i}")]


def _test(says: str, good: Any) -> Any:
    def check(value: Any, wanted: Any, schema: Any, root: Any, path: str) -> list[str]:
        return [] if good(value, wanted) else [f"{path}: {value!r} is not {says} {wanted!r}"]

    return check


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_CHECKS: dict[str, Any] = {
    "type": _type,
    "properties": _properties,
    "additionalProperties": _additional,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "$ref": _ref,
    "items": _items,
    "prefixItems": _prefix,
    "required": _test("complete with", lambda v, w: not isinstance(v, dict) or all(k in v for k in w)),
    "const": _test("equal to", lambda v, w: v == w),
    "enum": _test("one of", lambda v, w: v in w),
    "minimum": _test("at least", lambda v, w: not _number(v) or v >= w),
    "maximum": _test("at most", lambda v, w: not _number(v) or v <= w),
    "exclusiveMinimum": _test("above", lambda v, w: not _number(v) or v > w),
    "exclusiveMaximum": _test("below", lambda v, w: not _number(v) or v < w),
    "minItems": _test("at least as long as", lambda v, w: not isinstance(v, list) or len(v) >= w),
    "maxItems": _test("at most as long as", lambda v, w: not isinstance(v, list) or len(v) <= w),
    "minLength": _test("at least as long as", lambda v, w: not isinstance(v, str) or len(v) >= w),
}
