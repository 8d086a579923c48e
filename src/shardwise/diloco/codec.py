"""What travels: the trained parameters as one long vector, cut into parts, each a safetensors body.

A part is small (PART elements), so neither side ever holds more than a few of them besides what it trains. Parts come
from another machine: type and length are checked before a value is looked at, and a value that is no number is refused.
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
    """A body that is not what was agreed on; `finite` tells values that are no numbers from a wrong form."""

    def __init__(self, problem: str, finite: bool = True) -> None:
        self.finite = finite
        super().__init__(problem)


@dataclass(frozen=True)
class VectorPlan:
    """Names and shapes of what is trained, in the order of the vector, and how it is cut."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def total(self) -> int:
        """Elements of the vector."""
        return sum(prod(shape) for _, shape in self.tensors)

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return -(-self.total // PART)

    def size(self, part: int) -> int:
        """Elements of one part."""
        return min(PART, self.total - part * PART)

    @classmethod
    def read(cls, values: object) -> VectorPlan:
        """From JSON; raises ValueError if it is none."""
        if not isinstance(values, list) or not values:
            raise ValueError("no tensors are named")
        found = []
        for entry in values:
            if not (isinstance(entry, list) and len(entry) == 2):
                raise ValueError("a tensor is a name and a shape")
            name, shape = entry
            whole = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
            if not isinstance(name, str) or not whole:
                raise ValueError("a tensor is a name and a shape")
            found.append((name, tuple(shape)))
        if len({name for name, _ in found}) < len(found):
            raise ValueError("a tensor is named twice")
        return cls(tuple(found))

    def differs(self, other: VectorPlan) -> str | None:
        """The first difference from another plan in words, if there is one."""
        here, there = dict(self.tensors), dict(other.tensors)
        for name in [*here, *there]:
            if name not in there:
                return f"trains {name}, which the others do not"
            if name not in here:
                return f"does not train {name}, which the others do"
            if here[name] != there[name]:
                return f"has {name} of shape {list(here[name])}, the others {list(there[name])}"
        return None


def encode(values: torch.Tensor, dtype: Dtype, error: torch.Tensor | None = None) -> bytes:
    """A vector of fp32 as a body; `error` is added to it and then holds what rounding lost."""
    if dtype == "int2":
        return bytes(save({KEY: two_bits.pack(values, error)}))
    if bits := _BITS.get(dtype):
        return bytes(save({KEY: quantize(values.contiguous(), bits, error=error)}))
    if dtype == "fp32":
        return bytes(save({KEY: values.contiguous()}))
    wanted = values if error is None else values + error
    rounded = wanted.to(_FLOATS[dtype])
    if error is not None:
        error.copy_(wanted - rounded.float())
    return bytes(save({KEY: rounded}))


def decode(body: bytes, dtype: Dtype, size: int) -> torch.Tensor:
    """The vector of fp32 that a body stands for; raises BadPart."""
    try:
        found = load(body)
    except (SafetensorError, ValueError) as error:
        raise BadPart(f"is no safetensors body ({str(error)[:80]})") from None
    shape = (_length(dtype, size),)
    kind = _FLOATS.get(dtype, torch.uint8)
    if set(found) != {KEY} or tuple(found[KEY].shape) != shape or found[KEY].dtype != kind:
        raise BadPart(f"is not the {shape[0]} {str(kind).removeprefix('torch.')} values that were agreed on")
    if dtype == "int2":
        values = two_bits.unpack(found[KEY], size)
    elif bits := _BITS.get(dtype):
        values = torch.empty(size)
        dequantize_into(values, found[KEY], bits)
    else:
        values = found[KEY].float()
    if not bool(values.isfinite().all()):
        raise BadPart("has values that are no numbers", finite=False)
    return values


def most_bytes(dtype: Dtype, size: int) -> int:
    """The longest body of a part."""
    return HEADER + _length(dtype, size) * _FLOATS.get(dtype, torch.uint8).itemsize


def _length(dtype: Dtype, size: int) -> int:
    """Elements of a body's tensor: bytes, where values are packed."""
    if dtype == "int2":
        return two_bits.packed_bytes(size)
    return packed_bytes(size, _BITS[dtype]) if dtype in _BITS else size


class Cutter:
    """Takes tensors one after the other and gives parts, each as soon as it is full."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []
        self._count = 0

    def put(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """The parts that this tensor completes."""
        while flat.numel():
            taken = flat[: PART - self._count]
            self._held.append(taken)
            self._count += taken.numel()
            flat = flat[taken.numel() :]
            if self._count == PART:
                yield self._pop()

    def rest(self) -> Iterator[torch.Tensor]:
        """The last part, if it is not full."""
        if self._count:
            yield self._pop()

    def _pop(self) -> torch.Tensor:
        part, self._held, self._count = torch.cat(self._held), [], 0
        return part


class Joiner:
    """The way back: takes parts and gives tensors of the sizes that are asked for."""

    def __init__(self, parts: Iterator[torch.Tensor]) -> None:
        self._parts, self._left = parts, torch.empty(0)

    def take(self, shape: Sequence[int]) -> torch.Tensor:
        """The next tensor, flat."""
        found: list[torch.Tensor] = []
        missing = prod(shape)
        while missing:
            if not self._left.numel():
                self._left = next(self._parts)
            found.append(self._left[:missing])
            missing -= found[-1].numel()
            self._left = self._left[found[-1].numel() :]
        return torch.cat(found) if found else torch.empty(0)
