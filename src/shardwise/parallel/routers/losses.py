"""The losses of routers, from sums over tokens that add up over layers, ranks and stages.

The auxiliary loss of a group of tokens (transformers' `load_balancing_loss_func`, after the Switch Transformer, arXiv
2101.03961) depends on it through sums alone: how often each expert is among the likeliest `top_k` of a token (without
gradient), the probability that routers give each expert, and the number of rows, over all layers. So does the z-loss
(arXiv 2202.08906): the squared logsumexp of the logits. A table of (groups, sums) is all that is kept of a forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Terms:
    """Which losses there are, by their coefficients (0: not computed), and what the auxiliary one is made from."""

    aux: float
    z: float
    top_k: int

    @property
    def names(self) -> tuple[str, ...]:
        """Of the losses, as they are reported."""
        return (*(["aux_loss"] if self.aux else []), *(["z_loss"] if self.z else []))

    def __bool__(self) -> bool:
        return bool(self.aux or self.z)


def sums_of(
    logits: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor, terms: Terms
) -> torch.Tensor:
    """(groups, sums) of one layer: probabilities and counts by expert, squared logsumexp, rows.

    `logits`: (tokens, experts); `numbers`: each token's group, the last one being left out; `weights`: as many as
    groups, which gives the shape without a constant that a compiled block would be compiled anew for.
    """
    groups, experts = len(weights), logits.shape[-1]
    parts = []
    if terms.aux:
        # In the type of the logits, as the model's own code computes them.
        probabilities = torch.softmax(logits, -1)
        with torch.no_grad():
            chosen = probabilities.topk(terms.top_k, -1).indices
            flat = (numbers[:, None] * experts + chosen).flatten()
            ones = torch.ones_like(flat, dtype=torch.float32)
            counts = (
                ones.new_zeros(groups * experts).scatter_add(0, flat, ones).view(groups, experts)
            )
        probabilities = probabilities.float()
        parts += [
            probabilities.new_zeros(groups, experts).index_add(0, numbers, probabilities),
            counts,
        ]
    if terms.z:
        squares = logits.float().logsumexp(-1, keepdim=True).square()
        parts.append(squares.new_zeros(groups, 1).index_add(0, numbers, squares))
    rows = weights.new_zeros(groups, 1).index_add(
        0, numbers, weights.new_ones(1).expand(len(numbers), 1)
    )
    return torch.cat([*parts, rows], 1)[:-1]


def losses_of(sums: torch.Tensor, weights: torch.Tensor, terms: Terms) -> dict[str, torch.Tensor]:
    """Each loss summed over the groups, by their weights (the last, of padding, is none)."""
    parts, rows = sums[:, :-1], sums[:, -1].clamp(min=1.0)
    found: dict[str, torch.Tensor] = {}
    if terms.aux:
        experts = (parts.shape[1] - bool(terms.z)) // 2
        mean, share = (
            parts[:, :experts] / rows[:, None],
            parts[:, experts : 2 * experts] / rows[:, None],
        )
        found["aux_loss"] = (weights[:-1] * experts * (mean * share).sum(-1)).sum()
    if terms.z:
        found["z_loss"] = (weights[:-1] * parts[:, -1] / rows).sum()
    return found
