"""Block quantisation to int8 and int4: rows of floats become rows of bytes that one collective can send.

[Note: packed rows] A row of n floats is cut into blocks of BLOCK, the last one filled up with zeros. Each block has one
bf16 scale and symmetric codes in ±127 or ±7. The row's codes come first, then its scales, then zeros up to a multiple
of ALIGN bytes, so that rows lie next to each other and each can be read on its own. int4 puts element j of a block into
the low half of byte j and element j + BLOCK/2 into the high half: both halves are then read without a stride.

[Note: rounding] Weights round to nearest: it is exact to half a step, and every rank must come to the same codes.
Gradients round at random (`seed`): to nearest, whatever is smaller than half a step is lost in each block of each step,
in the same direction. One random number per block is enough: it is added to a golden-ratio sequence over the block's
elements, so each element sees a uniform number (its error is zero on average) at the price of two additions. All
numbers are multiples of 2⁻²³, so the sum is exact and reference and kernel agree.

A block that holds inf or nan gets that for its scale: it comes out as nan, and loss scaling sees it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from shardwise.kernels import quantize_reference as reference

BLOCK, ALIGN = reference.BLOCK, reference.ALIGN
Bits = Literal[4, 8]


def packed_bytes(n: int, bits: Bits) -> int:
    """Bytes of a row of n floats, scales included."""
    return reference.packed_bytes(n, bits)


def quantize(x: torch.Tensor, bits: Bits, seed: int | None = None) -> torch.Tensor:
    """(…, n) floats, contiguous along n → (…, packed_bytes) uint8; a seed (31 bits) rounds at random."""
    out = torch.empty(*x.shape[:-1], packed_bytes(x.shape[-1], bits), dtype=torch.uint8, device=x.device)
    if x.numel():
        _backend(x).quantize_into(_three(out), _three(x), bits, seed)
    return out


def dequantize_into(out: torch.Tensor, packed: torch.Tensor, bits: Bits) -> None:
    """(…, packed_bytes) uint8 → the floats of `out` (…, n), which may have any strides but along n."""
    if out.numel():
        _backend(out).dequantize_into(_three(out), _three(packed), bits)


def sum_dequantized_into(out: torch.Tensor, packed: torch.Tensor, bits: Bits, factor: float = 1.0) -> None:
    """(peers, …, packed_bytes) → factor × the sum over peers, in `out` (…, n); added up in fp32."""
    if out.numel():
        _backend(out).sum_dequantized_into(_two(out), packed.flatten(1, -2), bits, factor)


def requantize_sum(packed: torch.Tensor, n: int, bits: Bits, factor: float, seed: int | None) -> torch.Tensor:
    """(peers, …, packed_bytes) → factor × the sum over peers, packed again (…, packed_bytes), in one pass."""
    out = torch.empty(packed.shape[1:], dtype=torch.uint8, device=packed.device)
    if n:
        _backend(out).requantize_sum_into(_two(out), packed.flatten(1, -2), n, bits, factor, seed)
    return out


def _backend(tensor: torch.Tensor) -> Any:
    if tensor.is_cuda:
        from shardwise.kernels import quantize_triton

        return quantize_triton
    return reference


def _two(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, x.shape[-1])


def _three(x: torch.Tensor) -> torch.Tensor:
    """As (outer, inner, last), a view: two strides are what a transposed list of slices needs."""
    assert x.stride(-1) == 1 and x.ndim <= 3, f"rows must be contiguous, not {x.stride()}"
    return x[(None,) * (3 - x.ndim)]
