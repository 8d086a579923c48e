# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Flash attention with softcapped scores and sinks in Triton; see softcap.py for what it computes.

Documents lie one after the other, so the first key that a block of queries sees is that of its first query, and the
last query that sees a block of keys is that of its last key: loops run between the two and mask within.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of a kernel: queries and keys of a tile, warps, and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


# The fastest of those tried on an H200, by head size (rounded up to a power of two): forward, gradients of keys and
# values, gradients of queries.
FORWARD = {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 3), 256: Tiles(64, 64, 4, 3)}
OF_KEYS = {64: Tiles(32, 128, 4, 2), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 64, 8, 2)}
OF_QUERIES = {64: Tiles(64, 128, 4, 3), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 32, 4, 3)}


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))


@triton.jit
def _scores(q, k, scale, softcap, CAPPED: tl.constexpr):
    """Scores in units of log 2 (`scale` has the factor), and tanh where they are capped."""
    scores = tl.dot(q, k) * scale
    bent = scores
    if CAPPED:
        bent = _tanh(scores / softcap)
        scores = bent * (softcap * LOG2E)
    return scores, bent


@triton.jit
def _seen(queries, keys, first, tokens):
    return (keys[None, :] >= first[:, None]) & (keys[None, :] <= queries[:, None]) & (queries[:, None] < tokens)


