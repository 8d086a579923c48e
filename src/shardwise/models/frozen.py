"""A second model beside the one that is trained: a reference or a teacher, never changed.

It is in the compute type and divided like stage 3 over the mesh's shard axis, so it costs 2 bytes per parameter over
that many ranks (4 in fp32) and one block at a time besides. It is no part of checkpoints: whatever was resumed, it
comes from its own files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.models.build import build_on_meta, fill_random, find_blocks, materialise
from shardwise.models.names import Link, link
from shardwise.models.source import ModelSource, converted_folder, is_quantized
from shardwise.models.stored import Stored, read_stored, sample_digest, stored_tensors, tensor_files
from shardwise.models.weights import check_shapes, load_weights, match_names
from shardwise.parallel.mesh import World
from shardwise.zero.policy import store_in
from shardwise.zero.stages import COMPUTE, ShardedModel, shard_model


def readable(source: ModelSource, model: Any, say: Callable[[str], None] = lambda _: None) -> ModelSource:
    """The source with files whose tensors are named, shaped and laid out as the model's; converted once if need be."""
    if source.weights is None:
        return source
    folder, config = source.weights, source.config
    direct = None if is_quantized(config) else match_names(model, tensor_files(folder))
    if direct is None or not _as_transformers(model, direct, folder):
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


def _as_transformers(model: Any, direct: dict[str, str], folder: Path) -> bool:
    """Whether tensors that have a parameter's name are what transformers would load into it, unconverted."""
    linked = link(model, tensor_files(folder))
    state = model.state_dict(keep_vars=True)
    return not linked.converted and all(
        key in linked.same and state[linked.same[key]] is state[name] for name, key in direct.items()
    )


def _check_ties(linked: Link, stored: dict[str, Stored], label: str) -> None:
    """Tied tensors are trained as one: files that hold two would lose one of them in silence."""
    for part in linked.parts:
        names = [] if part.converts else [name for name in part.writes if name in stored]
        if len({sample_digest(read_stored(name, stored[name])) for name in names} if len(names) > 1 else ()) > 1:
            problem = f"its config ties {names[0]} to {names[1]}, but its files hold two different tensors"
            raise UserError("model", label, problem, "set tie_word_embeddings: false in its config.json")


def build_frozen(source: ModelSource, world: World, precision: str, seed: int) -> ShardedModel:
    """The model with its first values (the seed's, where it has no files), ready for forwards without gradients."""
    model = build_on_meta(source)
    model.requires_grad_(False)
    store_in(model, COMPUTE[precision])
    shard_model(model, find_blocks(model), world.mesh, 3, precision)
    materialise(model, world.device)
    if source.weights is not None:
        load_weights(model, source.weights)
    else:
        fill_random(model, source, seed)
    model.eval()
    return ShardedModel(model, 3, world.mesh)


def frozen_bytes(parameters: int, shard: int, precision: str) -> float:
    """What it takes on each rank."""
    return parameters * COMPUTE[precision].itemsize / shard
