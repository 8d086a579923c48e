"""Builds a model on `meta`, finds its blocks, and initialises fresh models with random weights unit by unit.

Parameters start on `meta`; buffers (rotary tables and such) are real, because no file holds them. The blocks are the
units of sharding and of recomputation.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.core.compat.hf_private import init_weights, unsplittable
from shardwise.core.errors import UserError
from shardwise.distributed.lazy_rows import LazyShardedTensor
from shardwise.nn.attention.varlen import built_with
from shardwise.nn.models.source import ModelSource
from shardwise.nn.models.tasks import auto_class
from shardwise.nn.models.weights import fill_local, packing_of

FLAG = "output_router_logits"
PLAIN = (int, float, type(None))


def build_on_meta(source: ModelSource) -> Any:
    """Returns the model with every parameter on `meta` and weights tied."""
    from accelerate import init_empty_weights

    config = without_recording(source.config)
    try:
        with init_empty_weights(include_buffers=False):
            model = built_with(
                auto_class(source.task), config, source.attention or None,
                dtype=torch.float32, trust_remote_code=source.trust_remote_code,
            )  # fmt: skip
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise UserError(
            "model", source.label, f"transformers could not build it ({error})", "check model.config"
        ) from None
    # Each registration under init_empty_weights makes a new meta tensor, which unties shared ones.
    model.tie_weights()
    model.config.use_cache = False
    return model


def without_recording(config: Any) -> Any:
    """Returns a config whose model neither returns router logits nor adds a loss for them: we do that ourselves."""
    parts = (config, config.get_text_config())
    if not any(getattr(part, FLAG, False) for part in parts):
        return config
    changed = copy.deepcopy(config)
    _record(changed, False)
    return changed


@contextmanager
def not_recording(model: Any) -> Iterator[None]:
    """Like `without_recording`, for an existing model inside the block."""
    recorded = any(getattr(part, FLAG, False) for part in (model.config, model.config.get_text_config()))
    _record(model.config, False)
    try:
        yield
    finally:
        if recorded:
            _record(model.config, True)


def _record(config: Any, value: bool) -> None:
    for part in (config, config.get_text_config()):
        if hasattr(part, FLAG):
            setattr(part, FLAG, value)


def class_name(model: nn.Module) -> str:
    """Returns the name of the model's own class; FSDP puts a subclass in front."""
    from torch.distributed.fsdp import FSDPModule

    return next(c.__name__ for c in type(model).__mro__ if not issubclass(c, FSDPModule))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model in evaluation mode without gradients inside the block, and restores it afterwards.

    Some modules note numbers as they evaluate, and train by them (the capacity of NLLB-MoE's experts).
    """
    training = model.training
    attributes: list[tuple[Any, dict[str, Any]]] = []
    for module in model.modules():
        values = {k: v for k, v in vars(module).items() if isinstance(v, PLAIN) and k[0] != "_" and k != "training"}
        attributes.append((module, values))
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        for module, values in attributes:
            vars(module).update(values)


def vocabulary_size(model: Any) -> int:
    """Returns the number of token embeddings; some classes' embeddings are no nn.Embedding."""
    embeddings = model.get_input_embeddings()
    size = getattr(embeddings, "num_embeddings", None)
    return int(getattr(embeddings, "weight", embeddings).shape[0] if size is None else size)


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the repeated layers of a model, in order: by `_no_split_modules`, else its largest module list.

    An encoder–decoder model has two such lists.
    """
    declared = unsplittable(model)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    listed = {id(child) for module_list in lists for child in module_list}
    blocks = [(n, m) for n, m in model.named_modules() if type(m).__name__ in declared and id(m) in listed]
    if not blocks and lists:
        children = [child for stack in _stacks(model) for child in _largest_list(stack)]
        # A list of lists (Funnel) is never called, nor are the lists in it.
        members: set[int] = set()
        for child in children:
            members |= {id(member) for member in (child if isinstance(child, nn.ModuleList) else [child])}
        blocks = [(n, m) for n, m in model.named_modules() if id(m) in members]
    outermost: list[tuple[str, nn.Module]] = []
    for name, module in blocks:
        if not any(name.startswith(outer + ".") for outer, _ in outermost):
            outermost.append((name, module))
    return outermost


def check_shared(model: nn.Module, label: str) -> None:
    """Rejects a model whose blocks share parameters: each block is a unit of sharding, and would get its own."""
    owners: dict[int, str] = {}
    for block, module in find_blocks(model):
        for name, parameter in module.named_parameters():
            if owners.setdefault(id(parameter), block) != block:
                problem = f"its blocks {owners[id(parameter)]} and {block} share {name}, which sharding would part"
                raise UserError("model", label, problem, "use another model")


def _stacks(model: Any) -> list[Any]:
    """The parts of a model that have layers of their own: encoder and decoder, or all of it."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return [model]
    return [model.get_encoder(), model.get_decoder()]


def _largest_list(module: nn.Module) -> nn.ModuleList:
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=lambda module_list: sum(p.numel() for p in module_list.parameters()), default=nn.ModuleList())


