"""Merges base and adapter: weight by weight, from the base's files, with no model in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from shardwise.config.resolve import Resolution, task_wanted
from shardwise.config.schema import Run
from shardwise.nn.adapters.layers import is_transposed, row_norms
from shardwise.nn.adapters.plan import AdapterPlan
from shardwise.nn.models.build import build_on_meta
from shardwise.nn.models.source import ModelSource, find_model
from shardwise.nn.models.stored import tensor_files
from shardwise.nn.models.weights import match_names

Get = Callable[[str], torch.Tensor]


def find_base(run: Run) -> tuple[ModelSource, Any]:
    """Returns the model that a run started from, with weights under the model's own names, and that model on `meta`."""
    from shardwise.nn.models.adapt import adapt_model
    from shardwise.nn.models.readable import readable

    source = find_model(run.model, task=task_wanted(run))
    source = adapt_model(Resolution(run), source, source.load_tokenizer())
    model = build_on_meta(source)
    return readable(source, model), model


class Merger:
    """Reads the tensors of base and adapter merged; `get` returns those named in `trained`, as in the checkpoint."""

    def __init__(self, model: Any, folder: Path, plan: AdapterPlan | None, trained: Collection[str], get: Get) -> None:
        self._model = model
        self._plan = plan
        self._trained = trained
        self._get = get
        self._files = tensor_files(folder)
        names = match_names(model, self._files)
        assert names is not None, "find_base converts folders whose names do not match"
        self._names = names
        self._targets = set(plan.targets) if plan is not None else set()

    def outline(self) -> list[tuple[str, torch.Size, torch.dtype]]:
        """Returns name, shape and dtype of each tensor, in order."""
        tensors = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        names = [name for name in tensors if name in self._names or name in self._trained]
        return [(name, tensors[name].shape, tensors[name].dtype) for name in names]

    def __call__(self, name: str) -> torch.Tensor:
        """Returns one tensor, in fp32 if anything was added to it."""
        if name in self._trained:
            return self._get(name)
        from safetensors import safe_open

        with safe_open(self._files[self._names[name]], framework="pt") as handle:
            tensor: torch.Tensor = handle.get_tensor(self._names[name])
        module, _, end = name.rpartition(".")
        if module not in self._targets or not tensor.is_floating_point():
            return tensor
        return self._merged(module, end, tensor.float()) if end in ("weight", "bias") else tensor

    def _merged(self, module: str, end: str, tensor: torch.Tensor) -> torch.Tensor:
        assert self._plan is not None
        transposed = is_transposed(self._model.get_submodule(module)) and end == "weight"
        adapter = {n: self._get(f"{module}.{n}").float() for n in self._adapter_names(module)}
        if self._plan.kind == "ia3":
            scales_input = self._plan.feedforward[module]
            if end == "bias":
                return tensor if scales_input else tensor * adapter["ia3_l"]
            return tensor * (adapter["ia3_l"][:, None] if scales_input == transposed else adapter["ia3_l"])
        if end == "bias":
            return tensor
        merged = merge_lora(tensor.t() if transposed else tensor, adapter, self._plan.scale(module))
        return merged.t().contiguous() if transposed else merged

    def _adapter_names(self, module: str) -> list[str]:
        assert self._plan is not None
        if self._plan.kind == "ia3":
            return ["ia3_l"]
        return ["lora_A", "lora_B", *(["lora_magnitude"] if self._plan.dora else [])]


def merge_lora(weight: torch.Tensor, adapter: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
    """Returns W + scale · B A (out × in), its rows scaled to their magnitudes if there are any."""
    merged = torch.addmm(weight, adapter["lora_B"], adapter["lora_A"], alpha=scale)
    if "lora_magnitude" in adapter:
        merged *= (adapter["lora_magnitude"] / row_norms(merged))[:, None]
    return merged
