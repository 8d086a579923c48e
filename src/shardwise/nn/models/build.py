"""Builds a model that takes no memory, finds its blocks, and fills fresh models with random weights unit by unit.

Parameters are born on `meta`; buffers (rotary tables and such) are real, because no file holds them. The blocks are the
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
from shardwise.distributed.lazy_rows import Rows
from shardwise.nn.attention.varlen import built_with
from shardwise.nn.models.source import ModelSource
from shardwise.nn.models.tasks import auto_class
from shardwise.nn.models.weights import fill_local, packing_of

FLAG = "output_router_logits"
PLAIN = (int, float, type(None))


def build_on_meta(source: ModelSource) -> Any:
    """The model with every parameter on `meta` and ties in place."""
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
    """A config whose model neither hands out router logits nor adds a loss of its own for them: that is ours to do."""
    parts = (config, config.get_text_config())
    if not any(getattr(part, FLAG, False) for part in parts):
        return config
    changed = copy.deepcopy(config)
    _record(changed, False)
    return changed


@contextmanager
def not_recording(model: Any) -> Iterator[None]:
    """The same for a model that is there already, for a while."""
    asked = any(getattr(part, FLAG, False) for part in (model.config, model.config.get_text_config()))
    _record(model.config, False)
    try:
        yield
    finally:
        if asked:
            _record(model.config, True)


def _record(config: Any, value: bool) -> None:
    for part in (config, config.get_text_config()):
        if hasattr(part, FLAG):
            setattr(part, FLAG, value)


def class_name(model: nn.Module) -> str:
    """The model's own class; FSDP puts a subclass of its own in front."""
    from torch.distributed.fsdp import FSDPModule

    return next(c.__name__ for c in type(model).__mro__ if not issubclass(c, FSDPModule))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it a model evaluates, without gradients; it is as it was afterwards.

    Some modules note numbers as they evaluate, and train by them (the capacity of NLLB-MoE's experts).
    """
    training = model.training
    plain = [
        (one, {k: v for k, v in vars(one).items() if isinstance(v, PLAIN) and k[0] != "_" and k != "training"})
        for one in model.modules()
    ]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        for module, values in plain:
            vars(module).update(values)


def vocabulary_size(model: Any) -> int:
    """How many tokens a model has embeddings for; some classes' embeddings are no nn.Embedding."""
    embeddings = model.get_input_embeddings()
    size = getattr(embeddings, "num_embeddings", None)
    return int(getattr(embeddings, "weight", embeddings).shape[0] if size is None else size)


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated layers of a model, in order: by the classes it calls unsplittable, else its largest module list.

    An encoder–decoder model has two such lists.
    """
    declared = unsplittable(model)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    listed = {id(child) for one in lists for child in one}
    blocks = [(n, m) for n, m in model.named_modules() if type(m).__name__ in declared and id(m) in listed]
    if not blocks and lists:
        children = [child for stack in _stacks(model) for child in _largest_list(stack)]
        # A list of lists (Funnel) is never called, nor are the lists in it.
        members = {id(one) for child in children for one in (child if isinstance(child, nn.ModuleList) else [child])}
        blocks = [(n, m) for n, m in model.named_modules() if id(m) in members]
    outermost: list[tuple[str, nn.Module]] = []
    for name, module in blocks:
        if not any(name.startswith(outer + ".") for outer, _ in outermost):
            outermost.append((name, module))
    return outermost


def check_shared(model: nn.Module, label: str) -> None:
    """Refuses a model whose blocks have parameters in common: each is a unit of sharding, and would get its own."""
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
    return max(lists, key=lambda one: sum(p.numel() for p in one.parameters()), default=nn.ModuleList())


def materialise(module: nn.Module, device: torch.device) -> None:
    """Gives meta parameters real, uninitialised memory; leaves real tensors as they are."""
    tied = _tied(module)
    # nn.Module.to_empty would wipe the buffers too; _apply is what it, .to() and FSDP's override share.
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for (first, key), *others in tied:
        for owner, name in others:
            owner._parameters[name] = first._parameters[key]


def _tied(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Where each plain parameter that several modules share lies; FSDP looks after those that it manages."""
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
    masters: Mapping[str, Rows] | None = None,
    only: Container[str] | None = None,
) -> None:
    """Fills a fresh, sharded model as its authors initialise it, holding one unit at a time besides the shards.

    `only`: just these parameters.

    A second, unsharded model on `meta` serves as the mould. The random stream of a unit depends on the seed and the
    unit's name alone, so the result is the same on any number of ranks.
    """
    targets = {name: p for name, p in model.named_parameters() if only is None or name in only}
    mould = build_on_meta(source)
    units = [u for u in _units(mould, {n for n, _ in find_blocks(mould)}) if only is None or _holds(u, targets)]
    # One buffer for all units in turn: memory given back piece by piece stays with the allocator, block after block.
    scratch = torch.empty(max(_room(unit, whole) for _, unit, whole in units))
    for name, unit, whole in units:
        own = dict(unit.named_parameters(recurse=whole))
        wanted = {n: targets[f"{name}.{n}" if name else n] for n in own if (f"{name}.{n}" if name else n) in targets}
        if not wanted:
            continue  # tied to a tensor that another unit makes
        _lay_out(unit, scratch, whole)
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:7], "little"))
            owner = _owner(mould, name)
            if whole:
                _initialise(unit, owner)
            else:
                init_weights(owner, unit)
        for key, target in wanted.items():
            whole_name = f"{name}.{key}" if name else key
            values, packing = unit.get_parameter(key).detach(), packing_of(model, whole_name)
            fill_local(target, values, (masters or {}).get(whole_name), packing)


