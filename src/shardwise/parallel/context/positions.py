"""Positions for modules that count them by themselves: from the row's length, which is a part's here, or not from 0.

The mask of a divided batch (mask.py) knows the positions of its tokens. While the forward of a model runs that was
given none (the decoders of BART and its kin take none), modules outside of its blocks that take `position_ids` get them
from there. Rotations that change with the longest position (dynamic and LongRoPE) see that of all ranks.
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
    """Hooks of a model that hold the mask of the forward that is running."""

    def __init__(self, model: nn.Module) -> None:
        self._rows: ContextRows | None = None
        self.divided = False  # whether the batch of the last forward was; a block computed again is of that one
        self._told = False  # whether the model was given positions: then it hands them on
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
        ]
        inside = {id(module) for _, block in find_blocks(model) for module in block.modules()}
        for module in model.modules():
            if module is model or id(module) in inside or "position_ids" not in _takes(module):
                continue
            grows = any(word in str(getattr(module, "rope_type", "")) for word in GROWING)
            before, after = (self._lengthen, _shorten) if grows else (self._tell, _flatten)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after))

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        found = [x for x in (*args, *kwargs.values()) if isinstance(x, ContextRows)]
        self._rows = found[0] if found else None
        self.divided = bool(found)
        self._told = kwargs.get("position_ids") is not None

    def _end(self, *_: Any) -> None:
        self._rows = None

    def _tell(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._rows is None or self._told:
            return None
        module.changed = True  # type: ignore[assignment]
        return (), _named(module, args, kwargs) | {"position_ids": self._rows.positions}

    def _lengthen(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._rows is None:
            return None
        given = _named(module, args, kwargs)
        positions = given["position_ids"]
        longest = torch.full_like(positions[..., :1], self._rows.layout.documents.longest - 1)
        module.changed = True  # type: ignore[assignment]
        return (), given | {"position_ids": torch.cat([positions, longest], -1)}


def _named(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    return {**dict(zip(_takes(module), args, strict=False)), **kwargs}


def _takes(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.forward).parameters


def _shorten(module: nn.Module, _: Any, output: Any) -> Any:
    """Without the position that was added."""
    if not module.__dict__.pop("changed", False):
        return None
    return tree_map(lambda x: x[..., :-1, :], output)


def _flatten(module: nn.Module, _: Any, output: Any) -> Any:
    """Some make one row of positions into a batch of one, and so make one too many of ours."""
    changed = module.__dict__.pop("changed", False)
    return (
        output[0]
        if changed and isinstance(output, torch.Tensor) and output.ndim == 4 and len(output) == 1
        else None
    )
