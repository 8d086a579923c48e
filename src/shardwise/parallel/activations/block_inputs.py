"""ZeRO-R's P_a and P_a+cpu: what recomputation keeps of each block, its input, divided over ranks or sent to the host.

[Note: the seam] Non-reentrant recomputation saves a block's positional inputs the way autograd saves any tensor. Hooks
on saved tensors that stand around the block therefore see them; inside the block recomputation's own hooks lie on top,
so ours see nothing else. Once `pack` has returned, nobody holds the full input and its memory is free.

[Note: overlap] On CUDA the copies have streams of their own and the host never waits. Out: the compute stream waits for
the copy of a block's input when the next block packs its own, a whole forward later; until then the input is kept
alive. In: as one block's input is asked for in backward, the copy of the block before it starts, and has that block's
recomputation and backward to finish. Pinned buffers go back to a pool with the event after which they may be
overwritten.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

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

# torch 2.13 has a new name for it and warns of the old one, which is all that 2.11 has.
SMALL = 4096  # bytes; scalars such as running auxiliary losses stay where they are
LARGE = 64 << 20


class BlockInputs:
    """Keeps the inputs of recomputed blocks as slices over `group`, on the host, or both; whole again in backward.

    `group`: ranks that compute the same activations (a tensor-parallel group); None = keep them whole.
    """

    def __init__(self, group: dist.ProcessGroup | None, host: bool, timer: Timer = OFF) -> None:
        assert group is not None or host, "nothing to do"
        self._group = group if group is not None and group.size() > 1 else None
        self._host = _HostBuffers(timer) if host else None
        self._timer = timer
        self.found_any = False
        self._wanted: set[int] = set()
        self._last: weakref.ref[_Kept] | None = None
        self._memo: dict[int, tuple[StorageWeakRef, Any, weakref.ref[_Kept]]] = {}
        self._alive: weakref.WeakSet[_Kept] = weakref.WeakSet()

    def attach(self, blocks: Sequence[tuple[str, nn.Module]]) -> Self:
        """Stands around each block, which must be under recomputation already and not yet be sharded."""
        for position, (name, block) in enumerate(blocks):
            assert hasattr(recompute.state(block), "enable_hook"), f"{name} is not recomputed"
            _Around(self, block, first=position == 0, last=position == len(blocks) - 1)
        return self

    def held(self) -> dict[str, int]:
        """Bytes of block inputs that this rank keeps now, on the device and on the host."""
        bytes_of = {"device": 0, "host": 0}
        for kept in self._alive:
            bytes_of["host" if self._host else "device"] += kept.numel * kept.dtype.itemsize
        return bytes_of

    def expect(self, inputs: Sequence[Any], first: bool) -> None:
        """Before a block saves its inputs: those on the path of the gradient are ours, masks and tables are not.

        So is what comes first, whose gradient nobody wants where embeddings are frozen.
        """
        if first:  # of a new forward pass: there is nothing before it to fetch early
            self._last, self._memo, self.found_any = None, {}, False
        plain = [t for t in inputs if type(t) in (torch.Tensor, FakeTensor)]
        moving = [t for t in plain if (t.requires_grad or t is inputs[0]) and t.is_floating_point()]
        self._wanted = {storage_key(t.untyped_storage()) for t in moving if t.nbytes >= SMALL}
        self.found_any |= bool(moving)

    @torch.no_grad()
    def pack(self, tensor: torch.Tensor) -> Any:
        """A tensor that autograd is about to keep: ours is put away, any other is kept as it is."""
        key = storage_key(tensor.untyped_storage())
        if key not in self._wanted:
            return tensor
        # The same tensor may go into many blocks (an encoder's output): it is put away once.
        look = (version_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        if (
            (seen := self._memo.get(key))
            and seen[1] == look
            and not seen[0].expired()
            and (kept := seen[2]())
        ):
            kept.users += 1
            return kept
        flat = tensor.reshape(-1)
        part = self._slice(flat) if self._group else flat
        kept = _Kept(tensor, part.numel(), self._last)
        if self._host:
            self._host.put(kept, part)
        else:
            kept.near = part.clone() if storage_key(part.untyped_storage()) == key else part
        self._last = weakref.ref(kept)
        self._memo[key] = (StorageWeakRef(tensor.untyped_storage()), look, self._last)
        self._alive.add(kept)
        return kept

    @torch.no_grad()
    def unpack(self, kept: Any) -> torch.Tensor:
        """The tensor as it was; starts to fetch the one that backward needs next."""
        if isinstance(kept, torch.Tensor):
            return kept
        assert isinstance(kept, _Kept)
        kept.users -= 1
        whole = kept.whole
        if whole is None:
            part = self._host.get(kept) if self._host else kept.near
            assert part is not None
            if self._host and kept.before and (before := kept.before()):
                self._host.fetch(before)
            whole = (self._gather(part) if self._group else part)[: math.prod(kept.shape)].view(
                kept.shape
            )
        kept.whole = whole if kept.users > 0 else None
        return whole

    def again(self, start: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """A second way to an input that `start` gives and that a block has just saved, without holding on to it."""
        tensor = start()
        seen = self._memo.get(storage_key(tensor.untyped_storage()))
        kept = seen[2]() if seen is not None and not seen[0].expired() else None
        if kept is None:
            return start
        kept.users += 1
        return lambda: self.unpack(kept)

    @torch.no_grad()
    def put_away(self, tensor: torch.Tensor) -> Any:
        """Sends what a block made besides to the host; the caller must not write to it any more."""
        assert self._host is not None and self._group is None
        kept = _Kept(tensor, tensor.numel(), None)
        self._host.put(kept, tensor.reshape(-1))
        self._alive.add(kept)
        return kept

    def start_back(self, kept: Any) -> None:
        """Starts the copy of what was put away."""
        assert self._host is not None
        self._host.fetch(kept)

    @torch.no_grad()
    def take_back(self, kept: Any) -> torch.Tensor:
        """What was put away, as often as asked for."""
        assert self._host is not None
        return self._host.get(kept).view(kept.shape)

    def _slice(self, flat: torch.Tensor) -> torch.Tensor:
        assert self._group is not None
        ranks, rank = self._group.size(), self._group.rank()
        size = -(-flat.numel() // ranks)
        mine = flat[rank * size : (rank + 1) * size]
        if mine.numel() < size:  # the last slice is filled up: all-gather wants equal ones
            mine = torch.cat([mine, mine.new_zeros(size - mine.numel())])
        return mine

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        assert self._group is not None
        whole = part.new_empty(part.numel() * self._group.size())
        with self._timer.collective("all_gather", whole.nbytes, self._group.size(), part="gather"):
            all_gather(whole, part, group=self._group)
        return whole


class _Kept:
    """One input put away: what it looked like, and its slice on the device (near) or the host (far)."""

    def __init__(self, tensor: torch.Tensor, numel: int, before: weakref.ref[_Kept] | None) -> None:
        self.shape, self.dtype, self.device, self.numel = (
            tensor.shape,
            tensor.dtype,
            tensor.device,
            numel,
        )
        self.before, self.users = before, 1
        self.whole: torch.Tensor | None = None
        self.near: torch.Tensor | None = None
        self.far: torch.Tensor | None = None
        self.buffer: torch.Tensor | None = None  # which `far` lies in
        self.left: torch.cuda.Event | None = None  # the copy to the host is done
        self.arrived: torch.cuda.Event | None = None  # the copy from the host is done
        self.stream: torch.cuda.Stream | None = None  # where it is computed with
        self.host: _HostBuffers | None = None

    def __del__(self) -> None:
        with suppress(Exception):  # at the interpreter's end there may be no CUDA to talk to
            if self.host is not None:
                self.host.drop(self)


class _HostBuffers:
    """Copies to and from pooled host buffers; on CUDA the buffers are pinned and the copies asynchronous."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._free: list[
            tuple[torch.Tensor, Any]
        ] = []  # bytes, and the event after which they may be overwritten
        self._out: torch.cuda.Stream | None = None
        self._in: torch.cuda.Stream | None = None
        self._leaving: _Kept | None = None

    def put(self, kept: _Kept, part: torch.Tensor) -> None:
        """Sends a slice to the host."""
        cuda, size = part.device.type == "cuda", kept.numel * kept.dtype.itemsize
        kept.buffer, idle = self._take(size, part.device)
        kept.far = far = kept.buffer[:size].view(kept.dtype)
        kept.host = self
        if not cuda:
            with self._timer.region("offload"):
                far.copy_(part)
            return
        if self._out is None:
            self._out, self._in = torch.cuda.Stream(part.device), torch.cuda.Stream(part.device)
        kept.stream = current = torch.cuda.current_stream(part.device)
        self._out.wait_stream(current)
        with torch.cuda.stream(self._out), self._timer.region("offload"):
            if idle is not None:
                self._out.wait_event(idle)
            far.copy_(part, non_blocking=True)
            kept.left = self._out.record_event()
        if (leaving := self._leaving) is not None:
            self._release(leaving, current)
        kept.near, self._leaving = part, kept

    def _take(self, size: int, device: torch.device) -> tuple[torch.Tensor, Any]:
        """The smallest free buffer that is large enough, else a new one.

        Batches differ in length, so buffers must serve many sizes: a new one takes the place of the smallest, and is
        rounded up a little. PyTorch rounds pinned memory up to a power of two, which is too much for large ones.
        """
        fitting = [i for i, (buffer, _) in enumerate(self._free) if buffer.numel() >= size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: self._free[i][0].numel()))
        if self._free:
            self._free.pop(min(range(len(self._free)), key=lambda i: self._free[i][0].numel()))
        if device.type != "cuda":
            return on_host(size) if stands_in() else torch.empty(size, dtype=torch.uint8), None
        power = 1 << (size - 1).bit_length()
        if size < LARGE:
            return torch.empty(power, dtype=torch.uint8, pin_memory=True), None
        return host_buffer(aligned(size, power // 16), device), None

    def _release(self, leaving: _Kept, stream: torch.cuda.Stream) -> None:
        """Lets go of an input whose copy has had a block's time: what reuses its memory comes after the copy."""
        assert leaving.left is not None
        stream.wait_event(leaving.left)
        leaving.near = None

    def fetch(self, kept: _Kept) -> None:
        """Starts the copy back, unless it is under way or the input has not left yet."""
        if kept.near is not None or kept.device.type != "cuda":
            return
        assert self._in is not None and kept.far is not None and kept.left is not None
        # Allocated for the compute stream, which may still be using that memory: hence the wait before writing to it.
        near = torch.empty(kept.numel, dtype=kept.dtype, device=kept.device)
        self._in.wait_stream(torch.cuda.current_stream(kept.device))
        with torch.cuda.stream(self._in), self._timer.region("offload"):
            self._in.wait_event(kept.left)
            near.copy_(kept.far, non_blocking=True)
            kept.arrived = self._in.record_event()
        kept.near = near

    def get(self, kept: _Kept) -> torch.Tensor:
        """The slice on the device, for the current stream; a second backward would fetch it again."""
        if kept.device.type != "cuda":
            assert kept.far is not None
            with self._timer.region("offload"):
                return kept.far.clone()
        if self._leaving is kept:
            self._leaving = None  # the last block's input: it is still here
            near, kept.near = kept.near, None
            assert near is not None and kept.left is not None
            # Its memory may be reused as soon as backward is through with it, by which time it must have been read.
            torch.cuda.current_stream(kept.device).wait_event(kept.left)
            return near
        self.fetch(kept)
        near, kept.near = kept.near, None
        assert near is not None and kept.arrived is not None
        torch.cuda.current_stream(kept.device).wait_event(kept.arrived)
        return near

    def drop(self, kept: _Kept) -> None:
        """An input that nobody needs any more: its buffer serves another."""
        if kept.buffer is None:
            return
        if (
            kept.near is not None and kept.arrived is not None and kept.stream is not None
        ):  # fetched for nothing
            kept.stream.wait_event(kept.arrived)
        self._free.append((kept.buffer, kept.arrived or kept.left))


class _Around:
    """Our saved-tensor hooks around one block's forward, but not around its recomputation."""

    def __init__(self, inputs: BlockInputs, block: nn.Module, first: bool, last: bool) -> None:
        self._inputs, self._first, self._last = inputs, first, last
        self._open: saved_tensors_hooks | None = None
        # Before recomputation's own hook on the way in, after it on the way out: hooks on saved tensors are a stack.
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
        if self._last and output is not None and not self._inputs.found_any:
            problem = "this model hands no activation to its blocks as a positional argument, so none would move"
            raise UserError("offload.activations", "cpu", problem, "set it to none")
