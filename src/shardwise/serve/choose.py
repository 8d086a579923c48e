"""Samples the next token of each row, exactly as `generate` would for that row alone.

Each row has a random stream of its own, so that a seed gives the same answer whatever else is being served.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from shardwise.nn.generate import Sampling


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability under the model, and the top tokens in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class Chooser:
    """Sampling of one row."""

    sampling: Sampling
    device: torch.device
    _steps: LogitsProcessorList = field(init=False)
    _random: torch.Generator | None = None

    def __post_init__(self) -> None:
        sampling = self.sampling
        steps = []
        if sampling.repetition_penalty != 1:
            steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.temperature > 0:
            steps.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_p < 1:
                steps.append(TopPLogitsWarper(sampling.top_p))
        self._steps = LogitsProcessorList(steps)
        if sampling.seed is not None:
            self._random = torch.Generator(self.device).manual_seed(sampling.seed)

    @property
    def plain(self) -> bool:
        """Whether sampling is greedy without any logits processor."""
        return not self._steps

    def pick(self, logits: torch.Tensor, seen: list[int]) -> int:
        """Returns the next token from logits [1, vocabulary], after the tokens seen so far."""
        processed: Any = self._steps(torch.tensor([seen], device=logits.device), logits)
        if self.sampling.temperature == 0:
            return int(processed.argmax(-1))
        probabilities = processed.softmax(-1)
        if not torch.isfinite(
            probabilities
        ).all():  # settings so extreme that they overflow, and would fail the whole batch
            return int(logits.argmax(-1))
        return int(torch.multinomial(probabilities, 1, generator=self._random))


def score(logits: torch.Tensor, token: int, top: int) -> Scored:
    """Returns the log-probability of a token before temperature and the like; logits [vocabulary]."""
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(top) if top else None
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True) if best is not None else ()
    return Scored(token, float(logprobs[token]), tuple(pairs))