def materialise(module: nn.Module, device: torch.device) -> None:
    """Gives meta parameters real, uninitialised memory; leaves real tensors unchanged."""
    tied = _tied(module)
    # nn.Module.to_empty would wipe the buffers too; _apply is what it, .to() and FSDP's override share.
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for (first, key), *others in tied:
        for owner, name in others:
            owner._parameters[name] = first._parameters[key]


def _tied(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The owners of each plain parameter that several modules share; FSDP handles those that it manages."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                owners.setdefault(parameter, []).append((owner, name))
    return [places for places in owners.values() if len(places) > 1]


@torch.no_grad()
def fill_random(
    model: nn.Module,
    source: ModelSource,
    seed: int,
    masters: Mapping[str, LazyShardedTensor] | None = None,
    only: Container[str] | None = None,
) -> None:
    """Initialises a fresh, sharded model as its authors do, holding one unit at a time besides the shards.

    `only`: just these parameters.

    A second, unsharded model on `meta` serves as the template. The random stream of a unit depends on the seed and the
    unit's name alone, so the result is the same on any number of ranks.
    """
    targets = {name: p for name, p in model.named_parameters() if only is None or name in only}
    template = build_on_meta(source)
    blocks = {name for name, _ in find_blocks(template)}
    units = [unit for unit in _units(template, blocks) if only is None or _holds(unit, targets)]
    # One buffer for all units in turn: memory given back piece by piece stays with the allocator, block after block.
    scratch = torch.empty(max(_scratch_elements(unit, recursive) for _, unit, recursive in units))
    for name, unit, recursive in units:
        unit_parameters = dict(unit.named_parameters(recurse=recursive))
        unit_targets = {
            n: targets[f"{name}.{n}" if name else n]
            for n in unit_parameters
            if (f"{name}.{n}" if name else n) in targets
        }
        if not unit_targets:
            continue  # tied to a tensor that another unit makes
        _use_scratch(unit, scratch, recursive)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:7], "little"))
            owner = _owner(template, name)
            if recursive:
                _initialise(unit, owner)
            else:
                init_weights(owner, unit)
        for key, target in unit_targets.items():
            full_name = f"{name}.{key}" if name else key
            values = unit.get_parameter(key).detach()
            packing = packing_of(model, full_name)
            fill_local(target, values, (masters or {}).get(full_name), packing)


def _holds(unit: tuple[str, nn.Module, bool], names: Container[str]) -> bool:
    prefix, module, recursive = unit
    return any((f"{prefix}.{n}" if prefix else n) in names for n, _ in module.named_parameters(recurse=recursive))


def _units(module: nn.Module, blocks: set[str], prefix: str = "") -> Iterator[tuple[str, nn.Module, bool]]:
    """A model in pieces: each block, each part without blocks, and (not recursive) each parent of blocks."""
    inside = [b for b in blocks if not prefix or b == prefix or b.startswith(prefix + ".")]
    if prefix in blocks or not inside:
        yield prefix, module, True
        return
    yield prefix, module, False
    for name, child in module.named_children():
        yield from _units(child, blocks, f"{prefix}.{name}" if prefix else name)


def _scratch_elements(unit: nn.Module, recursive: bool) -> int:
    """Elements of a unit, tied ones as often as they are held: each gets memory of its own."""
    return sum(p.numel() for m in (unit.modules() if recursive else [unit]) for p in m.parameters(recurse=False))


def _use_scratch(unit: nn.Module, scratch: torch.Tensor, recursive: bool) -> None:
    offset = 0
    for module in unit.modules() if recursive else [unit]:
        for name, parameter in list(module.named_parameters(recurse=False)):
            view = scratch[offset : offset + parameter.numel()].view(parameter.shape)
            setattr(module, name, nn.Parameter(view, parameter.requires_grad))
            offset += parameter.numel()


def _owner(model: Any, name: str) -> Any:
    """The innermost pretrained model around a unit, whose `_init_weights` applies (composite models have several)."""
    from transformers import PreTrainedModel

    parts = name.split(".") if name else []
    for depth in range(len(parts), -1, -1):
        owner = model.get_submodule(".".join(parts[:depth])) if depth else model
        if isinstance(owner, PreTrainedModel):
            return owner
    return model


def _initialise(module: nn.Module, owner: Any) -> None:
    from transformers import PreTrainedModel

    for child in module.children():
        _initialise(child, child if isinstance(child, PreTrainedModel) else owner)
    init_weights(owner, module)


def store_in(model: nn.Module, dtype: torch.dtype, frozen_only: bool = False) -> None:
    """Casts floating-point parameters to a dtype, all of them or only frozen ones."""
    converted: dict[int, nn.Parameter] = {}  # a tied parameter stays one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_floating_point() or parameter.dtype == dtype:
                continue
            if not (frozen_only and parameter.requires_grad):
                new = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                module._parameters[name] = converted.setdefault(id(parameter), new)


def children_of(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields children by full name; lists are flattened, because nothing calls them, so they could gather nothing."""
    for key, child in module.named_children():
        full_name = f"{name}.{key}" if name else key
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from children_of(full_name, child)
        else:
            yield full_name, child
