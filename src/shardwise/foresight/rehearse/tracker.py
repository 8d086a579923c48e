"""What a step does, operator by operator: memory as it comes and goes, arithmetic, traffic, and every collective.

The tracker follows storages, not tensors: views cost nothing, and what autograd keeps is alive because it keeps it. It
works on fake tensors and on real ones alike, so that a rehearsal and a run on CPUs are measured by the same rule.

Operators' inner workspaces are not seen. FSDP frees and fills its buffers by resizing their storages, which is no
operator: `UntypedStorage.resize_` is followed while a tracker is active.
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
    """A piece of memory: how large, when it came (and went), and what it was made by."""

    size: int
    phase: str
    module: str
    operator: str
    born: int
    category: str = ""
    died: int | None = None


@dataclass(frozen=True)
class OperatorWork:
    """What one operator did: for a model of its time."""

    phase: str
    operator: str
    flops: int
    bytes: int
    dtype: str
    largest: tuple[int, ...] = ()  # of a matrix product: rows, inner, columns; of attention: tokens, keys, head


@dataclass
class StepTracker(TorchDispatchMode):
    """Follows everything that happens while it is active; `phase` is what the caller says is going on."""

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
        """Compiled blocks stay compiled under it."""
        return True

    def begin(self, phase: str) -> None:
        """From here on."""
        self.phase = phase
        self.marks.append((self.time, phase))

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Active, with FSDP's resizing and the modules' forwards in view."""
        resize = torch.UntypedStorage.resize_
        tracker = self

        def followed(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            tracker._resized(storage)
            return result

        hooks = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        ]
        torch.UntypedStorage.resize_ = followed  # type: ignore[assignment, method-assign]
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
        kwargs, there = kwargs or {}, False
        if func is LONG and isinstance(args[0], FakeTensor):  # of real ones the operator itself keeps what is to be
            result, there = recalled(lambda: func(*args, **kwargs), watched=self)
        else:
            result = func(*args, **kwargs)
        found = collective_of(func, args, result)
        name = schema_of(func).name.partition("::")[2]
        phase, module = self.place()
        if found is not None:
            self.collectives.append((phase, module, found))
            if self.passes and phase != "update":
                self.passes[-1][sent(phase, found)] += 1
            for tensor in _tensors((args, kwargs)):
                self._label(tensor, "communication")
        elif schema_of(func).name.startswith("fsdp::"):
            for tensor in _tensors(kwargs.get("out", ())):
                self._label(tensor, "gathered" if "split" in name else "communication")
        for tensor in _tensors(result):
            self._see(tensor, phase, module, name)
            if found is not None:
                self._label(tensor, "communication")
        if not there and (inner := workspace_of(func, args)):
            block = MemoryBlock(0, phase, module, name, self.time, "temporary")
            self.blocks.append(block)
            self._fill(block, inner)
            self._free(block)
        light = func.is_view or name in NO_KERNEL
        self.calls["view" if light else "operator"] += 1
        if found is None and not light and not there:
            self._count(func, args, kwargs, result, phase, name)
        return result

    def place(self) -> tuple[str, str]:
        """The phase and the module in which something happens; recomputation counts as backward."""
        backward = in_backward()
        phase = "backward" if backward else "forward" if self.phase == "step" else self.phase
        return phase, self._stack[-1] if self._stack else ""

    def hold(self, tensors: Any, category: str) -> None:
        """Says what tensors are that are there already."""
        for tensor in _tensors(tensors):
            self._see(tensor, self.phase, "", "held")
            self._label(tensor, category)

    def _see(self, tensor: torch.Tensor, phase: str, module: str, name: str) -> None:
        storage = tensor.untyped_storage()
        known = self._live.get(storage_key(storage))
        if known is not None and known[1]() is storage:
            if not is_host(tensor):
                return
            self._free(known[0])  # seen as it was made, before it was said to be the host's
            del self._live[storage_key(storage)]
        if not is_host(tensor):
            self._add(storage, phase, module, name)
        elif phase == "forward" and name not in ("held", *NO_KERNEL) and storage not in self._hosted:
            self._hosted.add(storage)
            self.to_host += storage.nbytes()

    def _add(self, storage: torch.UntypedStorage, phase: str, module: str, name: str, category: str = "") -> None:
        key = storage_key(storage)
        block = MemoryBlock(0, phase, module, name, self.time, category)

        def gone(_: Any) -> None:
            if (known := self._live.get(key)) is not None and known[0] is block:
                del self._live[key]
            self._free(block)

        self._live[key] = block, weakref.ref(storage, gone)
        self.blocks.append(block)
        self._fill(block, _rounded(storage.nbytes()))

    def _label(self, tensor: torch.Tensor, category: str) -> None:
        known = self._live.get(storage_key(tensor.untyped_storage()))
        if known is not None and not known[0].category:
            known[0].category = category

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """A storage that is filled again counts as a new block."""
        known = self._live.get(storage_key(storage))
        if known is None or known[0].size * (known[0].died is None) == _rounded(storage.nbytes()):
            return
        block = known[0]
        self._free(block)
        self._add(storage, *self.place(), block.operator, block.category)

    def _fill(self, block: MemoryBlock, size: int) -> None:
        self.time += 1
        block.size = size
        self.now += size
        if self.now > self.peak:
            self.peak, self.peak_time = self.now, self.time

    def _free(self, block: MemoryBlock) -> None:
        if block.died is None:
            self.time += 1
            block.died = self.time
            self.now -= block.size

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, phase: str, name: str) -> None:
        given, made = _tensors((args, kwargs)), _tensors(result)
        written = {a.name for a in schema_of(func).arguments if a.alias_info is not None and a.alias_info.is_write}
        if written:
            named = dict(zip((a.name for a in schema_of(func).arguments), args, strict=False)) | kwargs
            made = _tensors([named.get(name) for name in written])
        if not made or not given:
            return
        size = _bytes(given) + _bytes(made) + 2 * workspace_of(func, args)
        flops = flops_of(func, args, kwargs, result)
        shape: tuple[int, ...] = ()
        kind = given[-1].dtype if name == "add_product" else made[0].dtype  # the sum is in fp32, the product is not
        if flops and name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "add_product"):
            matrices = [t for t in given if t.ndim >= 2]
            left, right = matrices[:2] if name == "_scaled_mm" else matrices[-2:]
            shape = (left.numel() // left.shape[-1], left.shape[-1], right.shape[-1])
        elif flops and name in GROUPED and len(given) > 1:
            groups = given[1].shape[0] if given[1].ndim == 3 else max(1, given[-1].numel())
            shape = (given[0].numel() // given[0].shape[-1] // groups, given[0].shape[-1], given[1].shape[-1])
        elif flops and ("attn" in name or "attention" in name):
            named = dict(zip((a.name for a in schema_of(func).arguments), args, strict=False)) | kwargs
            shape = (named["query"].shape[-2], named["key"].shape[-2], named["query"].shape[-1])
        done = OperatorWork(phase, name, flops, size, str(kind).removeprefix("torch."), shape)
        self.work[done] += 1
        if self.passes and phase != "update":
            self.passes[-1][done] += 1

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
        """Backward has come to a tensor: what made it is next."""
        tensor = next((t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.requires_grad), None)
        if tensor is not None:
            tensor.register_hook(lambda _: self.borders.append((self.time, kind, number)))


def sent(phase: str, one: Collective) -> tuple[str, str, tuple[int, ...], int]:
    """What makes a collective like another: phase, kind, ranks, bytes."""
    return phase, one.kind, one.ranks, one.bytes


def _tensors(tree: Any) -> list[torch.Tensor]:
    found = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, DTensor):
            leaf = local_tensor(leaf)
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
    return found


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _rounded(size: int) -> int:
    return -(-size // ROUND) * ROUND
