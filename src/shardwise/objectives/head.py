"""The model's head and the loss as one: the logits of a batch are never there all at once.

A vocabulary of 128,256 makes 4 GB of fp32 logits of 8,192 tokens, several times over. Here pieces of the batch go
through the head and the loss, and their gradient is computed while the logits are there: what is kept is as large as
the hidden states. The head is asked where the model calls it, so its weight is there at any stage of ZeRO, and the
losses travel through the model's own output, as FSDP's hooks expect.

Only for models that hand on what their head computes as it is; those that scale or cap it keep the plain path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardwise.core.compat.torch_private import local_tensor
from shardwise.core.effective_device import effective_device, indices_where
from shardwise.data.loader import IGNORE
from shardwise.nn.kernels.add_product import add_product_
from shardwise.nn.kernels.cross_entropy import cross_entropy_, cross_entropy_parallel_
from shardwise.nn.objective import Loss, sum_by_source
from shardwise.parallel.tensor.local import offset_of, to_local, to_whole
from shardwise.parallel.zero.collectives import all_gather
from shardwise.parallel.zero.stages import ShardedModel

# Logits at a time. On a GPU pieces large enough for its matrix products; on a CPU few enough to be no matter.
PIECE = {"cuda": 1 << 29, "cpu": 1 << 24}
PROBE = 4  # tokens of the trial


class HeadLoss:
    """Stands in a head's forward: losses of the labels it is given instead of logits."""

    def __init__(self, head: Any) -> None:
        self._head, self._plain = head, head.forward
        self._labels: torch.Tensor | None = None
        head.forward = self._forward

    def losses(self, model: Any, inputs: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """The model's losses of (rows, width) labels, flat; to be summed with one weight for all."""
        self._labels = labels
        try:
            return torch.as_tensor(model(**inputs).logits).flatten()
        finally:
            self._labels = None

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        labels = self._labels
        if labels is None:
            return torch.as_tensor(self._plain(hidden))
        hidden, weight, bias, cut = _parts_of(hidden, self._head)
        flat, wanted = hidden.flatten(0, -2), labels.flatten()
        learned = None
        if (
            effective_device(flat) == "cpu"
        ):  # elsewhere a list of rows would be a wait for the device
            learned = indices_where(wanted != IGNORE)
            flat, wanted = flat[learned], wanted[learned]
        losses: torch.Tensor = _HeadLoss.apply(flat, weight, bias, wanted, cut)  # type: ignore[no-untyped-call]
        if learned is not None:
            losses = losses.new_zeros(labels.numel()).index_put((learned,), losses)
        # A copy, for FSDP hangs its hooks on the output, which a view might lose.
        return losses.view(*labels.shape, 1).clone()


@dataclass(frozen=True)
class _VocabularyShard:
    """Which part of the vocabulary this rank has: from which entry on, of how many at most, and who has the others."""

    first: int
    widest: int
    group: dist.ProcessGroup


def _parts_of(
    hidden: torch.Tensor, head: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, _VocabularyShard | None]:
    """Hidden states and the head's parameters as plain tensors: of a head that is cut, this rank's part."""
    weight, bias = head.weight, head.bias
    if not isinstance(weight, DTensor):
        return hidden, weight, bias, None
    mesh, (where,) = weight.device_mesh, weight.placements
    cut = (
        None
        if where.is_replicate()
        else _VocabularyShard(
            offset_of(weight)[0], -(-len(weight) // mesh.size()), mesh.get_group()
        )
    )
    # Each rank's part of the vocabulary has a say in the gradient of the hidden states: they add up.
    back = Replicate() if cut is None else Partial()
    gathered = to_whole(hidden, mesh).redistribute(placements=[Replicate()])
    return (
        to_local(gathered, back),
        to_local(weight, where),
        None if bias is None else to_local(bias, where),
        cut,
    )


def join_head(sharded: ShardedModel, asked: Any) -> HeadLoss | None:
    """Joins head and loss where the model allows it; collective, for it takes a forward to know: that of `asked`."""
    head = sharded.model.get_output_embeddings()  # type: ignore[operator, union-attr]
    return HeadLoss(head) if type(head).forward is nn.Linear.forward and _hands_on(asked) else None


def _hands_on(asked: Any) -> bool:
    """Whether a model's logits are what its head computes, as it is."""
    model = asked.model
    head = model.get_output_embeddings()
    marker: list[torch.Tensor] = []

    def mark(hidden: torch.Tensor) -> torch.Tensor:
        marker.append(
            torch.randn(*hidden.shape[:-1], head.out_features, device=hidden.device).to(
                hidden.dtype
            )
        )
        return marker[-1]

    head.forward = mark
    ids = torch.arange(PROBE, device=asked.device)[None]
    try:
        with asked.evaluation(), torch.random.fork_rng(devices=[]):
            output = model(input_ids=ids, use_cache=False).logits
    finally:
        del head.forward
    same = len(marker) == 1 and output.shape == (1, PROBE, head.out_features)
    return same and torch.equal(output.float(), marker[0].float())


class _HeadLoss(torch.autograd.Function):
    """Losses of rows; the gradient assumes that they are summed with one weight, which it reads from the first."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: Any,
        bias: Any,
        labels: torch.Tensor,
        cut: _VocabularyShard | None = None,
    ) -> torch.Tensor:
        to_hidden, to_weight, to_bias, *_ = ctx.needs_input_grad
        gradient = to_hidden or to_weight or to_bias
        losses = torch.zeros(len(hidden), device=hidden.device)
        d_hidden = torch.empty_like(hidden) if to_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if to_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if to_bias else None
        # As many pieces on every rank: each is a meeting of them.
        piece = max(1, PIECE[effective_device(hidden)] // (cut.widest if cut else len(weight)))
        for start in range(0, len(hidden), piece):
            part = hidden[start : start + piece]
            logits = F.linear(part, weight, bias)
            wanted = labels[start : start + piece]
            if cut is None:
                losses[start : start + piece] = cross_entropy_(logits, wanted, IGNORE, gradient)
            else:
                found = cross_entropy_parallel_(
                    logits, wanted, IGNORE, gradient, cut.first, cut.group
                )
                losses[start : start + piece] = found
            if d_hidden is not None:
                torch.mm(logits, weight, out=d_hidden[start : start + piece])
            if d_weight is not None:
                add_product_(d_weight, logits.t(), part)
            if d_bias is not None:
                d_bias += logits.sum(0, dtype=torch.float32)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.kinds = weight.dtype, None if bias is None else bias.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (d_hidden, d_weight, d_bias), kinds = ctx.saved_tensors, ctx.kinds
        factor = gradient[0] if len(gradient) else gradient.new_zeros(())
        return (
            None if d_hidden is None else _times(d_hidden.float(), factor, d_hidden.dtype),
            None if d_weight is None else _times(d_weight, factor, kinds[0]),
            None if d_bias is None else _times(d_bias, factor, kinds[1]),
            None,
            None,
        )


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log p of flat labels, 0 where they are ignored; logits cut along the vocabulary are never put together."""
    if not isinstance(logits, DTensor):
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, labels, ignore_index=IGNORE, reduction="none")
    mesh, last = logits.device_mesh, Shard(logits.ndim - 1)
    if logits.placements != (last,):
        whole = to_local(logits.redistribute(placements=[Replicate()]), Replicate())
        return token_losses(whole, labels)
    first = offset_of(logits)[-1]
    losses: torch.Tensor = _VocabularyShardLoss.apply(
        to_local(logits, last), labels, first, mesh.get_group()
    )  # type: ignore[no-untyped-call]
    return losses


class _VocabularyShardLoss(torch.autograd.Function):
    """Losses of rows of logits of which each rank has some columns."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first: int, group: Any
    ) -> torch.Tensor:  # type: ignore[override]
        share = logits.clone()
        losses = cross_entropy_parallel_(
            share, labels, IGNORE, ctx.needs_input_grad[0], first, group
        )
        ctx.save_for_backward(share)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (share,) = ctx.saved_tensors
        return share * gradient[:, None].to(share.dtype), None, None, None


def _times(value: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.mul(value, factor, out=torch.empty_like(value, dtype=dtype))


@torch.no_grad()
def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The entry with the largest logit of each row; where ranks have parts of them, each tells its best alone."""
    if not isinstance(logits, DTensor):
        return logits.argmax(-1)
    (where,), local = logits.placements, local_tensor(logits)
    if where.is_replicate():
        return local.argmax(-1)
    assert where == Shard(logits.ndim - 1), where
    mesh, rows = logits.device_mesh, local.shape[:-1]
    best, entry = (
        local.max(-1)
        if local.shape[-1]
        else (local.new_full(rows, -torch.inf), local.new_zeros(rows).long())
    )
    values, entries = (_everyones(mine, mesh) for mine in (best, entry + offset_of(logits)[-1]))
    return entries.gather(0, values.argmax(0)[None])[0].view(rows)


def _everyones(mine: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    found = mine.new_empty(mesh.size() * mine.numel())
    all_gather(found, mine.flatten(), group=mesh.get_group())
    return found.view(mesh.size(), -1)


def token_loss(
    logits: torch.Tensor, labels: torch.Tensor, sources: torch.Tensor | None, source_count: int
) -> Loss:
    """Cross-entropy summed over the labels that are not ignored. Never waits for the device."""
    losses = token_losses(logits.flatten(0, 1), labels.flatten())
    return sum_by_source(losses, labels.flatten() != IGNORE, sources, source_count)
