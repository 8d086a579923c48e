"""Tracks a step operator by operator: memory allocated and freed, FLOPs, traffic, and every collective.

The tracker follows storages, not tensors: views cost nothing, and what autograd saves is alive because it is
referenced. It works on fake and on real tensors, so that a rehearsal and a run on CPUs are measured by the same rule.

Workspaces inside operators are not seen. FSDP frees and refills its buffers by resizing their storages, which is not an
operator: `UntypedStorage.resize_` is patched while a tracker is active.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.core.compat.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    in_backward,
    local_tensor,
    schema_of,
    storage_key,
    tree_leaves,
)
from shardwise.core.effective_device import is_host
from shardwise.foresight.rehearse.flops import GROUPED, flops_of, workspace_of
from shardwise.nn.attention.long_context import recalled
from shardwise.nn.models.build import find_blocks
from shardwise.parallel.zero.accounting import Collective, collective_of

ROUND = 512  # a GPU's allocator hands out multiples of it
LONG = torch.ops.shardwise.long_attention.default
NO_KERNEL = ("_unsafe_view", "empty_like", "new_empty", "empty")  # no views by their schema, but nothing is computed


@dataclass
class MemoryBlock:
    """A block of memory: its size, when it was allocated and freed, and by which operator."""

    size: int
    phase: str
    module: str
    operator: str
    born: int
    category: str = ""
    died: int | None = None


@dataclass(frozen=True)
class OperatorWork:
    """FLOPs and traffic of one operator, for the time model."""

    phase: str
    operator: str
    flops: int
    bytes: int
    dtype: str
    largest: tuple[int, ...] = ()  # of a matrix product: rows, inner, columns; of attention: tokens, keys, head


@dataclass
class StepTracker(TorchDispatchMode):
    """Dispatch mode that records everything while it is active; `phase` is set by the caller."""

    model: nn.Module | None = None
    phase: str = "load"
    time: int = 0  # counts events
    now: int = 0
    peak: int = 0
    peak_time: int = 0
    blocks: list[MemoryBlock] = field(default_factory=list)
    work: Counter[OperatorWork] = field(default_factory=Counter)
    passes: list[Counter[Any]] = field(default_factory=list)  # work and collectives of each micro-batch
    collectives: list[tuple[str, str, Collective]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)  # of operators, views and modules: what the host has to do
    marks: list[tuple[int, str]] = field(default_factory=list)  # when each phase began
    to_host: int = 0  # bytes that forward put into the host's memory
    borders: list[tuple[int, str, int]] = field(default_factory=list)  # when each pass over a model's block began

    def __post_init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[MemoryBlock, weakref.ref[Any]]] = {}
        self._hosted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stack: list[str] = []
        self._names = {m: n for n, m in self.model.named_modules()} if self.model is not None else {}
        blocks = find_blocks(self.model) if self.model is not None else []
        self._numbers = {module: number for number, (_, module) in enumerate(blocks)}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keeps compiled blocks compiled under this mode."""
        return True

    def begin(self, phase: str) -> None:
        """Starts a phase of the step."""
        self.phase = phase
        self.marks.append((self.time, phase))

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Activates the tracker, with FSDP's storage resizing and module forwards hooked."""
        resize = torch.UntypedStorage.resize_
        tracker = self

        def tracked_resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            tracker._resized(storage)
            return result

        hooks = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        ]
        torch.UntypedStorage.resize_ = tracked_resize  # type: ignore[assignment, method-assign]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # what it comes down to, rank by rank, is seen in its turn
        kwargs = kwargs or {}
        recalled_saved = False
        if func is LONG and isinstance(args[0], FakeTensor):  # of real ones the operator itself keeps what is to be
            result, recalled_saved = recalled(lambda: func(*args, **kwargs), watched=self)
        else:
            result = func(*args, **kwargs)
        collective = collective_of(func, args, result)
        name = func._schema.name.partition("::")[2]
        phase, module = self.place()
        if collective is not None:
            self.collectives.append((phase, module, collective))
            if self.passes and phase != "update":
                self.passes[-1][sent(phase, collective)] += 1
            for tensor in _tensors((args, kwargs)):
                self._label(tensor, "communication")
        elif schema_of(func).name.startswith("fsdp::"):
            for tensor in _tensors(kwargs.get("out", ())):
                self._label(tensor, "gathered" if "split" in name else "communication")
        for tensor in _tensors(result):
            self._see(tensor, phase, module, name)
            if collective is not None:
                self._label(tensor, "communication")
        if not recalled_saved and (workspace := workspace_of(func, args)):
            block = MemoryBlock(0, phase, module, name, self.time, "temporary")
            self.blocks.append(block)
            self._fill(block, workspace)
            self._free(block)
        no_kernel = func.is_view or name in NO_KERNEL
        self.calls["view" if no_kernel else "operator"] += 1
        if collective is None and not no_kernel and not recalled_saved:
            self._count(func, args, kwargs, result, phase, name)
        return result

    def place(self) -> tuple[str, str]:
        """Returns the current phase and module; recomputation counts as backward."""
        backward = torch._C._current_graph_task_id() != -1
        phase = "forward" if self.phase == "step" else self.phase
        if backward:
            phase = "backward"
        return phase, self._stack[-1] if self._stack else ""

    def hold(self, tensors: Any, category: str) -> None:
        """Registers tensors that exist already under a category."""
        for tensor in _tensors(tensors):
            self._see(tensor, self.phase, "", "held")
            self._label(tensor, category)

    def _see(self, tensor: torch.Tensor, phase: str, module: str, name: str) -> None:
        storage = tensor.untyped_storage()
        entry = self._live.get(storage._cdata)
        if entry is not None and entry[1]() is storage:
            if not is_host(tensor):
                return
            self._free(entry[0])  # seen as it was made, before it was said to be the host's
            del self._live[storage._cdata]
        if not is_host(tensor):
            self._add(storage, phase, module, name)
        elif phase == "forward" and name not in ("held", *NO_KERNEL) and storage not in self._hosted:
            self._hosted.add(storage)
            self.to_host += storage.nbytes()

    def _add(self, storage: torch.UntypedStorage, phase: str, module: str, name: str, category: str = "") -> None:
        key = storage_key(storage)
        block = MemoryBlock(0, phase, module, name, self.time, category)

        def on_freed(_: Any) -> None:
            if (entry := self._live.get(key)) is not None and entry[0] is block:
                del self._live[key]
            self._free(block)

        self._live[key] = block, weakref.ref(storage, on_freed)
        self.blocks.append(block)
        self._fill(block, _rounded(storage.nbytes()))

    def _label(self, tensor: torch.Tensor, category: str) -> None:
        entry = self._live.get(tensor.untyped_storage()._cdata)
        if entry is not None and not entry[0].category:
            entry[0].category = category

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """A storage that is refilled counts as a new block."""
        entry = self._live.get(storage._cdata)
        if entry is None or entry[0].size * (entry[0].died is None) == _rounded(storage.nbytes()):
            return
        block = entry[0]
        self._free(block)
        self._add(storage, *self.place(), block.operator, block.category)

    def _fill(self, block: MemoryBlock, size: int) -> None:
        self.time += 1
        block.size = size
        self.now += size
        if self.now > self.peak:
            self.peak = self.now
            self.peak_time = self.time

    def _free(self, block: MemoryBlock) -> None:
        if block.died is None:
            self.time += 1
            block.died = self.time
            self.now -= block.size

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, phase: str, name: str) -> None:
        inputs = _tensors((args, kwargs))
        outputs = _tensors(result)
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        if written:
            arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            outputs = _tensors([arguments.get(name) for name in written])
        if not outputs or not inputs:
            return
        size = _bytes(inputs) + _bytes(outputs) + 2 * workspace_of(func, args)
        flops = flops_of(func, args, kwargs, result)
        shape: tuple[int, ...] = ()
        kind = inputs[-1].dtype if name == "add_product" else outputs[0].dtype  # the sum is in fp32, the product is not
        if flops and name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "add_product"):
            matrices = [t for t in inputs if t.ndim >= 2]
            left, right = matrices[:2] if name == "_scaled_mm" else matrices[-2:]
            shape = (left.numel() // left.shape[-1], left.shape[-1], right.shape[-1])
        elif flops and name in GROUPED and len(inputs) > 1:
            groups = inputs[1].shape[0] if inputs[1].ndim == 3 else max(1, inputs[-1].numel())
            shape = (inputs[0].numel() // inputs[0].shape[-1] // groups, inputs[0].shape[-1], inputs[1].shape[-1])
        elif flops and ("attn" in name or "attention" in name):
            arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            shape = (arguments["query"].shape[-2], arguments["key"].shape[-2], arguments["query"].shape[-1])
        work = OperatorWork(phase, name, flops, size, str(kind).removeprefix("torch."), shape)
        self.work[work] += 1
        if self.passes and phase != "update":
            self.passes[-1][work] += 1

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.calls["module"] += 1
        self._stack.append(self._names.get(module, type(module).__name__))
        if module is self.model and self.place()[0] == "forward":
            self.passes.append(Counter())
        number = self._numbers.get(module)
        if number is not None and self.place()[0] == "forward":
            self.borders.append((self.time, "forward", number))
            if number == 0:
                self._when_graded(args, "end", -1)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        number = self._numbers.get(module)
        if number is not None and self.place()[0] == "forward":
            self.borders.append((self.time, "loss", number))  # cut short by the next block, but for the last
            self._when_graded(output, "backward", number)

    def _when_graded(self, tree: Any, kind: str, number: int) -> None:
        """Records when backward reaches a tensor: the operator that made it is next."""
        tensor = next((t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.requires_grad), None)
        if tensor is not None:
            tensor.register_hook(lambda _: self.borders.append((self.time, kind, number)))


def sent(phase: str, collective: Collective) -> tuple[str, str, tuple[int, ...], int]:
    """Returns the key under which equal collectives are counted: phase, kind, ranks, bytes."""
    return phase, collective.kind, collective.ranks, collective.bytes


def _tensors(tree: Any) -> list[torch.Tensor]:
    tensors = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, DTensor):
            leaf = local_tensor(leaf)
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
    return tensors


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _rounded(size: int) -> int:
    return -(-size // ROUND) * ROUND
