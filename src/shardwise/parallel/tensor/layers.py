"""How the layers of a tensor-parallel model run.

[Note: plain inside] Sharded layers, stacks of experts, and modules that DTensor cannot compute run
on plain tensors: inputs and parameters are replaced by their local shards, the layer's own forward
is called (of any class: with an adapter, or with a quantized weight), and its output is wrapped in
a DTensor again. A replicated parameter that is multiplied with a shard gets a partial gradient.

[Note: fallback] DTensor rejects operators it has no rule for before it computes anything, and so on
every rank alike. The innermost module around is then run again with the outputs of its column-cut
layers gathered (which helps fused projections that are split in their own way). If that fails too,
it runs on plain tensors, with its parameters gathered meanwhile. A module's first run is without
gradients: activation recomputation would otherwise hold tensors of a failed attempt.
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
from shardwise.parallel.tensor.local import (
    local_parameters,
    redistribute_local,
    to_local,
    to_whole,
    wrap,
)
from shardwise.parallel.tensor.local_blocks import LocalBlock, LocalRun, gather_inputs, ranks_of
from shardwise.parallel.tensor.quantized import is_packed
from shardwise.parallel.tensor.rng import local_dropout, own_stream

Forward = Callable[..., Any]


def exchange(module: Any, forward: Forward, *args: Any) -> None:
    """Replaces a module's forward by one that is called with `args` and the present forward."""
    module.forward = partial(forward, *args, module.forward)


