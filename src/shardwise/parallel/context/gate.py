"""Whether a model can have its sequences divided, by trying a tiny one of its class in one process.

The truth is what the model says of each document alone. Then whole rows are run by our attention, and all that any
module makes of them is written down. Then a rank's part of the rows is run, its attention reading the keys that were
written down instead of other ranks'. What mixes positions in any other way than attention, counts positions by place,
or masks by itself, makes something else of the part than of the whole: the first module that does is found. If it is a
part of a block, it may have whole rows (gather.py), and the trial begins anew.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.core.compat.hf_private import (
    from_config,
    is_config,
    set_attention_of,
    set_experts_of,
)
from shardwise.data.documents import Documents
from shardwise.data.loader import MicroBatch
from shardwise.nn.attention.varlen import Scores, install
from shardwise.nn.models.build import find_blocks
from shardwise.nn.models.source import quiet
from shardwise.nn.tiny.case import FIRST, CannotParallelize
from shardwise.nn.tiny.shrink import shrink
from shardwise.parallel.context.blocks import block_of, merge, sunk, wide
from shardwise.parallel.context.gather import CallShapes, call_changed, modules_of
from shardwise.parallel.context.mask import ContextMask, ContextRows
from shardwise.parallel.context.positions import Positions
from shardwise.parallel.context.split import SequenceLayout, split_batch

RANKS, WIDTH = 2, 20  # a width, and half of it, that no other size of a tiny model has
PACKED = [
    [7, 13],
    [12, 8],
]  # documents across the borders of parts, longer than windows of tiny models
PLAIN = [[WIDTH], [WIDTH]]
SAME = 1e-5  # of the largest: single precision inside of double (norms, rotations) leaves less
KINDS = 4  # of modules that may have whole rows; models have one or two


@dataclass(frozen=True)
class Way:
    """How a model is given its part: with positions, maybe counted from behind the padding's number as RoBERTa does.

    `registry`: all attention is asked of the registry, of modules too that would not by themselves.
    """

    positions: bool = True
    behind: bool = False
    registry: bool = True


WAYS = (Way(), Way(behind=True), Way(positions=False))


@dataclass(frozen=True)
class Findings:
    """What a model needs: the way it is called, the classes of modules that get whole rows, and if it takes packing."""

    way: Way
    whole: dict[str, CallShapes]
    packed: bool
    trouble: str = ""  # with packed documents


def examine(model: Any) -> Findings:
    """Runs a tiny model of the class; raises Refused where its sequences cannot be divided."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet():
        try:
            tiny = _tiny(model)
            ids = torch.randint(
                FIRST, tiny.config.get_text_config(decoder=True).vocab_size - 1, (2, WIDTH)
            )
            tiny(input_ids=ids, use_cache=False)
        except Exception as error:
            raise CannotParallelize(
                "", f"no tiny model of this class runs here to be tried ({error})"[:160]
            ) from error
        refusals: list[CannotParallelize] = []
        for kinds in (0, KINDS):
            for way in WAYS:
                try:
                    return _mended(
                        tiny, ids, Way(way.positions, way.behind, registry=kinds == 0), kinds
                    )
                except CannotParallelize as refusal:
                    refusals.append(refusal)
    raise refusals[0]


def _mended(model: Any, ids: torch.Tensor, way: Way, kinds: int) -> Findings:
    """Tries a way, with whole rows for at most so many kinds of modules."""
    whole: list[str] = []
    while True:
        try:
            calls = _try(model, ids, PLAIN, way, whole)
            break
        except CannotParallelize as refusal:
            kind = _part_of_block(model, refusal.module)
            if kind is None or kind in whole or len(whole) == kinds:
                raise
            whole.append(kind)
    try:
        _try(model, ids, PACKED, way, whole)
    except CannotParallelize as refusal:
        return Findings(way, calls, False, str(refusal))
    return Findings(way, calls, True)


def _part_of_block(model: nn.Module, name: str) -> str | None:
    """The class of that part of a block in which a module lies."""
    for block, _ in find_blocks(model):
        if name.startswith(block + "."):
            part = name.removeprefix(block + ".").split(".")[0]
            return type(model.get_submodule(f"{block}.{part}")).__name__
    return None


