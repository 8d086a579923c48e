"""Attention over packed documents on a CPU: documents of similar length are padded to the longest and batched.

One call per document spends more on calls than on short documents. Padding after a document's end is seen by none of
its tokens (attention is causal), so no mask is needed; what padding itself computes is dropped. Half precision is
computed in fp32: a CPU's backward takes three times as long in bf16 (measured with torch 2.13 on AVX-512), and the copy
into groups is made anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.data.documents import Documents

WASTE = 1.25  # scores that a group computes, against those of its documents


@dataclass(frozen=True)
class LengthGroup:
    """Documents in one batch: the indices of their tokens, and their positions among `count` × `longest`."""

    tokens: torch.Tensor
    places: torch.Tensor
    count: int
    longest: int

    @property
    def room(self) -> int:
        """Positions of the batch, padding included."""
        return self.count * self.longest


def group(lengths: Sequence[int], device: torch.device) -> list[LengthGroup]:
    """Returns groups that contain every document, the longest first."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    groups: list[list[int]] = []
    scores = 0
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        squared = lengths[number] ** 2
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] ** 2 <= WASTE * (scores + squared):
            groups[-1].append(number)
            scores += squared
        else:
            groups.append([number])
            scores = squared
    return [_group(sorted(members), lengths, starts, device) for members in groups]


def groups_of(documents: Documents) -> list[LengthGroup]:
    """Returns the groups of all documents of packed rows, cached: every block of a forward needs the same."""
    attributes = vars(documents)
    if "groups" not in attributes:
        attributes["groups"] = group(documents.lengths, documents.boundaries.device)
    groups: list[LengthGroup] = attributes["groups"]
    return groups


def _group(numbers: list[int], lengths: Sequence[int], starts: list[int], device: torch.device) -> LengthGroup:
    longest = max(lengths[n] for n in numbers)
    tokens = torch.cat([torch.arange(starts[n], starts[n] + lengths[n]) for n in numbers])
    places = torch.cat([torch.arange(i * longest, i * longest + lengths[n]) for i, n in enumerate(numbers)])
    return LengthGroup(tokens.to(device), places.to(device), len(numbers), longest)


def attend_in_groups(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: list[LengthGroup], dropout: float,
    scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """(tokens, heads, head) in and out; causal, and within documents only."""
    grouped = query.shape[1] != key.shape[1]
    by_group = zip(*(_ToGroups.apply(groups, x) for x in (query, key, value)), strict=True)
    outputs = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=grouped)
        for q, k, v in by_group
    ]
    return _FromGroups.apply(groups, query.shape[0], query.dtype, *outputs)  # type: ignore[no-any-return]


def _spread(groups: list[LengthGroup], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(tokens, heads, head) as a padded (documents, heads, longest, head) for each group, in fp32 at least."""
    padded = []
    dtype = torch.promote_types(x.dtype, torch.float32)
    for length_group in groups:
        full = length_group.room == len(length_group.places)
        shape = length_group.room, *x.shape[1:]
        rows = x.new_empty(shape, dtype=dtype) if full else x.new_zeros(shape, dtype=dtype)
        rows.index_copy_(0, length_group.places, x.index_select(0, length_group.tokens).to(dtype))
        padded.append(rows.view(length_group.count, length_group.longest, *x.shape[1:]).transpose(1, 2))
    return tuple(padded)


def _collect(groups: list[LengthGroup], total: int, dtype: torch.dtype, padded: Sequence[torch.Tensor]) -> torch.Tensor:
    """Inverse of `_spread`; every token is in one group."""
    _, heads, _, head = padded[0].shape
    out = padded[0].new_empty(total, heads, head, dtype=dtype)
    for length_group, part in zip(groups, padded, strict=True):
        flat = part.transpose(1, 2).reshape(length_group.room, heads, head)
        out.index_copy_(0, length_group.tokens, flat.index_select(0, length_group.places).to(dtype))
    return out


class _ToGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, groups: list[LengthGroup], x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ctx.groups = groups
        ctx.total = x.shape[0]
        ctx.kind = x.dtype
        return _spread(groups, x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        return None, _collect(ctx.groups, ctx.total, ctx.kind, gradients)


class _FromGroups(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, groups: list[LengthGroup], total: int, kind: torch.dtype, *laid: torch.Tensor
    ) -> torch.Tensor:
        ctx.groups = groups
        return _collect(groups, total, kind, laid)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, None, None, *_spread(ctx.groups, gradient.contiguous())
