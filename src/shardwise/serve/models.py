"""The models of a server, each under a name of its own.

Several names may share one set of weights: an adapter is switched on (`activate`) before its rows are decoded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.core.errors import UserError
from shardwise.nn.generate import context_length, stop_ids

Loader = Callable[[str], tuple[Any, Any]]
ADAPTER_FILE = "adapter_config.json"  # as PEFT names it


@dataclass(frozen=True, eq=False)
class Served:
    """A model ready to serve: weights, tokenizer and stop tokens."""

    name: str
    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
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
        """Whether the chat template supports tools."""
        return "tools" in str(self.tokenizer.chat_template or "")


class Models:
    """The served models by name, in the order given."""

    def __init__(self, served: list[Served]) -> None:
        self._by_name = {model.name: model for model in served}

    def get(self, name: str) -> Served | None:
        """Returns the model of that name, or None."""
        return self._by_name.get(name)

    def __iter__(self) -> Iterator[Served]:
        return iter(self._by_name.values())


def split_names(words: list[str], name: str | None) -> dict[str, str]:
    """Returns models by name from the command line: `MODEL`, or `NAME=MODEL`."""
    if name is not None and len(words) > 1:
        raise UserError("--name", name, "names one model, and there are several", "write NAME=MODEL for each")
    models: dict[str, str] = {}
    for word in words:
        label, equals, place = word.partition("=")
        if not equals or Path(word).expanduser().exists():
            label = _default_name(word)
            place = word
        label = name or label
        if not label or not place:
            raise UserError("MODEL", word, "lacks a name or a model", "write NAME=MODEL, e.g. tuned=out/run")
        if label in models:
            raise UserError("MODEL", word, f"the name {label} is taken", "write NAME=MODEL with another name")
        models[label] = place
    return models


def _default_name(word: str) -> str:
    """A hub id or an embedded name unchanged; the last part of a path."""
    path = Path(word).expanduser()
    return path.resolve().name if path.exists() else word


def load_models(places: dict[str, str], changed_tokenizer: bool, load: Loader) -> Models:
    """Loads each model once, whatever its names; adapters of one base share its weights."""
    loaded: dict[str, tuple[Any, Any]] = {}
    served = []
    shared = shared_bases(places)
    for name, place in places.items():
        base = shared.get(place, place)
        if base not in loaded:
            loaded[base] = load(base)
        model, tokenizer = loaded[base]
        if base in shared.values():
            served.append(_with_adapter(name, model, tokenizer, adapter_folder(place), changed_tokenizer))
        else:
            served.append(Served(name, model, tokenizer))
    return Models(served)


def shared_bases(places: dict[str, str]) -> dict[str, str]:
    """Returns the base of each place, for bases shared by several adapters or by an adapter and the bare model.

    An adapter that is alone on its base is loaded like any other model.
    """
    bases = {place: _base(folder) for place in places.values() if (folder := adapter_folder(place)) is not None}
    base_of_place = bases | {place: place for place in places.values() if place in bases.values()}
    return {place: base for place, base in base_of_place.items() if list(base_of_place.values()).count(base) > 1}


def adapter_folder(place: str) -> Path | None:
    """Returns the adapter's folder, itself or in a finished run; None if there is none."""
    path = Path(place).expanduser()
    return next((folder for folder in (path / "model", path) if (folder / ADAPTER_FILE).is_file()), None)


def _base(folder: Path) -> str:
    try:
        return str(json.loads((folder / ADAPTER_FILE).read_text())["base_model_name_or_path"])
    except (ValueError, KeyError, TypeError):
        raise UserError("MODEL", str(folder), f"its {ADAPTER_FILE} names no base model", "export it again") from None


def _with_adapter(name: str, model: Any, tokenizer: Any, folder: Path | None, changed_tokenizer: bool) -> Served:
    """A base under one of its names: with the adapter of a folder, or bare."""
    from transformers import AutoTokenizer

    from shardwise.data.fingerprint import check_fingerprint
    from shardwise.nn.adapters.library import load_adapters, use_adapter

    if folder is None:
        return Served(name, model, tokenizer, lambda: use_adapter(model, None))
    load_adapters(model, {name: folder})
    if (folder / "tokenizer.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not changed_tokenizer:
        check_fingerprint(folder, tokenizer)
    return Served(name, model, tokenizer, lambda: use_adapter(model, name))
