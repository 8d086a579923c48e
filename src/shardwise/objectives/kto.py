"""Learning from answers that are wanted or not, one by one: KTO (arXiv 2402.01306) with its point of reference at 0.

[Note: point of reference] The paper measures an answer's reward against the mean divergence from the reference,
estimated on answers to other prompts of the same batch. That makes an answer's loss depend on which others it is
computed with, so that accumulation and more ranks would train something else, and costs another forward. The estimate
is never taken below 0, and 0 is what it is at the start: we take that throughout.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.config.objectives import Kto
from shardwise.data.preference_layout import PreferenceBatch
from shardwise.nn.objective import Loss
from shardwise.objectives.answer_log_probs import AnswerLogProbs, Reference, judged_loss


class KtoObjective:
    """1 - σ(±β · how much likelier than by the reference the answer is), + for wanted ones.

    The figure `reward` is this ± mean: it rises when wanted answers become likelier and unwanted ones less so.
    """

    figures: tuple[str, ...] = ("accuracy", "reward")
    of_tokens = False

    def __init__(self, model: Any, apart: bool, settings: Kto, reference: Reference) -> None:
        self._log_probs, self._settings, self._reference = (
            AnswerLogProbs(model, apart),
            settings,
            reference,
        )

    def __call__(self, model: Any, batch: PreferenceBatch) -> Loss:
        """Summed over the answers of the micro-batch."""
        assert batch.wanted is not None
        before = self._log_probs.before(self._reference, model, batch)
        wanted = batch.wanted.to(before.dtype)
        reward = (
            (2 * wanted - 1) * self._settings.beta * (self._log_probs(model, batch)[0] - before)
        )
        weights = torch.lerp(
            torch.full_like(wanted, self._settings.undesirable_weight),
            torch.full_like(wanted, self._settings.desirable_weight),
            wanted,
        )
        return judged_loss(
            weights * torch.sigmoid(-reward), batch, accuracy=reward > 0, reward=reward
        )
