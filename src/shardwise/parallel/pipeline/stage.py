"""A rank's share of a model: the whole model object, with parameters only where they are needed.

The model's own forward runs on every stage. Blocks before a chunk pass their input on; the first of the chunk gets its
arguments from the wire; the one after it hands its arguments to the wire and ends the forward. Masks and positions are
made anew on every stage.

[Note: outside] Arguments are exchanged in the class's `__call__`, outside of all hooks: inside of activation
recomputation they would be exchanged again in the backward, for those of a later micro-batch, and the gradients would
be wrong in silence. When no forward is under way, which is so during recomputation, a block is as it was.

[Note: hollow parameters] What is made from parameters that a stage does not need is thrown away, but it is made: an
embedding is looked up before the first block. Such parameters are zeros that take no memory, made whenever they are
asked for, and no entries of `parameters()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardwise.core.compat.torch_private import is_view, register_pytree_node, tree_unflatten
from shardwise.nn.models.build import find_blocks
from shardwise.optim.shards import local_of
from shardwise.parallel.pipeline.cut import Arguments, Call, Cut, Like, OutputShape, Place
from shardwise.parallel.pipeline.schedule import Schedule


@dataclass(frozen=True)
class ShardLayout:
    """How a tensor is divided over ranks that share its stage."""

    axes: tuple[str, ...]
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class StageInput:
    """One tensor of a boundary: which argument it is, its size, and whether a gradient comes back."""

    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    layout: ShardLayout | None = None


@dataclass(frozen=True)
class StageIO:
    """What goes from one chunk to the next."""

    ports: tuple[StageInput, ...]
    tensors: tuple[torch.Tensor, ...]

    @property
    def differentiable(self) -> list[torch.Tensor]:
        """Those for which a gradient comes back."""
        return [tensor for port, tensor in zip(self.ports, self.tensors, strict=True) if port.grad]


class NoOutputHere(Exception):
    """The model's output was asked for on a stage that has none."""

    def __init__(self, boundary: Boundary) -> None:
        super().__init__("this stage is not the last: it has no output but what it hands on")
        self.boundary = boundary


@dataclass(eq=False)
class Boundary:
    """Returned by a model instead of its output where the stage is not the last; asking it for anything stops."""

    wire: StageIO

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NoOutputHere(self)

    def __getitem__(self, key: Any) -> Any:
        raise NoOutputHere(self)

    def __iter__(self) -> Any:
        raise NoOutputHere(self)


# So that FSDP finds the tensors, before whose gradients it must gather the parameters again. (Since torch 2.13 it looks
# into dataclasses and no longer here.)
register_pytree_node(
    Boundary,
    lambda boundary: (list(boundary.wire.tensors), boundary.wire.ports),
    lambda tensors, ports: Boundary(StageIO(ports, tuple(tensors))),
)


class _Reached(Exception):
    def __init__(self, wire: StageIO) -> None:
        super().__init__("the end of the stage")
        self.wire = wire


@dataclass
class Passed:
    """A chunk's forward on one micro-batch: what it was given and what came of it (a result on the last chunk)."""

    given: tuple[torch.Tensor, ...]
    wire: StageIO | None
    result: Any


class Carried(Protocol):
    """Something that grows from block to block and goes along with the hidden states: sums over routers."""

    def enter(self, micro: int) -> None:
        """Before anything is computed for a micro-batch."""

    def take(self, before: torch.Tensor) -> None:
        """What came with the hidden states, in the forward of a chunk."""

    def collect(self) -> torch.Tensor | None:
        """What goes on with them; None where there is nothing yet."""


CARRIED: Place = ("carried", 0)  # no argument's name


