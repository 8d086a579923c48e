"""Several adapters on one base, for inference: one at a time, or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.core.errors import UserError
from shardwise.nn.adapters.layers import adapter_layers, detach, is_added
from shardwise.nn.adapters.peft import read_tensors
from shardwise.nn.adapters.plan import AdapterPlan, attach, plan_folder


@dataclass
class Library:
    """The adapters loaded for a model."""

    adapters: dict[str, tuple[AdapterPlan, dict[str, torch.Tensor]]] = field(default_factory=dict)
    worn: str | None = None
    replaced: dict[str, nn.Parameter] = field(default_factory=dict)  # the base's own, of modules trained whole


def load_adapters(model: Any, folders: Mapping[str, str | Path]) -> None:
    """Loads PEFT folders to the model's device, by name; `use_adapter` activates one."""
    library = _library(model)
    device = model.device
    dtype = model.dtype
    for name, folder in folders.items():
        path = Path(folder).expanduser()
        plan, adapter = plan_folder(model, path)
        tensors = read_tensors(path, adapter)
        library.adapters[name] = plan, {key: value.to(device, dtype) for key, value in tensors.items()}


@torch.no_grad()
def use_adapter(model: Any, name: str | None) -> None:
    """Activates the adapter of this name; None = the bare base."""
    library = _library(model)
    if name is not None and name not in library.adapters:
        remedy = f"use one of {', '.join(library.adapters) or '(none is loaded)'}"
        raise UserError("adapter", name, "there is no such adapter on this model", remedy)
    if name == library.worn:
        return
    _take_off(model, library)
    if name is not None:
        plan, tensors = library.adapters[name]
        attach(model, plan)
        for key, value in tensors.items():
            module, _, end = key.rpartition(".")
            owner = model.get_submodule(module)
            if end in owner._parameters and not is_added(key):
                library.replaced[key] = owner._parameters[end]
            owner._parameters[end] = nn.Parameter(value, requires_grad=False)
    library.worn = name
    model.eval()


def _take_off(model: Any, library: Library) -> None:
    for _, layer in list(adapter_layers(model)):
        detach(layer)
    for key, parameter in library.replaced.items():
        module, _, end = key.rpartition(".")
        model.get_submodule(module)._parameters[end] = parameter
    library.replaced.clear()


def _library(model: Any) -> Library:
    if not hasattr(model, "shardwise_adapters"):
        model.shardwise_adapters = Library()
    library: Library = model.shardwise_adapters
    return library
