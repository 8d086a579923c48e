"""A proof's host with a bug planted: `python planted.py BUG PARENT MODEL DEVICE`, as shardwise.foresight.verify.host.

Each bug is one that training systems have really had. They are planted by patching the running code, in the ranks
alone: the reference shares none of it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch


def leak_between_documents() -> None:
    """Packed rows without their documents: attention goes across, positions run on."""
    from shardwise.objectives.causal import CausalObjective

    plain = CausalObjective.inputs

    def inputs(self: Any, batch: Any) -> dict[str, Any]:
        return plain(self, replace(batch, position_ids=None, documents=None))

    CausalObjective.inputs = inputs  # type: ignore[method-assign]


def positions_run_on() -> None:
    """Documents do not see each other, but positions are counted from the start of the row."""
    from shardwise.objectives.causal import CausalObjective

    plain = CausalObjective.inputs

    def inputs(self: Any, batch: Any) -> dict[str, Any]:
        given = plain(self, batch)
        given["position_ids"] = torch.arange(batch.input_ids.shape[1])[None].expand_as(batch.input_ids)
        return given

    CausalObjective.inputs = inputs  # type: ignore[method-assign]


def softcap_dropped() -> None:
    """Attention without the cap of its scores, as transformers 5.17's SDPA computes Gemma 2."""
    from shardwise.nn.attention import varlen as attention

    plain = attention.attend_documents

    def attend(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("softcap", None)
        return plain(*args, **kwargs)

    attention.attend_documents = attend


def mean_of_means() -> None:
    """Each micro-batch's mean loss, averaged: a token of a short one counts more than one of a long one."""
    from shardwise.data.loader import IGNORE
    from shardwise.train import loop

    def accumulate(parts: Any, batch: Any) -> torch.Tensor:
        summed = torch.zeros(1)
        for index, micro in enumerate(batch.micro_batches):
            parts.sharded.prepare_micro_batch(last=index == len(batch.micro_batches) - 1)
            loss = parts.objective(parts.sharded.model, micro)
            mean = loss.total / (micro.labels != IGNORE).sum() / len(batch.micro_batches)
            mean.backward()
            summed = summed + mean.detach() * batch.supervised / parts.world.layout.data
        return summed

    loop.accumulate = accumulate


def no_sum_over_ranks() -> None:
    """Gradients stay what each rank computed by itself."""
    from torch.distributed.fsdp import FSDPModule

    from shardwise.parallel.zero.stages import ShardedModel

    def prepare(self: Any, last: bool) -> None:
        assert isinstance(self.model, FSDPModule)
        self.last = last
        self.model.set_requires_all_reduce(False)

    ShardedModel.prepare_micro_batch = prepare  # type: ignore[method-assign]


def one_rank_forgotten() -> None:
    """What the second rank computed never reaches the others."""
    import torch.distributed as dist

    from shardwise.train import loop

    plain = loop.accumulate

    def accumulate(parts: Any, batch: Any) -> torch.Tensor:
        if dist.get_world_size() == 1 or dist.get_rank() == 0:
            return plain(parts, batch)
        whole = parts.scaler.scale
        parts.scaler.scale = lambda loss: whole(loss) * 0.0
        try:
            return plain(parts, batch)
        finally:
            parts.scaler.scale = whole

    loop.accumulate = accumulate


def one_rank_on_its_own() -> None:
    """After the sum the second rank takes its gradients for others: only its own parameters go astray."""
    import torch.distributed as dist

    from shardwise.train import loop

    plain = loop.accumulate

    def accumulate(parts: Any, batch: Any) -> torch.Tensor:
        found = plain(parts, batch)
        if dist.get_world_size() > 1 and dist.get_rank() == 1:
            for parameter in parts.sharded.parameters.values():
                parameter.grad.to_local().mul_(1.5)
        return found

    loop.accumulate = accumulate


def updates_never_gathered() -> None:
    """The parameters that were gathered stay for the next step: the loss never falls, and nothing says so."""
    from shardwise.parallel.zero.stages import ShardedModel

    plain = ShardedModel.prepare_micro_batch

    def prepare(self: Any, last: bool) -> None:
        plain(self, last)
        if self.stage in (1, 2):
            self.model.set_reshard_after_backward(False)

    ShardedModel.prepare_micro_batch = prepare  # type: ignore[method-assign]


def a_message_halved() -> None:
    """A pipeline's second stage gets half of what the first one computed."""
    from shardwise.parallel.pipeline.comm import StageComm

    plain = StageComm.send

    def send(self: Any, chunk: int, micro: int, ports: Any, tensors: Any) -> None:
        plain(self, chunk, micro, ports, [t * 0.5 if t.is_floating_point() else t for t in tensors])

    StageComm.send = send  # type: ignore[method-assign]


def router_losses_dropped() -> None:
    """What the model's config asks for is computed and reported, and never differentiated."""
    from shardwise.parallel.routers.hooks import RouterLosses

    plain = RouterLosses.finish

    def finish(self: Any, loss: Any, name: str) -> Any:
        return replace(plain(self, loss, name), total=loss.total)

    RouterLosses.finish = finish  # type: ignore[method-assign]


def router_sums_of_one_rank() -> None:
    """Of sequences that several ranks have parts of, each balances its own part."""
    from shardwise.parallel.context import sums

    def forward(ctx: Any, table: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.ranks = 2
        return table.clone()

    sums._Summed.forward = staticmethod(forward)  # type: ignore[assignment, method-assign]


def router_sums_of_one_stage() -> None:
    """The last stage of a pipeline balances its own layers alone."""
    from shardwise.parallel.routers.hooks import RouterLosses

    RouterLosses.take = lambda self, sums: None  # type: ignore[method-assign]


def loads_counted_again() -> None:
    """What backward computes again is counted again."""
    from shardwise.parallel.expert import load_counts as expert_loads

    def count(chosen: torch.Tensor, real: torch.Tensor, experts: int) -> torch.Tensor:
        asked = ((chosen < experts) & real[:, None]).long()
        counts = torch.zeros(experts, dtype=torch.int64)
        return counts.scatter_add_(0, chosen.clamp(max=experts - 1).flatten(), asked.flatten())

    expert_loads._count_choices = count  # type: ignore[assignment]


def padding_is_routed() -> None:
    """Padding counts as tokens do."""
    from shardwise.parallel.routers.token_groups import Tokens

    Tokens.real = None  # type: ignore[assignment]


def bias_of_one_rank() -> None:
    """Each rank moves the biases by its own tokens."""
    import torch.distributed as dist

    from shardwise.parallel.routers.bias import BiasUpdate

    plain = BiasUpdate.__call__

    def update(self: Any, taken: Any = True) -> None:
        summing, dist.all_reduce = dist.all_reduce, lambda *args, **kwargs: None
        try:
            plain(self, taken)
        finally:
            dist.all_reduce = summing

    BiasUpdate.__call__ = update  # type: ignore[method-assign]


def bias_never_moves() -> None:
    """The state of this project before biases were known."""
    from shardwise.parallel.routers.bias import BiasUpdate

    BiasUpdate.__call__ = lambda self, taken=True: None  # type: ignore[method-assign]


def a_block_left_unsharded() -> None:
    """In the assembly (parallel/parallelize.py): the first block is not sharded, and its gradients not summed."""
    from shardwise.parallel import parallelize
    from shardwise.parallel.zero import stages

    plain = parallelize.fully_shard_blocks

    def fully_shard_blocks(a: parallelize.Assembly) -> str | None:
        if a.world.size == 1:
            return plain(a)
        own, first = stages.unmanaged, set(a.blocks[0][1].parameters())
        stages.unmanaged = lambda *args: own(*args) | first
        try:
            return plain(a)
        finally:
            stages.unmanaged = own

    parallelize.STEPS = tuple(fully_shard_blocks if step is plain else step for step in parallelize.STEPS)


if __name__ == "__main__":
    from shardwise.foresight.verify import host

    globals()[sys.argv[1]]()
    host.main(int(sys.argv[2]), sys.argv[3], sys.argv[4])
