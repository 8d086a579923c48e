"""Divides the sequences of an unmodified Hugging Face model over the ranks of a mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.parallel.context.gate import Findings, examine, first_position, use_registry
from shardwise.parallel.context.mask import Attends, ContextRows
from shardwise.parallel.context.positions import Positions
from shardwise.parallel.context.ring import Ring
from shardwise.parallel.context.split import Batch, split_batch
from shardwise.parallel.context.ulysses import Ulysses
from shardwise.parallel.trial import Refused

Kind = Literal["ulysses", "ring"]


@dataclass(frozen=True)
class Context:
    """What divides batches for a model whose attention has been put in place."""

    ranks: int
    rank: int
    kind: Kind
    attends: Attends
    findings: Findings
    first: int  # position of a document's first token

    def split(self, batch: Batch) -> Batch:
        """This rank's part of a batch: the loss over its labels is this rank's share of the sum.

        Best called before the batch is moved: documents and padding are read on the host.
        """
        mine, layout = split_batch(batch, self.ranks, self.rank, zigzag=self.kind == "ring")
        if not self.findings.packed and not _one_a_row(layout.real, layout.documents.lengths):
            raise Refused("", f"takes no packed documents ({self.findings.trouble}): set data.packing: false")
        assert mine.position_ids is not None
        positions = mine.position_ids + self.first if self.findings.positions else None
        mask = ContextRows(layout, self.attends, batch.input_ids.device)
        # A mask that stands for a tensor; see [Note: context masks].
        return replace(mine, position_ids=positions, attention_mask=cast(torch.Tensor, mask))


def _one_a_row(real: torch.Tensor, lengths: tuple[int, ...]) -> bool:
    """Whether there is nothing in a row but a document and padding."""
    return len(lengths) <= int((~real).any(1).sum()) + len(real)


def install_context(model: Any, mesh: DeviceMesh, kind: Kind) -> Context:
    """Puts attention over a mesh of one dimension in place; raises Refused where the model would be wrong.

    Every rank calls it, before the model is sharded or recomputed.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise Refused("", "an encoder–decoder model has two sequences, which context parallelism does not divide yet")
    findings = examine(model)
    group = mesh.get_group()
    use_registry(model)
    Positions(model)
    attends: Attends = Ring(group) if kind == "ring" else Ulysses(group)
    return Context(mesh.size(), mesh.get_local_rank(), kind, attends, findings, first_position(model, findings.behind))
