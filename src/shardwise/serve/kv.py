"""The keys and values of requests that are answered together; rows join and leave between two steps.

Rows are aligned at their last token, so that the next one goes to the same column for all, and shorter rows are masked
on the left: what `generate` does with a batch, hence right for every kind of position and window that it is right for.
Each layer has spare columns, because copying the whole cache for every token (what `DynamicCache` does) costs as much
as reading the weights once some dozens of rows are under way.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from shardwise.core.compat.hf_private import is_stateful

SPARE = 64  # columns that are added at once


class Slab(DynamicLayer):
    """One layer's keys and values: views of the used columns of larger buffers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.keys: Any
        self.values: Any
        self.is_initialized: bool
        self.buffers: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds columns in place and gives all of them."""
        old = [self.keys, self.values] if self.is_initialized else []
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        if not self.buffers or end > self.buffers[0].shape[-2]:
            self.buffers = [_wider(new, end + SPARE) for new in (key_states, value_states)]
            for buffer, past in zip(self.buffers, old, strict=False):
                buffer[..., :begin, :] = past
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[..., begin:end, :] = new
        self.keys, self.values = (buffer[..., :end, :] for buffer in self.buffers)
        self.dtype, self.device, self.is_initialized = self.keys.dtype, self.keys.device, True
        return self.keys, self.values

    def rebuild(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Other contents, e.g. with other rows."""
        self.keys, self.values, self.buffers = keys, values, []


def _wider(like: torch.Tensor, columns: int) -> torch.Tensor:
    return like.new_empty((*like.shape[:-2], columns, like.shape[-1]))


def can_join(model: Any) -> bool:
    """Whether rows of different requests can share a cache: every layer keeps keys and values of each token."""
    if is_stateful(model):
        return False
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    return kinds <= {DynamicLayer, DynamicSlidingWindowLayer}


def new_cache(model: Any) -> Any:
    """An empty cache: one whose rows can be changed where the model allows it, else the model's own kind."""
    # A sliding window is kept by the mask; its layers store all tokens, so that rows of any length can be joined.
    return Cache(layer_class_to_replicate=Slab) if can_join(model) else DynamicCache(config=model.config)


def keep_rows(cache: Any, rows: torch.Tensor, first: int) -> None:
    """Leaves only the given rows, and no column before `first`."""
    for layer in cache.layers:
        layer.rebuild(layer.keys[rows, :, first:], layer.values[rows, :, first:])


def join(cache: Any, other: Any) -> None:
    """Appends the rows of another cache, aligned at the last column."""
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        mine.rebuild(stack(mine.keys, theirs.keys, -2), stack(mine.values, theirs.values, -2))


def stack(a: torch.Tensor, b: torch.Tensor, dim: int) -> torch.Tensor:
    """The rows of both; the one that is shorter along `dim` begins with zeros."""
    width = max(a.shape[dim], b.shape[dim])
    shape = list(a.shape)
    shape[0], shape[dim] = a.shape[0] + b.shape[0], width
    out = a.new_zeros(shape)
    for part, place in ((a, out[: a.shape[0]]), (b, out[a.shape[0] :])):
        place.narrow(dim, width - part.shape[dim], part.shape[dim]).copy_(part)
    return out


def bytes_of(cache: Any) -> int:
    """Memory of the used columns."""
    tensors = [t for layer in cache.layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
