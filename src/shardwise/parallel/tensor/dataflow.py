"""Traces one forward: which linear layers feed which, where attention is, and what chooses experts.

Every tensor carries the names of what it was computed from: a block's input is "residual", a linear
layer's output is that layer alone. A reader of a layer's output thus knows it by name, through any
reshaping, norm or activation in between, and without knowledge of the model's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.core.compat.torch_private import TorchDispatchMode, tree_iter
from shardwise.nn.adapters.layers import is_linear, is_transposed
from shardwise.nn.models.build import find_blocks

RESIDUAL = "residual"
HIGHEST = 3
SCORES = ("scaled_dot_product", "_softmax", "softmax", "_flash_attention", "_efficient_attention")
# Operators for which DTensor has no rule or a wrong one, or which other libraries' kernels replace.
UNSUPPORTED = (
    "nonzero",
    "convolution",
    "std",
    "sort",
    "bincount",
    "histc",
    "masked_scatter",
    "index_put",
    "unique_dim",
)
CHOICES = ("topk", "argmax", "sort", "one_hot")


@dataclass
class ForwardTrace:
    """What a forward showed of the linear layers inside blocks, by name.

    `readers`: for each layer, the layers that read its output. `attention_inputs`: layers whose
    output meets a softmax over scores; `attention`: modules whose own forward computes the scores.
    `ranked`: layers whose output is ranked, and modules that rank in their own forward.
    `unsupported`: modules whose own forward needs full tensors, and the operation that does.
    """

    readers: dict[str, set[str]] = field(default_factory=dict)
    reads_residual: set[str] = field(default_factory=set)
    called: list[str] = field(default_factory=list)
    attention_inputs: set[str] = field(default_factory=set)
    attention: set[str] = field(default_factory=set)
    ranked: set[str] = field(default_factory=set)
    unsupported: dict[str, str] = field(default_factory=dict)

    def height(self, name: str, path: frozenset[str] = frozenset()) -> int:
        """Returns the most linear layers that follow on a path to the block's end, up to HIGHEST.

        `path`: the layers before `name` on the path.
        """
        if len(path) == HIGHEST:  # the number of paths multiplies with every step
            return 0
        readers = self.readers.get(name, set()) - path - {name}
        return 1 + max((self.height(reader, path | {name}) for reader in readers), default=-1)

    def is_fed(self, name: str) -> bool:
        """Whether a layer reads the output of another linear layer."""
        return any(name in readers for readers in self.readers.values())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_iter(tree) if isinstance(x, torch.Tensor)]


class _Taint(TorchDispatchMode):
    def __init__(self, trace: ForwardTrace, stack: list[str]) -> None:
        super().__init__()
        self.names: Any = WeakIdKeyDictionary()
        self.computed: Any = WeakIdKeyDictionary()  # tensors that depend on parameters
        self._trace = trace
        self._stack = stack

    def get(self, x: torch.Tensor) -> frozenset[str]:
        names: frozenset[str] = self.names.get(x, frozenset())
        return names

    def _is_computed(self, x: Any) -> bool:
        return isinstance(x, nn.Parameter) or (isinstance(x, torch.Tensor) and x in self.computed)

    def _unsupported(self, operator: str, args: Any) -> str:
        """Returns what an operator that reads hidden states needs full plain tensors for."""
        if operator.strip("_") in UNSUPPORTED:
            return operator.strip("_")
        if operator.endswith("_") and not self._is_computed(args[0]):
            return "into a buffer"
        if operator == "cat" and any(x.ndim == 1 and not len(x) for x in args[0]):
            return "with an empty cache"
        return ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        names = frozenset().union(*map(self.get, inputs))
        operator = func.__name__.split(".")[0]
        if names:
            written = _tensors(output)
            if operator.endswith("_") and args and isinstance(args[0], torch.Tensor):
                written.append(args[0])
            for x in written:
                self.names[x] = self.get(x) | names
        if any(word in operator for word in SCORES) and _is_scores(operator, args):
            self._trace.attention_inputs |= names - {RESIDUAL}
            self._trace.attention.update(self._stack[-1:])
        if any(map(self._is_computed, inputs)):
            for x in _tensors(output):
                self.computed[x] = True
            if self._stack and (reason := self._unsupported(operator, args)):
                self._trace.unsupported.setdefault(self._stack[-1], reason)
        if operator in CHOICES:
            self._trace.ranked |= (names - {RESIDUAL}) | set(self._stack[-1:])
        return output


def _is_scores(operator: str, args: Any) -> bool:
    """A softmax over scores has a dim for heads; a router's has none."""
    return "softmax" not in operator or (isinstance(args[0], torch.Tensor) and args[0].ndim >= 4)


def trace_forward(model: nn.Module, inputs: dict[str, Any]) -> ForwardTrace:
    """Runs one forward without gradients and returns what it showed."""
    trace = ForwardTrace()
    stack: list[str] = []
    taint = _Taint(trace, stack)
    with torch.no_grad(), taint, _hooks(model, trace, taint, stack):
        model(**inputs)
    return trace


@contextmanager
def _hooks(
    model: nn.Module, trace: ForwardTrace, taint: _Taint, stack: list[str]
) -> Iterator[None]:
    inside: set[nn.Module] = set()
    handles = []
    for _, block in find_blocks(model):
        inside.update(block.modules())
        handles.append(block.register_forward_pre_hook(_block_input(taint), with_kwargs=True))
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
        if module in inside and is_linear(module):
            before = _linear_input(name, trace, taint)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(_linear_output(name, trace, taint)))
        handles.append(module.register_forward_hook(lambda *_: stack.pop() and None))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _block_input(taint: _Taint) -> Any:
    """A block's input, and whatever has its width (an encoder's output), is the residual stream."""

    def hook(_: Any, args: Any, kwargs: Any) -> None:
        floats = [x for x in _tensors((args, kwargs)) if x.is_floating_point()]
        for x in floats:
            if x.ndim == floats[0].ndim and x.shape[-1] == floats[0].shape[-1]:
                taint.names[x] = frozenset({RESIDUAL})

    return hook


def _linear_input(name: str, trace: ForwardTrace, taint: _Taint) -> Any:
    def hook(_: Any, args: Any, kwargs: Any) -> None:
        names = taint.get(_tensors((args, kwargs))[0])
        if name not in trace.readers:
            trace.readers[name] = set()
            trace.called.append(name)
        if RESIDUAL in names:
            trace.reads_residual.add(name)
        else:
            for source in names:
                trace.readers.setdefault(source, set()).add(name)

    return hook


def _linear_output(name: str, trace: ForwardTrace, taint: _Taint) -> Any:
    def hook(module: Any, args: Any, output: Any) -> None:
        if not _is_product(module, args, output):
            trace.unsupported[name] = "more than a product"
        for x in _tensors(output):
            taint.names[x] = frozenset({name})

    return hook


def _is_product(module: Any, args: Any, output: Any) -> bool:
    """Whether a linear layer of any class multiplied with its weight, and no more."""
    if type(module).forward is nn.Linear.forward:
        return True
    if len(args) != 1 or not isinstance(output, torch.Tensor):
        return False
    weight = module.weight.t() if is_transposed(module) else module.weight
    expected = nn.functional.linear(args[0], weight, module.bias)
    return expected.shape == output.shape and torch.allclose(expected, output, atol=1e-5)
