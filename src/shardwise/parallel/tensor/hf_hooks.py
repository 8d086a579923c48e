"""Where transformers lets others compute: attention on this rank's heads, and experts on this rank's experts.

Both get plain tensors, so whatever stands in transformers' registries (packed documents, context parallelism) is called
as it would be without tensor parallelism, with fewer heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardwise.parallel.tensor.local import local_parameters, offset_of, to_local, to_whole, wrap
from shardwise.parallel.tensor.rng import own_stream

PER_HEAD = {
    "s_aux": 0,
    "position_bias": 1,
}  # arguments of attention functions, and where heads are in them


class _GroupedAttention:
    """An attention module as a function in the registry sees it, but for how many heads share one of keys."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module, self.num_key_value_groups = module, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def local_heads(mesh: DeviceMesh) -> Iterator[None]:
    """Within it attention runs on local heads, by whatever stands in the registry now or calls torch's own function."""
    from transformers import AttentionInterface

    registered, own = AttentionInterface()["sdpa"], F.scaled_dot_product_attention
    AttentionInterface.register("sdpa", partial(_attend, mesh, registered))
    F.scaled_dot_product_attention = partial(_attend_own, mesh, own)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own
        AttentionInterface.register("sdpa", registered)


def _attend(
    mesh: DeviceMesh,
    plain: Callable[..., Any],
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    **kwargs: Any,
) -> Any:
    """In the attention registry: (rows, heads, width, head) in, (rows, width, heads, head) out."""
    if not isinstance(query, DTensor):
        return plain(module, query, key, value, attention_mask, **kwargs)
    heads = query.shape[1]
    q, k, v, groups = _local(query, key, value, mesh)
    mask = _heads_of(attention_mask, mesh, heads, 1)
    kwargs = {n: _heads_of(x, mesh, heads, PER_HEAD.get(n)) for n, x in kwargs.items()}
    if groups != getattr(module, "num_key_value_groups", 1):
        module = _GroupedAttention(module, groups)
    with _stream(mesh, heads, kwargs.get("dropout", 0.0)):
        out, _ = plain(module, q, k, v, mask, **kwargs)
    return _wrap(out, mesh, heads, 2), None


def _attend_own(
    mesh: DeviceMesh, plain: Callable[..., Any], query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """In the place of torch's function, for modules that call it by themselves."""
    if not isinstance(query, DTensor):
        return plain(query, key, value, attn_mask, *args, **kwargs)
    heads = query.shape[1]
    q, k, v, groups = _local(query, key, value, mesh)
    if groups > 1 and not kwargs.get("enable_gqa"):
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    with _stream(mesh, heads, args[0] if args else kwargs.get("dropout_p", 0.0)):
        out = plain(q, k, v, _heads_of(attn_mask, mesh, heads, 1), *args, **kwargs)
    return _wrap(out, mesh, heads, 1)


def _local(query: DTensor, key: Any, value: Any, mesh: DeviceMesh) -> tuple[Any, Any, Any, int]:
    """This rank's heads, and how many of them share one of keys; all heads where they cannot be shared out."""
    heads, fewer, size = query.shape[1], key.shape[1], mesh.size()
    key, value = to_whole(key, mesh), to_whole(value, mesh)
    if heads % size:
        q, k, v = (
            to_local(x.redistribute(placements=[Replicate()]), Replicate())
            for x in (query, key, value)
        )
        return q, k, v, heads // fewer
    where = [Shard(1)]
    q = to_local(query.redistribute(placements=where), Shard(1))
    if fewer % size == 0:
        k, v = (to_local(x.redistribute(placements=where), Shard(1)) for x in (key, value))
        return q, k, v, heads // fewer
    # Fewer heads of keys than ranks: each takes those its own heads read, and their gradients add up.
    mine = [h // (heads // fewer) for h in _my_heads(heads, mesh)]
    picked = sorted(set(mine))
    if any(mine.count(one) * len(picked) != len(mine) for one in picked):
        picked = mine
    index = torch.tensor(picked, device=q.device)
    k, v = (
        to_local(x.redistribute(placements=[Replicate()]), Partial())[:, index]
        for x in (key, value)
    )
    return q, k, v, len(mine) // len(picked)


def _stream(mesh: DeviceMesh, heads: int, dropout: float) -> AbstractContextManager[None]:
    return own_stream(mesh) if dropout and heads % mesh.size() == 0 else nullcontext()


def _my_heads(heads: int, mesh: DeviceMesh) -> range:
    own = heads // mesh.size()
    return range(mesh.get_local_rank() * own, (mesh.get_local_rank() + 1) * own)


def _heads_of(x: Any, mesh: DeviceMesh, heads: int, dim: int | None) -> Any:
    """An argument as this rank's heads need it."""
    if not isinstance(x, torch.Tensor):
        return x
    cut = dim is not None and x.ndim > dim and x.shape[dim] == heads and heads % mesh.size() == 0
    if isinstance(x, DTensor):
        where = Shard(dim) if cut and dim is not None else Replicate()
        back = where if cut or heads % mesh.size() else Partial()
        return to_local(x.redistribute(placements=[where]), back)
    if cut and dim is not None:
        mine = _my_heads(heads, mesh)
        return x.narrow(dim, mine.start, len(mine))
    return x


def _wrap(out: torch.Tensor, mesh: DeviceMesh, heads: int, dim: int) -> DTensor:
    shape = list(out.shape)
    shape[dim] = heads
    where = Replicate() if heads % mesh.size() else Shard(dim)
    return wrap(out, mesh, where, torch.Size(shape))


def local_experts(
    mesh: DeviceMesh,
    module: Any,
    forward: Callable[..., Any],
    hidden: Any,
    index: Any,
    weights: Any,
    *rest: Any,
) -> DTensor:
    """A stack of experts, of which this rank has some, on the tokens that chose those."""
    hidden, index, weights = (
        to_whole(x, mesh).redistribute(placements=[Replicate()]) for x in (hidden, index, weights)
    )
    flat, chosen, shares = (
        to_local(hidden, Partial()),
        index.to_local(),
        to_local(weights, Partial()),
    )
    with local_parameters(module, Partial()):
        stack: Any = next(iter(module.parameters(recurse=False)))
        own, first = stack.to_local().shape[0], offset_of(stack)[0]
        mine = (chosen >= first) & (chosen < first + own)
        tokens, places = mine.nonzero(as_tuple=True)
        if not len(
            tokens
        ):  # still part of the graph, or the other ranks wait for its gradients in vain
            tokens, places = (x.new_zeros(1) for x in (tokens, places))
        local = (chosen[tokens, places] - first).clamp(0, own - 1)
        share = shares[tokens, places] * mine[tokens, places]
        with _fewer(module, own):
            made = forward(flat[tokens], local[:, None], share[:, None], *rest)
    out = torch.zeros_like(flat).index_add(0, tokens, made.to(flat.dtype))
    return DTensor.from_local(out, mesh, [Partial()], run_check=False).redistribute(
        placements=[Replicate()]
    )


@contextmanager
def _fewer(module: Any, count: int) -> Iterator[None]:
    before = module.num_experts
    module.num_experts = count
    try:
        yield
    finally:
        module.num_experts = before
