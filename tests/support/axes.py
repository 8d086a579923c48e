"""What ranks of a run with axes hold and send (see ranks.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from support.scenarios import batch_of, parts_of


def measured(run: dict[str, Any]) -> dict[str, Any]:
    """Of one rank in its second step: bytes of weights, of saved activations, and on the wire by kind."""
    from shardwise.parallel.zero.accounting import WireCount
    from shardwise.train.loop import accumulate, seed_step

    parts = parts_of(run)
    for step in range(2):
        seed_step(0, step, parts.world.rank)
        saved, wire = _Saved(parts.sharded.model), WireCount()
        batch = batch_of(parts, step)
        with wire, saved:
            accumulate(parts, batch)
        parts.update()
    weights = sum(_local(p).numel() * 4 for p in parts.sharded.model.parameters())
    tokens = sum(micro.input_ids.numel() for micro in batch.micro_batches)
    names = {name: _local(p).numel() for name, p in parts.sharded.model.named_parameters()}
    return {"weights": weights, "names": names, "saved": saved.bytes, "wire": dict(wire.bytes), "tokens": tokens}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Saved:
    """Bytes that autograd keeps for backward, parameters apart; each storage once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._own = model
        self._seen: dict[int, tuple[Any, int]] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if not (isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)):
            storage = _local(tensor).untyped_storage()
            self._seen[storage._cdata] = (storage, storage.nbytes())
        return tensor

    @property
    def bytes(self) -> int:
        """Of everything that was kept in a step, freed or not."""
        return sum(size for _, size in self._seen.values())

    def __enter__(self) -> _Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
