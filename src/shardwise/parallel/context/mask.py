"""The mask of a sharded batch: an object that knows the layout of the full rows, not a tensor.

[Note: context masks] `ContextRows` is passed as a model's `attention_mask`. Through the registry of
nn/attention/varlen.py, transformers' mask functions ask it for the mask of the blocks: a
`ContextMask`, which holds the visibility rule (causal, a window, ...) and computes attention.
It is an argument of each block, so a recomputed block gets it again. No (width, width) tensor would
be right in its place, since the keys are on other ranks: code that asks for one is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from types import FunctionType
from typing import Any, Protocol

import torch

from shardwise.nn.attention.document_mask import OwnMask, OwnRows, RowsMask
from shardwise.nn.attention.varlen import Scores
from shardwise.nn.tiny.case import CannotParallelize
from shardwise.parallel.context.split import SequenceLayout


@dataclass(frozen=True)
class VisibilityRule:
    """Which positions of a document attend to which."""

    causal: bool = False
    window: int | None = None  # tokens back, including the token itself
    sides: int | None = None  # tokens to either side
    chunk: int | None = None  # size of the chunks that tokens do not see beyond

    @property
    def plain(self) -> bool:
        """Whether nothing but causality restricts attention."""
        return self.window is None and self.sides is None and self.chunk is None

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """The mask of two broadcastable tensors of positions; None if everything is visible."""
        masks: list[torch.Tensor] = []
        if self.causal:
            masks.append(queries >= keys)
        if self.window is not None:
            masks.append(queries - keys < self.window)
        if self.sides is not None:
            masks.append((queries - keys).abs() <= self.sides)
        if self.chunk is not None:
            masks.append(queries // self.chunk == keys // self.chunk)
        if not masks:
            return None
        return torch.stack(torch.broadcast_tensors(*masks)).all(0)


class Attends(Protocol):
    """Attention of local queries to all ranks' keys; tensors are (rows, heads, width, head)."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
        mask: ContextMask,
        plain: Any,
    ) -> torch.Tensor: ...


class ContextRows(OwnRows):
    """This rank's columns of a padding mask, (rows, width): zero at padding."""

    def __init__(
        self,
        layout: SequenceLayout,
        attends: Attends,
        device: torch.device,
        dtype: torch.dtype = torch.int64,
    ) -> None:
        self.layout = layout
        self.attends = attends
        self.device = device
        self.dtype = dtype
        self.shape = torch.Size((layout.rows, layout.width))

    @cached_property
    def real(self) -> torch.Tensor:
        return self.layout.take(self.layout.real).to(self.device, self.dtype)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Positions of this rank's tokens in their documents, (rows, width)."""
        return self.layout.take(self.layout.on(self.device).positions)

    def typed(self, dtype: torch.dtype) -> ContextRows:
        return ContextRows(self.layout, self.attends, self.device, dtype)

    def cumsum(self, dim: int) -> torch.Tensor:
        """Counts tokens from the start of their document, wherever this rank's part begins."""
        return self.positions + 1

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cumsum and isinstance(args[0], ContextRows):
            return args[0].positions + 1
        return super().__torch_function__(func, types, args, kwargs)

    @cached_property
    def full(self) -> Any:
        """The mask of the full rows: aware of documents, or a tensor where rows hold only one."""
        documents = self.layout.on(self.device)
        if self.layout.packed or self.layout.real.all():
            return RowsMask(documents, self.dtype)
        return self.layout.real.to(self.device, self.dtype)

    def for_blocks(self, ask: Callable[..., Any], **kwargs: Any) -> ContextMask:
        if (kwargs["q_length"], kwargs["kv_length"]) != (self.layout.width, self.layout.width):
            raise CannotParallelize("", "masks a sequence of another length than it was given")
        from transformers.masking_utils import causal_mask_function

        rule = rule_of(kwargs.get("mask_function", causal_mask_function))
        documents = self.layout.on(self.device)
        kwargs |= {
            "q_length": documents.width,
            "kv_length": documents.width,
            "attention_mask": RowsMask(documents),
        }
        make_full = partial(ask, **kwargs)
        return ContextMask(self.layout, rule, self.attends, self.device, make_full)


