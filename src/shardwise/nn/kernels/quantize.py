"""Block quantisation to 8 and 4 bits: rows of floats become rows of bytes that one collective can send.

[Note: packed rows] A row of n floats is cut into blocks of BLOCK, the last one filled up with zeros. Each block has one
bf16 scale and symmetric codes: ±127 steps, or a sign and a power of two. The row's codes come first, then its scales,
then zeros up to a multiple of ALIGN bytes, so that rows lie next to each other and each can be read on its own. With 4
bits, element j of a block is in the low half of byte j and element j + BLOCK/2 in the high half: both halves are then
read without a stride.

[Note: powers of two] 4 bits are a sign and one of 0, 1, 2, 4 … 64 in units of the scale, not ±7 steps. Most gradients
of a block are far below its largest; with steps they come out as 0 or as a multiple of themselves, and to Adam, which
divides by their mean square, that is worse than an error of the same share on every element, large or small.

[Note: what rounding lost] With an `error` buffer the rounding is to nearest, what it lost goes there, and is added the
next time: over some steps nothing is lost, and nothing is random. 200 steps of SmolLM2-135M on 117 documents, 2 nodes,
above the loss of fp32 gradients: ±7 steps at random 24%, powers of two at random 13%, steps with error buffer 25%,
powers of two with it 0.4%.

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

from shardwise.core.effective_device import stands_in
from shardwise.nn.kernels import quantize_reference as reference

BLOCK, ALIGN = reference.BLOCK, reference.ALIGN
Bits = Literal[4, 8]


def packed_bytes(n: int, bits: Bits) -> int:
    """Returns the bytes of a row of n floats, scales included."""
    return reference.packed_bytes(n, bits)


def quantize(x: torch.Tensor, bits: Bits, seed: int | None = None, error: torch.Tensor | None = None) -> torch.Tensor:
    """Quantises (…, n) floats, contiguous along n, to (…, packed_bytes) uint8; a seed (31 bits) rounds stochastically.

    `error` (shaped as x) is added to x and then holds what rounding lost.
    """
    out = torch.empty(*x.shape[:-1], packed_bytes(x.shape[-1], bits), dtype=torch.uint8, device=x.device)
    if x.numel():
        _backend(x).quantize_into(_three(out), _three(x), bits, seed, None if error is None else _three(error))
    return out


def dequantize_into(out: torch.Tensor, packed: torch.Tensor, bits: Bits) -> None:
    """Dequantises (…, packed_bytes) uint8 into `out` (…, n), which must be contiguous along n only."""
    if out.numel():
        _backend(out).dequantize_into(_three(out), _three(packed), bits)


def sum_dequantized_into(out: torch.Tensor, packed: torch.Tensor, bits: Bits, factor: float = 1.0) -> None:
    """Writes factor × the sum over peers of (peers, …, packed_bytes) to `out` (…, n); summed in fp32."""
    if out.numel():
        _backend(out).sum_dequantized_into(_two(out), packed.flatten(1, -2), bits, factor)


def requantize_sum(
    packed: torch.Tensor,
    n: int,
    bits: Bits,
    to: Bits,
    factor: float,
    seed: int | None = None,
    error: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns factor × the sum over peers of (peers, …, packed_bytes), packed in `to` bits, in one pass."""
    out = torch.empty(*packed.shape[1:-1], packed_bytes(n, to), dtype=torch.uint8, device=packed.device)
    if n:
        flat_error = None if error is None else _two(error)
        _backend(out).requantize_sum_into(_two(out), packed.flatten(1, -2), n, bits, to, factor, seed, flat_error)
    return out


class _StandIn:
    """Backend for fake tensors: writes what the kernels write, and takes no more memory than they do."""

    @staticmethod
    def quantize_into(out: torch.Tensor, *_: Any) -> None:
        out.zero_()

    dequantize_into = sum_dequantized_into = requantize_sum_into = quantize_into


def _backend(tensor: torch.Tensor) -> Any:
    if stands_in():
        return _StandIn
    if tensor.is_cuda:
        from shardwise.nn.kernels import quantize_triton

        return quantize_triton
    return reference


def _two(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, x.shape[-1])


def _three(x: torch.Tensor) -> torch.Tensor:
    """A view as (outer, inner, last): a transposed list of slices needs two strides."""
    assert x.stride(-1) == 1 and x.ndim <= 3, f"rows must be contiguous, not {x.stride()}"
    return x[(None,) * (3 - x.ndim)]
