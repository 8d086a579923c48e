"""Parts of a block that look at one token at a time, computed some tokens at a time and again in backward.

A feed-forward part is three or four times as wide as its input: for half a million tokens of an 8B model its
intermediate results are 60 GB. Tile by tile they are as large as a tile; what is kept for backward is the input.
Norms make copies in fp32 and gain likewise.

Which parts these are is found by trying: a child of a block qualifies if it was given one tensor, gave back one no
wider, and gives the same for the first tokens whether the others are there or not. Routed experts do not qualify: they
are counted and balanced over all tokens.
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
    """Lets the blocks' tokenwise parts go tile by tile; `tiny` is a small model of the kind and `inputs` are its.

    `fused`: blocks are compiled; so is then what computes a tile, each by itself.
    """
    found = tokenwise(tiny, inputs)
    parts = [
        child for _, block in blocks for key, child in children_of("", block) if key in found and _plain(child)
    ]  # fmt: skip
    if not any(is_linear(module) for child in parts for module in child.modules()):
        problem = "no feed-forward part of this model's blocks can be computed some tokens at a time"
        raise UserError("tiled_mlp", tile, problem, "leave it out")
    for child in (*parts, *(norm for name, norm in _norms_outside(model) if name in found)):
        child.forward = _Tiles(child, child.forward, tile, fused)  # type: ignore[method-assign]


@torch.no_grad()
def tokenwise(model: Any, inputs: dict[str, Any]) -> set[str]:
    """What looks at one token at a time: children of blocks, by their names there, and norms outside of blocks.

    A name counts if it does so in every block that has it.
    """
    seen: dict[str, list[bool]] = {}
    handles: list[Any] = []

    def look(key: str) -> Callable[..., None]:
        def hook(child: Any, args: Any, kwargs: Any, output: Any) -> None:
            seen.setdefault(key, []).append(_is_tokenwise(child, args, kwargs, output))

        return hook

    training = model.training
    model.eval()
    for _, block in find_blocks(model):
        handles += [child.register_forward_hook(look(key), with_kwargs=True) for key, child in children_of("", block)]
    handles += [norm.register_forward_hook(look(name), with_kwargs=True) for name, norm in _norms_outside(model)]
    try:
        model(**inputs, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    return {key for key, answers in seen.items() if all(answers)}


def _is_tokenwise(child: Any, args: Any, kwargs: Any, output: Any) -> bool:
    given = [value for value in (*args, *kwargs.values()) if value is not None]
    if len(args) != 1 or len(given) != 1 or not isinstance(output, torch.Tensor):
        return False
    x = args[0]
    if not isinstance(x, torch.Tensor) or x.ndim != 3 or output.shape[:2] != x.shape[:2] or x.shape[1] < 2:
        return False
    half = x.shape[1] // 2
    apart = (type(child).forward(child, x[:, :half].contiguous()) - output[:, :half]).abs().max()
    return output.shape[2] <= x.shape[2] and bool(apart <= NEAR * output.abs().max())


def _norms_outside(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules with vectors for parameters that are in no block."""
    inside = tuple(f"{name}." for name, _ in find_blocks(model))
    return [
        (name, module) for name, module in model.named_modules()
        if (own := list(module.parameters())) and all(p.ndim == 1 for p in own) and not name.startswith(inside)
    ]  # fmt: skip


def _plain(child: nn.Module) -> bool:
    """Whether it is made of matrices and vectors alone: no stack of experts, no router."""
    return all(p.ndim <= 2 for p in child.parameters()) and not any(hasattr(m, "experts") for m in child.modules())


class _Tiles:
    """Stands in a module's forward."""

    def __init__(self, module: nn.Module, plain: Callable[..., Any], tile: int, fused: bool) -> None:
        self.module, self._tile = module, tile
        self.plain = compiled(plain) if fused else plain
        self._draws = any(isinstance(m, nn.Dropout) and m.p > 0 for m in module.modules()) or any(
            getattr(m, "lora_dropout", 0) > 0 for m in module.modules()
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] <= self._tile:
            return torch.as_tensor(self.plain(x))
        learned = [p for p in self.module.parameters() if p.requires_grad]
        out: torch.Tensor = _Tiled.apply(self, x, *learned)  # type: ignore[no-untyped-call]
        return out

    def pieces(self, x: torch.Tensor) -> Iterator[slice]:
        """The tiles of a row's tokens."""
        for start in range(0, x.shape[1], self._tile):
            yield slice(start, min(start + self._tile, x.shape[1]))

    def states(self) -> Any:
        """Of the generators, where something is drawn."""
        if not (self._draws and self.module.training):
            return None
        return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    @contextmanager
    def again(self, states: Any) -> Iterator[None]:
        """Within it, the same is drawn as when the states were taken."""
        if states is None:
            yield
            return
        with torch.random.fork_rng():
            torch.set_rng_state(states[0])
            if states[1]:
                torch.cuda.set_rng_state_all(states[1])
            yield


class _Tiled(torch.autograd.Function):
    """A module on (rows, tokens, features), and its gradients; parameters are given so that autograd knows of them."""

    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, x: torch.Tensor, *learned: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.tiles, ctx.states = tiles, tiles.states()
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
        learned = [p for p in tiles.module.parameters() if p.requires_grad]
        wanted = ctx.needs_input_grad[1]
        d_x = torch.empty_like(x) if wanted else None
        sums: list[torch.Tensor | None] = [None] * len(learned)
        with tiles.again(ctx.states):
            for piece in tiles.pieces(x):
                part = x[:, piece].detach().contiguous().requires_grad_(wanted)
                with torch.enable_grad():
                    made = tiles.plain(part)
                inputs = [*([part] if wanted else []), *learned]
                found = list(torch.autograd.grad(made, inputs, gradient[:, piece], allow_unused=True))
                if d_x is not None:
                    d_x[:, piece] = found.pop(0)
                for index, one in enumerate(found):
                    if one is not None:
                        # In fp32: a sum of many tiles in bf16 would lose the small ones.
                        held = sums[index]
                        sums[index] = one.float() if held is None else held.add_(one)
        kinds = [None if s is None else s.to(p.dtype) for s, p in zip(sums, learned, strict=True)]
        return None, d_x, *kinds
