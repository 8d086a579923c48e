"""ZeRO++'s collectives, as all-gathers and reduce-scatters that FSDP2 accepts for a unit.

[Note: two hops] In a shard group of nodes × local ranks, rank r = node · local + place owns slice r
of a flat buffer. Both collectives take two hops, to send as little as possible between nodes:
  gather   across nodes first: the rank then has the slices of its place on every node, 1/local of
           the full buffer. That is hpZ's secondary shard. The hop within the node completes it, and
           is all that later gathers need.
  reduce   within the node first: the rank then has the node's sum of every slice of its place,
           1/local of the full buffer. Only that crosses nodes. Each hop sums what arrived in fp32:
           8 bits from within the node, 4 from other nodes.
Between the hops slices are ordered by place and then by node, not by rank: the buffers are read and
written with strides, and only a gather without quantisation copies for it.

Calls return None, never a work handle: what follows is ordered by the stream on CUDA, and done on
return on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwise.core.compat.torch_private import AllGather, ReduceScatter
from shardwise.distributed.mesh import Hops
from shardwise.nn.kernels.quantize import (
    Bits,
    dequantize_into,
    packed_bytes,
    quantize,
    requantize_sum,
    sum_dequantized_into,
)

WEIGHT_BITS: Bits = 8
GRADIENT_BITS: Bits = 4
# Within a node bandwidth is plenty, and rounding to 4 bits twice would give the sum 1.4 times the
# error.
NODE_GRADIENT_BITS: Bits = 8
# torch 2.13 renamed them and warns about the old names; 2.11 has the old names only.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PlainBuffers:
    """Allocates the buffers of a custom collective by the usual allocator."""

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer that FSDP gathers into, or reduces from or into."""
        return torch.empty(*size, dtype=dtype, device=device)


