"""Computes tokenwise parts of a block some tokens at a time, and recomputes them in backward.

A feed-forward part is three or four times as wide as its input: for half a million tokens of an 8B model its
intermediate results are 60 GB. Tile by tile they are as large as a tile; only the input is saved for backward. Norms
make copies in fp32 and gain likewise.

Which parts these are is found by trying: a child of a block qualifies if it was given one tensor, returned one no
wider, and returns the same for the first tokens whether the others are there or not. Routed experts do not qualify:
they are counted and balanced over all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.core.effective_device import compiled
from shardwise.core.errors import UserError
from shardwise.nn.adapters.layers import is_linear
from shardwise.nn.models.build import children_of, find_blocks

NEAR = 1e-4


def tile_blocks(
    model: nn.Module, blocks: list[tuple[str, nn.Module]], tiny: Any, inputs: dict[str, Any], tile: int, fused: bool
) -> None:
    """Makes the blocks' tokenwise parts compute tile by tile; `tiny` is a small model of the class, with `inputs`.

    `fused`: blocks are compiled; what computes a tile is then compiled by itself.
    """
    tokenwise_names = tokenwise(tiny, inputs)
    parts = [
        child
        for _, block in blocks
        for key, child in children_of("", block)
        if key in tokenwise_names and _plain(child)
    ]
    if not any(is_linear(module) for child in parts for module in child.modules()):
        problem = "no feed-forward part of this model's blocks can be computed some tokens at a time"
        raise UserError("advanced.memory.tiled_mlp", tile, problem, "leave it out")
    for child in (*parts, *(norm for name, norm in _norms_outside(model) if name in tokenwise_names)):
        child.forward = _Tiles(child, child.forward, tile, fused)  # type: ignore[method-assign]


@torch.no_grad()
def tokenwise(model: Any, inputs: dict[str, Any]) -> set[str]:
    """Returns what looks at one token at a time: children of blocks, by their names there, and norms outside blocks.

    A name counts if it does so in every block that has it.
    """
    results: dict[str, list[bool]] = {}
    handles: list[Any] = []

    def make_hook(key: str) -> Callable[..., None]:
        def hook(child: Any, args: Any, kwargs: Any, output: Any) -> None:
            results.setdefault(key, []).append(_is_tokenwise(child, args, kwargs, output))

        return hook

    training = model.training
    model.eval()
    for _, block in find_blocks(model):
        handles += [
            child.register_forward_hook(make_hook(key), with_kwargs=True) for key, child in children_of("", block)
        ]
    handles += [norm.register_forward_hook(make_hook(name), with_kwargs=True) for name, norm in _norms_outside(model)]
    try:
        model(**inputs, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    return {key for key, outcomes in results.items() if all(outcomes)}


def _is_tokenwise(child: Any, args: Any, kwargs: Any, output: Any) -> bool:
    values = [value for value in (*args, *kwargs.values()) if value is not None]
    if len(args) != 1 or len(values) != 1 or not isinstance(output, torch.Tensor):
        return False
    x = args[0]
    if not isinstance(x, torch.Tensor) or x.ndim != 3 or output.shape[:2] != x.shape[:2] or x.shape[1] < 2:
        return False
    half = x.shape[1] // 2
    difference = (type(child).forward(child, x[:, :half].contiguous()) - output[:, :half]).abs().max()
    return output.shape[2] <= x.shape[2] and bool(difference <= NEAR * output.abs().max())


def _norms_outside(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules outside blocks whose parameters are all vectors."""
    block_prefixes = tuple(f"{name}." for name, _ in find_blocks(model))
    norms = []
    for name, module in model.named_modules():
        parameters = list(module.parameters())
        if parameters and all(p.ndim == 1 for p in parameters) and not name.startswith(block_prefixes):
            norms.append((name, module))
    return norms


def _plain(child: nn.Module) -> bool:
    """Whether it has matrices and vectors only: no stacked experts, no router."""
    return all(p.ndim <= 2 for p in child.parameters()) and not any(hasattr(m, "experts") for m in child.modules())


class _Tiles:
    """Replaces a module's forward."""

    def __init__(self, module: nn.Module, plain: Callable[..., Any], tile: int, fused: bool) -> None:
        self.module = module
        self._tile = tile
        self.plain = compiled(plain) if fused else plain
        self._draws = any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules()) or any(
            getattr(m, "lora_dropout", 0) > 0 for m in module.modules()
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] <= self._tile:
            return torch.as_tensor(self.plain(x))
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        out: torch.Tensor = _Tiled.apply(self, x, *trainable)  # type: ignore[no-untyped-call]
        return out

    def pieces(self, x: torch.Tensor) -> Iterator[slice]:
        """Yields the tiles of a row's tokens."""
        for start in range(0, x.shape[1], self._tile):
            yield slice(start, min(start + self._tile, x.shape[1]))

    def states(self) -> Any:
        """Returns the states of the random generators, if the module draws from them."""
        if not (self._draws and self.module.training):
            return None
        return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    @contextmanager
    def again(self, states: Any) -> Iterator[None]:
        """Restores the random states inside the block, so that the same numbers are drawn."""
        if states is None:
            yield
            return
        with torch.random.fork_rng():
            torch.set_rng_state(states[0])
            if states[1]:
                torch.cuda.set_rng_state_all(states[1])
            yield


class _Tiled(torch.autograd.Function):
    """A module on (rows, tokens, features), and its gradients; parameters are passed so that autograd knows of them."""

    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, x: torch.Tensor, *trainable: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.tiles = tiles
        ctx.states = tiles.states()
        ctx.save_for_backward(x)
        out: torch.Tensor | None = None
        for piece in tiles.pieces(x):
            part = tiles.plain(x[:, piece].contiguous())
            if out is None:
                out = part.new_empty(*x.shape[:2], part.shape[2])
            out[:, piece] = part
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x,), tiles = ctx.saved_tensors, ctx.tiles
        trainable = [p for p in tiles.module.parameters() if p.requires_grad]
        needs_input = ctx.needs_input_grad[1]
        d_x = torch.empty_like(x) if needs_input else None
        sums: list[torch.Tensor | None] = [None] * len(trainable)
        with tiles.again(ctx.states):
            for piece in tiles.pieces(x):
                part = x[:, piece].detach().contiguous().requires_grad_(needs_input)
                with torch.enable_grad():
                    output = tiles.plain(part)
                inputs = [*([part] if needs_input else []), *trainable]
                gradients = list(torch.autograd.grad(output, inputs, gradient[:, piece], allow_unused=True))
                if d_x is not None:
                    d_x[:, piece] = gradients.pop(0)
                for index, grad in enumerate(gradients):
                    if grad is not None:
                        # In fp32: a sum of many tiles in bf16 would lose the small ones.
                        accumulated = sums[index]
                        sums[index] = grad.float() if accumulated is None else accumulated.add_(grad)
        parameter_grads = [None if s is None else s.to(p.dtype) for s, p in zip(sums, trainable, strict=True)]
        return None, d_x, *parameter_grads