class Stages:
    """Makes of a model (best on `meta`, before it is sharded) the share of one rank of a pipeline.

    `owners`: of every parameter of the whole model, by name, the ranks that have it; `shared`: those with several,
    the first of which counts and saves it. `blocks`: this rank's, by name. `chunks`: their numbers in the pipeline.
    `dtype`: what parameters are computed in, if it is not what they are stored in.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        rank: int,
        ranks: int,
        schedule: Schedule,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.cut, self.rank, self.ranks = model, cut, rank, ranks
        self.dtype, self.device = dtype, torch.device("cpu")
        self.meshes: Sequence[DeviceMesh] = ()
        self.carried: Carried | None = None
        chunk_owners = schedule.owners(ranks)
        assert len(chunk_owners) == len(cut.ranges), "the model is cut for another schedule"
        self.chunks = tuple(chunk for chunk, owner in enumerate(chunk_owners) if owner == rank)
        called = {call.block for call in cut.calls}
        named = {name: block for name, block in find_blocks(model) if name in called}
        self._names = {id(block): name for name, block in named.items()}
        owned = frozenset().union(*(cut.blocks(chunk) for chunk in self.chunks))
        self.blocks = [(name, block) for name, block in named.items() if name in owned]
        self.owners = _find_owners(model, cut, chunk_owners)
        self.shared = {name: holders for name, holders in self.owners.items() if len(holders) > 1}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._pass: _StageForward | None = None
        for name, block in named.items():
            self._gate(block, name in owned)
        self._drop([block for name, block in named.items() if name not in owned])
        self._wrap()

    @property
    def is_last(self) -> bool:
        """Whether the model's output is made here."""
        return len(self.cut.ranges) - 1 in self.chunks

    def forward(self, chunk: int, wire: StageIO | None, call: Callable[[], Any]) -> Passed:
        """Runs `call`, which calls the model once, for one chunk."""
        running = _StageForward(self, chunk, wire)
        self._pass = running
        try:
            result = call()
        except NoOutputHere:
            result = None
        finally:
            self._pass = None
        if not running.entered:
            raise RuntimeError("the model was not called")
        return Passed(running.given, running.wire, result if running.is_last else None)

    def connect(self, groups: dict[tuple[int, ...], dist.ProcessGroup]) -> None:
        """Takes the groups in which gradients of shared parameters are summed, by the ranks that have them."""
        self._groups = groups

    @torch.no_grad()
    def sum_shared_gradients(self) -> None:
        """After the last backward: what several stages have gets the sum of their gradients, shard by shard."""
        parameters = dict(self.model.named_parameters())
        for name, holders in sorted(self.shared.items()):
            if self.rank in holders and (parameter := parameters[name]).requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local_of(parameter.grad), group=self._groups[holders])

    def _gate(self, block: nn.Module, owned: bool) -> None:
        kind, stages = type(block), self

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if stages._pass is not None:
                return stages._pass.call(self, functools.partial(kind.__call__, self), args, kwargs)
            if not owned:
                raise RuntimeError(
                    f"{stages._names[id(self)]} lies on another rank: run the model by its pipeline"
                )
            return kind.__call__(self, *args, **kwargs)

        block.__class__ = _subclass(kind, {"__call__": __call__})

    def _drop(self, strange: Iterable[nn.Module]) -> None:
        """Takes away the parameters that this rank does not have, and whatever blocks of other ranks hold."""
        kept = {name for name, holders in self.owners.items() if self.rank in holders}
        gone = {id(p) for name, p in self.model.named_parameters() if name not in kept}
        for block in strange:
            for module in block.modules():
                module._parameters.update(
                    {name: None for name, p in module._parameters.items() if id(p) in gone}
                )
                module._buffers.update(dict.fromkeys(module._buffers))
        for module in list(self.model.modules()):
            if holes := {
                name: p for name, p in module._parameters.items() if p is not None and id(p) in gone
            }:
                for name in holes:
                    del module._parameters[name]
                hollow = {name: self._hole(p.shape, p.dtype) for name, p in holes.items()}
                module.__class__ = _subclass(type(module), hollow)

    def _hole(self, shape: torch.Size, stored: torch.dtype) -> property:
        def zeros(_: Any) -> torch.Tensor:
            dtype = self.dtype if self.dtype is not None and stored.is_floating_point else stored
            return torch.zeros((), dtype=dtype, device=self.device).expand(shape)

        return property(zeros)

    def _wrap(self) -> None:
        model: Any = self.model
        plain = model.forward

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            running = self._pass
            if running is None:
                return plain(*args, **kwargs)  # blocks of other ranks say what is wrong
            if running.entered:
                raise RuntimeError(
                    "the model was called twice for one micro-batch: a pipeline runs it once"
                )
            running.entered = True
            try:
                output = plain(*args, **kwargs)
            except _Reached as reached:
                running.wire = reached.wire
                return Boundary(reached.wire)
            running.check_ended()
            return output

        model.forward = forward


def _subclass(kind: type, entries: dict[str, Any]) -> type:
    return type(
        kind.__name__,
        (kind,),
        entries | {"__module__": kind.__module__, "__qualname__": kind.__qualname__},
    )


