"""Rows of one model that are decoded together: one forward gives each of them its next token."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

from shardwise.serve import kv
from shardwise.serve.choose import score
from shardwise.serve.models import Served
from shardwise.serve.rows import AnswerRow

log = logging.getLogger("shardwise.serve")


class DecodeBatch:
    """Rows with their shared KV cache. The first `step` prefills the prompts, each further one decodes a token."""

    def __init__(self, served: Served, rows: list[AnswerRow]) -> None:
        self.served = served
        self.rows = rows
        self.cache = kv.new_cache(served.model)
        device = served.model.device
        width = max(len(row.ask.prompt) for row in rows)
        pad = min(served.stops, default=0)  # masked: any id of the vocabulary serves
        padded_prompts = [[pad] * (width - len(row.ask.prompt)) + row.ask.prompt for row in rows]
        masks = [[0] * (width - len(row.ask.prompt)) + [1] * len(row.ask.prompt) for row in rows]
        self._next = torch.tensor(padded_prompts, device=device)  # [rows, tokens to be read]
        self._mask = torch.tensor(masks, device=device)  # [rows, columns of the cache and of `_next`]

    def step(self) -> None:
        """Generates a token for each row; finished rows are removed."""
        logits = self._forward().float()
        likeliest = logits.argmax(-1).tolist()
        tokens = [_advance(row, logits[i : i + 1], likeliest[i]) for i, row in enumerate(self.rows)]
        self._next = torch.tensor(tokens, device=logits.device)[:, None]
        self._mask = torch.cat([self._mask, self._mask.new_ones((len(self.rows), 1))], dim=1)
        self.drop()

    def drop(self) -> None:
        """Removes finished rows."""
        remaining = [i for i, row in enumerate(self.rows) if not row.over]
        if len(remaining) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in remaining]
        if not remaining:
            return
        index = torch.tensor(remaining, device=self._mask.device)
        mask = self._mask[index]
        first = int(mask.any(0).int().argmax())  # columns that only the rows that left had need of
        self._mask = mask[:, first:]
        self._next = self._next[index]
        kv.keep_rows(self.cache, index, first)

    def join(self, other: DecodeBatch) -> None:
        """Takes over the rows of another batch that has prefilled its prompts too."""
        self._mask = kv.stack(self._mask, other._mask, -1)
        self._next = torch.cat([self._next, other._next])
        self.rows = [*self.rows, *other.rows]
        kv.join(self.cache, other.cache)

    def bytes_per_token(self) -> float:
        """Bytes that one token of one row takes in the cache."""
        return kv.bytes_of(self.cache) / max(1, len(self.rows) * (self._mask.shape[1] - 1))

    def _forward(self) -> torch.Tensor:
        """Logits [rows, vocabulary] after the last token of each row."""
        if self.served.activate is not None:
            self.served.activate()
        model: Any = self.served.model
        extra: dict[str, Any] = {}
        names = inspect.signature(model.forward).parameters
        if "position_ids" in names:
            positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
            extra["position_ids"] = positions[:, -self._next.shape[1] :]
        if "logits_to_keep" in names:
            extra["logits_to_keep"] = 1
        out = model(
            input_ids=self._next, attention_mask=self._mask, past_key_values=self.cache, use_cache=True, **extra
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits


def _advance(row: AnswerRow, logits: torch.Tensor, likeliest: int) -> int:
    """Gives a row its next token; a row that fails does so alone. Logits [1, vocabulary]."""
    try:
        token = likeliest if row.chooser.plain else row.chooser.pick(logits, row.seen)
        top = row.ask.top_logprobs
        row.take(token, None if top is None else score(logits[0], token, top))
        return token
    except Exception:
        log.exception("a request failed")
        row.fail(500, "the server could not go on with this answer")
        return likeliest
