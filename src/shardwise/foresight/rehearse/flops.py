"""Arithmetic of the operators that matter: torch's own counts, and attention by what its mask lets through."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry

from shardwise.core.compat.torch_private import schema_of
from shardwise.nn.attention.long_context import heads_at_a_time

GROUPED = ("_grouped_mm", "grouped_product")  # the second: of nn/kernels/grouped.py
FLOAT8 = "lora_float8_product"  # of nn/adapters/lora_float8.py
LONG_BACKWARD = 9  # times the queries: cuDNN's own room is 4, the rest copies of what goes in and comes out
BACKWARD = 2.5  # of attention, against its forward: five matrix products for two


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Multiplications and additions of one call; 0 for what moves data at most."""
    name = schema_of(func).name.partition("::")[2]
    if "attn" in name or "attention" in name:
        return _attention(func, args, kwargs, "backward" in name)
    if name.startswith("lora_linear"):
        return _adapted(args, "backward" in name)
    if name == "add_product":
        return int(2 * args[1].shape[0] * args[1].shape[1] * args[2].shape[1])
    if name == FLOAT8:
        (tokens, inside), outside, rank = args[0].shape, result.shape[1], args[3].shape[1]
        return int(2 * tokens * outside * (inside + rank))
    counter = flop_registry.get(func.overloadpacket)
    if counter is not None:
        return int(counter(*args, **kwargs, out_val=result))
    if name in GROUPED:
        left, right = args[0], args[1]
        return int(2 * left.shape[-2] * left.shape[-1] * right.shape[-1])
    return 0


def _attention(func: Any, args: Any, kwargs: Any, backward: bool) -> int:
    given = dict(zip((a.name for a in schema_of(func).arguments), args, strict=False)) | kwargs
    query, key = given["query"], given["key"]
    value = given["value"]
    longest = given.get("max_k", given.get("longest"))
    if longest is not None:  # documents end to end, (tokens, heads, head): as if all were of the longest's length
        scores, heads = query.shape[0] * min(int(longest) / 2, given.get("window", longest)), query.shape[1]
    else:
        scores, heads = query.shape[0] * query.shape[-2] * key.shape[-2], query.shape[1]
        scores *= 0.5 if given.get("is_causal") else 1.0
    forward = 2 * scores * heads * (query.shape[-1] + value.shape[-1])
    return int(forward * (BACKWARD if backward else 1))


def _adapted(args: Any, backward: bool) -> int:
    """A product with a frozen weight and two with an adapter's; in backward no gradient of the weight is made."""
    if not backward:
        x, _, _, a, b = args[:5]
        return int(2 * x.shape[0] * (x.shape[1] * b.shape[0] + a.shape[0] * (x.shape[1] + b.shape[0])))
    gradient, x, low = args[:3]
    wide = x.shape[1] * gradient.shape[1] if args[-1] else 0
    return int(2 * x.shape[0] * (wide + 2 * low.shape[1] * (x.shape[1] + gradient.shape[1])))


def workspace_of(func: Any, args: Any) -> int:
    """Bytes that an operator of ours takes while it runs, such as the unpacked weight of a layer in few bits."""
    name = schema_of(func).name
    if name == "shardwise::lora_linear" and args[8]:
        return int(args[4].shape[0] * args[7] * args[0].element_size())
    if name == "shardwise::lora_linear_backward" and args[9]:
        return int(args[0].shape[1] * args[8] * args[0].element_size())
    if name == f"shardwise::{FLOAT8}":  # the weight turned over, and what nf4 becomes
        return int(args[2].shape[0] * args[6] * (int(args[9]) + int(args[7] == "nf4")))
    if name.startswith("shardwise::long_attention"):
        backward = name.endswith("backward")
        query, key = args[1:3] if backward else args[:2]
        part = query.numel() * query.element_size() * heads_at_a_time(query, key) // key.shape[1]
        return int(part * (LONG_BACKWARD if backward else 3))
    return 0
