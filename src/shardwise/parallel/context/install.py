"""Context parallelism: shards the sequences of an unmodified Hugging Face model over a mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.errors import UserError
from shardwise.nn.tiny.case import CannotParallelize
from shardwise.parallel.context.gather import Gathering, modules_of
from shardwise.parallel.context.mask import Attends, ContextRows
from shardwise.parallel.context.positions import Positions
from shardwise.parallel.context.ring import Ring
from shardwise.parallel.context.split import Batch, split_batch
from shardwise.parallel.context.support import ContextSupport, ask_registry, examine, first_position
from shardwise.parallel.context.ulysses import Ulysses, check_heads

Kind = Literal["ulysses", "ring"]


@dataclass(frozen=True)
class Context:
    """Splits batches for a model that `apply_context_parallel` has prepared."""

    ranks: int
    rank: int
    kind: Kind
    attends: Attends
    support: ContextSupport
    first: int  # position of a document's first token

    def check_packing(self, packing: bool) -> None:
        """Rejects packed rows if the model cannot divide them."""
        if packing and not self.support.packed:
            reason = self.support.trouble
            problem = f"packed documents cannot be divided over ranks by this model ({reason})"
            remedy = "set data.packing: false, or parallel.context: 1"
            raise UserError("data.packing", True, problem, remedy)

    def split(self, batch: Batch) -> Batch:
        """This rank's part of a batch: the loss over its labels is this rank's share of the sum.

        Best called before the batch is moved: documents and padding are read on the host.
        """
        part, layout = split_batch(batch, self.ranks, self.rank, zigzag=self.kind == "ring")
        if layout.packed and not self.support.packed:
            raise CannotParallelize(
                "", f"takes no packed documents ({self.support.trouble}): set data.packing: false"
            )
        assert part.position_ids is not None
        positions = part.position_ids + self.first if self.support.convention.positions else None
        mask = ContextRows(layout, self.attends, batch.input_ids.device)
        # The mask only stands in for a tensor; see [Note: context masks].
        return replace(part, position_ids=positions, attention_mask=cast(torch.Tensor, mask))


def apply_context_parallel(model: Any, mesh: DeviceMesh, kind: Kind) -> Context:
    """Installs attention over a 1-D mesh; raises CannotParallelize if results would be wrong.

    Every rank calls it, before the model is sharded or its blocks are checkpointed. Modules of the
    classes in `Context.support.whole` compute with full rows on every rank.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        problem = "an encoder–decoder model has two sequences"
        raise CannotParallelize("", f"{problem}, which context parallelism does not divide yet")
    if kind == "ulysses":
        check_heads(model.config.get_text_config(decoder=True), mesh.size())
    support = examine(model)
    group = mesh.get_group()
    ask_registry(model, support.convention)
    hooks = Positions(model)
    gathering = Gathering(group, kind == "ring", lambda: hooks.sharded)
    for name, _, module in modules_of(model, support.whole):
        gathering.wrap(module, support.whole[name])
    attends: Attends = Ring(group) if kind == "ring" else Ulysses(group)
    first = first_position(model, support.convention)
    return Context(mesh.size(), mesh.get_local_rank(), kind, attends, support, first)
