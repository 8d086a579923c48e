"""Quantized weights (nn/adapters/quantized.py) under tensor parallelism.

Sharding over rows of the packed weight deals out rows of bytes unchanged. For sharding over
columns each rank packs its own slice of the columns, with its own scales. Slices end where blocks
of a scale end, so the codes equal those of the full row (in 8 bits, where a row has a single scale,
they are more precise).
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
    """Whether a linear layer stores its weight quantized."""
    return "weight" in getattr(module, "packings", {})


def full_features(module: Any) -> tuple[int, int]:
    """Returns a linear layer's numbers of inputs and outputs, whether or not it is quantized."""
    if not is_packed(module):
        return features(module)
    rows, columns = module.packings["weight"].shape
    return (rows, columns) if is_transposed(module) else (columns, rows)


def _is_sliced(module: nn.Module, cut: str) -> bool:
    return cut == ("column" if is_transposed(module) else "row")


def can_slice(module: Any, cut: str, mesh: DeviceMesh) -> bool:
    """Whether a cut keeps the columns of each scale on one rank."""
    columns: int = module.packings["weight"].shape[1]
    return not _is_sliced(module, cut) or columns % (BLOCK * mesh.size()) == 0


def slice_packed(module: Any, cut: str, mesh: DeviceMesh) -> None:
    """Repacks a weight that is sharded over its columns as slices, side by side, one per rank."""
    if not _is_sliced(module, cut):
        return
    packing = module.packings["weight"]
    weight = module.weight
    form = replace(packing.form, columns=packing.form.columns // mesh.size())
    if weight.is_meta:
        shape = (len(weight), form.row_bytes * mesh.size())
        repacked = torch.empty(shape, dtype=torch.int8, device="meta")
    else:
        slices = packing.unpack(weight, torch.float32).split(form.columns, 1)
        repacked = torch.cat([packed_parameter(x, WeightPacking(x.shape, form)) for x in slices], 1)
    module.weight = nn.Parameter(repacked, False)
    start = mesh.get_local_rank() * form.columns
    module.packings["weight"] = replace(packing, form=form, start=start)
    if isinstance(module, LoraLayer) and module.lora_form is not None:
        module.lora_form = (module.lora_form[0], form.columns, form.bits, form.double)
