"""What the layers of a model divided by tensor parallelism do while it runs.

[Note: plain inside] A cut layer, a stack of experts, and whatever DTensor cannot compute run on plain tensors: inputs
and parameters are exchanged for this rank's part of them, the layer's own forward is called (of any class: with an
adapter, or with a weight in few bits), and what it made is a DTensor again. Whatever is whole on every rank there but
multiplied with a part has a gradient that is a part of the sum.

[Note: carefully] DTensor refuses what it has no rule for before anything is computed, and so on every rank alike. The
innermost module around is then tried again with the outputs of its cut layers put together (fused projections that are
split in ways of their own), and if that does not help, whole: its parameters are gathered for the time it takes. What
has never run is tried without gradients first: a trial that fails would leave its tensors with whoever recomputes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardwise.core.compat.torch_private import implicit_replication, local_tensor, tree_map
from shardwise.nn.adapters.layers import LoraLayer, is_transposed
from shardwise.parallel.tensor.dtensor_rules import add_rules
from shardwise.parallel.tensor.hf_hooks import local_experts, local_heads
from shardwise.parallel.tensor.local import local_parameters, to_local, to_whole, wrap
from shardwise.parallel.tensor.quantized import is_packed
from shardwise.parallel.tensor.rng import local_dropout, own_stream

Forward = Callable[..., Any]


def exchange(module: Any, forward: Forward, *args: Any) -> None:
    """Puts a forward that gets the present one, behind `args`, in its place."""
    module.forward = partial(forward, *args, module.forward)


class TensorParallel:
    """A model divided over the ranks of an axis; `whole` says what is not, and why."""

    def __init__(self, mesh: DeviceMesh, sequence: bool) -> None:
        self.mesh, self.sequence = mesh, sequence
        self.whole: dict[str, str] = {}
        self._together: set[nn.Module] = set()  # cut layers whose outputs are put together
        self._known: set[str] = set()  # modules that have been tried
        self._alone: set[str] = set()  # modules that turned out to need plain tensors
        add_rules()
        self._inside = False  # of a module that computes on plain tensors

    def inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What to pass to the model's forward for what is the same on every rank of the axis."""
        return {n: to_whole(x, self.mesh) if _is_floats(x) else x for n, x in given.items()}

    @contextmanager
    def active(self) -> Iterator[None]:
        """To be held around forward and backward: what is computed again there must find the same seams."""
        with implicit_replication(), local_heads(self.mesh), local_dropout(self.mesh):
            yield

    def between(self, x: DTensor) -> Placement:
        """How hidden states lie between layers."""
        return Shard(1) if self.sequence and x.ndim == 3 else Replicate()

    def column(self, module: Any, width: int, forward: Forward, x: torch.Tensor) -> torch.Tensor:
        """A layer of `width` outputs of which this rank computes some."""
        if self._inside:
            return forward(x)  # type: ignore[no-any-return]
        given = to_local(gather(to_whole(x, self.mesh)), Partial())
        changes = (
            {"nf": module.weight.to_local().shape[1]} if is_transposed(module) else {}
        )  # Conv1D's width, by name
        with local_parameters(module, Partial()), _changed(module, **changes):
            y = forward(given)
        made = wrap(y, self.mesh, Shard(y.ndim - 1), torch.Size((*y.shape[:-1], width)))
        return gather(made) if module in self._together else made

    def row(self, module: Any, forward: Forward, x: torch.Tensor) -> torch.Tensor:
        """A layer of which this rank has some inputs: the outputs of all ranks add up."""
        if self._inside:
            return forward(x)  # type: ignore[no-any-return]
        where = Shard(x.ndim - 1)
        given = to_local(to_whole(x, self.mesh).redistribute(placements=[where]), where)
        drops = module.training and getattr(module, "lora_dropout", 0)
        changes = {"lora_group": self.mesh.get_group()} if isinstance(module, LoraLayer) else {}
        stream = own_stream(self.mesh) if drops else nullcontext()
        with (
            local_parameters(module, Partial(), once=("bias",)),
            _changed(module, **changes),
            stream,
        ):
            y = forward(given)
        whole = wrap(y, self.mesh, Partial(), y.shape)
        return whole.redistribute(placements=[self.between(whole)])

    def experts(self, module: Any, forward: Forward, *args: Any) -> torch.Tensor:
        """A stack of experts of which this rank has some."""
        if self._inside:
            return forward(*args)  # type: ignore[no-any-return]
        return local_experts(self.mesh, module, forward, *args)

    def plain(self, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """A module computed whole on every rank, on plain tensors."""
        if self._inside:
            return forward(*args, **kwargs)

        def enter(x: Any) -> Any:
            return to_local(gather(x), Replicate()) if isinstance(x, DTensor) else x

        self._inside = True
        try:
            with local_parameters(module, Replicate(), deep=True):
                made = forward(*tree_map(enter, args), **tree_map(enter, kwargs))
        finally:
            self._inside = False
        return tree_map(lambda x: to_whole(x, self.mesh) if _is_floats(x) else x, made)

    def carefully(
        self, name: str, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any
    ) -> Any:
        """A module whose code DTensor may not be able to follow; see [Note: carefully]."""
        if self._inside:
            return forward(*args, **kwargs)
        if name not in self._known and torch.is_grad_enabled():
            copies = tree_map(
                lambda x: x.detach().clone() if isinstance(x, DTensor) else x, (args, kwargs)
            )
            devices = [torch.cuda.current_device()] if self.mesh.device_type == "cuda" else []
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                self._attempt(name, module, forward, *copies[0], **copies[1])
        return self._attempt(name, module, forward, *args, **kwargs)

    def _attempt(
        self, name: str, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any
    ) -> Any:
        self._known.add(name)
        while name not in self._alone:
            try:
                return forward(*args, **kwargs)
            except Exception as error:
                if not _is_refusal(error) or not self._step_back(name, module, error):
                    raise
        return self.plain(module, forward, *args, **kwargs)

    def _step_back(self, name: str, module: nn.Module, error: Exception) -> bool:
        """Whether there is another way to compute a module."""
        cut = {
            m
            for m in module.modules()
            if getattr(vars(m).get("forward"), "func", None) == self.column
        }
        if cut - self._together:
            self._together |= cut
            return True
        if any(_is_sliced(m) or _is_elsewhere(m, self.mesh) for m in module.modules()):
            return False
        self._alone.add(name)
        self.whole[name] = f"DTensor: {(str(error).splitlines() or [type(error).__name__])[0]}"
        return True

    def gather_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before a module that reads hidden states, once for all of its layers."""

        def gathered(x: Any) -> Any:
            return (
                gather(x)
                if isinstance(x, DTensor) and x.placements == (Shard(1),) and x.ndim == 3
                else x
            )

        return tree_map(gathered, args), tree_map(gathered, kwargs)

    def pin_outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        """What is whole gets a whole gradient, whatever reads it."""

        def pinned(x: Any) -> Any:
            whole = isinstance(x, DTensor) and x.placements == (Replicate(),) and x.requires_grad
            return wrap(to_local(x, Replicate()), self.mesh, Replicate(), x.shape) if whole else x

        return tree_map(pinned, output)

    def scatter_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After an embedding whose vocabulary is cut."""
        if not isinstance(output, DTensor):
            return output
        where = self.between(output)
        return wrap(
            to_local(output.redistribute(placements=[where]), where), self.mesh, where, output.shape
        )


def gather(x: DTensor) -> DTensor:
    """Whole on every rank; once for all layers that read the same tensor, and so once in backward."""
    if x.placements == (Replicate(),):
        return x
    known: DTensor | None = getattr(x, "_gathered", None)
    if known is None or known.requires_grad != (x.requires_grad and torch.is_grad_enabled()):
        known = x.redistribute(placements=[Replicate()])
        if not local_tensor(
            known
        ).is_contiguous():  # torch 2.11 leaves the padding of uneven parts in between
            known = known.clone(memory_format=torch.contiguous_format)  # type: ignore[assignment]
        x._gathered = known  # type: ignore[attr-defined]
    return known


@contextmanager
def _changed(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def _is_floats(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _is_sliced(module: Any) -> bool:
    return (
        is_packed(module)
        and module.packings["weight"].form.columns != module.packings["weight"].shape[1]
    )


def _is_elsewhere(module: nn.Module, mesh: DeviceMesh) -> bool:
    own = module.parameters(recurse=False)
    return any(isinstance(p, DTensor) and p.device_mesh != mesh for p in own)


def _is_refusal(error: Exception) -> bool:
    """Whether DTensor has no way to compute something: its own code raised, or an operator on parts that do not fit."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return any("torch/distributed/tensor" in name for name in frames[-6:])
