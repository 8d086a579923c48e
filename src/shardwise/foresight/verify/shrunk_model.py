"""The model of a verification: the user's own with fewer layers, as a folder that transformers and Shardwise both read.

Widths and the weights of the remaining layers are kept where memory and time allow; otherwise it is a tiny model of the
same class with the same vocabulary. Dropout is off: it draws different numbers for different shapes.
"""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.core.errors import UserError
from shardwise.nn.models.build import build_on_meta, find_blocks
from shardwise.nn.models.source import ModelSource, quiet
from shardwise.nn.models.tasks import auto_class
from shardwise.nn.tiny.shrink import POSITIONS, SIZES, SPECIAL, VOCABULARY, first_layers, shrink, with_low_caps

LAYERS = 2
MOST_LAYERS = 8  # kinds of layers that come round later than this are left out
# Fresh weights are moved, so that no error hides behind a bias of zeros, a norm of ones or scores near zero: products
# change by this share of what goes into them.
MOVED = 0.5
BYTES = 20  # per parameter and rank: weights, gradients, two moments, and what is gathered
WORK = {"cpu": 2e13, "cuda": 5e16}  # floating-point operations of all claims together: some minutes


@dataclass(frozen=True)
class ShrunkModel:
    """A model for verification: its folder, description, number of parameters and config."""

    folder: Path
    description: str
    parameters: int
    config: Any


@dataclass(frozen=True)
class ResourceBudget:
    """Resources of a verification: free memory, and the tokens that will be computed."""

    device: str
    memory: int
    ranks: int
    tokens: int  # through forward and backward, all claims together

    def holds(self, parameters: int) -> bool:
        """Whether every rank can hold a copy, and the work takes some minutes at most."""
        return (
            BYTES * parameters * self.ranks <= self.memory and 6.0 * parameters * self.tokens <= WORK[self.device]
        )  # fmt: skip


def make_model(
    source: ModelSource, folder: Path, room: ResourceBudget, layers: int | None, full: bool, stages: int
) -> ShrunkModel:
    """Writes the model's folder; a pipeline needs at least `stages` layers."""
    if full:
        return _full_model(source, folder, room)
    depth = max(layers or max(LAYERS, kinds_within(source.config), kinds_of_blocks(source)), stages)
    shallow = replace(source, config=fewer_layers(source.config, depth))
    count = _count(shallow)
    if room.holds(count):
        loaded = source.weights is not None
        _write(shallow, folder, loaded)
        weights_note = "its own weights" if loaded else "fresh weights"
        return ShrunkModel(
            folder, f"{source.label} with {depth} layers, real widths, {weights_note}", count, shallow.config
        )
    tiny = replace(source, config=tiny_config(source.config, depth))
    _write(tiny, folder, loaded=False)
    description = f"a tiny {source.config.model_type} with {depth} layers (real widths take too long here)"
    return ShrunkModel(folder, description, _count(tiny), tiny.config)


def _full_model(source: ModelSource, folder: Path, room: ResourceBudget) -> ShrunkModel:
    count = _count(source)
    if BYTES * count * room.ranks > room.memory:
        problem = f"{count / 1e6:.0f}M parameters on {room.ranks} ranks take about {_gib(BYTES * count * room.ranks)}"
        raise UserError("--full", None, f"{problem}, {_gib(room.memory)} are free", "leave --full out")
    if source.weights is None:
        _write(replace(source, config=still(source.config)), folder, loaded=False)
        return ShrunkModel(folder, f"{source.label}, whole, fresh weights", count, source.config)
    folder.mkdir(parents=True)
    for file in source.weights.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = still(source.config)
    config.architectures = source.config.architectures
    (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    return ShrunkModel(folder, f"{source.label}, whole", count, source.config)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _count(source: ModelSource) -> int:
    return sum(p.numel() for p in build_on_meta(source).parameters())


def kinds_within(config: Any) -> int:
    """Number of layers needed to include every layer type of the config."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    last = max((list(kinds).index(kind) for kind in set(kinds)), default=0)
    return min(last + 1, MOST_LAYERS)


def kinds_of_blocks(source: ModelSource) -> int:
    """Number of layers needed to include every kind of block: dense ones may come before MoE blocks."""
    stacks: dict[str, list[Any]] = {}
    for name, block in find_blocks(build_on_meta(source)):
        shapes = tuple((key, parameter.shape) for key, parameter in block.named_parameters())
        stacks.setdefault(name.rpartition(".")[0], []).append(shapes)
    last = max((kinds.index(kind) for kinds in stacks.values() for kind in kinds), default=0)
    return min(last + 1, MOST_LAYERS)


def fewer_layers(config: Any, layers: int) -> Any:
    """Returns the config with the first layers only, without dropout."""
    return still(first_layers(config, layers))


def still(config: Any) -> Any:
    """Returns the config without dropout or noise, in every sub-config."""
    config = copy.deepcopy(config)
    for part in (config, *(getattr(config, n, None) for n in getattr(type(config), "sub_configs", None) or {})):
        for name, value in list(vars(part).items()) if part is not None else []:
            if isinstance(value, float) and ("drop" in name or "noise" in name):
                setattr(part, name, 0.0)
    config.use_cache = False
    return config


def drops_out(config: Any) -> bool:
    """Whether a model uses dropout in training."""
    parts = (config, *(getattr(config, n, None) for n in getattr(type(config), "sub_configs", None) or {}))
    return any(
        isinstance(value, float) and value > 0 and "drop" in name and "classifier" not in name
        for part in parts if part is not None for name, value in vars(part).items()
    )  # fmt: skip


def tiny_config(config: Any, layers: int) -> Any:
    """Returns a tiny config of the same class for the same tokens and lengths."""
    small = shrink(config, layers)
    for small_part, original in ((small, config), (small.get_text_config(), config.get_text_config())):
        for name, size in SIZES.items():
            if (
                size in (VOCABULARY, POSITIONS)
                and isinstance(getattr(original, name, None), int)
                and name in vars(small_part)
            ):
                setattr(small_part, name, getattr(original, name))
        for name in SPECIAL:
            if hasattr(original, name):
                setattr(small_part, name, getattr(original, name))
    if getattr(config, "id2label", None):
        small.id2label = config.id2label
        small.label2id = config.label2id
    return small


def _write(source: ModelSource, folder: Path, loaded: bool) -> None:
    """Saves the model in fp32 as a Hugging Face folder."""
    model_class = auto_class(source.task)
    trust = source.trust_remote_code
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if loaded:
            model = model_class.from_pretrained(
                source.weights, config=source.config, dtype=torch.float32, trust_remote_code=trust
            )
        else:
            model = model_class.from_config(with_low_caps(source.config), dtype=torch.float32, trust_remote_code=trust)
            with torch.no_grad():
                for parameter in model.parameters():
                    size = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.4
                    parameter.add_(MOVED * size * torch.randn_like(parameter))
            model.tie_weights()
        model.save_pretrained(folder)


def write_adapter(
    folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, int]], ranks: dict[str, int]
) -> None:
    """Writes a LoRA adapter with non-zero values (a fresh B is zero, and so are the gradients of A)."""
    from safetensors.torch import save_file

    os.makedirs(folder)
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (in_features, out_features) in shapes.items():
        for matrix, shape in (("lora_A", (ranks[name], in_features)), ("lora_B", (out_features, ranks[name]))):
            values = torch.randn(shape, generator=random) / shape[1] ** 0.5
            tensors[f"base_model.model.{name}.{matrix}.weight"] = values * (1.0 if matrix == "lora_A" else 0.1)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
