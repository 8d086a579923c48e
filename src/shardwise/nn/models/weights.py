"""Streams weights from safetensors into the shards: each rank reads its own rows and no more.

With stage 3 no rank ever holds the full model; besides its shards it holds one piece of at most `PIECE` bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.core.compat.torch_private import compute_local_shape_and_global_offset
from shardwise.core.errors import UserError
from shardwise.distributed.lazy_rows import LazyShardedTensor
from shardwise.nn.adapters.layers import is_added
from shardwise.nn.models.heads import head_parameters
from shardwise.nn.models.stored import damaged, tensor_files

PIECE = 64 << 20


class PacksRows(Protocol):
    """How a module stores a parameter that it does not hold as the floats of the files."""

    @property
    def shape(self) -> torch.Size:
        """Shape in the files."""

    @property
    def columns(self) -> slice:
        """The columns of each row that are stored."""

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Converts rows of floats to rows of the parameter."""


def packing_of(model: nn.Module, name: str) -> PacksRows | None:
    """Returns how the module that owns a parameter packs it; None if it does not. Quantised layers have `packings`."""
    owner, _, leaf = name.rpartition(".")
    packings: Mapping[str, PacksRows] = getattr(model.get_submodule(owner), "packings", {})
    return packings.get(leaf)


def match_names(model: nn.Module, stored: dict[str, Path]) -> dict[str, str] | None:
    """Maps parameters and persistent buffers to their names in the files; None if they must be converted first.

    A new head (nn/models/heads.py) is in no file and so has no name here. If the files have tensors that match no name,
    what seems missing may be one of them under another name, which transformers knows.
    """
    prefix = getattr(model, "base_model_prefix", "")
    persistent = set(model.state_dict().keys())
    required = [n for n, _ in model.named_parameters() if not is_added(n)]
    optional = [n for n, _ in model.named_buffers() if n in persistent]
    result = {}
    new = head_parameters(model)
    tied = _tied_names(model)
    missing = False
    for name in required + optional:
        bare = name.removeprefix(prefix + ".")
        aliases = [name, bare, f"{prefix}.{name}", *tied.get(name, ())]
        stored_name = next((alias for alias in aliases if alias in stored), None)
        if stored_name is not None:
            result[name] = stored_name
        elif name in required and name not in new:
            return None
        else:
            missing = True
    return None if missing and _unclaimed(model, result, stored) else result


def _unclaimed(model: nn.Module, names: dict[str, str], stored: Collection[str]) -> set[str]:
    """Tensors of the files that match no parameter, under any name that it is tied to, and no buffer."""
    every = _tied_names(model)
    tied = {alias for name in names for alias in every.get(name, ())}
    return set(stored) - set(names.values()) - tied


def new_parameters(model: nn.Module, folder: Path) -> list[str]:
    """Returns the parameters of a new head, which the files of a folder do not have."""
    names = match_names(model, tensor_files(folder))
    if names is None:
        return []
    return [name for name, _ in model.named_parameters() if name not in names and not is_added(name)]


def _tied_names(model: nn.Module) -> dict[str, list[str]]:
    """The other names of each tied parameter, by its first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: others for first, *others in names.values() if others}


def check_shapes(model: nn.Module, folder: Path) -> None:
    """Compares the shapes in every file with the model's, reading headers only; runs before the ranks start."""
    from safetensors import SafetensorError, safe_open

    stored = tensor_files(folder)
    names = match_names(model, stored)
    assert names is not None, "the caller converts folders whose names do not match"
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    for file in sorted({stored[key] for key in names.values()}):
        try:
            with safe_open(file, framework="pt") as handle:
                for name, key in names.items():
                    if stored[key] == file:
                        _check_shape(handle.get_slice(key), packing_of(model, name) or tensors[name], name, file)
        except (SafetensorError, OSError) as error:
            raise damaged(file, error) from None


def _check_shape(stored: Any, target: torch.Tensor | PacksRows, name: str, file: Path) -> None:
    if list(stored.get_shape()) != list(target.shape):
        problem = f"{name} has shape {list(stored.get_shape())}, the config says {list(target.shape)}"
        remedy = "the weights and config.json belong to different models: fetch both again"
        raise UserError("model", str(file), problem, remedy)


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path, masters: Mapping[str, LazyShardedTensor] | None = None) -> None:
    """Loads every parameter and persistent buffer of a materialised model from the files of a folder.

    Parameters named in `masters` are written through them.
    """
    from safetensors import safe_open

    stored = tensor_files(folder)
    names = match_names(model, stored)
    assert names is not None, "the caller converts folders whose names do not match"
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, key in names.items():
        # Opened anew for each tensor: a mapping keeps every page it has read, and would grow to the rank's whole share.
        with safe_open(stored[key], framework="pt") as handle:
            stored_slice = handle.get_slice(key)
            packing = packing_of(model, name)
            _check_shape(stored_slice, packing or tensors[name], name, stored[key])
            fill_local(tensors[name], stored_slice, (masters or {}).get(name), packing)


def fill_local(
    target: torch.Tensor, full: Any, master: LazyShardedTensor | None = None, packing: PacksRows | None = None
) -> None:
    """Copies this rank's shard of a tensor from anything that can be sliced like the full one, in bounded pieces."""
    local = target.to_local() if isinstance(target, DTensor) else target
    if isinstance(target, DTensor):
        _, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    else:
        offset = (0,) * target.ndim
    if local.numel() == 0:
        return
    if local.ndim == 0:
        local.copy_(full[...])
        return
    inner, width = (packing.shape[1:], 4) if packing else (local.shape[1:], local.element_size())
    other_dims = tuple(slice(o, o + s) for o, s in zip(offset[1:], inner, strict=True))
    if packing is not None:  # columns of floats, not of bytes
        other_dims = (*other_dims[:-1], packing.columns)
    rows = max(1, PIECE // max(1, torch.Size(inner).numel() * width))
    for start in range(0, local.shape[0], rows):
        stop = min(start + rows, local.shape[0])
        part = full[(slice(offset[0] + start, offset[0] + stop), *other_dims)]
        if packing is not None:
            part = packing.pack(part.to(local.device))
        if master is not None:
            master.write([start], part)
        else:
            local[start:stop].copy_(part)
