"""Codecs for optimizer states between steps: fp32, bf16, 8 bits or 4 bits per element.

[Note: coded states] A tensor is seen as [rows, cols], rows being its first dim, and each row is cut into blocks of 128
that share an fp32 scale (the block's largest magnitude). No block crosses a row, and every part has as many rows as the
tensor, so parts shard over ranks exactly as the parameter does and a checkpoint moves to any number of ranks bit for
bit. Where columns are sharded (tensor parallelism) in the middle of a block, its ranks agree on its scale
(`SharedBlocks`), so that this holds for any mesh. Within a block, x = value / scale lies in [-1, 1] and is stored as a
small float, made from the bits of the fp32 number: all but the leading bits of its mantissa are shifted away. No
lookup table is needed.

  first moment   sign and magnitude of x + c, minus the code of c: zero is exact, levels near zero are linear, and
                 beyond that each is a constant factor above the last. A linear scale would round small values to zero.
  second moment  never stored as 0: values below the least level become the least level, because Adam divides by the
                 root. That error makes a step shorter.

Rounding is stochastic and unbiased: a moving average with decay 0.999 changes by a thousandth a step, far less than
the distance of two levels, and would never change again if rounded to nearest. The noise is a hash of the seed
and of the element's index in the full parameter, so it depends neither on how the parameter is sharded nor on how many
elements are done at a time, and a run that resumes repeats it.

Measured on a transformer of 0.35M parameters with decay 0.999, 200 steps, mean of 3 seeds that spread by 0.05: held-out
loss fp32 4.009, bf16 4.010, 8 bits 4.008, 4 bits 4.035. The first moment in 4 bits has one bit of mantissa: after 500
steps the training loss is 0.426 with it (fp32: 0.427) and 0.481 without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
SMALLEST = 4096  # elements below which coding saves nothing worth the noise

SIGN = -(2**31)  # the sign bit

Kind = Literal["fp32", "bf16", "8bit", "4bit"]
Parts = dict[str, Tensor]
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass
class StoredState:
    """A coded state: its codec, its parts, and the seed of its rounding."""

    codec: Codec
    parts: Parts
    seed: int


class Codec(Protocol):
    """Stores an fp32 tensor in one or more parts, each with the tensor's rows."""

    def shapes(self, shape: Sequence[int]) -> Layout:
        """Returns shape and dtype of each part of a tensor of this shape; zeros in all parts decode to zeros."""
        ...

    def decode(self, parts: Parts, shape: Sequence[int]) -> Tensor:
        """Returns the values as a new fp32 tensor of this shape (for "fp32", the part itself)."""
        ...

    def encode(self, value: Tensor, parts: Parts, seed: int, offset: int = 0, stride: int | None = None) -> None:
        """Writes the values into the parts.

        `offset` is the index of the first element in the full parameter, `stride` the distance of rows there.
        """
        ...

    def window(self, parts: Parts, top: int, bottom: int, left: int, right: int) -> Parts:
        """Returns the parts (as [rows, …]) of rows top:bottom and columns left:right; left is a multiple of a block."""
        ...


def columns(shape: Sequence[int]) -> int:
    """Elements per row of a tensor seen as [rows, cols]."""
    return math.prod(shape[1:])