def rule_of(function: Any) -> VisibilityRule:
    """The rule of a mask function of transformers, recognised by its code object."""
    return VisibilityRule(**_rule_fields(function))


def _rule_fields(function: Any) -> dict[str, Any]:
    from transformers import masking_utils as masks

    if function is masks.causal_mask_function:
        return {"causal": True}
    if function is masks.bidirectional_mask_function:
        return {}
    if isinstance(function, FunctionType):
        code = function.__code__
        cells = (cell.cell_contents for cell in function.__closure__ or ())
        variables = dict(zip(code.co_freevars, cells, strict=True))
        if code is masks.and_masks().__code__:
            fields: dict[str, Any] = {}
            for part in variables["mask_functions"]:
                fields |= _rule_fields(part)
            return fields
        if code is masks.or_masks().__code__:
            parts = [part for part in variables["mask_functions"] if not _is_empty(part)]
            if len(parts) == 1:
                return _rule_fields(parts[0])
        if code is masks.sliding_window_overlay(1).__code__:
            return {"window": variables["sliding_window"]}
        if code is masks.sliding_window_bidirectional_overlay(1).__code__:
            return {"sides": variables["sliding_window"]}
        if code is masks.chunked_overlay(1, torch.zeros(1)).__code__:
            return {"chunk": variables["chunk_size"]}
    raise CannotParallelize(
        "", "masks attention by a rule of its own, which says nothing of positions on other ranks"
    )


def _is_empty(function: Any) -> bool:
    """Whether a rule about groups of tokens (those of an image) has no groups."""
    from transformers import masking_utils as masks

    if getattr(function, "__code__", None) is not masks.blockwise_overlay(torch.zeros(1)).__code__:
        return False
    return bool((function.__closure__[0].cell_contents < 0).all())


class ContextMask(OwnMask):
    """Takes the place of a block's (rows, 1, width, width) mask; see [Note: context masks]."""

    dtype = torch.bool

    def __init__(
        self,
        layout: SequenceLayout,
        rule: VisibilityRule,
        attends: Attends,
        device: torch.device,
        make_full: Callable[[], Any] | None = None,
    ) -> None:
        self.layout = layout
        self.rule = rule
        self.attends = attends
        self.device = device
        self._make_full = make_full
        self.shape = torch.Size((layout.rows, 1, layout.width, layout.width))

    @cached_property
    def real(self) -> torch.Tensor:
        raise CannotParallelize(
            "", "computes with its mask outside of transformers' attention functions"
        )

    @cached_property
    def full(self) -> Any:
        """The mask of the full rows, as the model would get it on one rank."""
        assert self._make_full is not None
        return self._make_full()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The same mask in torch.bool; any other conversion is refused."""
        if (args, kwargs) not in (((torch.bool,), {}), ((), {"dtype": torch.bool})):
            return self.real
        return ContextMask(
            self.layout, self.rule, self.attends, self.device, lambda: self.full.to(torch.bool)
        )

    def attend(
        self, plain: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Called like transformers' attention functions."""
        shape = (self.layout.rows, self.layout.width)
        if any((x.shape[0], x.shape[2]) != shape for x in (query, key, value)):
            raise CannotParallelize(
                "", f"attends to {key.shape[2]} keys where its part of the sequence has {shape[1]}"
            )
        if kwargs.get("position_bias") is not None:
            raise CannotParallelize(
                "", "adds a bias to scores that is computed from this rank's positions alone"
            )
        scaling = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        dropout = kwargs.get("dropout") or 0.0
        scores = Scores(scale, kwargs.get("softcap"), kwargs.get("s_aux"), dropout)
        return self.attends(query, key, value, scores, self, plain).transpose(1, 2).contiguous()
