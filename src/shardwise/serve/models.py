"""Which models a server offers, each under a name of its own.

Several names may share one set of weights: an adapter is switched on (`activate`) before its rows are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.serve.generate import context_length, stop_ids

Loader = Callable[[str], tuple[Any, Any]]


@dataclass(frozen=True, eq=False)
class Served:
    """A model ready to answer: weights, tokenizer and what ends an answer."""

    name: str
    model: Any
    tokenizer: Any
    activate: Callable[[], None] | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        set_once: Any = object.__setattr__
        set_once(self, "stops", stop_ids(self.tokenizer, self.model))
        set_once(self, "context", context_length(self.model))

    stops: set[int] = field(init=False)
    context: int | None = field(init=False)

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        return "tools" in str(self.tokenizer.chat_template or "")


class Models:
    """Names of models, in the order they were given."""

    def __init__(self, served: list[Served]) -> None:
        self._by_name = {one.name: one for one in served}

    def get(self, name: str) -> Served | None:
        """The model of that name, if there is one."""
        return self._by_name.get(name)

    def __iter__(self) -> Iterator[Served]:
        return iter(self._by_name.values())


def split_names(words: list[str], name: str | None) -> dict[str, str]:
    """Model by name from what the command line gives: `MODEL`, or `NAME=MODEL`."""
    if name is not None and len(words) > 1:
        raise UserError("--name", name, "names one model, and there are several", "write NAME=MODEL for each")
    found: dict[str, str] = {}
    for word in words:
        label, equals, place = word.partition("=")
        if not equals or Path(word).expanduser().exists():
            label, place = _default_name(word), word
        label = name or label
        if not label or not place:
            raise UserError("MODEL", word, "lacks a name or a model", "write NAME=MODEL, e.g. tuned=out/run")
        if label in found:
            raise UserError("MODEL", word, f"the name {label} is taken", "write NAME=MODEL with another name")
        found[label] = place
    return found


def _default_name(word: str) -> str:
    """A hub id or an embedded name as it stands; the last part of a path."""
    path = Path(word).expanduser()
    return path.resolve().name if path.exists() else word


def load_models(places: dict[str, str], load: Loader) -> Models:
    """Loads each model once, whatever names it has."""
    loaded: dict[str, tuple[Any, Any]] = {}
    served = []
    for name, place in places.items():
        if place not in loaded:
            loaded[place] = load(place)
        model, tokenizer = loaded[place]
        served.append(Served(name, model, tokenizer))
    return Models(served)
