"""Attention over packed documents on a CPU: those of about one length are padded to the longest, and go together.

One call per document spends more on calls than on short documents. Behind a document's end, padding is seen by no token
of it (attention is causal), so no mask is needed; what padding itself computes is dropped. Half precision is attended
to in fp32: a CPU's backward takes three times as long in bf16 (measured with torch 2.13 on AVX-512), and the copy into
groups is made anyway.
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
    """Documents that go together: where their tokens are, and the places they get among `count` × `longest`."""

    tokens: torch.Tensor
    places: torch.Tensor
    count: int
    longest: int

    @property
    def room(self) -> int:
        return self.count * self.longest


def group(lengths: Sequence[int], device: torch.device) -> list[LengthGroup]:
    """Every document in a group, the longest first."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    found: list[list[int]] = []
    scores = 0
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        own = lengths[number] ** 2
        if found and (len(found[-1]) + 1) * lengths[found[-1][0]] ** 2 <= WASTE * (scores + own):
            found[-1].append(number)
            scores += own
        else:
            found.append([number])
            scores = own
    return [_group(sorted(one), lengths, starts, device) for one in found]


def groups_of(documents: Documents) -> list[LengthGroup]:
    """Groups of all documents of packed rows, made once: every block of a forward asks for the same."""
    known = vars(documents)
    if "groups" not in known:
        known["groups"] = group(documents.lengths, documents.boundaries.device)
    groups: list[LengthGroup] = known["groups"]
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
    """(tokens, heads, head) in and out; causal, and blind to other documents."""
    grouped = query.shape[1] != key.shape[1]
    apart = zip(*(_ToGroups.apply(groups, x) for x in (query, key, value)), strict=True)
    outputs = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=grouped)
        for q, k, v in apart
    ]
    return _FromGroups.apply(groups, query.shape[0], query.dtype, *outputs)  # type: ignore[no-any-return]


def _spread(groups: list[LengthGroup], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(tokens, heads, head) as a padded (documents, heads, longest, head) for each group, in fp32 at least."""
    found = []
    kind = torch.promote_types(x.dtype, torch.float32)
    for one in groups:
        full = one.room == len(one.places)
        shape = one.room, *x.shape[1:]
        laid = x.new_empty(shape, dtype=kind) if full else x.new_zeros(shape, dtype=kind)
        laid.index_copy_(0, one.places, x.index_select(0, one.tokens).to(kind))
        found.append(laid.view(one.count, one.longest, *x.shape[1:]).transpose(1, 2))
    return tuple(found)


def _collect(groups: list[LengthGroup], total: int, kind: torch.dtype, laid: Sequence[torch.Tensor]) -> torch.Tensor:
    """The opposite; every token is in one group."""
    _, heads, _, head = laid[0].shape
    out = laid[0].new_empty(total, heads, head, dtype=kind)
    for one, part in zip(groups, laid, strict=True):
        flat = part.transpose(1, 2).reshape(one.room, heads, head)
        out.index_copy_(0, one.tokens, flat.index_select(0, one.places).to(kind))
    return out


class _ToGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, groups: list[LengthGroup], x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ctx.groups, ctx.total, ctx.kind = groups, x.shape[0], x.dtype
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
