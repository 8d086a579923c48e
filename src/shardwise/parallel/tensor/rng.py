"""Random numbers under tensor parallelism: the same where every rank has the same tensor, others where it has a part.

The default generator of a device runs in step on the ranks of the axis (they are seeded alike). A region that has a
part of something draws from a stream of its own, which the state of the default generator and the rank make: so a block
that is computed again, for which torch puts that state back, draws the same once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardwise.core.compat.torch_private import unset_fake_temporarily
from shardwise.parallel.tensor.local import to_local, wrap

STEP = 4  # by how much a CUDA generator's offset may move


@contextmanager
def own_stream(mesh: DeviceMesh) -> Iterator[None]:
    """Within it the default generator's numbers are this rank's own; it moves on by the same amount on every rank."""
    rank = mesh.get_local_rank() + 1
    if mesh.device_type == "cuda":  # the state is on the host: nothing waits for the device
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.manual_seed(_mixed(seed, offset, rank))
        try:
            yield
        finally:
            generator.manual_seed(seed)
            generator.set_offset(offset + STEP)
        return
    with unset_fake_temporarily():  # a rehearsal draws numbers, but none that matter
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
    """Within it torch's dropout on DTensors draws so."""
    own = F.dropout
    F.dropout = partial(_dropout, mesh, own)
    try:
        yield
    finally:
        F.dropout = own


def _dropout(
    mesh: DeviceMesh,
    plain: Callable[..., Any],
    x: Any,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    if not isinstance(x, DTensor) or not training or p == 0:
        return x if isinstance(x, DTensor) else plain(x, p, training, inplace)
    (where,) = x.placements
    if where.is_partial():
        where = Replicate()
        x = x.redistribute(placements=[where])
    local = to_local(x, where)
    if where.is_replicate():
        return wrap(plain(local, p, training), mesh, where, x.shape)
    with own_stream(mesh):
        return wrap(plain(local, p, training), mesh, where, x.shape)
