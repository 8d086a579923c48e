"""transformers' extension points under tensor parallelism: attention on local heads, local experts.

Both run on plain tensors. Whatever is in transformers' registries (packed documents, context
parallelism) is called as it would be without tensor parallelism, with fewer heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardwise.parallel.tensor.local import (
    local_parameters,
    offset_of,
    on_mesh,
    redistribute_local,
    to_whole,
    wrap,
)
from shardwise.parallel.tensor.own_experts import sum_of_own_experts
from shardwise.parallel.tensor.rng import own_stream

# The dim of the heads in further arguments of attention functions.
HEAD_DIMS = {"s_aux": 0, "position_bias": 1}


class _GroupedAttention:
    """An attention module with another number of query heads per key head."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def local_heads(mesh: DeviceMesh) -> Iterator[None]:
    """Within it attention runs on local heads, through the registry or torch's own function."""
    from transformers import AttentionInterface

    registered = AttentionInterface()["sdpa"]
    original = F.scaled_dot_product_attention
    AttentionInterface.register("sdpa", on_mesh(_registered_attention, mesh, registered))
    F.scaled_dot_product_attention = on_mesh(_torch_attention, mesh, original)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original
        AttentionInterface.register("sdpa", registered)


def _registered_attention(
    mesh: DeviceMesh,
    registered: Callable[..., Any],
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    **kwargs: Any,
) -> Any:
    """Registry entry: (rows, heads, width, head) to (rows, width, heads, head)."""
    if not isinstance(query, DTensor):
        return registered(module, query, key, value, attention_mask, **kwargs)
    heads = query.shape[1]
    q, k, v, groups = _local_qkv(query, key, value, mesh)
    mask = _for_local_heads(attention_mask, mesh, heads, 1)
    for name, x in kwargs.items():
        kwargs[name] = _for_local_heads(x, mesh, heads, HEAD_DIMS.get(name))
    if groups != getattr(module, "num_key_value_groups", 1):
        module = _GroupedAttention(module, groups)
    with _stream(mesh, heads, kwargs.get("dropout", 0.0)):
        out, _ = registered(module, q, k, v, mask, **kwargs)
    return _wrap(out, mesh, heads, 2), None


def _torch_attention(
    mesh: DeviceMesh,
    original: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces torch's function, for modules that call it directly."""
    if not isinstance(query, DTensor):
        return original(query, key, value, attn_mask, *args, **kwargs)
    heads = query.shape[1]
    q, k, v, groups = _local_qkv(query, key, value, mesh)
    if groups > 1 and not kwargs.get("enable_gqa"):
        k = k.repeat_interleave(groups, 1)
        v = v.repeat_interleave(groups, 1)
    with _stream(mesh, heads, args[0] if args else kwargs.get("dropout_p", 0.0)):
        out = original(q, k, v, _for_local_heads(attn_mask, mesh, heads, 1), *args, **kwargs)
    return _wrap(out, mesh, heads, 1)


def _local_qkv(
    query: DTensor, key: Any, value: Any, mesh: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Returns the local heads and the number of query heads per key head.

    Every rank computes all heads where their number is not a multiple of the ranks.
    """
    heads = query.shape[1]
    key_heads = key.shape[1]
    key = to_whole(key, mesh)
    value = to_whole(value, mesh)
    if heads % mesh.size() == 0 and key_heads % mesh.size():
        return _local_gqa(query, key, value, mesh)
    placement = Replicate() if heads % mesh.size() else Shard(1)
    return (
        redistribute_local(query, placement),
        redistribute_local(key, placement),
        redistribute_local(value, placement),
        heads // key_heads,
    )


def _local_gqa(
    query: DTensor, key: DTensor, value: DTensor, mesh: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Takes the key heads that the local query heads read; their gradients add up over ranks."""
    heads = query.shape[1]
    key_heads = [h // (heads // key.shape[1]) for h in _local_range(heads, mesh)]
    unique = sorted(set(key_heads))
    even = all(key_heads.count(h) * len(unique) == len(key_heads) for h in unique)
    picked = unique if even else key_heads
    index = torch.tensor(picked, device=query.device)
    return (
        redistribute_local(query, Shard(1)),
        redistribute_local(key, Replicate(), Partial())[:, index],
        redistribute_local(value, Replicate(), Partial())[:, index],
        len(key_heads) // len(picked),
    )


def _stream(mesh: DeviceMesh, heads: int, dropout: float) -> AbstractContextManager[None]:
    return own_stream(mesh) if dropout and heads % mesh.size() == 0 else nullcontext()


def _local_range(heads: int, mesh: DeviceMesh) -> range:
    count = heads // mesh.size()
    return range(mesh.get_local_rank() * count, (mesh.get_local_rank() + 1) * count)


def _for_local_heads(x: Any, mesh: DeviceMesh, heads: int, dim: int | None) -> Any:
    """Returns what the local heads need of an argument; `dim`: that of its heads, if it has any."""
    if not isinstance(x, torch.Tensor):
        return x
    even = heads % mesh.size() == 0
    if even and dim is not None and x.ndim > dim and x.shape[dim] == heads:
        if isinstance(x, DTensor):
            return redistribute_local(x, Shard(dim))
        local = _local_range(heads, mesh)
        return x.narrow(dim, local.start, len(local))
    if isinstance(x, DTensor):
        return redistribute_local(x, Replicate(), Partial() if even else Replicate())
    return x


def _wrap(out: torch.Tensor, mesh: DeviceMesh, heads: int, dim: int) -> DTensor:
    shape = list(out.shape)
    shape[dim] = heads
    placement = Replicate() if heads % mesh.size() else Shard(dim)
    return wrap(out, mesh, placement, torch.Size(shape))


def local_experts(
    mesh: DeviceMesh,
    module: Any,
    forward: Callable[..., Any],
    hidden: Any,
    index: Any,
    weights: Any,
    *rest: Any,
) -> DTensor:
    """Returns the output of a stack of experts sharded over ranks, replicated.

    Each rank computes the tokens that chose its experts.
    """
    tokens = redistribute_local(to_whole(hidden, mesh), Replicate(), Partial())
    chosen = to_whole(index, mesh).redistribute(placements=[Replicate()]).to_local()
    shares = redistribute_local(to_whole(weights, mesh), Replicate(), Partial())
    with local_parameters(module, Partial()):
        stack: Any = next(iter(module.parameters(recurse=False)))
        count = stack.to_local().shape[0]
        first = offset_of(stack)[0]
        summed = sum_of_own_experts(module, forward, first, count, tokens, chosen, shares, *rest)
    partial_sums = DTensor.from_local(summed, mesh, [Partial()], run_check=False)
    return partial_sums.redistribute(placements=[Replicate()])
