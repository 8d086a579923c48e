"""Fuses the model's head with the loss, so that a batch's logits never exist all at once.

With a vocabulary of 128,256, fp32 logits of 8,192 tokens take 4 GB, several times over. Here pieces
of the batch go through head and loss, and each piece's gradient is computed while its logits exist:
what is saved has the size of the hidden states. This runs where the model calls its head, so the
weight is gathered at any ZeRO stage, and the losses are the model's output, as FSDP's hooks expect.

Only for models that return the output of their head unchanged; others use the plain path.
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
from shardwise.parallel.tensor.local import offset_of, to_local, to_whole, wrap
from shardwise.parallel.zero.collectives import all_gather
from shardwise.parallel.zero.stages import ShardedModel

# Logits at a time: on a GPU enough for efficient matrix products, on a CPU little memory.
PIECE = {"cuda": 1 << 29, "cpu": 1 << 24}
PROBE = 4  # tokens of the trial forward


class HeadLoss:
    """Replaces a head's forward: it returns losses instead of logits while labels are set."""

    def __init__(self, head: Any) -> None:
        self._head = head
        self._plain = head.forward
        self._labels: torch.Tensor | None = None
        head.forward = self._forward

    def losses(self, model: Any, inputs: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        """The model's losses of (rows, width) labels, flat; they must be summed with one weight."""
        self._labels = labels
        try:
            return torch.as_tensor(model(**inputs).logits).flatten()
        finally:
            self._labels = None

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        labels = self._labels
        if labels is None:
            return torch.as_tensor(self._plain(hidden))
        hidden, weight, bias, shard = _local_parts(hidden, self._head)
        hidden = hidden.flatten(0, -2)
        flat_labels = labels.flatten()
        trained = None
        if effective_device(hidden) == "cpu":  # elsewhere a list of rows would be a host sync
            trained = indices_where(flat_labels != IGNORE)
            hidden = hidden[trained]
            flat_labels = flat_labels[trained]
        losses: torch.Tensor = _HeadLoss.apply(hidden, weight, bias, flat_labels, shard)  # type: ignore[no-untyped-call]
        if trained is not None:
            losses = losses.new_zeros(labels.numel()).index_put((trained,), losses)
        # A copy, since FSDP registers hooks on the output, which a view might lose.
        return losses.view(*labels.shape, 1).clone()


@dataclass(frozen=True)
class _VocabularyShard:
    """This rank's part of the vocabulary: its first entry, the largest part, the group."""

    first: int
    largest: int
    group: dist.ProcessGroup


def _local_parts(
    hidden: torch.Tensor, head: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, _VocabularyShard | None]:
    """Hidden states and the local part of the head's parameters, as plain tensors."""
    weight = head.weight
    bias = head.bias
    if not isinstance(weight, DTensor):
        return hidden, weight, bias, None
    mesh = weight.device_mesh
    (placement,) = weight.placements
    shard = None
    gradient: Replicate | Partial = Replicate()
    if not placement.is_replicate():
        largest = -(-len(weight) // mesh.size())
        shard = _VocabularyShard(offset_of(weight)[0], largest, mesh.get_group())
        # The gradient of the hidden states is the sum over the parts of the vocabulary.
        gradient = Partial()
    gathered = to_whole(hidden, mesh).redistribute(placements=[Replicate()])
    if bias is not None:
        bias = to_local(bias, placement)
    return to_local(gathered, gradient), to_local(weight, placement), bias, shard


def join_head(sharded: ShardedModel, trial: Any) -> HeadLoss | None:
    """Fuses head and loss if a forward of `trial` (collective) shows that the model allows it."""
    head = sharded.model.get_output_embeddings()  # type: ignore[operator, union-attr]
    if type(head).forward is nn.Linear.forward and _returns_head_output(trial):
        return HeadLoss(head)
    return None


def _returns_head_output(trial: Any) -> bool:
    """Whether a model's logits are the unchanged output of its head."""
    model = trial.model
    head = model.get_output_embeddings()
    outputs: list[torch.Tensor] = []

    def random_output(hidden: torch.Tensor) -> torch.Tensor:
        output = torch.randn(*hidden.shape[:-1], head.out_features, device=hidden.device)
        outputs.append(output.to(hidden.dtype))
        return outputs[-1]

    head.forward = random_output
    ids = torch.arange(PROBE, device=trial.device)[None]
    try:
        with trial.evaluation(), torch.random.fork_rng(devices=[]):
            output = model(input_ids=ids, use_cache=False).logits
    finally:
        del head.forward
    if len(outputs) != 1 or output.shape != (1, PROBE, head.out_features):
        return False
    return torch.equal(output.float(), outputs[0].float())


class _HeadLoss(torch.autograd.Function):
    """Losses of rows; backward assumes they are summed with one weight, that of the first."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: Any,
        bias: Any,
        labels: torch.Tensor,
        shard: _VocabularyShard | None = None,
    ) -> torch.Tensor:
        to_hidden, to_weight, to_bias, *_ = ctx.needs_input_grad
        gradient = to_hidden or to_weight or to_bias
        losses = torch.zeros(len(hidden), device=hidden.device)
        d_hidden = torch.empty_like(hidden) if to_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if to_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if to_bias else None
        # The same number of pieces on every rank: each is a collective.
        piece = max(1, PIECE[effective_device(hidden)] // (shard.largest if shard else len(weight)))
        for start in range(0, len(hidden), piece):
            part = hidden[start : start + piece]
            logits = F.linear(part, weight, bias)
            part_labels = labels[start : start + piece]
            if shard is None:
                part_losses = cross_entropy_(logits, part_labels, IGNORE, gradient)
            else:
                part_losses = cross_entropy_parallel_(
                    logits, part_labels, IGNORE, gradient, shard.first, shard.group
                )
            losses[start : start + piece] = part_losses
            if d_hidden is not None:
                torch.mm(logits, weight, out=d_hidden[start : start + piece])
            if d_weight is not None:
                add_product_(d_weight, logits.t(), part)
            if d_bias is not None:
                d_bias += logits.sum(0, dtype=torch.float32)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        factor = gradient[0] if len(gradient) else gradient.new_zeros(())
        if d_hidden is not None:
            d_hidden = _times(d_hidden.float(), factor, d_hidden.dtype)
        if d_weight is not None:
            d_weight = _times(d_weight, factor, ctx.weight_dtype)
        if d_bias is not None:
            d_bias = _times(d_bias, factor, ctx.bias_dtype)
        return d_hidden, d_weight, d_bias, None, None


def full_logits(logits: torch.Tensor) -> torch.Tensor:
    """Logits in full on every rank, each of which computes the same loss from them."""
    if not isinstance(logits, DTensor):
        return logits
    return to_local(logits.redistribute(placements=[Replicate()]), Replicate())


def full_logits_at(logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(places, vocabulary) logits at these places of the flattened rows, in full on every rank."""
    if not isinstance(logits, DTensor):
        return logits.flatten(0, 1)[places]
    last = Shard(logits.ndim - 1)
    if logits.placements != (last,):
        return full_logits(logits).flatten(0, 1)[places]
    local = to_local(logits, last).flatten(0, 1)[places]
    shape = torch.Size([len(places), logits.shape[-1]])
    gathered = wrap(local, logits.device_mesh, Shard(1), shape)
    return to_local(gathered.redistribute(placements=[Replicate()]), Replicate())


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log p of flat labels, 0 where ignored; logits sharded by vocabulary are not gathered."""
    if not isinstance(logits, DTensor):
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide, labels, ignore_index=IGNORE, reduction="none")
    last = Shard(logits.ndim - 1)
    if logits.placements != (last,):
        return token_losses(full_logits(logits), labels)
    local = to_local(logits, last)
    first = offset_of(logits)[-1]
    group = logits.device_mesh.get_group()
    losses: torch.Tensor = _VocabularyShardLoss.apply(local, labels, first, group)  # type: ignore[no-untyped-call]
    return losses


class _VocabularyShardLoss(torch.autograd.Function):
    """Losses from logits of which each rank has some columns."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first: int, group: Any
    ) -> torch.Tensor:  # type: ignore[override]
        gradient = logits.clone()  # replaced in place
        needed = ctx.needs_input_grad[0]
        losses = cross_entropy_parallel_(gradient, labels, IGNORE, needed, first, group)
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (own,) = ctx.saved_tensors
        return own * gradient[:, None].to(own.dtype), None, None, None


def _times(value: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.mul(value, factor, out=torch.empty_like(value, dtype=dtype))


@torch.no_grad()
def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The entry with the largest logit of each row; ranks with parts exchange only their best."""
    if not isinstance(logits, DTensor):
        return logits.argmax(-1)
    (placement,) = logits.placements
    local = local_tensor(logits)
    if placement.is_replicate():
        return local.argmax(-1)
    assert placement == Shard(logits.ndim - 1), placement
    mesh = logits.device_mesh
    rows = local.shape[:-1]
    if local.shape[-1]:
        best, entry = local.max(-1)
    else:
        best = local.new_full(rows, -torch.inf)
        entry = local.new_zeros(rows).long()
    values = _gathered(best, mesh)
    entries = _gathered(entry + offset_of(logits)[-1], mesh)
    return entries.gather(0, values.argmax(0)[None])[0].view(rows)


def _gathered(local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """All ranks' tensors, (ranks, elements)."""
    gathered = local.new_empty(mesh.size() * local.numel())
    all_gather(gathered, local.flatten(), group=mesh.get_group())
    return gathered.view(mesh.size(), -1)


def token_loss(
    logits: torch.Tensor, labels: torch.Tensor, sources: torch.Tensor | None, source_count: int
) -> Loss:
    """Cross-entropy summed over the labels that are not ignored, without host syncs."""
    losses = token_losses(logits.flatten(0, 1), labels.flatten())
    return sum_by_source(losses, labels.flatten() != IGNORE, sources, source_count)