class WirePacking(Protocol):
    """An encoding that sends a shard in fewer bytes."""

    def takes(self, shard: torch.Tensor) -> bool:
        """Whether to encode this gather; the same answer on every rank."""

    def bytes_of(self, shard: torch.Tensor) -> int:
        """Bytes of the encoded shard."""

    def pack(self, shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """The shard as flat bytes; `group` holds all shards."""

    def unpack_into(self, slices: torch.Tensor, rows: torch.Tensor) -> None:
        """Decodes (…, bytes) into (…, elements); only the last dim must be contiguous."""


class Int8Packing:
    """qwZ. Buffers that are not floating point (packed 4-bit weights) are sent unchanged."""

    def takes(self, shard: torch.Tensor) -> bool:
        return shard.is_floating_point()

    def bytes_of(self, shard: torch.Tensor) -> int:
        return packed_bytes(shard.numel(), WEIGHT_BITS)

    def pack(self, shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return quantize(shard, WEIGHT_BITS)

    def unpack_into(self, slices: torch.Tensor, rows: torch.Tensor) -> None:
        dequantize_into(slices, rows, WEIGHT_BITS)


class WeightGather(PlainBuffers, AllGather):
    """One unit's gather: encoded by `packing` if given, with a secondary shard if `hops` (hpZ).

    The secondary shard is cached within a step, packed if both are on.
    """

    def __init__(self, packing: WirePacking | None, hops: Hops | None) -> None:
        self._packing = packing
        self._hops = hops
        self._secondary: torch.Tensor | None = None
        self._packed = False  # the secondary shard
        self._ready: torch.cuda.Event | None = None

    @property
    def secondary_bytes(self) -> int:
        """Current bytes of the secondary shard."""
        return 0 if self._secondary is None else self._secondary.nbytes

    def moved(self, shard: torch.Tensor, ranks: int) -> int:
        """Bytes of a gather over `ranks`, as sent."""
        packing = self._packing_for(shard)
        return ranks * (shard.nbytes if packing is None else packing.bytes_of(shard))

    def forget(self) -> None:
        """Drops the secondary shard, after the parameters changed."""
        self._secondary = None
        self._ready = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fills the output with every rank's input."""
        packing = self._packing_for(input_tensor)
        if self._hops is not None:
            nodes = self._hops.across.size()
            local = self._hops.within.size()
            rows = self._through_node(input_tensor, packing, group, self._hops)
            rows = rows.view(local, nodes, -1)
            slices = output_tensor.view(nodes, local, -1).transpose(0, 1)
        elif packing is not None:
            rows = _gather(packing.pack(input_tensor, group), group)
            slices = output_tensor.view(group.size(), -1)
        else:
            all_gather(output_tensor, input_tensor, group=group)
            return
        if packing is not None:
            packing.unpack_into(slices, rows)
        else:
            slices.copy_(rows)

    def _packing_for(self, shard: torch.Tensor) -> WirePacking | None:
        if self._packing is None or not self._packing.takes(shard):
            return None
        return self._packing

    def _through_node(
        self, shard: torch.Tensor, packing: WirePacking | None, group: dist.ProcessGroup, hops: Hops
    ) -> torch.Tensor:
        packed = packing is not None
        if self._secondary is None or self._packed is not packed:
            sent = shard if packing is None else packing.pack(shard, group)
            self._secondary = _gather(sent, hops.across)
            self._packed = packed
            if shard.is_cuda:
                self._ready = torch.cuda.Event()
                self._ready.record()
        elif self._ready is not None:
            self._ready.wait()  # it was gathered on another stream, perhaps
        return _gather(self._secondary.view(-1), hops.within)


class GradientReduce(PlainBuffers, ReduceScatter):
    """One unit's qgZ: a reduce-scatter by all-to-all of 4 bits, in two hops across nodes.

    With `feedback` the rounding error of 4 bits is stored, in bf16, and added to the next
    reduction; see the note in nn/kernels/quantize.py. It is not part of a checkpoint: `forget`
    drops it when one is saved, so that continued and resumed runs are the same.
    """

    def __init__(self, hops: Hops | None, feedback: bool = True) -> None:
        self._hops = hops
        self._feedback = feedback
        self._seeds = _Seeds()
        self._error: torch.Tensor | None = None

    @property
    def error_bytes(self) -> int:
        """Bytes of the stored rounding error."""
        return 0 if self._error is None else self._error.nbytes

    def forget(self) -> None:
        """Drops the stored rounding error."""
        self._error = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fills the output with this rank's slice of the reduced inputs."""
        factor = _factor(op, group.size())
        n = output_tensor.numel()
        hops = self._hops
        target = output_tensor.view(1, n)
        if hops is None or 1 in (hops.within.size(), hops.across.size()):
            slices = input_tensor.view(-1, 1, n)
            sent = quantize(slices, GRADIENT_BITS, *self._rounding(slices))
            sum_dequantized_into(target, _exchange(sent, group), GRADIENT_BITS, factor)
            return
        nodes = hops.across.size()
        local = hops.within.size()
        by_place = input_tensor.view(nodes, local, n).transpose(0, 1)
        arrived = _exchange(quantize(by_place, NODE_GRADIENT_BITS, self._seeds.next()), hops.within)
        rounding = self._rounding(by_place[0])
        sent = requantize_sum(arrived, n, NODE_GRADIENT_BITS, GRADIENT_BITS, 1.0, *rounding)
        arrived = _exchange(sent, hops.across).unsqueeze(1)
        sum_dequantized_into(target, arrived, GRADIENT_BITS, factor)

    def _rounding(self, like: torch.Tensor) -> tuple[int | None, torch.Tensor | None]:
        """A seed, or the buffer of the rounding error."""
        if not self._feedback:
            return self._seeds.next(), None
        if self._error is None:
            self._error = torch.zeros_like(
                like, dtype=torch.bfloat16, memory_format=torch.contiguous_format
            )
        return None, self._error


def _gather(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The flat buffers of all ranks, one row each."""
    out = flat.new_empty(group.size() * flat.numel())
    all_gather(out, flat, group=group)
    return out.view(group.size(), -1)


def _exchange(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sends row i to rank i; returns one row from each rank."""
    out = torch.empty_like(rows)
    dist.all_to_all_single(out, rows, group=group)
    return out


def _factor(op: Any, ranks: int) -> float:
    """The factor that an operator multiplies the sum over ranks by."""
    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.SUM:
        return 1.0
    if kind == dist.ReduceOp.AVG:
        return 1.0 / ranks
    assert kind == dist.ReduceOp.PREMUL_SUM, f"{op} is no sum"
    return float(op.__getstate__()[1])


class _Seeds:
    """A seed for each rounding, from the step, the call within it and the rank.

    A resume needs no state: each step of the loop seeds PyTorch from (seed, step, rank), so that
    PyTorch's seed identifies the step. Reading it draws no random number.
    """

    def __init__(self) -> None:
        self._step = 0
        self._calls = 0

    def next(self) -> int:
        step = torch.initial_seed()
        self._calls = self._calls + 1 if step == self._step else 0
        self._step = step
        return (
            step * 0x2545F491 + self._calls * 0x9E3779B1 + dist.get_rank() * 0x632BE5AB
        ) & 0x7FFFFFFF
