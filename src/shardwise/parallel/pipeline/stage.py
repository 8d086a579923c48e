"""A rank's share of a model: the complete module tree, with parameters only where they are needed.

The model's own forward runs on every stage. Blocks before a chunk pass their input on; the chunk's
first block gets its arguments from the previous stage; the block after the chunk hands its
arguments to the next stage and ends the forward. Every stage computes masks and positions itself.

[Note: outside] Arguments are exchanged in the class's `__call__`, outside of all hooks. Inside of
activation recomputation the backward would exchange them again, for those of a later micro-batch,
and gradients would be silently wrong. While no forward is running, which includes recomputation, a
block behaves as usual.

[Note: hollow parameters] What depends on parameters that a stage does not need is discarded, but it
is computed: an embedding lookup precedes the first block. Such parameters are properties that
return zeros without memory, and they are absent from `parameters()`.
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
from shardwise.parallel.pipeline.cut import Arguments, Call, Cut, OutputShape, Place, SameShapeAs
from shardwise.parallel.pipeline.schedule import Schedule
from shardwise.parallel.zero.stages import own_gradient


@dataclass(frozen=True)
class ShardLayout:
    """How a tensor is sharded over the ranks of its stage."""

    axes: tuple[str, ...]
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class StageInput:
    """One tensor of a boundary: which argument it is, its shape, and whether it gets a gradient."""

    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    layout: ShardLayout | None = None


@dataclass(frozen=True)
class StageIO:
    """The tensors that pass from one chunk to the next."""

    ports: tuple[StageInput, ...]
    tensors: tuple[torch.Tensor, ...]

    @property
    def differentiable(self) -> list[torch.Tensor]:
        """The tensors for which a gradient comes back."""
        return [tensor for port, tensor in zip(self.ports, self.tensors, strict=True) if port.grad]


class NoOutputHere(Exception):
    """Raised by access to the model's output on a stage that has none."""

    def __init__(self, boundary: NonLastOutput) -> None:
        super().__init__("this stage is not the last: it has no output but what it hands on")
        self.boundary = boundary


@dataclass(eq=False)
class NonLastOutput:
    """Returned by the model in place of its output on stages before the last; any access raises."""

    wire: StageIO

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NoOutputHere(self)

    def __getitem__(self, key: Any) -> Any:
        raise NoOutputHere(self)

    def __iter__(self) -> Any:
        raise NoOutputHere(self)


# FSDP must find the tensors, before whose gradients it gathers the parameters again. (Since torch
# 2.13 it looks into dataclasses instead.)
register_pytree_node(
    NonLastOutput,
    lambda boundary: (list(boundary.wire.tensors), boundary.wire.ports),
    lambda tensors, ports: NonLastOutput(StageIO(ports, tuple(tensors))),
)


class _Reached(Exception):
    def __init__(self, wire: StageIO) -> None:
        super().__init__("the end of the stage")
        self.wire = wire


@dataclass
class ChunkForward:
    """A chunk's forward on one micro-batch: its inputs and outputs (a result on the last chunk)."""

    given: tuple[torch.Tensor, ...]
    wire: StageIO | None
    result: Any


class CarriedSum(Protocol):
    """A value accumulated from block to block beside the hidden states: sums over routers."""

    def enter(self, micro: int) -> None:
        """Called before anything is computed for a micro-batch."""

    def take(self, before: torch.Tensor) -> None:
        """Called in a chunk's forward with the value received from the previous stage."""

    def collect(self) -> torch.Tensor | None:
        """Returns the value for the next stage; None if there is none yet."""


CARRIED: Place = ("carried", 0)  # no argument has this name


