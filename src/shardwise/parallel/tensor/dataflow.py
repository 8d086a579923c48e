"""Watches one forward pass: which linear layers feed which, where attention happens, and what chooses experts.

Every tensor carries the names of what it was made from: a block's input is "residual", a linear layer's output is that
layer alone. So what reads a layer's output knows it by name, through any reshaping, norm or activation in between, and
no model's code has to be known.
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
# What DTensor has no rule for, or a wrong one, or what kernels of other libraries do in its place.
UNSUITED = (
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
class Seen:
    """What a forward pass showed of the linear layers inside blocks, by name."""

    feeds: dict[str, set[str]] = field(
        default_factory=dict
    )  # layer → layers that read what it made
    reads_residual: set[str] = field(default_factory=set)
    called: list[str] = field(default_factory=list)
    attends: set[str] = field(
        default_factory=set
    )  # layers whose output meets a softmax over scores
    chooses: set[str] = field(
        default_factory=set
    )  # layers whose output is ranked, modules that rank in their forward
    attention: set[str] = field(
        default_factory=set
    )  # modules in whose own forward scores were made
    unsuited: dict[str, str] = field(
        default_factory=dict
    )  # modules whose own forward does what parts do not allow

    def height(self, name: str, above: frozenset[str] = frozenset()) -> int:
        """Linear layers still to come on the longest way from here to the end of the block; at most HIGHEST of them."""
        if len(above) == HIGHEST:  # ways multiply with every step
            return 0
        after = self.feeds.get(name, set()) - above - {name}
        return 1 + max(self.height(one, above | {name}) for one in after) if after else 0

    def fed(self, name: str) -> bool:
        """Whether it reads what another linear layer made."""
        return any(name in after for after in self.feeds.values())


class _Taint(TorchDispatchMode):
    def __init__(self, seen: Seen, stack: list[str]) -> None:
        super().__init__()
        self.of: Any = WeakIdKeyDictionary()
        self.computed: Any = WeakIdKeyDictionary()  # what parameters had a part in
        self._seen, self._stack = seen, stack

    def get(self, x: Any) -> frozenset[str]:
        return self.of.get(x, frozenset()) if isinstance(x, torch.Tensor) else frozenset()

    def _is_computed(self, x: Any) -> bool:
        return isinstance(x, nn.Parameter) or (isinstance(x, torch.Tensor) and x in self.computed)

    def _unsuited(self, operator: str, args: Any) -> str:
        """What an operator that reads hidden states does that needs all of them as a plain tensor."""
        if operator.strip("_") in UNSUITED:
            return operator.strip("_")
        if operator.endswith("_") and not self._is_computed(args[0]):
            return "into a buffer"
        if operator == "cat" and any(x.ndim == 1 and not len(x) for x in args[0]):
            return "with an empty cache"
        return ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        names = frozenset().union(*(self.get(x) for x in tree_iter((args, kwargs))))
        operator = func.__name__.split(".")[0]
        if names:
            for x in tree_iter(made):
                if isinstance(x, torch.Tensor):
                    self.of[x] = self.get(x) | names
            if operator.endswith("_") and args and isinstance(args[0], torch.Tensor):
                self.of[args[0]] = self.get(args[0]) | names
        if any(word in operator for word in SCORES) and _is_scores(operator, args):
            self._seen.attends |= names - {RESIDUAL}
            self._seen.attention.update(self._stack[-1:])
        if any(self._is_computed(x) for x in tree_iter((args, kwargs))):
            self.computed.update((x, True) for x in tree_iter(made) if isinstance(x, torch.Tensor))
            if self._stack and (unsuited := self._unsuited(operator, args)):
                self._seen.unsuited.setdefault(self._stack[-1], unsuited)
        if operator in CHOICES:
            self._seen.chooses |= (names - {RESIDUAL}) | set(self._stack[-1:])
        return made


def _is_scores(operator: str, args: Any) -> bool:
    """A softmax over scores has an axis for heads; a router's has none."""
    return "softmax" not in operator or (isinstance(args[0], torch.Tensor) and args[0].ndim >= 4)


def watch_forward(model: nn.Module, inputs: dict[str, Any]) -> Seen:
    """One forward without gradients."""
    seen = Seen()
    stack: list[str] = []
    taint = _Taint(seen, stack)
    with torch.no_grad(), taint, _hooks(model, seen, taint, stack):
        model(**inputs)
    return seen


@contextmanager
def _hooks(model: nn.Module, seen: Seen, taint: _Taint, stack: list[str]) -> Iterator[None]:
    blocks = [block for _, block in find_blocks(model)]
    inside = {module for block in blocks for module in block.modules()}
    handles = [b.register_forward_pre_hook(_enters(taint), with_kwargs=True) for b in blocks]
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
        if module in inside and is_linear(module):
            handles.append(
                module.register_forward_pre_hook(_reads(name, seen, taint), with_kwargs=True)
            )
            handles.append(module.register_forward_hook(_makes(name, seen, taint)))
        handles.append(module.register_forward_hook(lambda *_: stack.pop() and None))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _enters(taint: _Taint) -> Any:
    """A block's input, and whatever has its width (an encoder's output), is the residual stream."""

    def hook(_: Any, args: Any, kwargs: Any) -> None:
        floats = [
            x
            for x in tree_iter((args, kwargs))
            if isinstance(x, torch.Tensor) and x.is_floating_point()
        ]
        width = floats[0].shape[-1] if floats else 0
        for x in floats:
            if x.ndim == floats[0].ndim and x.shape[-1] == width:
                taint.of[x] = frozenset({RESIDUAL})

    return hook


def _reads(name: str, seen: Seen, taint: _Taint) -> Any:
    def hook(_: Any, args: Any, kwargs: Any) -> None:
        names = taint.get(next(x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)))
        if name not in seen.feeds:
            seen.feeds[name] = set()
            seen.called.append(name)
        if RESIDUAL in names:
            seen.reads_residual.add(name)
        else:
            for other in names:
                seen.feeds.setdefault(other, set()).add(name)

    return hook


def _makes(name: str, seen: Seen, taint: _Taint) -> Any:
    def hook(module: Any, args: Any, output: Any) -> None:
        if not _is_product(module, args, output):
            seen.unsuited[name] = "more than a product"
        for x in tree_iter(output):
            if isinstance(x, torch.Tensor):
                taint.of[x] = frozenset({name})

    return hook


def _is_product(module: Any, args: Any, output: Any) -> bool:
    """Whether a linear layer of whatever class multiplied with its weight, and no more."""
    if (
        type(module).forward is nn.Linear.forward
        or len(args) != 1
        or not isinstance(output, torch.Tensor)
    ):
        return type(module).forward is nn.Linear.forward
    weight = module.weight.t() if is_transposed(module) else module.weight
    wanted = nn.functional.linear(args[0], weight, module.bias)
    return wanted.shape == output.shape and torch.allclose(wanted, output, atol=1e-5)
