"""The outer step against torch's own SGD, and how workers are weighted."""

from __future__ import annotations

import pytest
import torch

from shardwise.diloco.outer_step import METHODS, OuterRule, mean_of, outer_step, weights_of


@pytest.mark.parametrize("optimizer, momentum", [("nesterov", 0.9), ("sgd", 0.9), ("sgd", 0.0)])
def test_it_is_sgd(optimizer: str, momentum: float) -> None:
    rule = OuterRule(optimizer, 0.7, momentum)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    ours, velocity = torch.randn(50, generator=generator), None
    theirs = torch.nn.Parameter(ours.clone())
    sgd = torch.optim.SGD([theirs], lr=0.7, momentum=momentum, nesterov=optimizer == "nesterov")
    for _ in range(5):
        gradient = torch.randn(50, generator=generator)
        ours, velocity = outer_step(ours, velocity, gradient.double(), rule)
        theirs.grad = gradient
        sgd.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)
    assert (velocity is None) == (momentum == 0)


def test_fedavg_is_the_weighted_mean_of_the_parameters() -> None:
    start, mine, yours = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5.0, 6.0, 7.0])
    rule = METHODS["fedavg"]
    weights = weights_of(rule, [300, 100])
    assert weights == [0.75, 0.25] and weights_of(METHODS["diloco"], [300, 100]) == [0.5, 0.5]
    assert weights_of(rule, [0, 0]) == [0.5, 0.5]  # nobody learned anything: nothing to divide by
    after, _ = outer_step(start, None, mean_of([start - mine, start - yours], weights), rule)
    assert torch.equal(after, 0.75 * mine + 0.25 * yours)
