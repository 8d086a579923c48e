"""Chooses which modules are gathered and reduced together: single blocks, or by `parallel.bucket`.

A unit's parameters are communicated in one collective, so its buffer is as large as they are. The
size counted is that of the larger of two buffers, the one of the gradients: four bytes per element,
with each parameter's rows padded to a multiple of the ranks that shard it. A gather in half
precision takes half of that. Packed weights have no gradients: one byte.

A block over the bucket gives up its largest children, one after the other, until the rest fits; a
child over the bucket is treated likewise. A module that holds more than a bucket by itself cannot
be split and is a unit of its own. Neighbouring blocks that fit into one bucket are one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from shardwise.core.errors import UserError
from shardwise.nn.models.build import children_of
from shardwise.optim.shards import local_of

REDUCE_BYTES = 4  # as in fp32, whatever the compute type and `parallel.reduce_dtype`


@dataclass(frozen=True)
class FSDPUnit:
    """Modules whose parameters are communicated together, and the bytes of the largest buffer."""

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    bytes: int


def list_of(name: str) -> str:
    """The module list that a block is in."""
    return name.rpartition(".")[0]


def choose_units(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    bucket: int | None = None,
    shard: int = 1,
    unmanaged: Collection[nn.Parameter] = (),
    together: int = 1,
    whole: Collection[nn.Module] = (),
    group_of: Callable[[str], Any] = list_of,
) -> list[FSDPUnit]:
    """The units in the order in which they must be sharded, the model itself last.

    Without a bucket, `together` is how many neighbouring blocks make a unit. Modules that are
    `whole` are never split. Only blocks of one group are joined.
    """
    parts = _Parts(model, shard, unmanaged, whole)
    units: list[FSDPUnit] = []
    if bucket is None:
        for neighbours in _neighbours(blocks, together, group_of):
            units.append(parts.take(neighbours))
        return [*units, parts.take([("", model)])]
    joined: list[tuple[str, nn.Module]] = []
    for name, block in blocks:
        if joined:
            modules = [block, *(module for _, module in joined)]
            if group_of(name) != group_of(joined[0][0]) or parts.bytes_of(modules) > bucket:
                units.append(parts.take(joined))
                joined = []
        if parts.bytes_of([block]) <= bucket:
            joined.append((name, block))
            continue
        units += _split(parts, name, block, bucket)
        if parts.free(block):
            units.append(parts.take([(name, block)]))
    if joined:
        units.append(parts.take(joined))
    units += _split(parts, "", model, bucket)
    return [*units, parts.take([("", model)])]


def _neighbours(
    blocks: list[tuple[str, nn.Module]], size: int, group_of: Callable[[str], Any]
) -> Iterator[list[tuple[str, nn.Module]]]:
    """Blocks that follow one another in one group, `size` at a time."""
    for _, group in groupby(blocks, key=lambda block: group_of(block[0])):
        neighbours = list(group)
        for start in range(0, len(neighbours), size):
            yield neighbours[start : start + size]


def describe_units(units: list[FSDPUnit], bucket: int) -> str:
    """A line for the plan: how many units, their largest buffer, and those over the bucket."""
    largest = max(unit.bytes for unit in units) / 1e6
    text = f"{len(units)} units, the largest buffer {largest:,.1f} MB"
    text += f" (bucket {bucket / 1e6:,.1f} MB)"
    over = [unit for unit in units if unit.bytes > bucket]
    if over:
        names = [f"{u.names[0] or 'the rest'} {u.bytes / 1e6:,.1f} MB" for u in over[:3]]
        named = ", ".join(names)
        more = f" and {len(over) - 3} more" if len(over) > 3 else ""
        text += f"; over it, because one module cannot be divided: {named}{more}"
    return text


@contextmanager
def explain_shard_access(bucket: int | None) -> Iterator[None]:
    """Around a first forward, explains the error of a module that reads another's shards."""
    try:
        yield
    except RuntimeError as error:
        if bucket is None or "DTensor" not in str(error):
            raise
        problem = (
            "a module of this model uses parameters of another without calling it, "
            "so it cannot be sharded so far"
        )
        remedy = "use a larger bucket, or leave it out"
        raise UserError("advanced.bucket", bucket, problem, remedy) from error


class _Parts:
    """The parameters that no unit has taken yet, and their sizes."""

    def __init__(
        self,
        model: nn.Module,
        shard: int,
        unmanaged: Collection[nn.Parameter],
        whole: Collection[nn.Module],
    ) -> None:
        self._shard = shard
        self.whole = whole
        self._taken = {id(p) for p in unmanaged}
        owners: dict[int, int] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        self._shared = {key for key, count in owners.items() if count > 1}

    def free(self, module: nn.Module) -> list[nn.Parameter]:
        """Parameters of a module that no unit has taken."""
        return [p for p in module.parameters() if id(p) not in self._taken]

    def movable(self, module: nn.Module) -> bool:
        """Whether a module may become a unit: shared parameters (tied embeddings) must not move."""
        free = {id(p) for p in self.free(module)}
        return bool(free) and free.isdisjoint(self._shared)

    def bytes_of(self, modules: list[nn.Module]) -> int:
        """Bytes of the largest buffer for the rest of these modules; frozen ones are not summed."""
        free: set[nn.Parameter] = set()
        for module in modules:
            free.update(self.free(module))
        total = 0
        for parameter in free:
            size = REDUCE_BYTES if parameter.requires_grad else parameter.element_size()
            total += size * self._padded(parameter)
        return total

    def take(self, named: list[tuple[str, nn.Module]]) -> FSDPUnit:
        """Makes a unit of the rest of some modules."""
        names, modules = zip(*named, strict=True)
        unit = FSDPUnit(names, modules, self.bytes_of(list(modules)))
        for module in modules:
            self._taken |= {id(p) for p in self.free(module)}
        return unit

    def _padded(self, parameter: nn.Parameter) -> int:
        if parameter.ndim == 0:
            return self._shard
        local = local_of(parameter)  # of a weight that other axes divide
        rows = local.shape[0]
        return local.numel() // max(1, rows) * (-(-rows // self._shard) * self._shard)


def _split(parts: _Parts, name: str, module: nn.Module, bucket: int) -> list[FSDPUnit]:
    """Units of children, taken until the rest of the module fits or nothing is left to take."""
    units: list[FSDPUnit] = []
    stuck: set[nn.Module] = set()
    while (size := parts.bytes_of([module])) > bucket:
        children = []
        for key, child in () if module in parts.whole else children_of(name, module):
            if parts.free(child) and child not in stuck:
                children.append((key, child))
        if not children:
            break  # the rest are parameters of its own, or tied ones
        key, child = max(children, key=lambda item: parts.bytes_of([item[1]]))
        if parts.bytes_of([child]) > bucket or not parts.movable(child):
            units += _split(parts, key, child, bucket)
            if parts.bytes_of([module]) < size:
                continue  # it may be small enough now to stay
        if parts.movable(child):
            units.append(parts.take([(key, child)]))
        else:
            stuck.add(child)
    return units
