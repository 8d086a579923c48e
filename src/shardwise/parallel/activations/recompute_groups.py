"""Groups of recomputed blocks that save only the first block's input and derive the others.

For sequences so long that not even the inputs of all blocks fit on device and host together. When
backward reaches a group, its forward runs once without a gradient to restore the inputs, then each
block is recomputed as usual. This costs one more forward of every block but the last of each group,
and divides the memory for inputs by the size of a group.

[Note: the seam] As in block_inputs.py, hooks on saved tensors around a block see what checkpointing
saves of it. The block's output is derived by its own `forward`, beneath the module hooks: those of
FSDP would gather and free in the wrong order, so this works on one rank only.
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


def save_inputs_by_group(
    blocks: Sequence[tuple[str, nn.Module]],
    size: int,
    inputs: BlockInputs | None,
    attention: SavedAttention | None = None,
) -> None:
    """Saves the input of one block in every group of `size`; call before sharding.

    `inputs`: what offloads those inputs, if anything; `attention`: what saves attention's outputs.
    """
    for start in range(0, len(blocks), size):
        members = [block for _, block in blocks[start : start + size]]
        if len(members) > 1:
            _Group(members, inputs, attention)


class _BlockCall:
    """A block's arguments besides its input, and the state of the random numbers at the call."""

    def __init__(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._block = block
        self._other_args = args[1:]
        self._kwargs = kwargs
        self._requires_grad = args[0].requires_grad
        self._cpu_state = None if stands_in() else torch.get_rng_state()
        self._devices, self._device_states = get_device_states(args[0])
        self.attention: SavedCalls | None = None  # if it was saved

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, whose first part is the next block's input.

        Gradients are enabled, so that the same compiled code runs, but nothing is saved for them.
        """
        save_nothing = saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0))
        attention = nullcontext() if self.attention is None else self.attention.replay(last=False)
        with torch.random.fork_rng(self._devices), torch.enable_grad(), save_nothing, attention:
            if self._cpu_state is not None:
                torch.set_rng_state(self._cpu_state)
            set_device_states(self._devices, self._device_states)
            x = x.detach().requires_grad_(self._requires_grad)
            output = self._block.forward(x, *self._other_args, **self._kwargs)
        return _first_tensor(output).detach()


def _first_tensor(output: Any) -> torch.Tensor:
    tensor: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return tensor


class _GroupForward:
    """One forward through a group: its input, its calls, and in backward the derived inputs."""

    def __init__(self, start: torch.Tensor) -> None:
        self.load_start: Callable[[], torch.Tensor] = lambda: start
        self.calls: list[_BlockCall] = []
        self._derived: list[torch.Tensor] = []

    def take_input(self, number: int) -> torch.Tensor:
        """The input of block `number`; each is taken once, from the last block to the first."""
        if len(self._derived) < number:
            x = self.load_start()
            self._derived = []
            for call in self.calls[:number]:
                x = call.run(x)
                self._derived.append(x)
        taken = self._derived[number - 1]
        self._derived = self._derived[: number - 1]
        return taken


class _DerivedInput:
    """Stands for a saved input: block `number` of a group's forward."""

    def __init__(self, forward: _GroupForward, number: int) -> None:
        self.forward = forward
        self.number = number


class _Group:
    """Hooks around the blocks of a group."""

    def __init__(
        self, members: list[nn.Module], inputs: BlockInputs | None, attention: SavedAttention | None
    ) -> None:
        self._inputs = inputs
        self._attention = attention
        self._forward: _GroupForward | None = None
        self._output: StorageWeakRef | None = None  # of the previous block
        self._number = 0
        self._open: saved_tensors_hooks | None = None
        for number, block in enumerate(members):
            # Enter before checkpointing's hook, leave after it: saved-tensor hooks are a stack.
            block.register_forward_pre_hook(
                self._enter_hook(number), prepend=True, with_kwargs=True
            )
            block.register_forward_hook(self._leave_hook(number == 0), always_call=True)

    def _enter_hook(self, number: int) -> Any:
        def enter(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not recompute.state(block).enable_hook or not torch.is_grad_enabled():
                return
            x = args[0] if args else None
            if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.nbytes < SMALL:
                self._forward = None
            elif number == 0:
                self._forward = _GroupForward(x.detach())
            elif not self._is_output(x):
                self._forward = None  # not the previous block's output: saved as usual
            if self._forward is None:
                return
            self._forward.calls.append(_BlockCall(block, args, kwargs))
            if number > 0:
                self._number = number
                self._open = saved_tensors_hooks(self._pack, self._unpack)
                self._open.__enter__()

        return enter

    def _leave_hook(self, first: bool) -> Any:
        def leave(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._open is not None:
                self._open.__exit__()
                self._open = None
            if self._forward is None or output is None or in_backward():
                return  # not handled here, an error, or a recomputation in backward
            if self._attention is not None:
                self._forward.calls[-1].attention = self._attention.last
            if first and self._inputs is not None:
                self._forward.load_start = self._inputs.share(self._forward.load_start)
            self._output = StorageWeakRef(_first_tensor(output).untyped_storage())

        return leave

    def _is_output(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the previous block's output."""
        return self._output is not None and (
            StorageWeakRef(tensor.untyped_storage()) == self._output
        )

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self._forward is None or not self._is_output(tensor):
            return tensor
        return _DerivedInput(self._forward, self._number)

    @staticmethod
    def _unpack(saved: Any) -> Any:
        if isinstance(saved, _DerivedInput):
            return saved.forward.take_input(saved.number)
        return saved
