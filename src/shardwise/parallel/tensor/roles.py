"""What each part of a model is, and how it may be divided: found by watching a tiny model of the same class run once.

[Note: heights] Within a block the residual stream is whole on every rank. A layer with one more linear one after it is
cut by outputs (column), the layer after it by inputs (row), and one sum puts the stream together again. What has more
layers to come (low-rank queries, gates of gates), or none before and none after it (a router), stays whole: its output
is needed everywhere. So the height above the end of the block and whether a layer is fed by another tell the cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from shardwise.core.compat.hf_private import tensor_plan
from shardwise.core.compat.torch_private import ConvNd
from shardwise.nn.adapters.layers import is_linear
from shardwise.nn.adapters.quantized_experts import is_experts
from shardwise.nn.adapters.targets import output_head
from shardwise.nn.models.build import find_blocks
from shardwise.parallel.tensor.dataflow import HIGHEST, Seen, watch_forward

Kind = Literal[
    "embedding",
    "positions",
    "block",
    "attention",
    "mlp",
    "norm",
    "router",
    "experts",
    "head",
    "other",
]
Cut = Literal["column", "row", "vocabulary", "experts", "whole"]
TOKENS = 12
PUBLISHED: dict[str, Cut] = {
    "colwise": "column", "rowwise": "row", "colwise_gather_output": "column", "colwise_rep": "column",
}  # fmt: skip


@dataclass(frozen=True)
class Role:
    """A part by its name, with * for the number of its layer; why it is not cut, if it is not."""

    name: str
    kind: Kind
    cut: Cut
    count: int
    why: str = ""


@dataclass(frozen=True)
class Roles:
    """Of a whole model, in its order, and where its own published plan says something else."""

    parts: tuple[Role, ...]
    differs: tuple[str, ...]
    plain: Mapping[str, str] = field(
        default_factory=dict
    )  # modules that compute on plain tensors only, and why

    def __getitem__(self, name: str) -> Role:
        wanted = pattern_of(name)
        return next(part for part in self.parts if part.name == wanted)


def pattern_of(name: str) -> str:
    """A name with * for numbers: layers of one kind share it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def inputs_for(model: Any, vocabulary: int) -> dict[str, torch.Tensor]:
    """Ids that any language model takes."""
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) % (vocabulary - 3) + 3
    return {"input_ids": ids} | (
        {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    )


def find_roles(model: Any) -> Roles:
    """The roles in a model that can run here, which a shrunk one can (nn/tiny/shrink.py)."""
    model.train()  # the code that will run
    seen = watch_forward(
        model, inputs_for(model, model.config.get_text_config(decoder=True).vocab_size)
    )
    found: dict[str, list[Role]] = {}
    blocks = {name for name, _ in find_blocks(model)}
    for name, module in model.named_modules():
        if (role := _role(name, module, model, seen, name in blocks)) is not None:
            found.setdefault(role.name, []).append(role)
    parts = tuple(_agreed(roles) for roles in found.values())
    return Roles(parts, tuple(_differences(parts, model)), _plain(model, seen))


def _plain(model: nn.Module, seen: Seen) -> dict[str, str]:
    """Modules that cannot compute on parts of tensors."""
    found: dict[str, str] = {}
    blocks = [name for name, _ in find_blocks(model)]
    above = {one for name in blocks for one in _paths(name)} | {""}
    for name, module in model.named_modules():
        why = "" if is_experts(module) or name in above else _unsuited(name, module, seen)
        if not why:
            continue
        # Kernels that take a convolution's weight do so from where it is called.
        conv = isinstance(module, ConvNd) and (owner := _owner(name)) not in above
        found.setdefault(pattern_of(owner if conv else name), why)
    inner = {name for name in found for other in found if name.startswith(other + ".")}
    return {name: why for name, why in found.items() if name not in inner}


def _paths(name: str) -> list[str]:
    """A name and those of all that it is in."""
    parts = name.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _unsuited(name: str, module: nn.Module, seen: Seen) -> str:
    if name in seen.unsuited:
        return f"computes {seen.unsuited[name]}, which parts of tensors do not allow"
    stacks = [p for p in module.parameters(recurse=False) if p.ndim > 2]
    return "is a stack of matrices with code of its own" if stacks else ""


def _role(name: str, module: nn.Module, model: Any, seen: Seen, block: bool) -> Role | None:
    pattern, count = pattern_of(name), sum(p.numel() for p in module.parameters())
    if block:
        return Role(pattern, "block", "whole", count)
    if module is output_head(model):
        return Role(pattern, "head", "vocabulary" if is_linear(module) else "whole", count)
    if module is model.get_input_embeddings():
        plain = isinstance(module, nn.Embedding)
        return Role(pattern, "embedding", "vocabulary" if plain else "whole", count)
    if isinstance(module, nn.Embedding) and module.weight is model.get_input_embeddings().weight:
        return Role(pattern, "embedding", "vocabulary", 0)
    if isinstance(module, nn.Embedding):
        return Role(
            pattern, "positions", "whole", count, "a table that is small or read by position"
        )
    if is_experts(module):
        return Role(pattern, "experts", "experts", count)
    if is_linear(module):
        return _linear(name, pattern, count, seen)
    own = list(module.parameters(recurse=False))
    if own and all(p.ndim <= 1 for p in own):
        return Role(pattern, "norm", "whole", count)
    if own and name in seen.chooses:
        return Role(pattern, "router", "whole", count, "its output chooses experts")
    if own:
        return Role(pattern, "other", "whole", count, f"{type(module).__name__} is no linear layer")
    return None


def _linear(name: str, pattern: str, count: int, seen: Seen) -> Role:
    if name not in seen.called:
        return Role(
            pattern, "other", "whole", count, "outside of the blocks, or not called by itself"
        )
    height, fed = seen.height(name), seen.fed(name)
    if height == 0 and not fed:
        router = name in seen.chooses
        kind: Kind = "router" if router else "other"
        why = (
            "its output chooses experts"
            if router
            else "no linear layer comes before or after it in the block"
        )
        return Role(pattern, kind, "whole", count, why)
    beside = _owner(name) in {_owner(one) for one in seen.attends} | seen.attention
    after = any(name in seen.feeds.get(one, ()) for one in seen.attends)
    kind = "attention" if beside or after else "mlp"
    if height == 0:
        return Role(pattern, kind, "row", count)
    if height == 1:
        return Role(pattern, kind, "column", count)
    many = f"{height} or more" if height == HIGHEST else height
    return Role(pattern, kind, "whole", count, f"{many} linear layers come after it in the block")


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _agreed(roles: list[Role]) -> Role:
    """One role for the layers that share a name: where their cuts differ, none."""
    first = roles[0]
    total = sum(role.count for role in roles)
    if {role.cut for role in roles} == {first.cut}:
        return Role(first.name, first.kind, first.cut, total, first.why)
    return Role(first.name, first.kind, "whole", total, "its layers are used in different ways")


def _differences(parts: tuple[Role, ...], model: Any) -> list[str]:
    ours = {part.name: part for part in parts}
    told = []
    for name, style in tensor_plan(model).items():
        theirs, mine = PUBLISHED.get(style), ours.get(name)
        if theirs is not None and mine is not None and mine.kind != "head" and mine.cut != theirs:
            told.append(f"{name}: {mine.cut} here, {style} in the plan that the model publishes")
    return told
