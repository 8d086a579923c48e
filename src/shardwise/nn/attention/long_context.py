"""Causal attention over very long sequences, a few heads of keys at a time.

Kernels for attention take room of their own in backward, four times the size of the queries in cuDNN's (gradients in
fp32, those of keys and values for every head of queries): at a million tokens of an 8B model 36 GB. A few heads of keys
at a time, with the heads of queries that look at them, it is their share of that; sequences as long as this keep a GPU
busy with few heads as with many.

Whoever computes a block again may have kept what its attention made (parallel/activations/saved_attention.py): within
`remembering` the operator asks there before it computes. An operator is opaque to the compiler, so this holds in
compiled blocks too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from shardwise.core.compat.torch_private import (
    cpu_flash_attention,
    cpu_flash_attention_backward,
    cudnn_attention,
    cudnn_attention_backward,
    flash_attention,
    flash_attention_backward,
)

LONG = 2 << 30  # from so many bytes of queries on
AT_A_TIME = 1 << 28  # of queries; from 262,144 tokens on a head of keys is as fast as all of them on an H200
CUDNN = (9, 0)  # GPUs on which cuDNN's kernels come first (nn/attention/varlen.py)
_thread = threading.local()  # an operator is given tensors and numbers alone; backward computes again in its own thread

Made = tuple[torch.Tensor, torch.Tensor]


class Memory(Protocol):
    """What becomes of the outputs of one block's attention, in the order of its calls."""

    def recall(self) -> Made | None:
        """What the call made when it was computed first, if that was kept; the caller's own."""

    def keep(self, made: Made) -> None:
        """Takes a copy, if it wants one."""


@contextmanager
def remembering(memory: Memory) -> Iterator[None]:
    """Within it, this thread's attention is asked for there first."""
    before = getattr(_thread, "memory", None)
    _thread.memory = memory
    try:
        yield
    finally:
        _thread.memory = before


def recalled(compute: Callable[[], Made], watched: AbstractContextManager[Any] | None = None) -> tuple[Made, bool]:
    """What attention makes, and whether it was there already; `watched` is around what the memory does."""
    memory: Memory | None = getattr(_thread, "memory", None)
    watched = watched or nullcontext()
    if memory is None:
        return compute(), False
    with watched:
        found = memory.recall()
    if found is not None:
        return found, True
    made = compute()
    with watched:
        memory.keep(made)
    return made, False


def is_long(query: torch.Tensor) -> bool:
    """Whether queries are so many that their heads are better taken a few at a time."""
    return query.numel() * query.element_size() >= LONG


def attend_long(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Causal; (rows, heads, width, head) in, where keys may have fewer heads; (rows, width, heads, head) out."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: torch.Tensor = long_attention(query, key, value, scale, True)[0]
    return out.transpose(1, 2)


def heads_at_a_time(query: torch.Tensor, key: torch.Tensor) -> int:
    """Of keys."""
    each = query.numel() * query.element_size() // key.shape[1]
    return max(1, min(key.shape[1], AT_A_TIME // each))


def _parts(query: torch.Tensor, key: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Heads of queries and of keys that go together."""
    step, ratio = heads_at_a_time(query, key), query.shape[1] // key.shape[1]
    for start in range(0, key.shape[1], step):
        stop = min(start + step, key.shape[1])
        yield slice(start * ratio, stop * ratio), slice(start, stop)


@torch.library.custom_op("shardwise::long_attention", mutates_args=())
def long_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, laid out by tokens, and the logarithms of the sums that softmax divides by."""
    return recalled(lambda: _attend(query, key, value, scale, is_causal))[0]


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, is_causal: bool) -> Made:
    (out, sums), kernel = _empty(query, value), _kernel(query)
    for of_queries, of_keys in _parts(query, key):
        q, k, v = _own(query[:, of_queries], key[:, of_keys], value[:, of_keys])
        if kernel == "cudnn":
            found = cudnn_attention(q, k, v, None, True, 0.0, is_causal, False, scale=scale)
        else:
            k, v = (_repeated(x, q.shape[1]) for x in (k, v))
            found = (
                flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
                if kernel == "flash"
                else cpu_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
            )
        out[:, of_queries] = found[0]
        sums[:, of_queries] = found[1].view(sums[:, of_queries].shape)
    return out, sums


@long_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(query, value)


@torch.library.custom_op("shardwise::long_attention_backward", mutates_args=())
def long_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    scale: float,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values."""
    grads, kernel = (_by_tokens(query), _by_tokens(key), _by_tokens(value)), _kernel(query)
    for of_queries, of_keys in _parts(query, key):
        q, k, v = _own(query[:, of_queries], key[:, of_keys], value[:, of_keys])
        o, grad, lse = _own(out[:, of_queries], gradient[:, of_queries], sums[:, of_queries])
        if kernel == "cudnn":
            seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that is none
            found = cudnn_attention_backward(
                grad, q, k, v, o, lse[..., None], seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, is_causal,
                scale=scale,
            )  # fmt: skip
        else:
            k, v = (_repeated(x, q.shape[1]) for x in (k, v))
            if kernel == "flash":
                seed = torch.zeros((), dtype=torch.int64, device=q.device)
                found = flash_attention_backward(
                    grad, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, seed, seed, scale=scale
                )
            else:
                found = cpu_flash_attention_backward(grad, q, k, v, o, lse, 0.0, is_causal, scale=scale)
        for whole, part, place in zip(grads, found, (of_queries, of_keys, of_keys), strict=True):
            heads = place.stop - place.start
            whole[:, place] = part if part.shape[1] == heads else part.unflatten(1, (heads, -1)).sum(2)
    return grads


@long_attention_backward.register_fake
def _(gradient: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = given[:3]
    return _by_tokens(query), _by_tokens(key), _by_tokens(value)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, ctx.scale, ctx.is_causal = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[1])


def _grad(ctx, gradient, _):  # type: ignore[no-untyped-def]
    return *long_attention_backward(gradient, *ctx.saved_tensors, ctx.scale, ctx.is_causal), None, None


long_attention.register_autograd(_grad, setup_context=_save)


def _own(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies that lie in one piece: kernels count within them in 32 bits, for which whole sequences are too long."""
    return tuple(part.contiguous() for part in parts)


def _kernel(query: torch.Tensor) -> str:
    if query.device.type != "cuda":
        return "cpu"
    return "cudnn" if torch.cuda.get_device_capability(query.device) >= CUDNN else "flash"


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Every head of queries has a head of keys of its own."""
    rows, few, width, size = x.shape
    return x[:, :, None].expand(rows, few, heads // few, width, size).flatten(1, 2)


def _by_tokens(x: torch.Tensor) -> torch.Tensor:
    """Empty, of the same shape, all heads of a token side by side: the layout of projections."""
    rows, heads, width, size = x.shape
    return x.new_empty(rows, width, heads, size).transpose(1, 2)


def _empty(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, width, _ = query.shape
    out = query.new_empty(rows, width, heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty(rows, heads, width, dtype=torch.float32)
