"""What attention made of a recomputed block is kept beside the block's input, and not computed again in backward.

Of long sequences attention is most of the work: at 524,288 tokens of an 8B model its forward takes nine tenths of a
block's. What it makes is as large as a block's input (and goes to the host with it), so the same memory that keeps the
inputs of all blocks keeps attention and, with `recompute_group`, one input in several, for a fifth less time.

[Note: the seam] Recomputation asks for two contexts for each forward (`context_fn`), one around it and one around its
repetition in backward: they share what was kept. Within them the operator of nn/attention/long_context.py asks first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from shardwise.nn.attention.long_context import Made, remembering
from shardwise.parallel.activations.block_inputs import BlockInputs


class SavedAttention:
    """For the blocks of a model: what each forward's attention made, on the device or by `inputs` on the host."""

    def __init__(self) -> None:
        self.last: SavedCalls | None = None  # of the block that was computed last
        self.found = False  # whether anything was ever kept

    def around(self, block: nn.Module, inputs: BlockInputs | None) -> Any:
        """The `context_fn` for a block's recomputation; its modules are told to attend by the operator."""
        for module in block.modules():
            module.keeps_attention = True  # type: ignore[assignment]  # asked for in nn/attention/varlen.py

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            if not torch.is_grad_enabled():
                return nullcontext(), nullcontext()
            self.found = self.found or (self.last is not None and bool(self.last.made))
            self.last = calls = SavedCalls(inputs)
            return remembering(_First(calls)), calls.again(last=True)

        return contexts

    def idle(self) -> list[str]:
        """What is to be told at the end, if it was asked for in vain."""
        if self.found or self.last is None or self.last.made:
            return []
        return [
            "advanced.memory.recompute_attention: false kept nothing: no row was one document, "
            "or this model's attention is its own"
        ]


class SavedCalls:
    """The attention of one forward of a block, call by call."""

    def __init__(self, inputs: BlockInputs | None) -> None:
        self.inputs = inputs
        self.made: list[
            tuple[Any, torch.Tensor] | None
        ] = []  # by tokens, or put away; and the sums

    @contextmanager
    def again(self, last: bool) -> Iterator[None]:
        """Around a repetition; after the last one nothing is kept."""
        if self.inputs is not None:
            for one in self.made:
                if one is not None:
                    self.inputs.start_back(one[0])
        with remembering(_Again(self, last)):
            yield


class _First:
    """Computes all, and keeps copies: compiled code may write over what it was given."""

    def __init__(self, calls: SavedCalls) -> None:
        self._calls = calls

    def recall(self) -> Made | None:
        return None

    def keep(self, made: Made) -> None:
        own, inputs = made[0].transpose(1, 2).clone(), self._calls.inputs
        self._calls.made.append((own if inputs is None else inputs.put_away(own), made[1].clone()))


class _Again:
    """Gives what was kept."""

    def __init__(self, calls: SavedCalls, last: bool) -> None:
        self._calls, self._last, self._number = calls, last, -1

    def recall(self) -> Made | None:
        self._number += 1
        made, inputs = self._calls.made, self._calls.inputs
        found = made[self._number] if self._number < len(made) else None
        if found is None:
            return None
        out, sums = found if inputs is None else (inputs.take_back(found[0]), found[1])
        if self._last:
            made[self._number] = None
        else:
            out, sums = out.clone() if inputs is None else out, sums.clone()
        return out.transpose(1, 2), sums

    def keep(self, made: Made) -> None:
        """Nothing: backward asks once."""
