"""ZeRO-R's P_a and P_a+cpu: saved inputs of recomputed blocks, sharded over ranks or offloaded.

[Note: the seam] Non-reentrant activation checkpointing saves a block's positional inputs the way
autograd saves any tensor. Hooks on saved tensors around the block therefore see them; inside the
block the hooks of checkpointing lie on top, so ours see nothing else. Once `pack` has returned,
nothing references the full input and its memory is free.

[Note: overlap] On CUDA the copies run on streams of their own and the host never waits. To the
host: the compute stream waits for the copy of a block's input when the next block packs its own, a
whole forward later; until then the input stays alive. To the device: unpacking one block's input in
backward starts the copy of the previous block's, which overlaps with this block's recomputation and
backward. Pinned buffers go back to a pool with the event after which they may be overwritten.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.core.compat.torch_private import FakeTensor, storage_key, version_of
from shardwise.core.compat.torch_private import checkpoint as recompute
from shardwise.core.effective_device import on_host, stands_in
from shardwise.core.errors import UserError
from shardwise.observe.breakdown import OFF, Timer
from shardwise.parallel.offload.pinned_memory import aligned, host_buffer
from shardwise.parallel.zero.collectives import all_gather

SMALL = 4096  # bytes; scalars such as running auxiliary losses stay where they are
LARGE = 64 << 20


class BlockInputs:
    """Saves the inputs of recomputed blocks as shards over `group`, on the host, or both.

    Backward gets them back unsharded. `group`: ranks that compute the same activations (a
    tensor-parallel group); None saves them unsharded.
    """

    def __init__(self, group: dist.ProcessGroup | None, host: bool, timer: Timer = OFF) -> None:
        assert group is not None or host, "nothing to do"
        self._group = group if group is not None and group.size() > 1 else None
        self._host = _HostBuffers(timer) if host else None
        self._timer = timer
        self.any_eligible = False
        self._eligible_storages: set[int] = set()
        self._last: weakref.ref[_SavedInput] | None = None
        self._memo: dict[int, _MemoEntry] = {}
        self._alive: weakref.WeakSet[_SavedInput] = weakref.WeakSet()

    def attach(self, blocks: Sequence[tuple[str, nn.Module]]) -> Self:
        """Installs hooks around each block, recomputed already and not yet sharded."""
        for position, (name, block) in enumerate(blocks):
            assert hasattr(recompute.state(block), "enable_hook"), f"{name} is not recomputed"
            _BlockHooks(self, block, first=position == 0, last=position == len(blocks) - 1)
        return self

    def held(self) -> dict[str, int]:
        """Bytes of block inputs that this rank saves now, on the device and on the host."""
        bytes_of = {"device": 0, "host": 0}
        place = "host" if self._host else "device"
        for saved in self._alive:
            bytes_of[place] += saved.numel * saved.dtype.itemsize
        return bytes_of

    def expect(self, inputs: Sequence[Any], first: bool) -> None:
        """Selects the inputs of a block to save: those that need a gradient, not masks or tables.

        The first input is selected too: it needs no gradient where embeddings are frozen.
        """
        if first:  # of a new forward pass: there is no earlier input to prefetch
            self._last = None
            self._memo = {}
            self.any_eligible = False
        self._eligible_storages = set()
        for tensor in inputs:
            if type(tensor) not in (torch.Tensor, FakeTensor) or not tensor.is_floating_point():
                continue
            if tensor.requires_grad or tensor is inputs[0]:
                self.any_eligible = True
                if tensor.nbytes >= SMALL:
                    self._eligible_storages.add(storage_key(tensor.untyped_storage()))

    @torch.no_grad()
    def pack(self, tensor: torch.Tensor) -> Any:
        """Hook on a tensor that autograd saves: eligible inputs are moved, others returned."""
        key = storage_key(tensor.untyped_storage())
        if key not in self._eligible_storages:
            return tensor
        # The same tensor may go into many blocks (an encoder's output): it is saved once.
        layout = (version_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        saved = self._memoized(key, layout)
        if saved is not None:
            saved.users += 1
            return saved
        flat = tensor.reshape(-1)
        shard = self._shard(flat) if self._group else flat
        saved = _SavedInput(tensor, shard.numel(), self._last)
        if self._host:
            self._host.put(saved, shard)
        else:
            is_view = storage_key(shard.untyped_storage()) == key
            saved.on_device = shard.clone() if is_view else shard
        self._last = weakref.ref(saved)
        self._memo[key] = _MemoEntry(StorageWeakRef(tensor.untyped_storage()), layout, self._last)
        self._alive.add(saved)
        return saved

    @torch.no_grad()
    def unpack(self, saved: Any) -> torch.Tensor:
        """The original tensor; starts to prefetch the one that backward needs next."""
        if isinstance(saved, torch.Tensor):
            return saved
        assert isinstance(saved, _SavedInput)
        saved.users -= 1
        full = saved.full
        if full is None:
            full = self._restore_input(saved)
        saved.full = full if saved.users > 0 else None
        return full

    def share(self, load: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Replaces `load`, which returns a just saved input, by one without a reference to it."""
        saved = self._memoized(storage_key(load().untyped_storage()))
        if saved is None:
            return load
        saved.users += 1
        return lambda: self.unpack(saved)

    @torch.no_grad()
    def offload(self, tensor: torch.Tensor) -> Any:
        """Copies another tensor of a block to the host; the caller must not write to it again."""
        assert self._host is not None and self._group is None
        saved = _SavedInput(tensor, tensor.numel(), None)
        self._host.put(saved, tensor.reshape(-1))
        self._alive.add(saved)
        return saved

    def prefetch(self, saved: Any) -> None:
        """Starts to copy back what `offload` returned."""
        assert self._host is not None
        self._host.fetch(saved)

    @torch.no_grad()
    def restore(self, saved: Any) -> torch.Tensor:
        """The tensor that `offload` copied to the host; may be called several times."""
        assert self._host is not None
        return self._host.get(saved).view(saved.shape)

    def _memoized(self, key: int, layout: Any = None) -> _SavedInput | None:
        """The saved input for a storage (of this layout, if given) that is still in use."""
        entry = self._memo.get(key)
        if entry is None or entry.storage.expired():
            return None
        if layout is not None and entry.layout != layout:
            return None
        return entry.saved()

    def _restore_input(self, saved: _SavedInput) -> torch.Tensor:
        flat = saved.on_device
        if self._host:
            flat = self._host.get(saved)
            previous = saved.previous() if saved.previous is not None else None
            if previous is not None:
                self._host.fetch(previous)
        assert flat is not None
        if self._group:
            flat = self._gather(flat)
        return flat[: math.prod(saved.shape)].view(saved.shape)

    def _shard(self, flat: torch.Tensor) -> torch.Tensor:
        assert self._group is not None
        ranks = self._group.size()
        rank = self._group.rank()
        size = -(-flat.numel() // ranks)
        shard = flat[rank * size : (rank + 1) * size]
        if shard.numel() < size:  # the last shard is padded: all-gather needs equal sizes
            shard = torch.cat([shard, shard.new_zeros(size - shard.numel())])
        return shard

    def _gather(self, shard: torch.Tensor) -> torch.Tensor:
        assert self._group is not None
        ranks = self._group.size()
        full = shard.new_empty(shard.numel() * ranks)
        with self._timer.collective("all_gather", full.nbytes, ranks, part="gather"):
            all_gather(full, shard, group=self._group)
        return full


class _SavedInput:
    """A saved input: its metadata, and its shard on the device or on the host."""

    def __init__(
        self, tensor: torch.Tensor, numel: int, previous: weakref.ref[_SavedInput] | None
    ) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.numel = numel
        self.previous = previous
        self.users = 1
        self.full: torch.Tensor | None = None
        self.on_device: torch.Tensor | None = None
        self.on_host: torch.Tensor | None = None
        self.buffer: torch.Tensor | None = None  # the memory of `on_host`
        self.copied_out: torch.cuda.Event | None = None
        self.copied_in: torch.cuda.Event | None = None
        self.stream: torch.cuda.Stream | None = None  # that computes with it
        self.host: _HostBuffers | None = None

    def __del__(self) -> None:
        with suppress(Exception):  # at interpreter exit CUDA may be gone
            if self.host is not None:
                self.host.drop(self)


class _MemoEntry(NamedTuple):
    """The storage and layout that a saved input was made of."""

    storage: StorageWeakRef
    layout: Any
    saved: weakref.ref[_SavedInput]


class _HostBuffers:
    """Copies to and from pooled host buffers; on CUDA they are pinned, the copies asynchronous."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        # Bytes, and the event after which they may be overwritten.
        self._free: list[tuple[torch.Tensor, Any]] = []
        self._out: torch.cuda.Stream | None = None
        self._in: torch.cuda.Stream | None = None
        self._leaving: _SavedInput | None = None

    def put(self, saved: _SavedInput, shard: torch.Tensor) -> None:
        """Copies a shard to the host."""
        size = saved.numel * saved.dtype.itemsize
        saved.buffer, idle = self._take(size, shard.device)
        on_host = saved.buffer[:size].view(saved.dtype)
        saved.on_host = on_host
        saved.host = self
        if shard.device.type != "cuda":
            with self._timer.region("offload"):
                on_host.copy_(shard)
            return
        if self._out is None:
            self._out = torch.cuda.Stream(shard.device)
            self._in = torch.cuda.Stream(shard.device)
        current = torch.cuda.current_stream(shard.device)
        saved.stream = current
        self._out.wait_stream(current)
        with torch.cuda.stream(self._out), self._timer.region("offload"):
            if idle is not None:
                self._out.wait_event(idle)
            on_host.copy_(shard, non_blocking=True)
            saved.copied_out = self._out.record_event()
        if self._leaving is not None:
            self._release(self._leaving, current)
        saved.on_device = shard
        self._leaving = saved

    def _take(self, size: int, device: torch.device) -> tuple[torch.Tensor, Any]:
        """The smallest free buffer that is large enough, else a new one.

        Batches differ in length, so buffers must serve many sizes: a new one replaces the smallest,
        and is rounded up a little. PyTorch rounds pinned memory up to a power of two, which is too
        much for large ones.
        """

        def capacity(index: int) -> int:
            return self._free[index][0].numel()

        fitting = [i for i in range(len(self._free)) if capacity(i) >= size]
        if fitting:
            return self._free.pop(min(fitting, key=capacity))
        if self._free:
            self._free.pop(min(range(len(self._free)), key=capacity))
        if device.type != "cuda":
            return on_host(size) if stands_in() else torch.empty(size, dtype=torch.uint8), None
        power = 1 << (size - 1).bit_length()
        if size < LARGE:
            return torch.empty(power, dtype=torch.uint8, pin_memory=True), None
        return host_buffer(aligned(size, power // 16), device), None

    def _release(self, leaving: _SavedInput, stream: torch.cuda.Stream) -> None:
        """Frees an input after its copy, which has had a block's time to complete."""
        assert leaving.copied_out is not None
        stream.wait_event(leaving.copied_out)
        leaving.on_device = None

    def fetch(self, saved: _SavedInput) -> None:
        """Starts the copy back, unless it has started or the input is still on the device."""
        if saved.on_device is not None or saved.device.type != "cuda":
            return
        assert self._in is not None and saved.on_host is not None and saved.copied_out is not None
        # Allocated for the compute stream, which may still use that memory: wait before writing.
        target = torch.empty(saved.numel, dtype=saved.dtype, device=saved.device)
        self._in.wait_stream(torch.cuda.current_stream(saved.device))
        with torch.cuda.stream(self._in), self._timer.region("offload"):
            self._in.wait_event(saved.copied_out)
            target.copy_(saved.on_host, non_blocking=True)
            saved.copied_in = self._in.record_event()
        saved.on_device = target

    def get(self, saved: _SavedInput) -> torch.Tensor:
        """The shard on the device, for the current stream; a second backward fetches it again."""
        if saved.device.type != "cuda":
            assert saved.on_host is not None
            with self._timer.region("offload"):
                return saved.on_host.clone()
        if self._leaving is saved:  # the last block's input is still on the device
            self._leaving = None
            # Its memory may be reused right after backward, by when the copy must have read it.
            ready = saved.copied_out
        else:
            self.fetch(saved)
            ready = saved.copied_in
        shard = saved.on_device
        saved.on_device = None
        assert shard is not None and ready is not None
        torch.cuda.current_stream(saved.device).wait_event(ready)
        return shard

    def drop(self, saved: _SavedInput) -> None:
        """Returns the buffer of an input that is no longer needed to the pool."""
        if saved.buffer is None:
            return
        if saved.on_device is not None and saved.copied_in is not None and saved.stream is not None:
            saved.stream.wait_event(saved.copied_in)  # prefetched and never used
        self._free.append((saved.buffer, saved.copied_in or saved.copied_out))


class _BlockHooks:
    """Our saved-tensor hooks around one block's forward, but not around its recomputation."""

    def __init__(self, inputs: BlockInputs, block: nn.Module, first: bool, last: bool) -> None:
        self._inputs = inputs
        self._first = first
        self._last = last
        self._open: saved_tensors_hooks | None = None
        # Enter before the hook of checkpointing, leave after it: saved-tensor hooks are a stack.
        block.register_forward_pre_hook(self._enter, prepend=True)
        block.register_forward_hook(self._leave, always_call=True)

    def _enter(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        if recompute.state(block).enable_hook and torch.is_grad_enabled():
            self._inputs.expect(args, self._first)
            self._open = saved_tensors_hooks(self._inputs.pack, self._inputs.unpack)
            self._open.__enter__()

    def _leave(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._open is None:
            return
        self._open.__exit__()
        self._open = None
        if self._last and output is not None and not self._inputs.any_eligible:
            problem = "this model passes no activation to its blocks as a positional argument"
            raise UserError("offload.activations", "cpu", problem, "set it to none")
