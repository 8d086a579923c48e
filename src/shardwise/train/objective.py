"""What is minimised: a small object that turns a micro-batch into a summed loss, and tells it by source.

Sums, not means: the loop divides by the learned tokens of the whole step, so that accumulation over micro-batches and
ranks of any shape equals the one big batch.
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.data.loader import IGNORE, MicroBatch


@dataclass(frozen=True)
class Loss:
    """The summed loss of a micro-batch, to be differentiated, and the sums by source, to be told."""

    total: torch.Tensor
    by_source: torch.Tensor

    def sums(self) -> torch.Tensor:
        """The total and, where there are several sources, the sum of each; detached, still on the device."""
        total = self.total.detach()[None]
        return total if len(self.by_source) == 1 else torch.cat([total, self.by_source])


class Objective(Protocol):
    """Anything the loop can train: a forward that returns the summed loss of the learned tokens."""

    def __call__(self, model: Any, batch: MicroBatch) -> Loss: ...


class CausalObjective:
    """Next-token cross-entropy. `apart`: packed batches bring their documents; else the model sees positions alone."""

    def __init__(self, model: Any, apart: bool = False) -> None:
        self._apart = apart
        self._keeps_some = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, model: Any, batch: MicroBatch) -> Loss:
        """Sum of -log p over the learned tokens of the micro-batch."""
        inputs: dict[str, Any] = {"input_ids": batch.input_ids}
        if batch.position_ids is not None:
            inputs["position_ids"] = batch.position_ids
        if batch.attention_mask is not None:
            inputs["attention_mask"] = batch.attention_mask
        elif self._apart and batch.documents is not None:
            inputs["attention_mask"] = batch.documents.mask()
        labels, sources = batch.labels, batch.sources
        if self._keeps_some and labels.device.type == "cpu":
            # The head is a fifth of a small model's work; columns that no row learns from need no logits. On a GPU the
            # list of columns would be a host sync, so there all are computed.
            columns = (labels != IGNORE).any(0).nonzero().flatten()
            if 0 < len(columns) < labels.shape[1]:
                inputs["logits_to_keep"], labels = columns, labels[:, columns]
                sources = None if sources is None else sources[:, columns]
        logits = model(**inputs, use_cache=False).logits
        losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="none")
        total = losses.sum()
        if sources is None:
            return Loss(total, total.detach()[None])
        # Where nothing is learned the loss is 0, so padding counts for no source. No host sync in any of this.
        by_source = losses.new_zeros(batch.source_count).index_add_(0, sources.flatten(), losses.detach())
        return Loss(total, by_source)


def fast_attention(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """From Hopper on cuDNN's attention comes first: 1.8 times flash's speed on an H200 (466 against 258 TFLOP/s).

    Around backward as well: a block that is recomputed must choose the same kernel again.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return contextlib.nullcontext()
    kinds = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kinds, set_priority=True)  # type: ignore[no-any-return]
