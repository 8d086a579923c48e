"""Initial values of adapters: fresh from (seed, name), the same on any number of ranks, or an adapter folder's."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.distributed.lazy_rows import LazyShardedTensor
from shardwise.nn.adapters.layers import NAMES, LoraLayer, dense_weight, row_norms
from shardwise.nn.adapters.peft import read_adapter, read_tensors
from shardwise.nn.models.weights import fill_local


@torch.no_grad()
def fill_adapters(sharded: Any, seed: int, adapter: str | None, through: Mapping[str, LazyShardedTensor]) -> None:
    """Initialises an adapter's parameters on a model whose base has its values; collective with DoRA."""
    parameters = dict(sharded.model.named_parameters(remove_duplicate=False))
    if adapter is not None:
        folder = Path(adapter).expanduser()
        for name, value in read_tensors(folder, read_adapter(folder)).items():
            fill_local(parameters[name], value, through.get(name))
        return
    for name, parameter in parameters.items():
        if (kind := name.rpartition(".")[2]) in NAMES:
            fill_local(parameter, _fresh(kind, parameter.shape, seed, name), through.get(name))
    for name, value in _magnitudes(sharded).items():
        fill_local(parameters[name], value, through.get(name))


def _fresh(kind: str, shape: torch.Size, seed: int, name: str) -> torch.Tensor:
    """As peft initialises: A uniform within ±1/√in (Kaiming with a = √5), B zero, factors one."""
    if kind in ("ia3_l", "lora_magnitude"):
        # A magnitude only until its norm is known; but the gather that makes it known may round neighbours together.
        return torch.ones(shape)
    if kind == "lora_B":
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.empty(shape).uniform_(-1, 1, generator=generator) / math.sqrt(shape[1])


def _magnitudes(sharded: Any) -> dict[str, torch.Tensor]:
    """DoRA's magnitudes are the norms of the base's rows; unit by unit, for which its weights are gathered."""
    magnitudes: dict[str, torch.Tensor] = {}
    layers = {n: m for n, m in sharded.model.named_modules() if isinstance(m, LoraLayer) and _has_magnitude(m)}
    if not layers:
        return magnitudes
    for unit in sharded.units:
        unit.unshard()
        for name, layer in layers.items():
            base = [p for n, p in layer.named_parameters(recurse=False) if n not in NAMES]
            if f"{name}.lora_magnitude" not in magnitudes and all(_is_gathered(p, layer) for p in base):
                norms = row_norms(dense_weight(layer))
                magnitudes[f"{name}.lora_magnitude"] = (
                    norms.full_tensor() if isinstance(norms, DTensor) else norms
                ).cpu()
        unit.reshard()
    sharded.updated()
    return magnitudes


def _is_gathered(parameter: torch.Tensor, layer: LoraLayer) -> bool:
    """Whether FSDP has gathered it, except for tensor parallelism's shards."""
    return not isinstance(parameter, DTensor) or parameter.device_mesh == layer.tensor_mesh


def _has_magnitude(layer: Any) -> bool:
    return layer._parameters.get("lora_magnitude") is not None  # another stage may have it