@dataclass
class _StageForward:
    """A forward under way: counts the blocks' calls and knows what to do with each."""

    stages: Stages
    chunk: int
    incoming: StageIO | None
    entered: bool = False
    at: int = 0
    wire: StageIO | None = None
    given: tuple[torch.Tensor, ...] = ()
    # What stood in the arguments before → what came by wire; a later block may be given the same tensor again.
    _instead: dict[int, tuple[Any, torch.Tensor]] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        return self.chunk == len(self.stages.cut.ranges) - 1

    def call(self, block: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        begin, end = self.stages.cut.ranges[self.chunk]
        calls, at = self.stages.cut.calls, self.at
        name = self.stages._names[id(block)]
        if at >= len(calls) or calls[at].block != name:
            raise RuntimeError(f"{name} runs out of its order: a layer was skipped or repeated")
        self.at += 1
        arguments = Arguments(args, kwargs)
        if at < begin:
            return _stand_in(calls[at], arguments)
        for place, leaf in arguments.leaves.items():
            if id(leaf) in self._instead:
                arguments.leaves[place] = self._instead[id(leaf)][1]
        if at == end:
            raise _Reached(self._handed_on(_captured(calls[at], arguments)))
        if at == begin and self.incoming is not None:
            self._feed(self.incoming, arguments, name)
        args, kwargs = arguments.rebuilt()
        return run(*args, **kwargs)

    def _handed_on(self, wire: StageIO) -> StageIO:
        """With what is carried along."""
        found = None if self.stages.carried is None else self.stages.carried.collect()
        if found is None:
            return wire
        grad = found.requires_grad
        found = found.clone() if grad and found.is_leaf else found.contiguous()
        port = StageInput(CARRIED, tuple(found.shape), found.dtype, grad)
        return StageIO((*wire.ports, port), (*wire.tensors, found))

    def _feed(self, wire: StageIO, arguments: Arguments, name: str) -> None:
        given = []
        for port, tensor in zip(wire.ports, wire.tensors, strict=True):
            leaf = tensor.detach().requires_grad_(port.grad and torch.is_grad_enabled())
            given.append(leaf)
            if port.place == CARRIED:
                assert self.stages.carried is not None
                self.stages.carried.take(leaf)
                continue
            if port.place not in arguments.leaves:
                raise RuntimeError(
                    f"{name} is called without its argument {port.place} on this stage"
                )
            before = arguments.leaves[port.place]
            after = leaf if port.layout is None else self._divided(leaf, port.layout)
            if (
                self.stages.cut.into
                and isinstance(before, torch.Tensor)
                and before.dtype == after.dtype
            ):
                before.copy_(after)
                continue
            arguments.leaves[port.place] = after
            if isinstance(before, torch.Tensor):
                self._instead[id(before)] = (before, after)
        self.given = tuple(given)

    def _divided(self, tensor: torch.Tensor, layout: ShardLayout) -> DTensor:
        mesh = next((m for m in self.stages.meshes if m.mesh_dim_names == layout.axes), None)
        if mesh is None:
            raise RuntimeError(
                f"a boundary is divided over {layout.axes}, of which the pipeline was given no mesh"
            )
        return DTensor.from_local(
            tensor,
            mesh,
            layout.placements,
            run_check=False,
            shape=torch.Size(layout.shape),
            stride=layout.stride,
        )

    def check_ended(self) -> None:
        if self.at != len(self.stages.cut.calls) or not self.is_last:
            raise RuntimeError(
                f"the forward ended after {self.at} of {len(self.stages.cut.calls)} blocks"
            )


def _stand_in(call: Call, arguments: Arguments) -> Any:
    """What a block would return, by its structure: of the values nothing is used."""
    found = {
        place: leaf
        for place in call.takes
        if isinstance(leaf := arguments.leaves.get(place), torch.Tensor)
    }
    some = next(iter(found.values()))
    sizes = dict(zip(call.gives.like, some.shape, strict=False))
    leaves = []
    for leaf in call.gives.leaves:
        if isinstance(leaf, OutputShape):
            leaves.append(some.new_zeros(()).expand([sizes.get(size, size) for size in leaf.sizes]))
        else:
            leaves.append(found.get(leaf.place, some) if isinstance(leaf, Like) else leaf)
    return tree_unflatten(leaves, call.gives.spec)


def _captured(call: Call, arguments: Arguments) -> StageIO:
    ports, tensors = [], []
    for place in call.takes:
        tensor = arguments.leaves.get(place)
        if not isinstance(tensor, torch.Tensor):
            continue
        layout = None
        if isinstance(tensor, DTensor):
            whole = [Replicate() if isinstance(p, Partial) else p for p in tensor.placements]
            tensor = tensor.redistribute(placements=whole)
            layout = ShardLayout(
                tuple(tensor.device_mesh.mesh_dim_names or ()),
                tuple(whole),
                tuple(tensor.shape),
                tensor.stride(),
            )
            tensor = tensor.to_local(grad_placements=whole)
        grad = tensor.requires_grad
        tensor = tensor.contiguous()
        if grad and (is_view(tensor) or tensor.is_leaf):
            tensor = (
                tensor.clone()
            )  # gradients are asked for from here on: an own node of the graph
        ports.append(StageInput(place, tuple(tensor.shape), tensor.dtype, grad, layout))
        tensors.append(tensor)
    return StageIO(tuple(ports), tuple(tensors))


def _find_owners(
    model: nn.Module, cut: Cut, chunk_owners: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """The ranks that need each parameter; what none needs stays with the last chunk."""
    holders: dict[str, set[int]] = {call.block: set() for call in cut.calls}
    for chunk, owner in enumerate(chunk_owners):
        for block in cut.blocks(chunk):
            holders[block].add(owner)
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    found: dict[str, tuple[int, ...]] = {}
    for names in aliases.values():
        ranks: set[int] = set()
        for name in names:
            if (inside := next((one for one in _above(name) if one in holders), None)) is not None:
                ranks |= holders[inside]
            else:
                ranks |= {
                    owner for chunk, owner in enumerate(chunk_owners) if cut.needs(chunk, name)
                }
        found[names[0]] = tuple(sorted(ranks)) or (chunk_owners[-1],)
    return found


def _above(name: str) -> Iterator[str]:
    """The names of the modules that a parameter is in, from the inside."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
