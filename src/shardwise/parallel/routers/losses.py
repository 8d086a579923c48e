"""Router losses, from sums over tokens that add up over layers, ranks and stages.

The auxiliary loss of a group of tokens (transformers' `load_balancing_loss_func`, after the Switch
Transformer, arXiv 2101.03961) depends only on sums over all layers: how often each expert is in the
top `top_k` of a token (without gradient), its total probability, and the number of rows. So does
the z-loss (arXiv 2202.08906): the squared logsumexp of the logits. Of a forward, only a table of
(groups, sums) is saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RouterLossWeights:
    """Coefficients of the losses (0: not computed), and the experts per token."""

    aux: float
    z: float
    top_k: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names under which the losses are reported."""
        coefficients = {"aux_loss": self.aux, "z_loss": self.z}
        return tuple(name for name, coefficient in coefficients.items() if coefficient)

    def __bool__(self) -> bool:
        return bool(self.aux or self.z)


def sums_of(
    logits: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor, terms: RouterLossWeights
) -> torch.Tensor:
    """(groups, sums) of one layer: probabilities and counts by expert, squared logsumexp, rows.

    `logits`: (tokens, experts); `numbers`: each token's group, the last of which is dropped;
    `weights`: one per group: a tensor, since a constant number of groups would recompile blocks.
    """
    groups = len(weights)
    experts = logits.shape[-1]
    parts = []
    if terms.aux:
        # In the dtype of the logits, like the model's own code.
        probabilities = torch.softmax(logits, -1)
        with torch.no_grad():
            chosen = probabilities.topk(terms.top_k, -1).indices
            flat = (numbers[:, None] * experts + chosen).flatten()
            ones = torch.ones_like(flat, dtype=torch.float32)
            counts = ones.new_zeros(groups * experts).scatter_add(0, flat, ones)
        probabilities = probabilities.float()
        totals = probabilities.new_zeros(groups, experts).index_add(0, numbers, probabilities)
        parts += [totals, counts.view(groups, experts)]
    if terms.z:
        squares = logits.float().logsumexp(-1, keepdim=True).square()
        parts.append(squares.new_zeros(groups, 1).index_add(0, numbers, squares))
    ones = weights.new_ones(1).expand(len(numbers), 1)
    rows = weights.new_zeros(groups, 1).index_add(0, numbers, ones)
    return torch.cat([*parts, rows], 1)[:-1]


def losses_of(
    sums: torch.Tensor, weights: torch.Tensor, terms: RouterLossWeights
) -> dict[str, torch.Tensor]:
    """Each loss as a weighted sum over groups, of which the last weight (padding) has none."""
    parts = sums[:, :-1]
    rows = sums[:, -1].clamp(min=1.0)
    losses: dict[str, torch.Tensor] = {}
    if terms.aux:
        experts = (parts.shape[1] - bool(terms.z)) // 2
        mean = parts[:, :experts] / rows[:, None]
        share = parts[:, experts : 2 * experts] / rows[:, None]
        losses["aux_loss"] = (weights[:-1] * experts * (mean * share).sum(-1)).sum()
    if terms.z:
        losses["z_loss"] = (weights[:-1] * parts[:, -1] / rows).sum()
    return losses
