"""Two seconds of proof before training: this model, as built, neither looks ahead nor across packed documents.

Some architectures ignore `position_ids` or the mask that packing relies on, and say nothing. We change a token and see
whether logits move that must not. All ranks run it together (the forwards are collective).
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.errors import UserError
from shardwise.zero.stages import ShardedModel

LENGTH = 24


def check_model(sharded: ShardedModel, vocabulary: int, packing: bool, label: str, device: torch.device) -> None:
    """Refuses a model whose logits depend on later tokens, or on another document of the same sequence."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (1, 2 * LENGTH), generator=generator)
    positions = torch.arange(LENGTH).repeat(2)[None] if packing else None
    with sharded.evaluation():
        base = _logits(sharded.model, ids, positions, device)
        last = _logits(sharded.model, _changed(ids, -1, vocabulary), positions, device)
        if _moved(base[:, :-1], last[:, :-1]):
            problem = "its predictions depend on later tokens, so it is not a causal language model"
            remedy = "use a decoder model (for BERT-like configs: is_decoder: true)"
            raise UserError("model", label, problem, remedy)
        if packing:
            first = _logits(sharded.model, _changed(ids, 3, vocabulary), positions, device)
            if _moved(base[:, LENGTH:], first[:, LENGTH:]):
                raise UserError("data.packing", True, "this model lets packed documents see each other",
                                "set data.packing: false")  # fmt: skip


def _logits(model: Any, ids: torch.Tensor, positions: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    inputs = {"input_ids": ids.to(device)} | ({} if positions is None else {"position_ids": positions.to(device)})
    try:
        return torch.as_tensor(model(**inputs, use_cache=False).logits.float())
    except TypeError as error:
        if positions is not None and "position_ids" in str(error):
            raise UserError("data.packing", True, "this model takes no position_ids, so documents cannot be kept apart",
                            "set data.packing: false") from None  # fmt: skip
        raise


def _changed(ids: torch.Tensor, at: int, vocabulary: int) -> torch.Tensor:
    other = ids.clone()
    other[0, at] = (other[0, at] + vocabulary // 2) % vocabulary
    return other


def _moved(a: torch.Tensor, b: torch.Tensor) -> bool:
    scale = a.abs().max().clamp(min=1e-6)
    return bool(((a - b).abs().max() / scale) > 1e-3)