class Stages:
    """Reduces a model (best on `meta`, before it is sharded) to one rank's share of a pipeline.

    `owners`: the ranks that have each parameter of the full model, by name; `shared`: those that
    several have, of which the first counts and saves them. `blocks`: this rank's, by name.
    `chunks`: their numbers in the pipeline. `dtype`: the compute dtype of parameters, if it differs
    from that of storage.
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
        self.model = model
        self.cut = cut
        self.rank = rank
        self.ranks = ranks
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.meshes: Sequence[DeviceMesh] = ()
        self.carried: CarriedSum | None = None
        chunk_owners = schedule.owners(ranks)
        assert len(chunk_owners) == len(cut.ranges), "the model is cut for another schedule"
        self.chunks = tuple(chunk for chunk, owner in enumerate(chunk_owners) if owner == rank)
        users = _find_chunks(model, cut)
        self.owners = {n: tuple(sorted({chunk_owners[c] for c in u})) for n, u in users.items()}
        # Parameters whose gradients are incomplete after the last backward of one chunk.
        self.complete_late = {name for name, chunks in users.items() if len(chunks) > 1}
        self.shared = {name: holders for name, holders in self.owners.items() if len(holders) > 1}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._pass: _StageForward | None = None
        self._names: dict[int, str] = {}
        self.blocks: list[tuple[str, nn.Module]] = []
        foreign: list[nn.Module] = []
        called = {call.block for call in cut.calls}
        owned = frozenset().union(*map(cut.blocks, self.chunks))
        for name, block in find_blocks(model):
            if name not in called:
                continue
            self._names[id(block)] = name
            self._gate(block, name in owned)
            if name in owned:
                self.blocks.append((name, block))
            else:
                foreign.append(block)
        self._drop(foreign)
        self._wrap()

    def chunks_of(self, block: str) -> tuple[int, ...]:
        """This rank's chunks that a block is in: it runs with them."""
        return tuple(chunk for chunk in self.chunks if block in self.cut.blocks(chunk))

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the model's output."""
        return len(self.cut.ranges) - 1 in self.chunks

    def forward(self, chunk: int, wire: StageIO | None, call: Callable[[], Any]) -> ChunkForward:
        """Runs `call`, which calls the model once, for one chunk; returns inputs and outputs."""
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
        return ChunkForward(running.given, running.wire, result if running.is_last else None)

    def connect(self, groups: dict[tuple[int, ...], dist.ProcessGroup]) -> None:
        """Sets the groups that sum gradients of shared parameters, by the ranks that have them."""
        self._groups = groups

    @torch.no_grad()
    def sum_shared_gradients(
        self, gradient_of: Callable[[nn.Parameter], torch.Tensor] = own_gradient
    ) -> None:
        """Sums gradients of parameters that several stages have; call after the last backward."""
        parameters = dict(self.model.named_parameters())
        for name, holders in sorted(self.shared.items()):
            if self.rank in holders and (parameter := parameters[name]).requires_grad:
                gradient = local_of(gradient_of(parameter))
                dist.all_reduce(gradient, group=self._groups[holders])

    def _gate(self, block: nn.Module, owned: bool) -> None:
        kind = type(block)
        stages = self

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if stages._pass is not None:
                return stages._pass.call(self, functools.partial(kind.__call__, self), args, kwargs)
            if not owned:
                name = stages._names[id(self)]
                raise RuntimeError(f"{name} lies on another rank: run the model by its pipeline")
            return kind.__call__(self, *args, **kwargs)

        block.__class__ = _subclass(kind, {"__call__": __call__})

    def _drop(self, foreign: Iterable[nn.Module]) -> None:
        """Removes parameters that this rank does not have, and the buffers of foreign blocks."""
        needed = {name for name, holders in self.owners.items() if self.rank in holders}
        dropped = {id(p) for name, p in self.model.named_parameters() if name not in needed}
        for block in foreign:
            for module in block.modules():
                for name, parameter in module._parameters.items():
                    if id(parameter) in dropped:
                        module._parameters[name] = None
                module._buffers.update(dict.fromkeys(module._buffers))
        for module in list(self.model.modules()):
            hollow: dict[str, property] = {}
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and id(parameter) in dropped:
                    hollow[name] = self._hollow(parameter.shape, parameter.dtype)
                    del module._parameters[name]
            if hollow:
                module.__class__ = _subclass(type(module), hollow)

    def _hollow(self, shape: torch.Size, stored: torch.dtype) -> property:
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
                return plain(*args, **kwargs)  # blocks of other ranks raise
            if running.entered:
                raise RuntimeError(
                    "the model was called twice for one micro-batch: a pipeline runs it once"
                )
            running.entered = True
            try:
                output = plain(*args, **kwargs)
            except _Reached as reached:
                running.wire = reached.wire
                return NonLastOutput(reached.wire)
            running.check_ended()
            return output

        model.forward = forward


def _subclass(kind: type, entries: dict[str, Any]) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), entries | names)


