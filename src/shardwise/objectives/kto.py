"""KTO (arXiv 2402.01306): single answers labelled wanted or unwanted, with a reference point of 0.

[Note: point of reference] The paper subtracts the mean divergence from the reference, estimated on
answers to other prompts of the same batch. An answer's loss would then depend on the rest of its
batch, so accumulation and more ranks would change training, and it costs another forward. The
estimate is clamped at 0, and is 0 at the start of training: here it is always 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.config.objectives import Kto
from shardwise.data.preference_layout import PreferenceBatch
from shardwise.nn.objective import Loss
from shardwise.objectives.answer_log_probs import AnswerLogProbs, Reference


class KtoObjective:
    """1 - σ(±β · log-ratio of model and reference), with + for wanted answers.

    The figure `reward` is the mean of the argument of σ: it rises when wanted answers become
    likelier and unwanted ones less likely.
    """

    figures: tuple[str, ...] = ("accuracy", "reward")
    of_tokens = False

    def __init__(
        self,
        model: Any,
        apart: bool,
        settings: Kto,
        reference: Reference,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._log_probs = AnswerLogProbs(model, apart, group)
        self._settings = settings
        self._reference = reference

    def prepare(self, batches: list[PreferenceBatch]) -> list[PreferenceBatch]:
        """The micro-batches with the reference's log-probabilities."""
        return self._log_probs.by_reference(self._reference, batches)

    def __call__(self, model: Any, batch: PreferenceBatch) -> Loss:
        """The loss, summed over the answers of a prepared micro-batch."""
        sums, _ = self._log_probs(model, batch)
        assert batch.wanted is not None and batch.reference is not None
        wanted = batch.wanted.to(sums.dtype)
        reward = (2 * wanted - 1) * self._settings.beta * (sums - batch.reference)
        weights = torch.lerp(
            torch.full_like(wanted, self._settings.undesirable_weight),
            torch.full_like(wanted, self._settings.desirable_weight),
            wanted,
        )
        losses = weights * torch.sigmoid(-reward)
        return self._log_probs.loss(losses, batch, accuracy=reward > 0, reward=reward)
