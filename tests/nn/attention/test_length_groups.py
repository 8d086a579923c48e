"""Documents that go together on a CPU: the same as one by one, outputs and gradients."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from shardwise.nn.attention.length_groups import WASTE, attend_in_groups, group


def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float) -> torch.Tensor:
    done = []
    for a, b, c in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        parts = (x.transpose(0, 1)[None] for x in (a, b, c))
        done.append(F.scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=True)[0])
    return torch.cat([x.transpose(0, 1) for x in done])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["all", "grouped"])
def test_the_same_as_one_by_one(seed: int, heads: tuple[int, int]) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    lengths = [random.choice([1, 2, 7, 30, 31, 33, 64]) for _ in range(random.randint(1, 12))]
    shapes = [(sum(lengths), n, 16) for n in (heads[0], heads[1], heads[1])]
    found = []
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    slope = torch.randn(shapes[0], dtype=torch.float64)
    for way in (0, 1):
        q, k, v = (x.clone().requires_grad_() for x in given)
        groups = group(lengths, torch.device("cpu"))
        out = attend_in_groups(q, k, v, groups, 0.0, 0.3) if way else one_by_one(q, k, v, lengths, 0.3)
        out.backward(slope)
        found.append([out.detach(), q.grad, k.grad, v.grad])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_groups_hold_every_token_once_and_waste_little() -> None:
    random.seed(0)
    lengths = [random.randint(1, 200) for _ in range(200)]
    groups = group(lengths, torch.device("cpu"))
    tokens = torch.cat([one.tokens for one in groups])
    assert torch.equal(tokens.sort().values, torch.arange(sum(lengths)))
    assert sum(one.count for one in groups) == 200 and len(groups) < 20
    assert sum(one.count * one.longest**2 for one in groups) <= WASTE * sum(n * n for n in lengths)
    assert len(group([64] * 9, torch.device("cpu"))) == 1