def _tiny(model: Any) -> Any:
    """As in trial.py: parameters are away from where their authors start them, sums are in double precision."""
    torch.manual_seed(0)
    kind: Any = next(
        c for c in type(model).__mro__ if c.__module__.split(".")[0] not in ("torch", "shardwise")
    )
    with torch.device("cpu"):
        tiny = from_config(kind, shrink(model.config)).double()
    set_experts_of(tiny.config, "eager")  # grouped matmuls know no double precision
    for parameter in tiny.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    tiny.tie_weights()
    return tiny.train()


def first_position(model: Any, way: Way) -> int:
    """What a model counts positions from."""
    pad = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    return pad + 1 if way.behind and pad is not None else 0


def _try(
    model: Any, ids: torch.Tensor, lengths: list[list[int]], way: Way, whole: list[str]
) -> dict[str, CallShapes]:
    """Raises Refused with the name of a module; else tells how those that had whole rows were called."""
    documents = Documents.of_lengths(lengths)
    batch = MicroBatch(ids, ids, None, None, documents=documents)
    pieces = (
        [ids]
        if documents.alone
        else [piece[None] for piece in ids.flatten().split(documents.lengths)]
    )
    truth = torch.cat(
        [model(input_ids=piece, use_cache=False).logits.flatten(0, 1) for piece in pieces]
    )
    configs = [(module, module.config) for module in model.modules() if hasattr(module, "config")]
    watch, hooks = _Watch(model), Positions(model)
    try:
        ask_registry(model, way)
        with watch.hooks(), watch.whole_rows(whole):
            for rank, ranks in ((0, 1), *((r, RANKS) for r in range(RANKS))):
                part, layout = split_batch(batch, ranks, rank, zigzag=True)
                watch.begin(layout)
                given: dict[str, Any] = {
                    "attention_mask": ContextRows(layout, watch.attend, ids.device)
                }
                if way.positions:
                    assert part.position_ids is not None
                    given["position_ids"] = part.position_ids + first_position(model, way)
                logits = model(input_ids=part.input_ids, use_cache=False, **given).logits
                if not _same(logits, layout.take(truth.view(*ids.shape, -1))):
                    what = (
                        "a part of a row than for the whole"
                        if ranks > 1
                        else "documents in a row than for each alone"
                    )
                    raise CannotParallelize(
                        watch.first_block, f"predicts something else for {what}"
                    )
    except CannotParallelize as refusal:
        raise refusal if refusal.module else CannotParallelize(watch.inside, refusal.why) from None
    except Exception as error:  # the model's own code, given a mask that is no tensor or positions it does not know
        raise CannotParallelize(watch.inside, f"{type(error).__name__}: {error}"[:160]) from error
    finally:
        hooks.remove()
        for module, config in configs:
            module.config = config
    return {kind: CallShapes(*watch.calls[kind]) for kind in whole}


def ask_registry(model: Any, way: Way) -> None:
    """Puts our functions in place; where the way is so, under the name whose code paths have no surprises.

    The config is the model's own from then on: others may build from the one it had.
    """
    copies: dict[int, Any] = {}
    for module in model.modules() if way.registry else ():
        if is_config(getattr(module, "config", None)):
            module.config = copy.deepcopy(module.config, copies)
            set_attention_of(module.config, "sdpa")
    if not install(model):
        raise CannotParallelize(
            "", "its attention is set to a kernel of its own: leave attn_implementation out"
        )


