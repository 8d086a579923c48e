"""FLOPs of the operators that matter: torch's own counts, and attention by what its mask lets through."""

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
    """Returns the multiplications and additions of one call; 0 for operators that only move data."""
    name = func._schema.name.partition("::")[2]
    if "attn" in name or "attention" in name:
        return _attention(func, args, kwargs, "backward" in name)
    if name.startswith("lora_linear"):
        return _adapted(args, "backward" in name)
    if name == "add_product":
        return int(2 * args[1].shape[0] * args[1].shape[1] * args[2].shape[1])
    if name == FLOAT8:
        (tokens, in_features), out_features, rank = args[0].shape, result.shape[1], args[3].shape[1]
        return int(2 * tokens * out_features * (in_features + rank))
    counter = flop_registry.get(func.overloadpacket)
    if counter is not None:
        return int(counter(*args, **kwargs, out_val=result))
    if name in GROUPED:
        left = args[0]
        right = args[1]
        return int(2 * left.shape[-2] * left.shape[-1] * right.shape[-1])
    return 0


def _attention(func: Any, args: Any, kwargs: Any, backward: bool) -> int:
    arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    query = arguments["query"]
    key = arguments["key"]
    value = arguments["value"]
    longest = arguments.get("max_k", arguments.get("longest"))
    if longest is not None:  # documents end to end, (tokens, heads, head): as if all were of the longest's length
        scores = query.shape[0] * min(int(longest) / 2, arguments.get("window", longest))
        heads = query.shape[1]
    else:
        scores = query.shape[0] * query.shape[-2] * key.shape[-2]
        heads = query.shape[1]
        scores *= 0.5 if arguments.get("is_causal") else 1.0
    forward = 2 * scores * heads * (query.shape[-1] + value.shape[-1])
    return int(forward * (BACKWARD if backward else 1))


def _adapted(args: Any, backward: bool) -> int:
    """A product with a frozen weight and two with an adapter's; backward computes no gradient of the weight."""
    if not backward:
        x, _, _, a, b = args[:5]
        return int(2 * x.shape[0] * (x.shape[1] * b.shape[0] + a.shape[0] * (x.shape[1] + b.shape[0])))
    gradient, x, low = args[:3]
    weight_product = x.shape[1] * gradient.shape[1] if args[-1] else 0
    return int(2 * x.shape[0] * (weight_product + 2 * low.shape[1] * (x.shape[1] + gradient.shape[1])))


def workspace_of(func: Any, args: Any) -> int:
    """Bytes of workspace that one of our operators allocates while it runs, such as a dequantized weight."""
    name = func._schema.name
    if name == "shardwise::lora_linear" and args[8]:
        return int(args[4].shape[0] * args[7] * args[0].element_size())
    if name == "shardwise::lora_linear_backward" and args[9]:
        return int(args[0].shape[1] * args[8] * args[0].element_size())
    if name == f"shardwise::{FLOAT8}":  # the weight turned over, and what nf4 becomes
        return int(args[2].shape[0] * args[6] * (int(args[9]) + int(args[7] == "nf4")))
    if name.startswith("shardwise::long_attention"):
        backward = name.endswith("backward")
        query, key = args[1:3] if backward else args[:2]
        query_bytes = query.numel() * query.element_size() * heads_at_a_time(query, key) // key.shape[1]
        return int(query_bytes * (LONG_BACKWARD if backward else 3))
    return 0
