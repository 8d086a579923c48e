"""Whether a model can have its sequences divided, by trying a tiny one of its class in one process.

The truth is what the model says of each document alone. Then whole rows are run by our attention, and all that any
module makes of them is written down. Then a rank's part of the rows is run, its attention reading the keys that were
written down instead of other ranks'. What mixes positions in any other way than attention, counts positions by place,
or masks by itself, makes something else of the part than of the whole: the first module that does is named.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.data.loader import MicroBatch
from shardwise.models.attention import install
from shardwise.models.documents import Documents
from shardwise.models.shrink import shrink
from shardwise.models.source import quiet
from shardwise.parallel.context.blocks import block_of, merge, sunk, wide
from shardwise.parallel.context.mask import ContextMask, ContextRows, Scores
from shardwise.parallel.context.positions import Positions
from shardwise.parallel.context.split import split_batch
from shardwise.parallel.trial import FIRST, Refused

RANKS, WIDTH = 2, 20  # a width, and half of it, that no other size of a tiny model has
PACKED = [[7, 13], [12, 8]]  # documents across the borders of parts, longer than windows of tiny models
PLAIN = [[WIDTH], [WIDTH]]
SAME = 1e-5  # of the largest: single precision inside of double (norms, rotations) leaves less


@dataclass(frozen=True)
class Findings:
    """What a model takes: positions (counted from behind the padding's number, as RoBERTa does) or none, and packing."""

    positions: bool
    behind: bool
    packed: bool
    trouble: str = ""  # with packed documents


def examine(model: Any) -> Findings:
    """Runs a tiny model of the class; raises Refused where its sequences cannot be divided."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet():
        try:
            tiny = _tiny(model)
            ids = torch.randint(FIRST, tiny.config.get_text_config(decoder=True).vocab_size - 1, (2, WIDTH))
            tiny(input_ids=ids, use_cache=False)
        except Exception as error:
            raise Refused(
                "", f"no tiny model of this class runs here, so that nothing is known of it ({error})"
            ) from error
        refusals: list[Refused] = []
        for positions, behind in ((True, False), (True, True), (False, False)):
            try:
                _try(tiny, ids, PLAIN, positions, behind)
            except Refused as refusal:
                refusals.append(refusal)
                continue
            try:
                _try(tiny, ids, PACKED, positions, behind)
            except Refused as refusal:
                return Findings(positions, behind, False, str(refusal))
            return Findings(positions, behind, True)
    raise refusals[0]


def _tiny(model: Any) -> Any:
    """As in trial.py: parameters are away from where their authors start them, sums are in double precision."""
    torch.manual_seed(0)
    kind: Any = next(c for c in type(model).__mro__ if c.__module__.split(".")[0] not in ("torch", "shardwise"))
    with torch.device("cpu"):
        tiny = kind._from_config(shrink(model.config)).double()
    tiny.config._experts_implementation = "eager"  # grouped matmuls know no double precision
    for parameter in tiny.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    tiny.tie_weights()
    return tiny.train()


def first_position(model: Any, behind: bool) -> int:
    """What a model counts positions from."""
    pad = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    return pad + 1 if behind and pad is not None else 0


def _try(model: Any, ids: torch.Tensor, lengths: list[list[int]], positions: bool, behind: bool) -> None:
    documents = Documents.of_lengths(lengths)
    batch = MicroBatch(ids, ids, None, None, documents=documents)
    pieces = [piece[None] for piece in ids.flatten().split(documents.lengths)]
    if documents.alone:
        pieces = [ids]
    truth = torch.cat([model(input_ids=piece, use_cache=False).logits.flatten(0, 1) for piece in pieces])
    kept = [(module, module.config) for module in model.modules() if hasattr(module, "config")]
    watch, hooks = _Watch(model), Positions(model)
    try:
        use_registry(model)
        with watch.hooks():
            for rank, ranks in ((0, 1), *((r, RANKS) for r in range(RANKS))):
                part, layout = split_batch(batch, ranks, rank, zigzag=True)
                attends = _Attention(watch, ranks)
                watch.begin(None if ranks == 1 else layout)
                given: dict[str, Any] = {"attention_mask": ContextRows(layout, attends, ids.device)}
                if positions:
                    assert part.position_ids is not None
                    given["position_ids"] = part.position_ids + first_position(model, behind)
                logits = model(input_ids=part.input_ids, use_cache=False, **given).logits
                watch.compare(logits, layout.take(truth.view(*ids.shape, -1)))
    except Refused as refusal:
        raise refusal if refusal.module else Refused(watch.inside, refusal.why) from None
    except Exception as error:  # the model's own code, given a mask that is no tensor or positions it does not know
        raise Refused(watch.inside, f"{type(error).__name__}: {error}"[:160]) from error
    finally:
        hooks.remove()
        for module, config in kept:
            module.config = config


def use_registry(model: Any) -> None:
    """Attention through the registry, under the name whose code paths have no surprises; others may use the config."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            module.config = copy.deepcopy(module.config, copies)
            module.config._attn_implementation = "sdpa"
    install(model)


@dataclass
class _Watch:
    """What modules made of whole rows, in their order, to be held against what they make of a part."""

    model: nn.Module
    keys: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    made: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    attended: int = 0
    _names: list[str] = field(default_factory=list)
    _calls: Counter[str] = field(default_factory=Counter)
    _layout: Any = None  # of the part that is run; None while all is written down

    @property
    def inside(self) -> str:
        """The module whose forward is running, or was when something was raised."""
        return self._names[-1] if self._names else ""

    def begin(self, layout: Any) -> None:
        self._layout, self.attended = layout, 0
        self._calls.clear()

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Follows every module."""
        handles = []
        for name, module in self.model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._names.append(name)))
            handles.append(module.register_forward_hook(lambda _, __, output: self._leave(output)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self, output: Any) -> None:
        name = self._names.pop()
        width = WIDTH if self._layout is None else self._layout.width
        if not isinstance(output, torch.Tensor) or output.ndim != 3 or output.shape[1] != width:
            return
        if self._layout is None:
            self.made[name].append(output.clone())  # some are changed in place later
        elif (call := self._calls[name]) < len(self.made[name]):
            self._calls[name] += 1
            if not _same(output, self._layout.take(self.made[name][call])):
                raise Refused(name, "mixes positions, or counts them by their place, in another way than by attention")

    def compare(self, logits: torch.Tensor, truth: torch.Tensor) -> None:
        if not self.attended:
            raise Refused(self._first_block(), "does not attend through transformers' registry")
        if not _same(logits, truth):
            raise Refused(self._first_block(), "predicts something else for a part of a row than for the whole")

    def _first_block(self) -> str:
        from shardwise.models.build import find_blocks

        return next((name for name, _ in find_blocks(self.model)), "")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= SAME * b.abs().max())


class _Attention:
    """Attention to keys that are written down while whole rows are run, and read while parts of them are."""

    def __init__(self, watch: _Watch, ranks: int) -> None:
        self._watch, self._ranks = watch, ranks

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, mask: ContextMask, plain: Any
    ) -> torch.Tensor:
        """In the place of `Attends`."""
        layout, watch = mask.layout, self._watch
        if self._ranks == 1:
            watch.keys.append((key.clone(), value.clone()))
        if watch.attended >= len(watch.keys):
            raise Refused("", "attends more often to a part of a row than to the whole")
        whole, watch.attended = watch.keys[watch.attended], watch.attended + 1
        for ours, theirs in zip((key, value), whole, strict=True):
            if not _same(ours, layout.take(theirs, dim=2)):
                raise Refused("", "its keys depend on more than their own tokens and positions")
        out = torch.zeros(*query.shape[:3], value.shape[-1], dtype=wide(query.dtype))
        lse = torch.full(query.shape[:3], float("-inf"), dtype=out.dtype)
        for rank in range(self._ranks):
            if (block := block_of(layout, mask.rule, scores, rank)) is None:
                continue
            mine, seen = block.piece.queries, block.piece.keys
            found = block.forward(query[:, :, mine], *(layout.take(x, rank, dim=2)[:, :, seen] for x in whole))
            out[:, :, mine], lse[:, :, mine] = merge(out[:, :, mine], lse[:, :, mine], *found)
        return out if scores.sinks is None else sunk(out, lse, scores.sinks)[0]
