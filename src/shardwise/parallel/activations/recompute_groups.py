"""Of a group of recomputed blocks the first one's input is kept alone: the others' are computed again from it.

For sequences so long that not even the inputs of all blocks fit device and host together. Where backward comes to a
group, its forward runs once without a gradient to have the inputs back, then each block is recomputed as ever: a
forward more for all blocks but the last of each group, for a group's share of the memory.

[Note: the seam] As in activations.py: hooks on saved tensors around a block see what recomputation keeps of it. A
block's own `forward` makes its output again, beneath the hooks of modules: those of sharding would gather and free in
the wrong order, hence one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import get_device_states, set_device_states

from shardwise.core.compat.torch_private import checkpoint as recompute
from shardwise.core.compat.torch_private import in_backward
from shardwise.core.effective_device import stands_in
from shardwise.parallel.activations.block_inputs import SMALL, BlockInputs
from shardwise.parallel.activations.saved_attention import SavedAttention, SavedCalls


def keep_one_of(
    blocks: Sequence[tuple[str, nn.Module]],
    size: int,
    inputs: BlockInputs | None,
    kept: SavedAttention | None = None,
) -> None:
    """Keeps the input of one block in `size`; before sharding.

    `inputs`: what puts those away, if anything does; `kept`: what keeps attention, likewise.
    """
    for at in range(0, len(blocks), size):
        members = [block for _, block in blocks[at : at + size]]
        if len(members) > 1:
            _Group(members, inputs, kept)


class _Call:
    """What a block was called with besides its input, and the state of the random numbers then."""

    def __init__(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._block, self._rest, self._kwargs, self._learns = (
            block,
            args[1:],
            kwargs,
            args[0].requires_grad,
        )
        self._cpu = None if stands_in() else torch.get_rng_state()
        self._devices, self._states = get_device_states(args[0])
        self.attention: SavedCalls | None = None  # where it was kept

    def again(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, whose first part goes into the next block.

        With a gradient, so that the same compiled code computes it, but nothing is kept for one.
        """
        nothing = saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0))
        attention = (
            self.attention.again(last=False) if self.attention is not None else nullcontext()
        )
        with torch.random.fork_rng(self._devices), torch.enable_grad(), nothing, attention:
            if self._cpu is not None:
                torch.set_rng_state(self._cpu)
            set_device_states(self._devices, self._states)
            out = self._block.forward(
                x.detach().requires_grad_(self._learns), *self._rest, **self._kwargs
            )
        return _first(out).detach()


def _first(output: Any) -> torch.Tensor:
    made: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return made


class _GroupForward:
    """One forward through a group: where it began, how it went on, and in backward the inputs that were made again."""

    def __init__(self, start: torch.Tensor) -> None:
        self.start: Callable[[], torch.Tensor] = lambda: start
        self.calls: list[_Call] = []
        self._made: list[torch.Tensor] = []

    def take(self, number: int) -> torch.Tensor:
        """The input of block `number` of the group; asked for from the last one on, each once."""
        if len(self._made) < number:
            x = self.start()
            self._made = [x := call.again(x) for call in self.calls[:number]]
        found, self._made = self._made[number - 1], self._made[: number - 1]
        return found


class _Derived:
    def __init__(self, way: _GroupForward, number: int) -> None:
        self.way, self.number = way, number


class _Group:
    def __init__(
        self, members: list[nn.Module], inputs: BlockInputs | None, kept: SavedAttention | None
    ) -> None:
        self._inputs, self._kept = inputs, kept
        self._way: _GroupForward | None = None
        self._output: StorageWeakRef | None = None  # of the block before
        self._number = 0
        self._open: saved_tensors_hooks | None = None
        for number, block in enumerate(members):
            # Before recomputation's own hook on the way in, after it on the way out: such hooks are a stack.
            block.register_forward_pre_hook(self._entering(number), prepend=True, with_kwargs=True)
            block.register_forward_hook(self._leaving(number == 0), always_call=True)

    def _entering(self, number: int) -> Any:
        def enter(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not recompute.state(block).enable_hook or not torch.is_grad_enabled():
                return
            x = args[0] if args else None
            if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.nbytes < SMALL:
                self._way = None
            elif number == 0:
                self._way = _GroupForward(x.detach())
            elif self._output is None or StorageWeakRef(x.untyped_storage()) != self._output:
                self._way = None  # not what the block before made: kept as ever
            if self._way is None:
                return
            self._way.calls.append(_Call(block, args, kwargs))
            if number > 0:
                self._number = number
                self._open = saved_tensors_hooks(self._pack, self._unpack)
                self._open.__enter__()

        return enter

    def _leaving(self, first: bool) -> Any:
        def leave(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._open is not None:
                self._open.__exit__()
                self._open = None
            if self._way is None or output is None or in_backward():
                return  # nothing of ours, an error on its way, or a block that backward computes again
            if self._kept is not None:
                self._way.calls[-1].attention = self._kept.last
            if first and self._inputs is not None:
                self._way.start = self._inputs.again(self._way.start)
            self._output = StorageWeakRef(_first(output).untyped_storage())

        return leave

    def _pack(self, tensor: torch.Tensor) -> Any:
        if (
            self._way is None
            or self._output is None
            or StorageWeakRef(tensor.untyped_storage()) != self._output
        ):
            return tensor
        return _Derived(self._way, self._number)

    @staticmethod
    def _unpack(kept: Any) -> Any:
        return kept.way.take(kept.number) if isinstance(kept, _Derived) else kept
