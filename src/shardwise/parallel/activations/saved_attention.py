"""Saves the output of attention of a recomputed block beside the block's input.

Attention dominates long sequences: at 524,288 tokens of an 8B model its forward takes nine tenths
of a block's. Its output is as large as a block's input (and is offloaded with it), so the memory
that saves the inputs of all blocks can instead save attention and, with `recompute_group`, the
input of one block in several, for a fifth less time.

[Note: the seam] Checkpointing takes two contexts for each forward (`context_fn`), one around it and
one around its recomputation: they share what was saved. Within them the operator of
nn/attention/long_context.py asks first.
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
    """The outputs of attention in a model's blocks, saved on the device or on the host."""

    def __init__(self) -> None:
        self.last: SavedCalls | None = None  # of the latest block
        self.any_saved = False

    def around(self, block: nn.Module, inputs: BlockInputs | None) -> Any:
        """The `context_fn` for a block's checkpointing; its modules then attend by the operator."""
        for module in block.modules():
            module.keeps_attention = True  # type: ignore[assignment]  # see varlen.py

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            if not torch.is_grad_enabled():
                return nullcontext(), nullcontext()
            self.any_saved = self.any_saved or (self.last is not None and bool(self.last.outputs))
            calls = SavedCalls(inputs)
            self.last = calls
            return remembering(_Recording(calls)), calls.replay(last=True)

        return contexts

    def idle(self) -> list[str]:
        """A note for the end of the run if nothing was ever saved."""
        if self.any_saved or self.last is None or self.last.outputs:
            return []
        return [
            "advanced.memory.recompute_attention: false kept nothing: no row was one document, "
            "or this model's attention is its own"
        ]


class SavedCalls:
    """The attention of one forward of a block, call by call."""

    def __init__(self, inputs: BlockInputs | None) -> None:
        self.inputs = inputs
        # The output by tokens (or its handle on the host), and the log-sum-exps.
        self.outputs: list[tuple[Any, torch.Tensor] | None] = []

    @contextmanager
    def replay(self, last: bool) -> Iterator[None]:
        """Around a recomputation; the last one frees what was saved."""
        if self.inputs is not None:
            for entry in self.outputs:
                if entry is not None:
                    self.inputs.prefetch(entry[0])
        with remembering(_Replay(self, last)):
            yield


class _Recording:
    """Lets everything be computed, and saves copies: compiled code may overwrite its inputs."""

    def __init__(self, calls: SavedCalls) -> None:
        self._calls = calls

    def recall(self) -> Made | None:
        return None

    def keep(self, made: Made) -> None:
        inputs = self._calls.inputs
        output: Any = made[0].transpose(1, 2).clone()
        if inputs is not None:
            output = inputs.offload(output)
        self._calls.outputs.append((output, made[1].clone()))


class _Replay:
    """Returns what was saved."""

    def __init__(self, calls: SavedCalls, last: bool) -> None:
        self._calls = calls
        self._last = last
        self._number = -1

    def recall(self) -> Made | None:
        self._number += 1
        outputs = self._calls.outputs
        inputs = self._calls.inputs
        entry = outputs[self._number] if self._number < len(outputs) else None
        if entry is None:
            return None
        output, sums = entry
        if inputs is not None:
            output = inputs.restore(output)
        if self._last:
            outputs[self._number] = None
        else:
            sums = sums.clone()
            if inputs is None:
                output = output.clone()
        return output.transpose(1, 2), sums

    def keep(self, made: Made) -> None:
        """Saves nothing: backward asks once."""