@dataclass
class _StageForward:
    """A forward in progress: counts the calls of blocks and handles each of them."""

    stages: Stages
    chunk: int
    incoming: StageIO | None
    entered: bool = False
    at: int = 0
    wire: StageIO | None = None
    given: tuple[torch.Tensor, ...] = ()
    # By id, an original argument and the received tensor that replaces it: a later block may be
    # called with the same argument.
    _replaced: dict[int, tuple[Any, torch.Tensor]] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        return self.chunk == len(self.stages.cut.ranges) - 1

    def call(self, block: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        begin, end = self.stages.cut.ranges[self.chunk]
        calls = self.stages.cut.calls
        at = self.at
        name = self.stages._names[id(block)]
        if at >= len(calls) or calls[at].block != name:
            raise RuntimeError(f"{name} runs out of its order: a layer was skipped or repeated")
        self.at += 1
        arguments = Arguments(args, kwargs)
        if at < begin:
            return _stand_in(calls[at], arguments)
        for place, leaf in arguments.leaves.items():
            if id(leaf) in self._replaced:
                arguments.leaves[place] = self._replaced[id(leaf)][1]
        if at == end:
            raise _Reached(self._with_carried(_captured(calls[at], arguments)))
        if at == begin and self.incoming is not None:
            self._feed(self.incoming, arguments, name)
        args, kwargs = arguments.rebuilt()
        return run(*args, **kwargs)

    def _with_carried(self, wire: StageIO) -> StageIO:
        """Adds the carried value to the tensors for the next stage."""
        value = None if self.stages.carried is None else self.stages.carried.collect()
        if value is None:
            return wire
        grad = value.requires_grad
        value = value.clone() if grad and value.is_leaf else value.contiguous()
        port = StageInput(CARRIED, tuple(value.shape), value.dtype, grad)
        return StageIO((*wire.ports, port), (*wire.tensors, value))

    def _feed(self, wire: StageIO, arguments: Arguments, name: str) -> None:
        """Replaces the arguments of the first block by what the previous stage sent."""
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
            after = leaf if port.layout is None else self._sharded(leaf, port.layout)
            is_tensor = isinstance(before, torch.Tensor)
            if self.stages.cut.in_place and is_tensor and before.dtype == after.dtype:
                before.copy_(after)
                continue
            arguments.leaves[port.place] = after
            if is_tensor:
                self._replaced[id(before)] = (before, after)
        self.given = tuple(given)

    def _sharded(self, tensor: torch.Tensor, layout: ShardLayout) -> DTensor:
        mesh = next((m for m in self.stages.meshes if m.mesh_dim_names == layout.axes), None)
        if mesh is None:
            raise RuntimeError(
                f"a boundary is sharded over {layout.axes}, of which the pipeline was given no mesh"
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
        """Raises unless all blocks have run on the last chunk."""
        count = len(self.stages.cut.calls)
        if self.at != count or not self.is_last:
            raise RuntimeError(f"the forward ended after {self.at} of {count} blocks")


def _stand_in(call: Call, arguments: Arguments) -> Any:
    """Returns the structure of a block's output; its values are never used."""
    inputs: dict[Place, torch.Tensor] = {}
    for place in call.inputs:
        leaf = arguments.leaves.get(place)
        if isinstance(leaf, torch.Tensor):
            inputs[place] = leaf
    first = next(iter(inputs.values()))
    sizes = dict(zip(call.output.input_shape, first.shape, strict=False))
    leaves: list[Any] = []
    for leaf in call.output.leaves:
        if isinstance(leaf, OutputShape):
            shape = [sizes.get(size, size) for size in leaf.sizes]
            leaves.append(first.new_zeros(()).expand(shape))
        elif isinstance(leaf, SameShapeAs):
            leaves.append(inputs.get(leaf.place, first))
        else:
            leaves.append(leaf)
    return tree_unflatten(leaves, call.output.spec)


def _captured(call: Call, arguments: Arguments) -> StageIO:
    """Returns the arguments of a block as tensors for the next stage."""
    ports: list[StageInput] = []
    tensors: list[torch.Tensor] = []
    for place in call.inputs:
        tensor = arguments.leaves.get(place)
        if not isinstance(tensor, torch.Tensor):
            continue
        layout = None
        if isinstance(tensor, DTensor):
            placements: list[Any] = []
            for placement in tensor.placements:
                placements.append(Replicate() if isinstance(placement, Partial) else placement)
            tensor = tensor.redistribute(placements=placements)
            layout = ShardLayout(
                tuple(tensor.device_mesh.mesh_dim_names or ()),
                tuple(placements),
                tuple(tensor.shape),
                tensor.stride(),
            )
            tensor = tensor.to_local(grad_placements=placements)
        grad = tensor.requires_grad
        tensor = tensor.contiguous()
        if grad and (is_view(tensor) or tensor.is_leaf):
            tensor = tensor.clone()  # backward starts here: it needs its own graph node
        ports.append(StageInput(place, tuple(tensor.shape), tensor.dtype, grad, layout))
        tensors.append(tensor)
    return StageIO(tuple(ports), tuple(tensors))


def _find_chunks(model: nn.Module, cut: Cut) -> dict[str, set[int]]:
    """Returns the chunks that need each parameter; the last one if none does."""
    count = len(cut.ranges)
    holders: dict[str, set[int]] = {call.block: set() for call in cut.calls}
    for chunk in range(count):
        for block in cut.blocks(chunk):
            holders[block].add(chunk)
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    users: dict[str, set[int]] = {}
    for names in aliases.values():
        chunks: set[int] = set()
        for name in names:
            around = next((module for module in _modules_around(name) if module in holders), None)
            if around is not None:
                chunks |= holders[around]
                continue
            for chunk in range(count):
                if cut.needs(chunk, name):
                    chunks.add(chunk)
        users[names[0]] = chunks or {count - 1}
    return users


def _modules_around(name: str) -> Iterator[str]:
    """Yields the names of the modules that a parameter is in, innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
