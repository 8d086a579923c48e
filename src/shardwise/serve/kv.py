"""The KV cache of requests that are decoded together; rows join and leave between two steps.

Rows are aligned at their last token, so that the next one goes to the same column for all, and shorter rows are masked
on the left: as `generate` does with a batch, hence right for every kind of position and window it supports. Each layer
has spare columns, because copying the whole cache for every token (as `DynamicCache` does) costs as much as reading the
weights once some dozens of rows are running.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from shardwise.core.compat.hf_private import is_stateful

SPARE = 64  # columns that are added at once


class Slab(DynamicLayer):
    """Keys and values of one layer: views of the used columns of larger buffers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.keys: Any
        self.values: Any
        self.is_initialized: bool
        self.buffers: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends columns in place and returns all of them."""
        previous = [self.keys, self.values] if self.is_initialized else []
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if not self.buffers or end > self.buffers[0].shape[-2]:
            self.buffers = [_wider(new, end + SPARE) for new in (key_states, value_states)]
            for buffer, past in zip(self.buffers, previous, strict=False):
                buffer[..., :start, :] = past
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[..., start:end, :] = new
        self.keys, self.values = (buffer[..., :end, :] for buffer in self.buffers)
        self.dtype = self.keys.dtype
        self.device = self.keys.device
        self.is_initialized = True
        return self.keys, self.values

    def rebuild(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Replaces the contents, e.g. with other rows."""
        self.keys = keys
        self.values = values
        self.buffers = []


def _wider(template: torch.Tensor, columns: int) -> torch.Tensor:
    return template.new_empty((*template.shape[:-2], columns, template.shape[-1]))


def can_join(model: Any) -> bool:
    """Whether rows of different requests can share a cache: every layer stores keys and values of each token."""
    if getattr(model, "_is_stateful", False):
        return False
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    return kinds <= {DynamicLayer, DynamicSlidingWindowLayer}


def new_cache(model: Any) -> Any:
    """Returns an empty cache: one whose rows can change if the model allows it, else the model's own kind."""
    # A sliding window is kept by the mask; its layers store all tokens, so that rows of any length can be joined.
    return Cache(layer_class_to_replicate=Slab) if can_join(model) else DynamicCache(config=model.config)


def keep_rows(cache: Any, rows: torch.Tensor, first: int) -> None:
    """Keeps only the given rows, and no column before `first`."""
    for layer in cache.layers:
        layer.rebuild(layer.keys[rows, :, first:], layer.values[rows, :, first:])


def join(cache: Any, other: Any) -> None:
    """Appends the rows of another cache, aligned at the last column."""
    for layer, other_layer in zip(cache.layers, other.layers, strict=True):
        layer.rebuild(stack(layer.keys, other_layer.keys, -2), stack(layer.values, other_layer.values, -2))


def stack(a: torch.Tensor, b: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the rows of both; the shorter one along `dim` is padded with zeros at the front."""
    width = max(a.shape[dim], b.shape[dim])
    shape = list(a.shape)
    shape[0], shape[dim] = a.shape[0] + b.shape[0], width
    out = a.new_zeros(shape)
    for part, target in ((a, out[: a.shape[0]]), (b, out[a.shape[0] :])):
        target.narrow(dim, width - part.shape[dim], part.shape[dim]).copy_(part)
    return out


def bytes_of(cache: Any) -> int:
    """Bytes of the used columns."""
    tensors = [t for layer in cache.layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