@triton.jit
def attention_forward(
    q, k, v, sinks, starts, out, sums, scale, softcap, window, tokens,
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head,
    GROUP: tl.constexpr, CAPPED: tl.constexpr, SUNK: tl.constexpr, HEAD: tl.constexpr, VALUE: tl.constexpr,
    WIDE: tl.constexpr, VWIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # The last blocks have the most to do in a long document: they come first.
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    at = block * QUERIES + tl.arange(0, QUERIES)
    d, dv = tl.arange(0, WIDE), tl.arange(0, VWIDE)
    mine = at < tokens
    first = tl.maximum(tl.load(starts + at, mask=mine, other=tokens), at - (window - 1))
    query = tl.load(q + at.to(tl.int64)[:, None] * q_token + head * q_head + d[None, :],
                    mask=mine[:, None] & (d < HEAD)[None, :], other=0.0)  # fmt: skip
    low = tl.min(first) // KEYS * KEYS
    high = tl.minimum((block + 1) * QUERIES, tokens)
    k += (head // GROUP) * k_head
    v += (head // GROUP) * v_head
    if SUNK:  # the first score that every query has seen
        largest = tl.zeros((QUERIES,), tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total = tl.full((QUERIES,), 1.0, tl.float32)
    else:
        largest = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, VWIDE), tl.float32)
    for start in range(low, high, KEYS):
        there = start + tl.arange(0, KEYS)
        inside = there < tokens
        place = there.to(tl.int64)
        key = tl.load(k + place[None, :] * k_token + d[:, None], mask=inside[None, :] & (d < HEAD)[:, None], other=0.0)
        scores, _ = _scores(query, key, scale, softcap, CAPPED)
        scores = tl.where(_seen(at, there, first, tokens), scores, float("-inf"))
        most = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen nothing yet has no largest score to subtract.
        base = tl.where(most == float("-inf"), 0.0, most)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(largest - base)
        total = total * fade + tl.sum(weights, 1)
        value = tl.load(v + place[:, None] * v_token + dv[None, :],
                        mask=inside[:, None] & (dv < VALUE)[None, :], other=0.0)  # fmt: skip
        mixed = mixed * fade[:, None] + tl.dot(weights.to(value.dtype), value)
        largest = most
    safe = tl.where(total == 0.0, 1.0, total)
    mixed = mixed / safe[:, None]
    tl.store(out + at.to(tl.int64)[:, None] * o_token + head * o_head + dv[None, :], mixed.to(out.dtype.element_ty),
             mask=mine[:, None] & (dv < VALUE)[None, :])  # fmt: skip
    tl.store(sums + head.to(tl.int64) * tokens + at, (largest + tl.log2(safe)) / LOG2E, mask=mine)


@triton.jit
def attention_of_keys(
    grad, q, k, v, starts, ends, sums, delta, dk, dv_out, scale, softcap, window, tokens,
    g_token, g_head, q_token, q_head, k_token, k_head, v_token, v_head,
    GROUP: tl.constexpr, CAPPED: tl.constexpr, HEAD: tl.constexpr, VALUE: tl.constexpr,
    WIDE: tl.constexpr, VWIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values, of all heads of queries that look at them."""
    block, key_head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    there = block * KEYS + tl.arange(0, KEYS)
    inside = there < tokens
    place = there.to(tl.int64)
    d, dv = tl.arange(0, WIDE), tl.arange(0, VWIDE)
    key = tl.load(k + place[:, None] * k_token + key_head * k_head + d[None, :],
                  mask=inside[:, None] & (d < HEAD)[None, :], other=0.0)  # fmt: skip
    value = tl.load(v + place[:, None] * v_token + key_head * v_head + dv[None, :],
                    mask=inside[:, None] & (dv < VALUE)[None, :], other=0.0)  # fmt: skip
    last = tl.max(tl.minimum(tl.load(ends + there, mask=inside, other=0), there + window))
    low = block * KEYS // QUERIES * QUERIES
    d_key = tl.zeros((KEYS, WIDE), tl.float32)
    d_value = tl.zeros((KEYS, VWIDE), tl.float32)
    for number in range(0, GROUP):
        head = key_head * GROUP + number
        for start in range(low, last, QUERIES):
            at = start + tl.arange(0, QUERIES)
            mine = at < tokens
            spot = at.to(tl.int64)
            first = tl.maximum(tl.load(starts + at, mask=mine, other=tokens), at - (window - 1))
            # Turned round: (keys, queries).
            query = tl.load(q + spot[None, :] * q_token + head * q_head + d[:, None],
                            mask=mine[None, :] & (d < HEAD)[:, None], other=0.0)  # fmt: skip
            scores, bent = _scores(key, query, scale, softcap, CAPPED)
            seen = (there[:, None] >= first[None, :]) & (there[:, None] <= at[None, :]) & mine[None, :]
            lse = tl.load(sums + head.to(tl.int64) * tokens + at, mask=mine, other=0.0) * LOG2E
            weights = tl.where(seen, tl.exp2(scores - lse[None, :]), 0.0)
            above = tl.load(grad + spot[:, None] * g_token + head * g_head + dv[None, :],
                            mask=mine[:, None] & (dv < VALUE)[None, :], other=0.0)  # fmt: skip
            d_value += tl.dot(weights.to(above.dtype), above)
            own = tl.load(delta + head.to(tl.int64) * tokens + at, mask=mine, other=0.0)
            slope = weights * (tl.dot(value, tl.trans(above)) - own[None, :])
            if CAPPED:
                slope *= 1.0 - bent * bent
            d_key += tl.dot(slope.to(query.dtype), tl.trans(query))
    factor = scale if CAPPED else scale / LOG2E
    tl.store(dk + place[:, None] * (heads * HEAD) + key_head * HEAD + d[None, :],
             (d_key * factor).to(dk.dtype.element_ty), mask=inside[:, None] & (d < HEAD)[None, :])  # fmt: skip
    tl.store(dv_out + place[:, None] * (heads * VALUE) + key_head * VALUE + dv[None, :],
             d_value.to(dv_out.dtype.element_ty), mask=inside[:, None] & (dv < VALUE)[None, :])  # fmt: skip


@triton.jit
def attention_of_queries(
    grad, q, k, v, starts, sums, delta, dq, scale, softcap, window, tokens,
    g_token, g_head, q_token, q_head, k_token, k_head, v_token, v_head,
    GROUP: tl.constexpr, CAPPED: tl.constexpr, HEAD: tl.constexpr, VALUE: tl.constexpr,
    WIDE: tl.constexpr, VWIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    at = block * QUERIES + tl.arange(0, QUERIES)
    d, dv = tl.arange(0, WIDE), tl.arange(0, VWIDE)
    mine = at < tokens
    spot = at.to(tl.int64)
    first = tl.maximum(tl.load(starts + at, mask=mine, other=tokens), at - (window - 1))
    query = tl.load(q + spot[:, None] * q_token + head * q_head + d[None, :],
                    mask=mine[:, None] & (d < HEAD)[None, :], other=0.0)  # fmt: skip
    above = tl.load(grad + spot[:, None] * g_token + head * g_head + dv[None, :],
                    mask=mine[:, None] & (dv < VALUE)[None, :], other=0.0)  # fmt: skip
    lse = tl.load(sums + head.to(tl.int64) * tokens + at, mask=mine, other=0.0) * LOG2E
    own = tl.load(delta + head.to(tl.int64) * tokens + at, mask=mine, other=0.0)
    low = tl.min(first) // KEYS * KEYS
    high = tl.minimum((block + 1) * QUERIES, tokens)
    k += (head // GROUP) * k_head
    v += (head // GROUP) * v_head
    d_query = tl.zeros((QUERIES, WIDE), tl.float32)
    for start in range(low, high, KEYS):
        there = start + tl.arange(0, KEYS)
        inside = there < tokens
        place = there.to(tl.int64)
        key = tl.load(k + place[None, :] * k_token + d[:, None], mask=inside[None, :] & (d < HEAD)[:, None], other=0.0)
        value = tl.load(v + place[None, :] * v_token + dv[:, None],
                        mask=inside[None, :] & (dv < VALUE)[:, None], other=0.0)  # fmt: skip
        scores, bent = _scores(query, key, scale, softcap, CAPPED)
        weights = tl.where(_seen(at, there, first, tokens), tl.exp2(scores - lse[:, None]), 0.0)
        slope = weights * (tl.dot(above, value) - own[:, None])
        if CAPPED:
            slope *= 1.0 - bent * bent
        d_query += tl.dot(slope.to(key.dtype), tl.trans(key))
    factor = scale if CAPPED else scale / LOG2E
    tl.store(dq + spot[:, None] * (heads * HEAD) + head * HEAD + d[None, :], (d_query * factor).to(dq.dtype.element_ty),
             mask=mine[:, None] & (d < HEAD)[None, :])  # fmt: skip


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, starts: torch.Tensor,
    scale: float, softcap: float, window: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns output and log-sum-exp."""
    query, key, value = map(_rows, (query, key, value))
    tokens, heads, _ = query.shape
    out = query.new_empty(tokens, heads, value.shape[-1])
    sums = query.new_empty(heads, tokens, dtype=torch.float32)
    tiles = _tiles(FORWARD, query, value)
    sizes = _sizes(query, key, value, softcap)
    grid = (triton.cdiv(tokens, tiles.queries), heads)
    attention_forward[grid](
        query, key, value, query if sinks is None else sinks, starts, out, sums, _factor(scale, softcap), softcap,
        window, tokens, *_strides(query, key, value, out), **sizes, SUNK=sinks is not None, **_shape(tiles),
    )  # fmt: skip
    return out, sums


def backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor,
    ends: torch.Tensor, sums: torch.Tensor, delta: torch.Tensor, scale: float, softcap: float, window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns the gradients of queries, keys and values."""
    gradient, query, key, value = map(_rows, (gradient, query, key, value))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    tokens, heads, _ = query.shape
    sizes = _sizes(query, key, value, softcap)
    strides = _strides(gradient, query, key, value)
    scalars = (_factor(scale, softcap), softcap, window, tokens)
    tiles = _tiles(OF_KEYS, query, value)
    attention_of_keys[(triton.cdiv(tokens, tiles.keys), key.shape[1])](
        gradient, query, key, value, starts, ends, sums, delta, dk, dv, *scalars, *strides, **sizes, **_shape(tiles)
    )
    tiles = _tiles(OF_QUERIES, query, value)
    attention_of_queries[(triton.cdiv(tokens, tiles.queries), heads)](
        gradient, query, key, value, starts, sums, delta, dq, *scalars, *strides, **sizes, **_shape(tiles)
    )
    return dq, dk, dv


def _factor(scale: float, softcap: float) -> float:
    """Factor of the products: capped scores get the factor of exp2 after the cap."""
    return scale if softcap else scale * float(LOG2E.value)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: torch.Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def _wide(size: int) -> int:
    return max(16, int(triton.next_power_of_2(size)))


def _sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softcap: float) -> dict[str, Any]:
    head = query.shape[-1]
    wanted = value.shape[-1]
    return {
        "GROUP": query.shape[1] // key.shape[1], "CAPPED": softcap != 0.0, "HEAD": head, "VALUE": wanted,
        "WIDE": _wide(head), "VWIDE": _wide(wanted),
    }  # fmt: skip


def _tiles(table: dict[int, Tiles], query: torch.Tensor, value: torch.Tensor) -> Tiles:
    size = _wide(max(query.shape[-1], value.shape[-1]))
    return table[min((s for s in table if s >= size), default=256)]


def _shape(tiles: Tiles) -> dict[str, int]:
    return {"QUERIES": tiles.queries, "KEYS": tiles.keys, "num_warps": tiles.warps, "num_stages": tiles.stages}
