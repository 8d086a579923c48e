"""What is known of model families by hand (families.yaml), and which family a chat template is of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

Message = dict[str, Any]
EOS = "{eos}"  # stands for the tokenizer's
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


@dataclass(frozen=True)
class Family:
    """A model family. Ends may be lists, where its templates differ.

    needles   strings that its templates have; `named`: or that stand in their names
    end       what ends an answer; null: nothing does, so that the template must be refused
    last      what ends the last answer, if that is something else
    calls     what ends a message with tool calls, if that is something else
    by_role   what ends an answer before a message of this role, if that is something else
    special   its special tokens; `words`: tokens that are added and not special
    stops     what its generation config stops at besides eos
    opens     what opens turns: never trained on
    lead      words that answers begin with before the content
    plain     what ends answers, and the last one, on a tokenizer without these tokens; null: must be refused
    """

    name: str
    needles: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    end: Any = None
    last: Any = None
    calls: Any = None
    by_role: dict[str, Any] = field(default_factory=dict)
    special: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=lambda: list(TAGS))
    bos: str = "<s>"
    eos: str = "</s>"
    stops: list[str] = field(default_factory=list)
    opens: list[str] = field(default_factory=list)
    lead: list[str] = field(default_factory=list)
    plain: list[str] | None = None

    def endings(self, messages: Sequence[Message], index: int, mode: str) -> list[str] | None:
        """What this answer may end with; None if there is nothing, so that the conversation must be refused."""
        following = messages[index + 1]["role"] if index + 1 < len(messages) else None
        eos = self.eos if mode == "special" else "</s>"
        end = self.end
        if mode == "plain" and EOS not in str(self.end):
            end = self.plain and self.plain[following is None]
        elif following in self.by_role:
            end = self.by_role[following]
        elif messages[index].get("tool_calls") and self.calls is not None:
            end = self.calls
        elif following is None and self.last is not None:
            end = self.last
        if end is None:
            return None
        return [one.replace(EOS, eos) for one in (end if isinstance(end, list) else [end])]

    def has(self, name: str, template: str) -> bool:
        """Whether a template is of this family."""
        if self.named:
            return any(part in name for part in self.named)
        return all(needle in template for needle in self.needles)


@lru_cache
def _table() -> dict[str, dict[str, dict[str, Any]]]:
    return dict(yaml.safe_load(Path(__file__).with_name("families.yaml").read_text(encoding="utf-8")))


@lru_cache
def published() -> tuple[Family, ...]:
    """The families of published models, in the order in which a template is tried on them."""
    return tuple(Family(name, **values) for name, values in _table()["published"].items())


def family_of(name: str, template: str) -> Family:
    """The family of a template."""
    return next(family for family in published() if family.has(name, template))


def own_names() -> list[str]:
    """Our own templates."""
    return list(_table()["own"])


def own_family(name: str) -> Family:
    """What is known of one of our own templates."""
    from support.templates import FAMILIES

    written = FAMILIES[name]
    tokens = {"special": list(written.special), "eos": written.eos, "bos": written.bos or "<s>"}
    assert set(_table()["own"][name]) <= {f.name for f in fields(Family)}
    return Family(f"own/{name}", **tokens | _table()["own"][name])


def squashed(text: str) -> str:
    """A text without its blanks."""
    return re.sub(r"\s+", "", text)
