"""Which modules are gathered and reduced together: one block at a time, or as `parallel.bucket` bounds it.

A unit's parameters travel in one collective, so its buffer is as large as they are. What is counted is the larger of
the two buffers, that of the gradients: four bytes per element, with each parameter's rows filled up to a multiple of
the ranks that divide it. A gather in half precision takes half of that. Packed weights have no gradients: one byte.

A block over the bucket gives up its largest children, one after the other, until the rest fits; a child over the bucket
is treated likewise. A module that holds more than a bucket by itself cannot be divided and is a unit of its own.
Neighbouring blocks that fit into one bucket together are one unit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from shardwise.core.errors import UserError
from shardwise.nn.models.build import children_of

REDUCE_BYTES = 4  # as in fp32, whatever the compute type and `parallel.reduce_dtype`


@dataclass(frozen=True)
class FSDPUnit:
    """Modules whose parameters travel together, and the bytes of their largest buffer."""

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    bytes: int


def choose_units(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    bucket: int | None = None,
    shard: int = 1,
    unmanaged: Collection[nn.Parameter] = (),
    together: int = 1,
) -> list[FSDPUnit]:
    """The units in the order in which they must be sharded, the model itself last; see the module's text.

    Without a bucket, `together` is how many neighbouring blocks make a unit.
    """
    parts = _Parts(model, shard, unmanaged)
    if bucket is None:
        return [
            *(parts.take(some) for some in _neighbours(blocks, together)),
            parts.take([("", model)]),
        ]
    units: list[FSDPUnit] = []
    joined: list[tuple[str, nn.Module]] = []
    for name, block in blocks:
        near = bool(joined) and name.rpartition(".")[0] == joined[0][0].rpartition(".")[0]
        if joined and not (
            near and parts.bytes_of([block, *(module for _, module in joined)]) <= bucket
        ):
            units.append(parts.take(joined))
            joined = []
        if parts.bytes_of([block]) <= bucket:
            joined.append((name, block))
            continue
        units += _divide(parts, name, block, bucket)
        if parts.free(block):
            units.append(parts.take([(name, block)]))
    if joined:
        units.append(parts.take(joined))
    units += _divide(parts, "", model, bucket)
    return [*units, parts.take([("", model)])]


def _neighbours(
    blocks: list[tuple[str, nn.Module]], most: int
) -> Iterator[list[tuple[str, nn.Module]]]:
    """Blocks that follow one another in one list, so many at a time."""
    for _, run in groupby(blocks, key=lambda block: block[0].rpartition(".")[0]):
        near = list(run)
        yield from (near[at : at + most] for at in range(0, len(near), most))


def describe_units(units: list[FSDPUnit], bucket: int) -> str:
    """What the plan says of them."""
    largest = max(unit.bytes for unit in units)
    text = f"{len(units)} units, the largest buffer {largest / 1e6:,.1f} MB (bucket {bucket / 1e6:,.1f} MB)"
    over = [unit for unit in units if unit.bytes > bucket]
    if over:
        named = ", ".join(
            f"{unit.names[0] or 'the rest'} {unit.bytes / 1e6:,.1f} MB" for unit in over[:3]
        )
        more = f" and {len(over) - 3} more" if len(over) > 3 else ""
        text += f"; over it, because one module cannot be divided: {named}{more}"
    return text


@contextmanager
def explain_divided(bucket: int | None) -> Iterator[None]:
    """Around a first forward: a module that reaches for another's parameters finds shards where it was divided."""
    try:
        yield
    except RuntimeError as error:
        if bucket is None or "DTensor" not in str(error):
            raise
        problem = "a module of this model uses parameters of another without calling it, so it cannot be divided so far"
        raise UserError(
            "advanced.bucket", bucket, problem, "use a larger bucket, or leave it out"
        ) from error


class _Parts:
    """Sizes of what no unit has taken yet."""

    def __init__(self, model: nn.Module, shard: int, unmanaged: Collection[nn.Parameter]) -> None:
        self._shard = shard
        self._taken = {id(p) for p in unmanaged}
        owners: dict[int, int] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        self._shared = {one for one, count in owners.items() if count > 1}

    def free(self, module: nn.Module) -> list[nn.Parameter]:
        """Parameters of a module that no unit has taken."""
        return [p for p in module.parameters() if id(p) not in self._taken]

    def movable(self, module: nn.Module) -> bool:
        """Whether a module may become a unit: a parameter that modules share (tied embeddings) must stay above both."""
        free = self.free(module)
        return bool(free) and not any(id(p) in self._shared for p in free)

    def bytes_of(self, modules: list[nn.Module]) -> int:
        """Bytes of the largest buffer of what is left of these modules; what is frozen is gathered only."""
        free = {id(p): p for module in modules for p in self.free(module)}
        return sum(
            (REDUCE_BYTES if p.requires_grad else p.element_size()) * self._padded(p)
            for p in free.values()
        )

    def take(self, named: list[tuple[str, nn.Module]]) -> FSDPUnit:
        """Makes a unit of what is left of some modules."""
        modules = [module for _, module in named]
        unit = FSDPUnit(tuple(name for name, _ in named), tuple(modules), self.bytes_of(modules))
        self._taken |= {id(p) for module in modules for p in self.free(module)}
        return unit

    def _padded(self, parameter: nn.Parameter) -> int:
        if parameter.ndim == 0:
            return self._shard
        rows = parameter.shape[0]
        return parameter.numel() // max(1, rows) * (-(-rows // self._shard) * self._shard)


def _divide(parts: _Parts, name: str, module: nn.Module, bucket: int) -> list[FSDPUnit]:
    """Units of children, taken until what is left of the module fits or there is nothing to take."""
    units: list[FSDPUnit] = []
    stuck: set[nn.Module] = set()
    while (size := parts.bytes_of([module])) > bucket:
        children = [
            (n, child)
            for n, child in children_of(name, module)
            if parts.free(child) and child not in stuck
        ]
        if not children:
            break  # what is left are parameters of its own, or tied ones
        key, child = max(children, key=lambda item: parts.bytes_of([item[1]]))
        if parts.bytes_of([child]) > bucket or not parts.movable(child):
            units += _divide(parts, key, child, bucket)
            if parts.bytes_of([module]) < size:
                continue  # it may be small enough now to stay
        if parts.movable(child):
            units.append(parts.take([(key, child)]))
        else:
            stuck.add(child)
    return units
