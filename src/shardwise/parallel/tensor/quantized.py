"""Weights in few bits (nn/adapters/quantized.py) under tensor parallelism.

Rows of bytes are dealt out as they are. Where a layer is cut along its rows each rank packs its own slice of the
columns, with scales of its own: between blocks of a scale, so that the codes are those of the whole row (in 8 bits,
where a row has one scale, they are finer).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.nn.adapters.layers import LoraLayer, features, is_transposed
from shardwise.nn.adapters.packing import WeightPacking, packed_parameter
from shardwise.nn.kernels.nf4 import BLOCK


def is_packed(module: Any) -> bool:
    """Whether a linear layer keeps its weight in few bits."""
    return "weight" in getattr(module, "packings", {})


def whole_features(module: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer, however it keeps its weight."""
    if not is_packed(module):
        return features(module)
    shape = module.packings["weight"].shape
    return (shape[0], shape[1]) if is_transposed(module) else (shape[1], shape[0])


def _is_sliced(module: nn.Module, cut: str) -> bool:
    return cut == ("column" if is_transposed(module) else "row")


def can_slice(module: Any, cut: str, mesh: DeviceMesh) -> bool:
    """Whether a cut leaves blocks whole."""
    columns: int = module.packings["weight"].shape[1]
    return not _is_sliced(module, cut) or columns % (BLOCK * mesh.size()) == 0


def slice_packed(module: Any, cut: str, mesh: DeviceMesh) -> None:
    """Makes the weight of a layer that is cut along its rows one of slices, side by side, each packed by itself."""
    if not _is_sliced(module, cut):
        return
    packing, weight = module.packings["weight"], module.weight
    form = replace(packing.form, columns=packing.form.columns // mesh.size())
    if weight.is_meta:
        bytes_of_all = form.row_bytes * mesh.size()
        module.weight = nn.Parameter(
            torch.empty(len(weight), bytes_of_all, dtype=torch.int8, device="meta"), False
        )
    else:
        parts = packing.unpack(weight, torch.float32).split(form.columns, 1)
        packed: list[torch.Tensor] = [
            packed_parameter(part, WeightPacking(part.shape, form)) for part in parts
        ]
        module.weight = nn.Parameter(torch.cat(packed, 1), False)
    module.packings["weight"] = replace(
        packing, form=form, start=mesh.get_local_rank() * form.columns
    )
    if isinstance(module, LoraLayer) and module.lora_form is not None:
        module.lora_form = (module.lora_form[0], form.columns, form.bits, form.double)