def _holds(unit: tuple[str, nn.Module, bool], names: Container[str]) -> bool:
    prefix, module, whole = unit
    return any((f"{prefix}.{n}" if prefix else n) in names for n, _ in module.named_parameters(recurse=whole))


def _units(module: nn.Module, blocks: set[str], prefix: str = "") -> Iterator[tuple[str, nn.Module, bool]]:
    """A model in pieces: each block, each part without blocks, and (not whole) each holder of blocks."""
    inside = [b for b in blocks if not prefix or b == prefix or b.startswith(prefix + ".")]
    if prefix in blocks or not inside:
        yield prefix, module, True
        return
    yield prefix, module, False
    for name, child in module.named_children():
        yield from _units(child, blocks, f"{prefix}.{name}" if prefix else name)


def _room(unit: nn.Module, whole: bool) -> int:
    """Elements of a unit, tied ones as often as they are held: each place gets memory of its own."""
    return sum(p.numel() for m in (unit.modules() if whole else [unit]) for p in m.parameters(recurse=False))


def _lay_out(unit: nn.Module, scratch: torch.Tensor, whole: bool) -> None:
    at = 0
    for module in unit.modules() if whole else [unit]:
        for name, parameter in list(module.named_parameters(recurse=False)):
            view = scratch[at : at + parameter.numel()].view(parameter.shape)
            setattr(module, name, nn.Parameter(view, parameter.requires_grad))
            at += parameter.numel()


def _owner(model: Any, name: str) -> Any:
    """The innermost pretrained model around a unit, whose `_init_weights` counts (composite models have several)."""
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
    """Gives floating-point parameters another type, all of them or those that are not trained."""
    made: dict[int, nn.Parameter] = {}  # a tied parameter stays one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_floating_point() or parameter.dtype == dtype:
                continue
            if not (frozen_only and parameter.requires_grad):
                new = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                module._parameters[name] = made.setdefault(id(parameter), new)


def children_of(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Children by full name; lists are seen through, because nothing calls them and so they could gather nothing."""
    for key, child in module.named_children():
        inside = f"{name}.{key}" if name else key
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from children_of(inside, child)
        else:
            yield inside, child
