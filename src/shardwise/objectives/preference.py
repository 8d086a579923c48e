"""Preference pairs, chosen and rejected: DPO (arXiv 2305.18290) and ORPO (arXiv 2403.07691).

The unit of loss is a pair. Token losses (`sft`, ORPO's first term) are means over the chosen
answer, so that pairs count alike, however long their answers are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwise.config.objectives import Dpo, Orpo
from shardwise.data.preference_layout import PreferenceBatch
from shardwise.nn.objective import Loss
from shardwise.objectives.answer_log_probs import AnswerLogProbs, Reference

CERTAIN = -1e-6  # largest mean log-probability of an answer, which keeps its odds finite


class DpoObjective:
    """-log σ(β · difference of the log-ratios of model and reference, chosen minus rejected)."""

    figures: tuple[str, ...] = ("accuracy", "margin", "reward_chosen", "reward_rejected")
    of_tokens = False

    def __init__(
        self,
        model: Any,
        apart: bool,
        settings: Dpo,
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
        """The loss, summed over the pairs of a prepared micro-batch."""
        settings = self._settings
        sums, counts = self._log_probs(model, batch)
        assert batch.reference is not None
        chosen, rejected = (settings.beta * (sums - batch.reference)).view(-1, 2).unbind(1)
        margin = chosen - rejected
        smoothing = settings.label_smoothing
        losses = -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
        if settings.sft:
            losses = losses - settings.sft * (sums / counts)[::2]
        return self._log_probs.loss(
            losses,
            batch,
            accuracy=margin > 0,
            margin=margin,
            reward_chosen=chosen,
            reward_rejected=rejected,
        )


class OrpoObjective:
    """The plain loss of the chosen answer, minus β · log σ of the log odds ratio of the pair."""

    figures: tuple[str, ...] = ("accuracy", "margin", "loss_chosen")
    of_tokens = False

    def __init__(
        self, model: Any, apart: bool, settings: Orpo, group: dist.ProcessGroup | None = None
    ) -> None:
        self._log_probs = AnswerLogProbs(model, apart, group)
        self._beta = settings.beta

    def __call__(self, model: Any, batch: PreferenceBatch) -> Loss:
        """The loss, summed over the pairs of the micro-batch."""
        sums, counts = self._log_probs(model, batch)
        means = sums / counts
        odds = means - torch.log(-torch.expm1(means.clamp(max=CERTAIN)))
        chosen, rejected = odds.view(-1, 2).unbind(1)
        plain = -means[::2]
        margin = chosen - rejected
        losses = plain - self._beta * F.logsigmoid(margin)
        figures = {"accuracy": margin > 0, "margin": margin, "loss_chosen": plain}
        return self._log_probs.loss(losses, batch, **figures)
