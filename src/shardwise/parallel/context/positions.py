"""Position ids for modules that compute their own, from the row's length or not from 0.

With a sharded sequence, the row's length is that of a part. The mask of a sharded batch (mask.py)
knows the positions of its tokens. While a forward runs without `position_ids` (the decoders of BART
and its relatives take none), modules outside of the blocks that accept `position_ids` get them from
the mask. Rotations that depend on the longest position (dynamic and LongRoPE) see the longest of
all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwise.core.compat.torch_private import tree_map
from shardwise.nn.models.build import find_blocks
from shardwise.parallel.context.mask import ContextRows

GROWING = ("dynamic", "longrope")


class Positions:
    """Hooks of a model that hold the mask of the running forward."""

    def __init__(self, model: nn.Module) -> None:
        self._rows: ContextRows | None = None
        # Whether the batch of the last forward was sharded; recomputed blocks belong to it.
        self.sharded = False
        self._given = False  # whether the model got positions, which it passes on
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]
        inside = {id(module) for _, block in find_blocks(model) for module in block.modules()}
        for module in model.modules():
            if module is model or id(module) in inside or "position_ids" not in _parameters(module):
                continue
            rope_type = str(getattr(module, "rope_type", ""))
            if any(word in rope_type for word in GROWING):
                before, after = self._append_longest, _drop_longest
            else:
                before, after = self._give_positions, _unbatch
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after))

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._rows = None
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, ContextRows):
                self._rows = argument
                break
        self.sharded = self._rows is not None
        self._given = kwargs.get("position_ids") is not None

    def _end(self, *_: Any) -> None:
        self._rows = None

    def _give_positions(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._rows is None or self._given:
            return None
        module.changed = True  # type: ignore[assignment]
        return (), _named(module, args, kwargs) | {"position_ids": self._rows.positions}

    def _append_longest(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._rows is None:
            return None
        named = _named(module, args, kwargs)
        positions = named["position_ids"]
        longest = torch.full_like(positions[..., :1], self._rows.layout.documents.longest - 1)
        module.changed = True  # type: ignore[assignment]
        return (), named | {"position_ids": torch.cat([positions, longest], -1)}


def _named(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    return {**dict(zip(_parameters(module), args, strict=False)), **kwargs}


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.forward).parameters


def _drop_longest(module: nn.Module, _: Any, output: Any) -> Any:
    """Drops the position that `_append_longest` added."""
    if not module.__dict__.pop("changed", False):
        return None
    return tree_map(lambda x: x[..., :-1, :], output)


def _unbatch(module: nn.Module, _: Any, output: Any) -> Any:
    """Some modules add a batch dimension to the positions: one too many for ours."""
    changed = module.__dict__.pop("changed", False)
    if changed and isinstance(output, torch.Tensor) and output.ndim == 4 and len(output) == 1:
        return output[0]
    return None
