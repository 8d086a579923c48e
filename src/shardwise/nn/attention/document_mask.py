"""Document boundaries in packed rows, and masks that express them without being built.

A packed batch needs no T x T mask: the boundaries say everything. They are known on the host when the batch is laid out
and travel with it, as the `attention_mask` argument of the model's forward: no state is held anywhere, and a block that
is recomputed in backward finds them among its own arguments.

[Note: masks that are not there] `RowsMask` stands in for a mask of shape (rows, width) that a model takes,
`DocumentMask` for one of shape (rows, 1, width, width) that its blocks take. Our attention function reads boundaries
from the latter. Any other code that touches one (an operator, a slice, `F.scaled_dot_product_attention`) gets the
tensor it stands for, made on first use: slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Self

import torch
import torch.nn.functional as F

from shardwise.core.compat.torch_private import tree_map
from shardwise.data.documents import Documents

ALIGNED = 8  # elements, at which attention kernels want the rows of a bias to begin


class _Standing:
    """Stands in for a tensor, which is made as soon as it is computed with; see [Note: masks that are not there]."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def real(self) -> torch.Tensor:
        """The tensor that this stands for."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by copy and pickle, not by computations
            raise AttributeError(name)
        return getattr(self.real, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(_become, args), **tree_map(_become, kwargs or {}))

    __hash__ = object.__hash__


def _become(value: Any) -> Any:
    return value.real if isinstance(value, _Standing) else value


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: _Standing, *args: Any) -> Any:
        return getattr(self.real, name)(*(_become(a) for a in args))

    return apply


# Python looks operators up on the class: each is passed on by name.
for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "invert", "and", "rand", "or", "ror"),
    *("xor", "rxor", "eq", "ne", "lt", "le", "gt", "ge", "bool", "len", "iter", "getitem", "setitem", "float", "int"),
):
    setattr(_Standing, f"__{_name}__", _operator(f"__{_name}__"))


class StandingRows(_Standing):
    """A mask of shape (rows, width); what models do to it before transformers' mask functions loses nothing."""

    def typed(self, dtype: torch.dtype) -> Self:
        """Returns the mask with another dtype."""
        raise NotImplementedError

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Returns the mask with another dtype; it is already on the device of the batch."""
        dtypes = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
        return self.typed(dtypes[0] if dtypes else self.dtype)

    def bool(self) -> Self:
        return self.typed(torch.bool)

    def long(self) -> Self:
        return self.typed(torch.int64)

    def int(self) -> Self:
        return self.typed(torch.int32)

    def float(self) -> Self:
        return self.typed(torch.float32)

    def contiguous(self) -> Self:
        return self

    def view(self, *shape: Any) -> Any:
        """Returns the mask itself if the shape is the same, as GPT-2 requests."""
        other = self.real.view(*shape)
        return self if other.shape == self.shape else other


class RowsMask(StandingRows):
    """A mask of ones, (rows, width), that knows the documents: no token is hidden from all, many from each other."""

    def __init__(self, documents: Documents, dtype: torch.dtype = torch.int64) -> None:
        self.documents = documents
        self.dtype = dtype
        self.shape = torch.Size((documents.rows, documents.width))
        self.device = documents.boundaries.device

    @cached_property
    def real(self) -> torch.Tensor:
        return torch.ones(self.shape, dtype=self.dtype, device=self.device)

    def typed(self, dtype: torch.dtype) -> RowsMask:
        return RowsMask(self.documents, dtype)


class OwnRows(StandingRows):
    """Rows that make the mask of a model's blocks themselves (parallel/context)."""

    def for_blocks(self, ask: Callable[..., Any], **kwargs: Any) -> Any:
        """Returns the mask for blocks from the arguments of transformers' mask functions; `ask` makes others."""
        raise NotImplementedError


class OwnMask(_Standing):
    """A mask of blocks that computes attention itself (parallel/context)."""

    def attend(self, plain: Callable[..., Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               **kwargs: Any) -> torch.Tensor:  # fmt: skip
        """(rows, heads, width, head) in, (rows, width, heads, head) out; `plain` is the attention otherwise used."""
        raise NotImplementedError


class DocumentMask(_Standing):
    """Visibility in packed rows: earlier tokens of the same document, at most `window` of them including itself.

    `largest_head`: the largest head size of the device's variable-length kernel; 0 = it has none.
    """

    dtype = torch.bool

    def __init__(self, documents: Documents, window: int | None, largest_head: int = 0) -> None:
        self.documents = documents
        self.window = window
        self.largest_head = largest_head
        self.shape = torch.Size((documents.rows, 1, documents.width, documents.width))
        self.rows_and_width = (documents.rows, documents.width)
        self.device = documents.boundaries.device
        # For the kernel of capped scores; made here since a block may be compiled.
        self.spans = documents.spans if largest_head else None
        self._bands: dict[int, torch.Tensor] = {}
        self._biases: dict[torch.dtype, torch.Tensor] = {}

    @cached_property
    def real(self) -> torch.Tensor:
        position = torch.arange(self.documents.width, device=self.device)
        sees = position[:, None] >= position
        if self.window is not None:
            sees = sees & (position[:, None] - position < self.window)
        index = self.documents.index
        return (sees & (index[:, :, None] == index[:, None, :]))[:, None]

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the mask as an additive bias, cached: SDPA would make and save one of its own in every layer.

        It would do so too with rows in memory that do not begin at multiples of ALIGNED.
        """
        if dtype not in self._biases:
            zero = torch.zeros((), dtype=dtype, device=self.device)
            padded = F.pad(self.real, (0, -self.documents.width % ALIGNED))
            self._biases[dtype] = torch.where(padded, zero, float("-inf"))[..., : self.documents.width]
        return self._biases[dtype]

    def covers(self, length: int) -> bool:
        """Whether the window covers a document of this length."""
        return self.window is None or length <= self.window

    def band(self, length: int) -> torch.Tensor | None:
        """Returns the mask within a document of this length; None if it is just causal."""
        if self.window is None or self.covers(length):
            return None
        if length not in self._bands:
            position = torch.arange(length, device=self.device)
            self._bands[length] = (position[:, None] >= position) & (position[:, None] - position < self.window)
        return self._bands[length]
