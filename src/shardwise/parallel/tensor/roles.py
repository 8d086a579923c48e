"""Finds each module's role and how it may be sharded, by tracing a tiny model of the same class.

[Note: heights] Within a block the residual stream is replicated. A layer with one more linear layer
after it is cut by outputs (column), the layer after it by inputs (row), and one sum restores the
stream. A layer with more layers after it (low-rank queries, gates of gates), or with none before
and none after it (a router), is not sharded: its output is needed everywhere. The number of layers
between a layer and the end of the block (its height), and whether another layer feeds it, thus
determine the cut.
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
from shardwise.parallel.tensor.dataflow import HIGHEST, ForwardTrace, trace_forward

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
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column",
    "colwise_rep": "column",
}


@dataclass(frozen=True)
class Role:
    """The role of the modules whose names match `name`, which has * for layer numbers.

    `count`: their parameters. `why`: why they are not sharded, if they are not.
    """

    name: str
    kind: Kind
    cut: Cut
    count: int
    why: str = ""


@dataclass(frozen=True)
class Roles:
    """The roles in a model, in its order.

    `differs`: where the plan that the model publishes says otherwise. `plain`: modules that compute
    on plain tensors only, and why.
    """

    parts: tuple[Role, ...]
    differs: tuple[str, ...]
    plain: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Role:
        pattern = pattern_of(name)
        return next(part for part in self.parts if part.name == pattern)


def pattern_of(name: str) -> str:
    """Returns a module's name with * for numbers: layers of one kind share it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def inputs_for(model: Any, vocabulary: int) -> dict[str, torch.Tensor]:
    """Returns token ids that any language model accepts, by argument."""
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) % (vocabulary - 3) + 3
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    return inputs


def find_roles(model: Any) -> Roles:
    """Returns the roles in a model that can run here, such as a shrunk one (nn/tiny/shrink.py)."""
    model.train()  # the code that will run
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    trace = trace_forward(model, inputs_for(model, vocabulary))
    by_pattern: dict[str, list[Role]] = {}
    blocks = {name for name, _ in find_blocks(model)}
    for name, module in model.named_modules():
        if (role := _role(name, module, model, trace, name in blocks)) is not None:
            by_pattern.setdefault(role.name, []).append(role)
    parts = tuple(map(_merged, by_pattern.values()))
    return Roles(parts, tuple(_differences(parts, model)), _plain(model, trace))


def _plain(model: nn.Module, trace: ForwardTrace) -> dict[str, str]:
    """Returns the modules that cannot compute on shards, and why."""
    reasons: dict[str, str] = {}
    above = {""}
    for block, _ in find_blocks(model):
        above.update(_prefixes(block))
    for name, module in model.named_modules():
        reason = "" if is_experts(module) or name in above else _plain_reason(name, module, trace)
        if not reason:
            continue
        # Kernels that take a convolution's weight are called by the module around it.
        if isinstance(module, ConvNd) and _owner(name) not in above:
            name = _owner(name)
        reasons.setdefault(pattern_of(name), reason)
    return {
        n: why for n, why in reasons.items() if not any(o in reasons for o in _prefixes(n)[:-1])
    }


def _prefixes(name: str) -> list[str]:
    """Returns the names of the modules around a module, from the outside, and its own."""
    parts = name.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _plain_reason(name: str, module: nn.Module, trace: ForwardTrace) -> str:
    if name in trace.unsupported:
        return f"computes {trace.unsupported[name]}, which parts of tensors do not allow"
    if any(p.ndim > 2 for p in module.parameters(recurse=False)):
        return "is a stack of matrices with code of its own"
    return ""


def _role(
    name: str, module: nn.Module, model: Any, trace: ForwardTrace, is_block: bool
) -> Role | None:
    pattern = pattern_of(name)
    count = sum(p.numel() for p in module.parameters())
    if is_block:
        return Role(pattern, "block", "whole", count)
    if module is output_head(model):
        return Role(pattern, "head", "vocabulary" if is_linear(module) else "whole", count)
    if module is model.get_input_embeddings():
        is_table = isinstance(module, nn.Embedding)
        return Role(pattern, "embedding", "vocabulary" if is_table else "whole", count)
    if isinstance(module, nn.Embedding):
        if module.weight is model.get_input_embeddings().weight:
            return Role(pattern, "embedding", "vocabulary", 0)
        why = "a table that is small or read by position"
        return Role(pattern, "positions", "whole", count, why)
    if is_experts(module):
        return Role(pattern, "experts", "experts", count)
    if is_linear(module):
        return _linear(name, pattern, count, trace)
    own = list(module.parameters(recurse=False))
    if not own:
        return None
    if all(p.ndim <= 1 for p in own):
        return Role(pattern, "norm", "whole", count)
    if name in trace.ranked:
        return Role(pattern, "router", "whole", count, "its output chooses experts")
    return Role(pattern, "other", "whole", count, f"{type(module).__name__} is no linear layer")


def _linear(name: str, pattern: str, count: int, trace: ForwardTrace) -> Role:
    if name not in trace.called:
        why = "outside of the blocks, or not called by itself"
        return Role(pattern, "other", "whole", count, why)
    height = trace.height(name)
    if height == 0 and not trace.is_fed(name):
        if name in trace.ranked:
            return Role(pattern, "router", "whole", count, "its output chooses experts")
        why = "no linear layer comes before or after it in the block"
        return Role(pattern, "other", "whole", count, why)
    kind: Kind = "attention" if _is_attention(name, trace) else "mlp"
    if height == 0:
        return Role(pattern, kind, "row", count)
    if height == 1:
        return Role(pattern, kind, "column", count)
    many = f"{height} or more" if height == HIGHEST else height
    return Role(pattern, kind, "whole", count, f"{many} linear layers come after it in the block")


def _is_attention(name: str, trace: ForwardTrace) -> bool:
    """Whether a layer is beside one that makes attention scores, or reads the output of one."""
    owners = trace.attention | set(map(_owner, trace.attention_inputs))
    if _owner(name) in owners:
        return True
    return any(name in trace.readers.get(layer, ()) for layer in trace.attention_inputs)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _merged(roles: list[Role]) -> Role:
    """One role for the modules that share a pattern: not sharded where their cuts differ."""
    first = roles[0]
    total = sum(role.count for role in roles)
    if all(role.cut == first.cut for role in roles):
        return Role(first.name, first.kind, first.cut, total, first.why)
    return Role(first.name, first.kind, "whole", total, "its layers are used in different ways")


def _differences(parts: tuple[Role, ...], model: Any) -> list[str]:
    roles = {part.name: part for part in parts}
    lines = []
    for name, style in tensor_plan(model).items():
        published = PUBLISHED.get(style)
        role = roles.get(name)
        if published is None or role is None or role.kind == "head":
            continue
        if role.cut != published:
            lines.append(f"{name}: {role.cut} here, {style} in the plan that the model publishes")
    return lines
