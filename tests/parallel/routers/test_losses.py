"""Sums by group against transformers' own function on each group."""

from __future__ import annotations

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from shardwise.parallel.routers.losses import RouterLossWeights, losses_of, sums_of

LENGTHS = (5, 9, 3, 12)
WEIGHTS = torch.tensor([2.0, 7.0, 0.0, 5.0, 0.0])  # the last is padding's
EXPERTS, TOP_K, LAYERS, PADDING = 6, 2, 3, 4


def logits(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    made = (torch.randn(sum(LENGTHS) + PADDING, EXPERTS, generator=random).to(dtype) for _ in range(LAYERS))
    return [one.requires_grad_() for one in made]


def numbers() -> torch.Tensor:
    return torch.arange(5).repeat_interleave(torch.tensor([*LENGTHS, PADDING]))


def ours(layers: list[torch.Tensor], terms: RouterLossWeights) -> dict[str, torch.Tensor]:
    sums = torch.stack([sums_of(one, numbers(), WEIGHTS, terms) for one in layers]).sum(0)
    return losses_of(sums, WEIGHTS, terms)


def theirs(layers: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    aux, z, start = torch.zeros(()), torch.zeros(()), 0
    for length, weight in zip(LENGTHS, WEIGHTS.tolist(), strict=False):
        mine = tuple(one[start : start + length] for one in layers)
        aux = aux + weight * load_balancing_loss_func(mine, EXPERTS, TOP_K)
        z = z + weight * torch.stack([one.float().logsumexp(-1).square().mean() for one in mine]).mean()
        start += length
    return aux, z


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_each_group_alone(dtype: torch.dtype) -> None:
    found = ours(mine := logits(dtype), RouterLossWeights(0.3, 0.2, TOP_K))
    wanted = theirs(other := logits(dtype))
    assert [float(found["aux_loss"]), float(found["z_loss"])] == pytest.approx([float(w) for w in wanted], rel=1e-5)
    (found["aux_loss"] + 0.1 * found["z_loss"]).backward()
    (wanted[0] + 0.1 * wanted[1]).backward()
    for a, b in zip(mine, other, strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-5 if dtype is torch.float32 else 2e-2, atol=1e-6)
        assert not a.grad[-PADDING:].any()


def test_only_what_is_asked_for_is_computed() -> None:
    layers = logits()
    assert list(ours(layers, RouterLossWeights(1.0, 0.0, TOP_K))) == ["aux_loss"]
    assert list(ours(layers, RouterLossWeights(0.0, 1.0, TOP_K))) == ["z_loss"]
    assert not RouterLossWeights(0.0, 0.0, TOP_K)


def test_one_group_of_all_is_transformers_own_with_a_mask() -> None:
    layers, terms = logits(), RouterLossWeights(1.0, 0.0, TOP_K)
    real = (numbers() < len(LENGTHS)).long()
    weights = torch.tensor([3.0, 0.0])
    sums = torch.stack([sums_of(one, 1 - real, weights, terms) for one in layers]).sum(0)
    wanted = load_balancing_loss_func(tuple(layers), EXPERTS, TOP_K, real[None])
    assert float(losses_of(sums, weights, terms)["aux_loss"]) == pytest.approx(3 * float(wanted), rel=1e-6)
