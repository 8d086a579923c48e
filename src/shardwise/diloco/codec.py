"""Wire format: the trained parameters as one long vector, cut into parts, each a safetensors body.

A part is small (PART elements), so neither side holds more than a few of them at a time. Parts come from another
machine: dtype and length are checked before the values, and non-finite values are rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from shardwise.diloco import two_bit_codec as two_bits
from shardwise.nn.kernels.quantize import Bits, dequantize_into, packed_bytes, quantize

PART = 1 << 22  # elements: 16 MiB in fp32
HEADER = 1 << 10  # bytes of safetensors' own, at most
KEY = "values"

Dtype = Literal["fp32", "bf16", "int8", "int4", "int2"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
_FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_BITS: dict[str, Bits] = {"int8": 8, "int4": 4}


class BadPart(ValueError):
    """A body with the wrong form or, if not `finite`, with non-finite values."""

    def __init__(self, problem: str, finite: bool = True) -> None:
        self.finite = finite
        super().__init__(problem)


@dataclass(frozen=True)
class VectorPlan:
    """Names and shapes of the trained tensors, in the order of the vector, and how it is cut into parts."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def total(self) -> int:
        """Number of elements of the vector."""
        return sum(prod(shape) for _, shape in self.tensors)

    @property
    def parts(self) -> int:
        """Number of parts."""
        return -(-self.total // PART)

    def size(self, part: int) -> int:
        """Number of elements of one part."""
        return min(PART, self.total - part * PART)

    @classmethod
    def read(cls, values: object) -> VectorPlan:
        """Parses a plan from JSON; raises ValueError if it is invalid."""
        if not isinstance(values, list) or not values:
            raise ValueError("no tensors are named")
        tensors = []
        for entry in values:
            if not (isinstance(entry, list) and len(entry) == 2):
                raise ValueError("a tensor is a name and a shape")
            name, shape = entry
            valid_shape = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
            if not isinstance(name, str) or not valid_shape:
                raise ValueError("a tensor is a name and a shape")
            tensors.append((name, tuple(shape)))
        if len({name for name, _ in tensors}) < len(tensors):
            raise ValueError("a tensor is named twice")
        return cls(tuple(tensors))

    def differs(self, other: VectorPlan) -> str | None:
        """Describes the first difference from another plan; None if they are equal."""
        own, others = dict(self.tensors), dict(other.tensors)
        for name in [*own, *others]:
            if name not in others:
                return f"trains {name}, which the others do not"
            if name not in own:
                return f"does not train {name}, which the others do"
            if own[name] != others[name]:
                return f"has {name} of shape {list(own[name])}, the others {list(others[name])}"
        return None


def encode(values: torch.Tensor, dtype: Dtype, error: torch.Tensor | None = None) -> bytes:
    """Encodes an fp32 vector as a body; `error` is added to it and then holds the rounding error."""
    if dtype == "int2":
        return bytes(save({KEY: two_bits.pack(values, error)}))
    if bits := _BITS.get(dtype):
        return bytes(save({KEY: quantize(values.contiguous(), bits, error=error)}))
    if dtype == "fp32":
        return bytes(save({KEY: values.contiguous()}))
    exact = values if error is None else values + error
    rounded = exact.to(_FLOATS[dtype])
    if error is not None:
        error.copy_(exact - rounded.float())
    return bytes(save({KEY: rounded}))


def decode(body: bytes, dtype: Dtype, size: int) -> torch.Tensor:
    """Decodes a body to an fp32 vector; raises BadPart."""
    try:
        tensors = load(body)
    except (SafetensorError, ValueError) as error:
        raise BadPart(f"is no safetensors body ({str(error)[:80]})") from None
    shape = (_length(dtype, size),)
    kind = _FLOATS.get(dtype, torch.uint8)
    if set(tensors) != {KEY} or tuple(tensors[KEY].shape) != shape or tensors[KEY].dtype != kind:
        raise BadPart(f"is not the {shape[0]} {str(kind).removeprefix('torch.')} values that were agreed on")
    if dtype == "int2":
        values = two_bits.unpack(tensors[KEY], size)
    elif bits := _BITS.get(dtype):
        values = torch.empty(size)
        dequantize_into(values, tensors[KEY], bits)
    else:
        values = tensors[KEY].float()
    if not bool(values.isfinite().all()):
        raise BadPart("has values that are no numbers", finite=False)
    return values


def most_bytes(dtype: Dtype, size: int) -> int:
    """Maximum size of a part's body in bytes."""
    return HEADER + _length(dtype, size) * _FLOATS.get(dtype, torch.uint8).itemsize


def _length(dtype: Dtype, size: int) -> int:
    """Number of elements of a body's tensor: bytes, where values are packed."""
    if dtype == "int2":
        return two_bits.packed_bytes(size)
    return packed_bytes(size, _BITS[dtype]) if dtype in _BITS else size


class Cutter:
    """Concatenates tensors and yields parts, each as soon as it is full."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []
        self._count = 0

    def put(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields the parts that this tensor completes."""
        while flat.numel():
            piece = flat[: PART - self._count]
            self._held.append(piece)
            self._count += piece.numel()
            flat = flat[piece.numel() :]
            if self._count == PART:
                yield self._pop()

    def rest(self) -> Iterator[torch.Tensor]:
        """Yields the last part, if it is not full."""
        if self._count:
            yield self._pop()

    def _pop(self) -> torch.Tensor:
        part = torch.cat(self._held)
        self._held = []
        self._count = 0
        return part


class Joiner:
    """Inverse of Cutter: takes parts and returns tensors of the requested sizes."""

    def __init__(self, parts: Iterator[torch.Tensor]) -> None:
        self._parts = parts
        self._left = torch.empty(0)

    def take(self, shape: Sequence[int]) -> torch.Tensor:
        """Returns the next tensor, flat."""
        pieces: list[torch.Tensor] = []
        missing = prod(shape)
        while missing:
            if not self._left.numel():
                self._left = next(self._parts)
            pieces.append(self._left[:missing])
            missing -= pieces[-1].numel()
            self._left = self._left[pieces[-1].numel() :]
        return torch.cat(pieces) if pieces else torch.empty(0)