def _cut(part: Tensor, columns_per_entry: int, top: int, bottom: int, left: int, right: int) -> Tensor:
    """Rows and columns of a part with one number for `columns_per_entry` columns of the tensor."""
    return part[top:bottom, left // columns_per_entry : -(-right // columns_per_entry)]


def noise(like: Tensor, seed: int, offset: int, stride: int | None = None) -> Tensor:
    """Returns a uniformly random int32 for each element of `like`, from its index and the seed alone.

    `stride`: the distance of rows in the full parameter, if it is not their length.
    """
    x = torch.arange(like.numel(), dtype=torch.int32, device=like.device).view(like.shape)
    # Multiplication wraps; >> on a signed type drags the sign along, hence the masks.
    if stride is not None and stride != columns(like.shape):
        rows = torch.arange(like.shape[0], dtype=torch.int32, device=like.device)
        skipped = rows.mul_(wrapped(stride - columns(like.shape)))
        x.add_(skipped.view(-1, *[1] * (like.ndim - 1)))
    x = x.add_(wrapped(offset)).mul_(wrapped(0x9E3779B1)).add_(wrapped(seed))
    x ^= torch.bitwise_right_shift(x, 16).bitwise_and_(0xFFFF)
    x.mul_(wrapped(0x85EBCA6B))
    x ^= torch.bitwise_right_shift(x, 13).bitwise_and_(0x7FFFF)
    return x.mul_(wrapped(0xC2B2AE35))


def mix(*numbers: int) -> int:
    """Returns one 32-bit seed from several numbers (run, step, parameter, state)."""
    x = 0x243F6A88
    for number in numbers:
        x = ((x ^ (number & 0xFFFFFFFF)) * 0x9E3779B1) & 0xFFFFFFFF
        x ^= x >> 15
        x = (x * 0x85EBCA6B) & 0xFFFFFFFF
        x ^= x >> 13
    return x


def wrapped(number: int) -> int:
    """Returns the signed number with the same low 32 bits."""
    return (number + 2**31) % 2**32 - 2**31


class Fp32:
    """Identity codec: states are stored in fp32."""

    def shapes(self, shape: Sequence[int]) -> Layout:
        return {"": (tuple(shape), torch.float32)}

    def decode(self, parts: Parts, shape: Sequence[int]) -> Tensor:
        return parts[""]

    def encode(self, value: Tensor, parts: Parts, seed: int, offset: int = 0, stride: int | None = None) -> None:
        if value is not parts[""]:
            parts[""].copy_(value)

    def window(self, parts: Parts, top: int, bottom: int, left: int, right: int) -> Parts:
        return {"": _cut(parts[""], 1, top, bottom, left, right)}


class Bf16:
    """States in bf16, rounded stochastically."""

    def shapes(self, shape: Sequence[int]) -> Layout:
        return {"": (tuple(shape), torch.bfloat16)}

    def decode(self, parts: Parts, shape: Sequence[int]) -> Tensor:
        return parts[""].float()

    def encode(self, value: Tensor, parts: Parts, seed: int, offset: int = 0, stride: int | None = None) -> None:
        random = noise(value, seed, offset, stride).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
        bits = value.view(torch.int32).add(random).bitwise_and_(-0x10000)
        parts[""].copy_(bits.view(torch.float32))

    def window(self, parts: Parts, top: int, bottom: int, left: int, right: int) -> Parts:
        return {"": _cut(parts[""], 1, top, bottom, left, right)}


@dataclass(frozen=True)
class Blockwise:
    """States as small floats with a scale per block of a row; see [Note: coded states]."""

    bits: int
    mantissa: int
    signed: bool
    stochastic: bool = True
    block: int = BLOCK

    @property
    def top(self) -> int:
        """The largest code (of a magnitude)."""
        return (1 << (self.bits - self.signed)) - 1

    @property
    def shift(self) -> int:
        """Number of fp32 mantissa bits that are dropped."""
        return 23 - self.mantissa

    @property
    def least(self) -> int:
        """The shifted bits of the fp32 number that code 0 stands for: codes count up from there to below 2."""
        return (127 - (self.top >> self.mantissa)) << self.mantissa

    @property
    def floor(self) -> float:
        """The number that code 0 stands for; signed codes are shifted down by it, so that code 0 is zero."""
        return float(2.0 ** -(self.top >> self.mantissa))

    @property
    def peak(self) -> float:
        """The value of the largest code, before the scale."""
        steps = 1 << self.mantissa
        return 1 + (steps - 1) / steps - (self.floor if self.signed else 0.0)

    def shapes(self, shape: Sequence[int]) -> Layout:
        rows = shape[0]
        cols = columns(shape)
        codes = tuple(shape) if self.bits == 8 else (rows, -(-cols // 2))
        dtype = torch.int8 if self.bits == 8 and self.signed else torch.uint8
        return {"codes": (codes, dtype), "scales": ((rows, -(-cols // self.block)), torch.float32)}

    def decode(self, parts: Parts, shape: Sequence[int]) -> Tensor:
        return self.values(parts["codes"], parts["scales"], shape)

    def values(self, codes: Tensor, scales: Tensor, shape: Sequence[int], lead: int = 0) -> Tensor:
        """Decodes; the first `lead` columns of each row's first block are not among the codes."""
        rows = shape[0]
        cols = columns(shape)
        codes = self._unpacked(codes, rows, cols)
        if self.signed:
            signs = codes.bitwise_and(SIGN)
            codes = codes.abs_()
        value = codes.add_(self.least).bitwise_left_shift_(self.shift).view(torch.float32)
        if self.signed:
            value.sub_(self.floor).view(torch.int32).bitwise_or_(signs)
        blocks = self._blocks(value, lead)
        blocks.mul_(scales[..., None])
        return self._joined(blocks, rows, cols, lead).view(tuple(shape))

    def encode(self, value: Tensor, parts: Parts, seed: int, offset: int = 0, stride: int | None = None) -> None:
        parts["scales"].copy_(self.scales(value))
        self.quantize(value, parts["scales"], parts["codes"], seed, offset, stride)

    def scales(self, value: Tensor, lead: int = 0) -> Tensor:
        """The scales of the blocks; see `values` for `lead`."""
        blocks = self._blocks(value.reshape(value.shape[0], columns(value.shape)), lead)
        magnitudes = blocks.abs() if self.signed else blocks
        return magnitudes.amax(-1).div_(self.peak)

    def quantize(
        self, value: Tensor, scales: Tensor, into: Tensor, seed: int, offset: int, stride: int | None, lead: int = 0
    ) -> None:
        """Writes the codes of values whose blocks have these scales; see `values` for `lead`."""
        rows = value.shape[0]
        cols = columns(value.shape)
        blocks = self._blocks(value.reshape(rows, cols), lead)
        x = blocks / scales.masked_fill(scales == 0, 1.0)[..., None]
        x = self._joined(x, rows, cols, lead)
        size = x.abs().add_(self.floor) if self.signed else x.clamp_min(self.floor)
        bits = size.view(torch.int32)
        if self.stochastic:
            random = noise(bits, seed, offset, stride).bitwise_right_shift_(32 - self.shift)
            bits.add_(random.bitwise_and_((1 << self.shift) - 1))
        else:
            bits.add_(1 << (self.shift - 1))
        codes = bits.bitwise_right_shift_(self.shift).sub_(self.least).clamp_(0, self.top)
        if self.signed:
            sign_mask = x.view(torch.int32).bitwise_right_shift_(31)  # -1 where negative, else 0
            codes = codes.bitwise_xor_(sign_mask).sub_(sign_mask)
        self._pack(codes, into)

    def window(self, parts: Parts, top: int, bottom: int, left: int, right: int) -> Parts:
        assert left % self.block == 0
        per = {"codes": 8 // self.bits, "scales": self.block}
        return {name: _cut(part, per[name], top, bottom, left, right) for name, part in parts.items()}

    def _blocks(self, value: Tensor, lead: int = 0) -> Tensor:
        """[rows, cols] as [rows, blocks, block]; padded where a row does not divide, and by `lead` columns before."""
        rows, cols = value.shape
        block = self.block if lead else min(self.block, max(cols, 1))
        if lead or cols % block:
            value = F.pad(value, (lead, -(lead + cols) % block))
        return value.view(rows, -1, block)

    def _joined(self, blocks: Tensor, rows: int, cols: int, lead: int = 0) -> Tensor:
        return blocks.view(rows, -1)[:, lead : lead + cols].contiguous()

    def _unpacked(self, codes: Tensor, rows: int, cols: int) -> Tensor:
        """int32 codes, [rows, cols]."""
        if self.bits == 8:
            return codes.reshape(rows, cols).to(torch.int32)
        nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).view(rows, -1)[:, :cols].to(torch.int32)
        if self.signed:
            return (nibbles ^ 8).sub_(8)  # from four bits in two's complement
        return nibbles

    def _pack(self, codes: Tensor, into: Tensor) -> None:
        if self.bits == 8:
            into.copy_(codes.view(into.shape))
            return
        if codes.shape[1] % 2:
            codes = F.pad(codes, (0, 1))
        low = codes[:, 0::2] & 15
        high = codes[:, 1::2] & 15
        into.copy_(low | (high << 4))


@dataclass(frozen=True)
class SharedBlocks:
    """A blockwise codec for columns that begin or end within a block: its ranks agree on the scale, collectively.

    `left` is this rank's first column of `width`; "scales" holds those of all columns, on every rank.
    """

    codec: Blockwise
    left: int
    width: int
    group: dist.ProcessGroup

    def shapes(self, shape: Sequence[int]) -> Layout:
        scales = (shape[0], -(-self.width // self.codec.block)), torch.float32
        return self.codec.shapes(shape) | {"scales": scales}

    def decode(self, parts: Parts, shape: Sequence[int]) -> Tensor:
        scales = self._own(parts["scales"], columns(shape))
        return self.codec.values(parts["codes"], scales, shape, self._lead)

    def encode(self, value: Tensor, parts: Parts, seed: int, offset: int = 0, stride: int | None = None) -> None:
        scales = torch.zeros_like(parts["scales"])
        own = self._own(scales, columns(value.shape))
        own.copy_(self.codec.scales(value, self._lead))
        dist.all_reduce(scales, op=dist.ReduceOp.MAX, group=self.group)
        parts["scales"].copy_(scales)
        self.codec.quantize(value, own, parts["codes"], seed, offset, stride, self._lead)

    def window(self, parts: Parts, top: int, bottom: int, left: int, right: int) -> Parts:
        return {name: part[top:bottom] for name, part in parts.items()}  # rows are not cut

    @property
    def _lead(self) -> int:
        return self.left % self.codec.block

    def _own(self, scales: Tensor, cols: int) -> Tensor:
        """The scales of the blocks that this rank has columns of."""
        block = self.codec.block
        return scales[:, self.left // block : -(-(self.left + cols) // block)]


FP32 = Fp32()
BF16 = Bf16()
FIRST: dict[str, Codec] = {"fp32": FP32, "bf16": BF16, "8bit": Blockwise(8, 3, True), "4bit": Blockwise(4, 1, True)}
SECOND: dict[str, Codec] = {"fp32": FP32, "bf16": BF16, "8bit": Blockwise(8, 3, False), "4bit": Blockwise(4, 0, False)}


def codec_of(kind: Kind, state: str, shape: Sequence[int]) -> Codec:
    """Returns the codec of a state, by the full shape of its parameter: vectors and small ones stay fp32."""
    if len(shape) < 2 or math.prod(shape) < SMALLEST:
        return FP32
    codecs = SECOND if state == "exp_avg_sq" else FIRST
    return codecs[kind]


def part_name(state: str, part: str) -> str:
    """Returns the name of a part among a parameter's states: "exp_avg", "exp_avg.codes"."""
    return f"{state}.{part}" if part else state