class TensorParallel:
    """A model sharded over a tensor-parallel axis.

    `unsharded`: the modules that every rank computes in full, and why. `sequence`: shard the hidden
    states between layers along the sequence. `local`: blocks that run on plain tensors.
    """

    def __init__(self, mesh: DeviceMesh, sequence: bool) -> None:
        self.mesh = mesh
        self.sequence = sequence
        self.unsharded: dict[str, str] = {}
        self._gathered_columns: set[nn.Module] = (
            set()
        )  # column-cut layers whose outputs are gathered
        self._tried: set[str] = set()  # modules that have run once
        self._plain: set[str] = set()  # modules that fell back to plain tensors
        self.run = LocalRun(ranks_of(mesh))
        self.local: dict[nn.Module, LocalBlock] = {}
        self._inside = False  # whether a module that computes on plain tensors is running
        add_rules()

    def inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns arguments for the model's forward from inputs that are equal on every rank."""
        return {name: self._replicated(x) for name, x in given.items()}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Enter it around forward and backward: recomputed blocks need the same replacements."""
        with implicit_replication(), local_heads(self.mesh), local_dropout(self.mesh):
            yield

    def between(self, x: DTensor) -> Placement:
        """Returns the placement of hidden states between layers."""
        return Shard(1) if self.sequence and x.ndim == 3 else Replicate()

    def column(self, module: Any, width: int, forward: Forward, x: torch.Tensor) -> torch.Tensor:
        """Forward of a layer whose `width` outputs are sharded."""
        if self.run.width:
            return self.run.column(forward, x)  # type: ignore[no-any-return]
        if self._inside:
            return forward(x)  # type: ignore[no-any-return]
        local = to_local(gather(to_whole(x, self.mesh)), Partial())
        changes = {}
        if is_transposed(module):
            changes["nf"] = module.weight.to_local().shape[1]  # the width of a Conv1D
        with local_parameters(module, Partial()), _changed(module, **changes):
            y = forward(local)
        output = wrap(y, self.mesh, Shard(y.ndim - 1), torch.Size((*y.shape[:-1], width)))
        return gather(output) if module in self._gathered_columns else output

    def row(self, module: Any, forward: Forward, x: torch.Tensor) -> torch.Tensor:
        """Forward of a layer whose inputs are sharded: the outputs of all ranks are summed."""
        if self.run.width:
            return self.run.row(forward, x)  # type: ignore[no-any-return]
        if self._inside:
            return forward(x)  # type: ignore[no-any-return]
        local = redistribute_local(to_whole(x, self.mesh), Shard(x.ndim - 1))
        drops = module.training and getattr(module, "lora_dropout", 0)
        changes = {"lora_group": self.mesh.get_group()} if isinstance(module, LoraLayer) else {}
        with (
            local_parameters(module, Partial(), once=("bias",)),
            _changed(module, **changes),
            own_stream(self.mesh) if drops else nullcontext(),
        ):
            y = forward(local)
        output = wrap(y, self.mesh, Partial(), y.shape)
        return output.redistribute(placements=[self.between(output)])

    def experts(self, module: Any, forward: Forward, *args: Any) -> torch.Tensor:
        """Forward of a stack of experts that is sharded over ranks."""
        if self.run.width:
            return self.run.experts(module, forward, *args)
        if self._inside:
            return forward(*args)  # type: ignore[no-any-return]
        return local_experts(self.mesh, module, forward, *args)

    def plain(self, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Forward of a module that every rank computes in full, on plain tensors."""
        if self._inside:
            return forward(*args, **kwargs)

        def enter(x: Any) -> Any:
            return to_local(gather(x), Replicate()) if isinstance(x, DTensor) else x

        self._inside = True
        try:
            with local_parameters(module, Replicate(), deep=True):
                output = forward(*tree_map(enter, args), **tree_map(enter, kwargs))
        finally:
            self._inside = False
        return tree_map(self._replicated, output)

    def with_fallback(
        self, name: str, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any
    ) -> Any:
        """Forward of a module whose code DTensor may not be able to run; see [Note: fallback]."""
        if self._inside or self.run.width:
            return forward(*args, **kwargs)
        if name not in self._tried and torch.is_grad_enabled():
            copied_args, copied_kwargs = tree_map(_copied, (args, kwargs))
            devices = [torch.cuda.current_device()] if self.mesh.device_type == "cuda" else []
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                self._attempt(name, module, forward, *copied_args, **copied_kwargs)
        return self._attempt(name, module, forward, *args, **kwargs)

    def _attempt(
        self, name: str, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any
    ) -> Any:
        self._tried.add(name)
        while name not in self._plain:
            try:
                return forward(*args, **kwargs)
            except Exception as error:
                if not _is_refusal(error) or not self._fall_back(name, module, error):
                    raise
        return self.plain(module, forward, *args, **kwargs)

    def _fall_back(self, name: str, module: nn.Module, error: Exception) -> bool:
        """Chooses the next way to compute a module; False if there is none."""
        columns = {m for m in module.modules() if self._is_column(m)}
        if columns - self._gathered_columns:
            self._gathered_columns |= columns
            return True
        if any(_is_sliced(m) or _is_elsewhere(m, self.mesh) for m in module.modules()):
            return False
        self._plain.add(name)
        self.unsharded[name] = f"DTensor: {(str(error).splitlines() or [type(error).__name__])[0]}"
        return True

    def _is_column(self, module: nn.Module) -> bool:
        return getattr(vars(module).get("forward"), "func", None) == self.column

    def _replicated(self, x: Any) -> Any:
        is_floats = isinstance(x, torch.Tensor) and x.is_floating_point()
        return to_whole(x, self.mesh) if is_floats else x

    def gather_inputs(self, has_columns: bool, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Pre-hook of a module that reads hidden states: gathers once for all of its layers.

        In local blocks, only modules with column layers of their own (`has_columns`) need them all.
        """
        if self.run.width:
            return gather_inputs(self.run, module, args, kwargs) if has_columns else None

        def gathered(x: Any) -> Any:
            if isinstance(x, DTensor) and x.placements == (Shard(1),) and x.ndim == 3:
                return gather(x)
            return x

        return tree_map(gathered, args), tree_map(gathered, kwargs)

    def pin_outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook: replicated outputs get replicated gradients, whatever reads them."""
        if self.run.width:
            return output

        def pinned(x: Any) -> Any:
            if isinstance(x, DTensor) and x.placements == (Replicate(),) and x.requires_grad:
                return wrap(to_local(x, Replicate()), self.mesh, Replicate(), x.shape)
            return x

        return tree_map(pinned, output)

    def scatter_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook of an embedding whose vocabulary is sharded."""
        if not isinstance(output, DTensor):
            return output
        placement = self.between(output)
        return wrap(redistribute_local(output, placement), self.mesh, placement, output.shape)


def gather(x: DTensor) -> DTensor:
    """Returns a replicated DTensor, cached on `x`: one gather for all readers, one in backward."""
    if x.placements == (Replicate(),):
        return x
    cached: DTensor | None = getattr(x, "_gathered", None)
    if cached is None or cached.requires_grad != (x.requires_grad and torch.is_grad_enabled()):
        cached = x.redistribute(placements=[Replicate()])
        # torch 2.11 leaves the padding of uneven shards in between.
        if not local_tensor(cached).is_contiguous():
            cached = cached.clone(memory_format=torch.contiguous_format)  # type: ignore[assignment]
        x._gathered = cached  # type: ignore[attr-defined]
    return cached


@contextmanager
def _changed(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, DTensor) else x


def _is_sliced(module: Any) -> bool:
    if not is_packed(module):
        return False
    packing = module.packings["weight"]
    return bool(packing.form.columns != packing.shape[1])


def _is_elsewhere(module: nn.Module, mesh: DeviceMesh) -> bool:
    parameters = module.parameters(recurse=False)
    return any(isinstance(p, DTensor) and p.device_mesh != mesh for p in parameters)


def _is_refusal(error: Exception) -> bool:
    """Whether DTensor cannot compute something: its own code raised, or an operator on shards."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return any("torch/distributed/tensor" in name for name in frames[-6:])