@dataclass
class _Watch:
    """What modules made of whole rows, to be held against what they make of a part."""

    model: nn.Module
    calls: dict[str, tuple[dict[str, int | None], dict[str, int | None]]] = field(
        default_factory=dict
    )
    _keys: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _made: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    _given: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    _names: list[str] = field(default_factory=list)
    _count: Counter[str] = field(default_factory=Counter)
    _layout: Any = None

    @property
    def inside(self) -> str:
        """The module whose forward is running, or was when something was raised."""
        return self._names[-1] if self._names else ""

    @property
    def first_block(self) -> str:
        return next((name for name, _ in find_blocks(self.model)), "")

    def begin(self, layout: SequenceLayout) -> None:
        """Whole rows are written down, parts are held against them."""
        self._layout = layout
        self._count.clear()

    def _next(self, name: str) -> int:
        self._count[name] += 1
        return self._count[name] - 1

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Follows every module."""
        handles = []
        for name, module in self.model.named_modules():
            handles.append(
                module.register_forward_pre_hook(lambda *_, name=name: self._names.append(name))
            )
            handles.append(module.register_forward_hook(lambda _, __, output: self._leave(output)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self, output: Any) -> None:
        name = self._names.pop()
        if (
            not isinstance(output, torch.Tensor)
            or output.ndim != 3
            or output.shape[1] != self._layout.width
        ):
            return
        if self._layout.ranks == 1:
            self._made[name].append(output.clone())  # some are changed in place later
            return
        known, call = self._made[name], self._next(name)
        if call < len(known) and not _same(output, self._layout.take(known[call])):
            raise CannotParallelize(
                name,
                "mixes positions, or counts them by their place, in another way than by attention",
            )

    @contextmanager
    def whole_rows(self, kinds: list[str]) -> Iterator[None]:
        """Lets modules of some classes have whole rows."""
        modules = list(modules_of(self.model, kinds))
        for kind, name, module in modules:
            self.calls[kind] = ({}, {})
            module.forward = self._whole(kind, name, module.forward)
        try:
            yield
        finally:
            for _, _, module in modules:
                module.__dict__.pop("forward", None)

    def _whole(self, kind: str, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """As of gather.py, with what was written down in the place of other ranks' parts."""

        def call(*args: Any, **kwargs: Any) -> Any:
            arguments, results = self.calls[kind]
            recording = self._layout.ranks == 1
            if recording:
                self._given[name].append({})
            given = self._given[name][-1 if recording else self._next(f"whole {name}")]

            def argument(place: str, leaf: Any) -> Any:
                leaf = leaf.whole if isinstance(leaf, (ContextRows, ContextMask)) else leaf
                if recording:
                    given[place] = leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
                    return leaf
                return self._written(given[place], leaf, place, arguments)

            def result(place: str, leaf: Any) -> Any:
                along = (
                    [d for d, size in enumerate(leaf.shape) if size == WIDTH]
                    if _is_tensor(leaf)
                    else []
                )
                if recording or not along:
                    return leaf
                results[place] = along[0] if len(along) == 1 else None
                return self._layout.take(leaf, dim=along[0]) if len(along) == 1 else None

            return call_changed(forward, args, kwargs, argument, result)

        return call

    def _written(self, whole: Any, part: Any, place: str, dims: dict[str, int | None]) -> Any:
        """What was written down of an argument, if that is what the ranks' parts would make."""
        if isinstance(part, int) and (part, whole) == (self._layout.width, WIDTH):
            dims[place] = None
            return whole
        if not _is_tensor(part) or not _is_tensor(whole):
            return part
        along = [d for d, (a, b) in enumerate(zip(part.shape, whole.shape, strict=True)) if a != b]
        if len(along) == 1:
            dims[place] = along[0]
        mine = self._layout.take(whole, dim=along[0]) if along else whole
        if len(along) > 1 or not _same(part, mine):
            raise CannotParallelize(
                "", "is given what depends on more than its tokens and positions"
            )
        return whole

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
        mask: ContextMask,
        plain: Any,
    ) -> torch.Tensor:
        """In the place of `Attends`: to keys that are written down of whole rows, and read for parts of them."""
        layout = mask.layout
        if layout.ranks == 1:
            self._keys.append((key.clone(), value.clone()))
        call = self._next("")
        if call >= len(self._keys):
            raise CannotParallelize("", "attends more often to a part of a row than to the whole")
        whole = self._keys[call]
        for ours, theirs in zip((key, value), whole, strict=True):
            if not _same(ours, layout.take(theirs, dim=2)):
                raise CannotParallelize(
                    "", "its keys depend on more than their own tokens and positions"
                )
        out = torch.zeros(*query.shape[:3], value.shape[-1], dtype=wide(query.dtype))
        lse = torch.full(query.shape[:3], float("-inf"), dtype=out.dtype)
        for rank in range(layout.ranks):
            if (block := block_of(layout, mask.rule, scores, rank)) is None:
                continue
            mine, seen = block.piece.queries, block.piece.keys
            found = block.forward(
                query[:, :, mine], *(layout.take(x, rank, dim=2)[:, :, seen] for x in whole)
            )
            out[:, :, mine], lse[:, :, mine] = merge(out[:, :, mine], lse[:, :, mine], *found)
        return out if scores.sinks is None else sunk(out, lse, scores.sinks)[0]


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point() or a.shape != b.shape:
        return torch.equal(a, b)
    return bool((a - b).abs().max() <= SAME * b.abs().max())
