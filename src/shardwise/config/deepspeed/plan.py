"""State of a translation from a DeepSpeed config: our values, and an account of each key.

One setting may have three sources: the DeepSpeed config, RUN.yaml and our defaults. A key of the config and a key of
RUN.yaml that contradict each other are an error, never a silent choice; "auto" takes RUN.yaml's value or our default;
and a key missing from the config takes DeepSpeed's default only if RUN.yaml does not set it either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pydantic import BaseModel

from shardwise.config.advanced import written
from shardwise.config.paths import ABSENT, find, place
from shardwise.config.schema import Run
from shardwise.config.units import parse_number, parse_size
from shardwise.core.errors import UserError

Verdict = Literal["honoured", "no effect", "refused"]


class NoEffect(str):
    """Returned by a rule if this value of a supported key changes nothing, with the reason."""


class Auto(str):
    """Returned by a rule for "auto": names our setting that provides the value once the run is resolved."""

    target: str

    def __new__(cls, text: str, target: str) -> Auto:
        instance = super().__new__(cls, text)
        instance.target = target
        return instance


@dataclass(frozen=True)
class KeyAccount:
    """One entry of the account: a key, its value, and how it was handled.

    `given` is false for a default adopted from DeepSpeed; `auto` names the setting that answers "auto".
    """

    key: str
    value: Any
    verdict: Verdict
    done: str
    given: bool = True
    auto: str | None = None


@dataclass
class PartialTranslation:
    """A translation in progress."""

    config: dict[str, Any]
    ranks: int
    run: dict[str, Any] = field(default_factory=dict)  # what RUN.yaml says, nested
    file: str = "ds_config.json"
    forgiving: bool = False  # the command line has the last word: no conflict with it
    values: dict[str, Any] = field(default_factory=dict)
    account: list[KeyAccount] = field(default_factory=list)
    refusals: list[UserError] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)  # our path → DeepSpeed's key

    def get(self, path: str, default: Any = None) -> Any:
        """A value of the config by dotted path; the default if it is absent, null or "auto"."""
        value = find(self.config, path)
        return default if value is ABSENT or value is None or value == "auto" else value

    def run_value(self, target: str) -> Any:
        """RUN.yaml's value of a setting, or ABSENT."""
        return find(self.run, target)

    def now(self, target: str) -> Any:
        """Current value of a setting: the config's, else RUN.yaml's, else our default."""
        for values in (self.values, self.run):
            if (value := find(values, target)) is not ABSENT:
                return value
        return default_of(target)

    def put(self, key: str, target: str, value: Any) -> str:
        """Sets one of our values from a key of the config; raises if RUN.yaml contradicts it."""
        existing = self.run_value(target)
        undecided = existing is ABSENT or (existing == "auto" and target in ("train.micro_batch_size", "precision"))
        if not undecided and not same(existing, value) and not self.forgiving:
            problem = f"contradicts {written(target)} = {existing!r} of the run"
            raise self.mistake(key, self.get(key, None), problem, f'remove one of the two, or write "{key}": "auto"')
        earlier = find(self.values, target)
        if earlier is not ABSENT and not same(earlier, value) and self.sources.get(target) != key:
            other = self.sources.get(target, "another key")
            problem = f"wants {written(target)}: {show(value)}, but {other} wants {show(earlier)}"
            raise self.mistake(key, self.get(key, None), problem, "make the two agree, or remove one")
        place(self.values, target, value)
        self.sources[target] = key
        return f"{written(target)}: {show(value)}"

    def put_default(self, key: str, target: str, value: Any) -> None:
        """Sets DeepSpeed's default for an absent key, unless RUN.yaml or another key decides."""
        if self.run_value(target) is not ABSENT or find(self.values, target) is not ABSENT:
            return
        if same(default_of(target), value):
            return
        place(self.values, target, value)
        self.sources[target] = f"{key} (default)"
        done = f"DeepSpeed's default → {written(target)}: {show(value)}"
        self.account.append(KeyAccount(key, None, "honoured", done, False))

    def auto(self, target: str) -> str:
        """Account entry for "auto": RUN.yaml's value, else our default; sets nothing."""
        value = self.run_value(target)
        if value is not ABSENT:
            return Auto(f"auto → {written(target)}: {show(value)} (of the run)", target)
        return Auto(f"auto → {written(target)}: {show(default_of(target))} (our default)", target)

    def mistake(self, key: str, value: Any, problem: str, remedy: str) -> UserError:
        """UserError about the config, with its file and key."""
        return UserError(f"{self.file}: {key}", value, problem, remedy)

    # Checked reading. JSON's 5e8 is a float, and people write counts so.
    def number(self, key: str, value: Any, least: float = 0.0) -> float:
        """Validates a finite number of at least `least`."""
        if isinstance(value, str):
            value = parse_number(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < float("inf"):
            raise self.mistake(key, value, "is not a number that fits here", f"write a number of at least {least:g}")
        return float(value)

    def integer(self, key: str, value: Any, least: int = 0) -> int:
        """Validates an integer of at least `least`."""
        number = self.number(key, value, least)
        if not number.is_integer():
            raise self.mistake(key, value, "is not a whole number", "write e.g. 2")
        return int(number)

    def flag(self, key: str, value: Any) -> bool:
        """Validates true or false."""
        if not isinstance(value, bool):
            raise self.mistake(key, value, "is neither true nor false", "write true or false")
        return value

    def choice(self, key: str, value: Any, allowed: tuple[str, ...]) -> str:
        """Validates one of the allowed names."""
        if value not in allowed:
            raise self.mistake(key, value, "is not known", f"use one of {', '.join(allowed)}")
        return str(value)


Rule = Callable[[PartialTranslation, str, Any], str]


def default_of(target: str) -> Any:
    """Our default of a setting; None if it has none."""
    section: Any = Run
    for part in target.split("."):
        info = getattr(section, "model_fields", {}).get(part)
        if info is None:
            return None
        default = info.default
        section = _section(info.annotation)
    return list(default) if isinstance(default, tuple) else default


def _section(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((section for part in get_args(annotation) if (section := _section(part)) is not None), None)


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal, including `1e-4` and 0.0001 or `2GB` and 2000000000."""
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, dict) and isinstance(second, dict):
        return all(key in first and same(first[key], value) for key, value in second.items())
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, str) and isinstance(second, (int, float)):
        try:
            return bool(parse_number(first) == second or parse_size(first) == second)
        except ValueError:
            return False
    return bool(first == second)


def show(value: Any) -> str:
    """Formats a value as RUN.yaml would have it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(show, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
