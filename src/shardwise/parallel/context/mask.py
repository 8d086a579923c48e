"""The mask that travels with a divided batch: no tensor, but what every rank knows of all.

[Note: context masks] `ContextRows` goes in as a model's `attention_mask`; transformers' mask functions ask it,
through the registry of nn/attention/varlen.py, what the blocks get: a `ContextMask`, which holds the rule (causal, a
window, ...) by which positions see each other, and attends by itself. It is among a block's arguments, so that a
block computed again in backward finds it there. There is no tensor of (width, width) that would be right in its
place, since the keys are elsewhere: code that asks for one is refused.
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
    """Who sees whom within a document, by their positions in it."""

    causal: bool = False
    window: int | None = None  # so many tokens back, itself among them
    sides: int | None = None  # so many tokens to either side
    chunk: int | None = None  # only those in the same chunk of this size

    @property
    def plain(self) -> bool:
        """Causal or not, and no more."""
        return self.window is None and self.sides is None and self.chunk is None

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """As a mask of positions that are broadcast against each other; None where all see all."""
        seen: list[torch.Tensor] = []
        if self.causal:
            seen.append(queries >= keys)
        if self.window is not None:
            seen.append(queries - keys < self.window)
        if self.sides is not None:
            seen.append((queries - keys).abs() <= self.sides)
        if self.chunk is not None:
            seen.append(queries // self.chunk == keys // self.chunk)
        return torch.stack(torch.broadcast_tensors(*seen)).all(0) if seen else None


class Attends(Protocol):
    """Attention of this rank's queries to the keys of all; in and out as (rows, heads, width, head)."""

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
    """This rank's columns of a mask, (rows, width): ones but for padding."""

    def __init__(
        self,
        layout: SequenceLayout,
        attends: Attends,
        device: torch.device,
        dtype: torch.dtype = torch.int64,
    ) -> None:
        self.layout, self.attends, self.device, self.dtype = layout, attends, device, dtype
        self.shape = torch.Size((layout.rows, layout.width))

    @cached_property
    def real(self) -> torch.Tensor:
        return self.layout.take(self.layout.real).to(self.device, self.dtype)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Of this rank's tokens in their documents, (rows, width)."""
        return self.layout.take(self.layout.on(self.device).positions)

    def typed(self, dtype: torch.dtype) -> ContextRows:
        return ContextRows(self.layout, self.attends, self.device, dtype)

    def cumsum(self, dim: int) -> torch.Tensor:
        """Counts tokens, for positions or biases: from the start of the document, wherever this part begins."""
        return self.positions + 1

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cumsum and isinstance(args[0], ContextRows):
            return args[0].positions + 1
        return super().__torch_function__(func, types, args, kwargs)

    @cached_property
    def whole(self) -> Any:
        """The mask of whole rows: one that knows documents, or where there is but one a row, the tensor."""
        documents = self.layout.on(self.device)
        if self.layout.packed or self.layout.real.all():
            return RowsMask(documents, self.dtype)
        return self.layout.real.to(self.device, self.dtype)

    def for_blocks(self, ask: Callable[..., Any], **kwargs: Any) -> ContextMask:
        if (kwargs["q_length"], kwargs["kv_length"]) != (self.layout.width, self.layout.width):
            raise CannotParallelize("", "masks a sequence of another length than it was given")
        from transformers.masking_utils import causal_mask_function

        rule = kwargs.get("mask_function", causal_mask_function)
        documents = self.layout.on(self.device)
        size = {
            "q_length": documents.width,
            "kv_length": documents.width,
            "attention_mask": RowsMask(documents),
        }
        return ContextMask(
            self.layout, rule_of(rule), self.attends, self.device, partial(ask, **kwargs | size)
        )


def rule_of(function: Any) -> VisibilityRule:
    """What a mask function of transformers says, by the code that it is made of."""
    return VisibilityRule(**_said(function))


def _said(function: Any) -> dict[str, Any]:
    from transformers import masking_utils as known

    if function is known.causal_mask_function:
        return {"causal": True}
    if function is known.bidirectional_mask_function:
        return {}
    if isinstance(function, FunctionType):
        start = torch.zeros(1)
        cells = (cell.cell_contents for cell in function.__closure__ or ())
        held = dict(zip(function.__code__.co_freevars, cells, strict=True))
        makers: dict[Any, Callable[[], dict[str, Any]]] = {
            known.and_masks(): lambda: {
                k: v for one in held["mask_functions"] for k, v in _said(one).items()
            },
            known.or_masks(): lambda: _said(
                _only([one for one in held["mask_functions"] if not _empty(one)])
            ),
            known.sliding_window_overlay(1): lambda: {"window": held["sliding_window"]},
            known.sliding_window_bidirectional_overlay(1): lambda: {
                "sides": held["sliding_window"]
            },
            known.chunked_overlay(1, start): lambda: {"chunk": held["chunk_size"]},
        }
        for theirs, tell in makers.items():
            if theirs.__code__ is function.__code__:
                return tell()
    raise CannotParallelize(
        "", "masks attention by a rule of its own, which says nothing of positions on other ranks"
    )


def _empty(function: Any) -> bool:
    """Whether a rule about groups of tokens (those of an image) finds none."""
    from transformers import masking_utils as known

    if getattr(function, "__code__", None) is not known.blockwise_overlay(torch.zeros(1)).__code__:
        return False
    return bool((function.__closure__[0].cell_contents < 0).all())


def _only(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else None


class ContextMask(OwnMask):
    """In a block's place of a mask (rows, 1, width, width); see [Note: context masks]."""

    dtype = torch.bool

    def __init__(
        self,
        layout: SequenceLayout,
        rule: VisibilityRule,
        attends: Attends,
        device: torch.device,
        ask: Callable[[], Any] | None = None,
    ) -> None:
        self.layout, self.rule, self.attends, self.device, self._ask = (
            layout,
            rule,
            attends,
            device,
            ask,
        )
        self.shape = torch.Size((layout.rows, 1, layout.width, layout.width))

    @cached_property
    def real(self) -> torch.Tensor:
        raise CannotParallelize(
            "", "computes with its mask outside of transformers' attention functions"
        )

    @cached_property
    def whole(self) -> Any:
        """The mask of whole rows, as the model would have been given it without us."""
        assert self._ask is not None
        return self._ask()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The same as a mask of truths."""
        if (args, kwargs) not in (((torch.bool,), {}), ((), {"dtype": torch.bool})):
            return self.real
        return ContextMask(
            self.layout, self.rule, self.attends, self.device, lambda: self.whole.to(torch.bool)
        )

    def attend(
        self, plain: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """As transformers' attention functions are called."""
        shape = (self.layout.rows, self.layout.width)
        if any((x.shape[0], x.shape[2]) != shape for x in (query, key, value)):
            raise CannotParallelize(
                "", f"attends to {key.shape[2]} keys where its part of the sequence has {shape[1]}"
            )
        if kwargs.get("position_bias") is not None:
            raise CannotParallelize(
                "", "adds a bias to scores that is computed from this rank's positions alone"
            )
        scaling, sinks = kwargs.get("scaling"), kwargs.get("s_aux")
        scores = Scores(
            query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            kwargs.get("softcap"),
            sinks,
            kwargs.get("dropout") or 0.0,
        )
        return self.attends(query, key, value, scores, self, plain).transpose(1, 2).contiguous()
