"""Weight files as a model's own code loads them: named, shaped and laid out as its parameters, or converted once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.core.errors import UserError
from shardwise.nn.models.names import TensorNames, link
from shardwise.nn.models.source import ModelSource, converted_folder, is_quantized
from shardwise.nn.models.stored import StoredTensor, read_stored, sample_digest, stored_tensors, tensor_files
from shardwise.nn.models.weights import check_shapes, match_names


def readable(source: ModelSource, model: Any, say: Callable[[str], None] = lambda _: None) -> ModelSource:
    """Returns the source with files that match the model's names, shapes and layout; converted once if needed."""
    if source.weights is None:
        return source
    folder = source.weights
    config = source.config
    direct = None if is_quantized(config) else match_names(model, tensor_files(folder))
    if direct is None or not _loads_unconverted(model, direct, folder):
        say("converting the weights to the model's own names (once)")
        folder = converted_folder(source)
    check_shapes(model, folder)
    if source.origin is None:
        return replace(source, weights=folder)
    stored = stored_tensors(source.origin)
    linked = link(model, stored)
    _check_ties(linked, stored, source.label)
    if is_quantized(config):  # what is trained and exported is not
        config = copy.deepcopy(config)
        del config.quantization_config
    return replace(source, weights=folder, config=config, extra=tuple(linked.extra))


def _loads_unconverted(model: Any, direct: dict[str, str], folder: Path) -> bool:
    """Whether tensors with a parameter's name are what transformers would load into it, unconverted."""
    linked = link(model, tensor_files(folder))
    state = model.state_dict(keep_vars=True)
    return not linked.converted and all(
        key in linked.same and state[linked.same[key]] is state[name] for name, key in direct.items()
    )


def _check_ties(linked: TensorNames, stored: dict[str, StoredTensor], label: str) -> None:
    """Tied tensors are trained as one: files that hold two would silently lose one of them."""
    for part in linked.parts:
        names = [] if part.converts else [name for name in part.writes if name in stored]
        if len({sample_digest(read_stored(name, stored[name])) for name in names} if len(names) > 1 else ()) > 1:
            problem = f"its config ties {names[0]} to {names[1]}, but its files hold two different tensors"
            raise UserError("model", label, problem, "set tie_word_embeddings: false in its config.json")
