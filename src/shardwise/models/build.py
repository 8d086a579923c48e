"""Builds a model that takes no memory, finds its blocks, and fills fresh models with random weights unit by unit.

Parameters are born on `meta`; buffers (rotary tables and such) are real, because no file holds them. The blocks are the
units of sharding and of recomputation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.errors import UserError
from shardwise.models.source import ModelSource


def build_on_meta(source: ModelSource) -> Any:
    """The model with every parameter on `meta` and ties in place."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(
                source.config, dtype=torch.float32, trust_remote_code=source.trust_remote_code
            )
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise UserError("model", source.label, f"transformers could not build it ({error})", "check model.config") from None
    # Each registration under init_empty_weights makes a new meta tensor, which unties shared ones.
    model.tie_weights()
    model.config.use_cache = False
    return model


def class_name(model: nn.Module) -> str:
    """The model's own class; FSDP puts a subclass of its own in front."""
    from torch.distributed.fsdp import FSDPModule

    return next(c.__name__ for c in type(model).__mro__ if not issubclass(c, FSDPModule))


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated layers of a model, in order: by the classes it declares unsplittable, else its largest module list."""
    declared = set(getattr(model, "_no_split_modules", None) or ())
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    listed = {id(child) for one in lists for child in one}
    blocks = [(n, m) for n, m in model.named_modules() if type(m).__name__ in declared and id(m) in listed]
    if not blocks and lists:
        largest = max(lists, key=lambda one: sum(p.numel() for p in one.parameters()))
        members = {id(child) for child in largest}
        blocks = [(n, m) for n, m in model.named_modules() if id(m) in members]
    outermost: list[tuple[str, nn.Module]] = []
    for name, module in blocks:
        if not any(name.startswith(outer + ".") for outer, _ in outermost):
            outermost.append((name, module))
    return outermost


def materialise(module: nn.Module, device: torch.device) -> None:
    """Gives meta parameters real, uninitialised memory; leaves real tensors as they are."""
    # nn.Module.to_empty would wipe the buffers too; _apply is what it, .to() and FSDP's override share.
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))


def random_unit(model: Any, seed: int, device: torch.device) -> Callable[[str, nn.Module], None]:
    """A function that materialises one unit of a fresh model and initialises it as the model's authors do.

    The random stream depends on the seed and the unit's name alone, so the result is the same on any number of ranks.
    """

    def fill(name: str, unit: nn.Module) -> None:
        materialise(unit, torch.device("cpu"))
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:7], "little"))
            _initialise(unit, _initialiser_of(model, name))
        if device.type != "cpu":
            unit._apply(lambda t: t if _is_sharded(t) else t.to(device))

    return fill


def _is_sharded(tensor: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _initialiser_of(model: Any, name: str) -> Any:
    """`_init_weights` of the innermost pretrained model around a unit (composite models have several)."""
    from transformers import PreTrainedModel

    parts = name.split(".") if name else []
    for depth in range(len(parts), -1, -1):
        owner = model.get_submodule(".".join(parts[:depth])) if depth else model
        if isinstance(owner, PreTrainedModel):
            return owner
    return model


def _initialise(module: nn.Module, owner: Any) -> None:
    from torch.distributed.fsdp import FSDPModule
    from transformers import PreTrainedModel

    for child in module.children():
        if not isinstance(child, FSDPModule):  # sharded already: it was initialised before
            _initialise(child, child if isinstance(child, PreTrainedModel) else owner)
    if not any(_is_sharded(p) for p in module.parameters()):
        owner._init_weights(module)
    elif any(True for _ in module.parameters(recurse=False)):
        raise AssertionError(f"{type(module).__name__} holds parameters beside sharded children")
