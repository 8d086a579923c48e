"""Random numbers under tensor parallelism: equal for replicated tensors, distinct for shards.

The default generators of a device are seeded alike on the ranks of the axis and stay in step. A
region that computes on shards draws from its own stream, derived from the state of the default
generator and the rank. torch restores that state for a recomputed block, which therefore draws the
same numbers again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardwise.core.compat.torch_private import unset_fake_temporarily
from shardwise.parallel.tensor.local import on_mesh, to_local, wrap

STEP = 4  # CUDA generators take offsets that are multiples of 4


@contextmanager
def own_stream(mesh: DeviceMesh) -> Iterator[None]:
    """Within it the default generator yields numbers of this rank's own.

    Afterwards the generator has advanced by the same amount on every rank.
    """
    rank = mesh.get_local_rank() + 1
    if mesh.device_type == "cuda":  # the state is on the host: nothing waits for the device
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        seed = generator.initial_seed()
        offset = generator.get_offset()
        generator.manual_seed(_mixed(seed, offset, rank))
        try:
            yield
        finally:
            generator.manual_seed(seed)
            generator.set_offset(offset + STEP)
        return
    with unset_fake_temporarily():  # a rehearsal draws numbers, but their values do not matter
        seed = int(torch.empty((), dtype=torch.int64).random_())
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(_mixed(seed, 0, rank))
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _mixed(seed: int, offset: int, rank: int) -> int:
    return hash((seed, offset, rank)) & (2**63 - 1)


@contextmanager
def local_dropout(mesh: DeviceMesh) -> Iterator[None]:
    """Within it torch's dropout on sharded DTensors draws from the rank's own stream."""
    original = F.dropout
    F.dropout = on_mesh(_dropout, mesh, original)
    try:
        yield
    finally:
        F.dropout = original


def _dropout(
    mesh: DeviceMesh,
    original: Callable[..., Any],
    x: Any,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    if not isinstance(x, DTensor):
        return original(x, p, training, inplace)
    if not training or p == 0:
        return x
    (placement,) = x.placements
    if placement.is_partial():
        placement = Replicate()
        x = x.redistribute(placements=[placement])
    local = to_local(x, placement)
    if placement.is_replicate():
        return wrap(original(local, p, training), mesh, placement, x.shape)
    with own_stream(mesh):
        return wrap(original(local, p, training), mesh, placement, x.shape)
