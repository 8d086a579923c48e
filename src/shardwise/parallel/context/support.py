"""Checks whether a model's sequences can be sharded, by trying a tiny model of its class.

The trial runs in one process. The reference is the model's output for each document alone. First,
full rows run through our attention, and the output of every module is recorded. Then each rank's
part of the rows runs, with recorded keys in the place of those of other ranks. A module that mixes
positions other than by attention, computes positions by itself or masks by itself gives another
output for the part: the first such module is identified. If it is inside of a block, that part of
the block gets full rows (gather.py), and the trial starts again.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from shardwise.parallel.context.blocks import add_attention_sinks, block_of, merge, wide
from shardwise.parallel.context.gather import CallShapes, call_changed, modules_of
from shardwise.parallel.context.mask import ContextMask, ContextRows
from shardwise.parallel.context.positions import Positions
from shardwise.parallel.context.split import SequenceLayout, split_batch

RANKS = 2
WIDTH = 20  # neither it nor its half is another size of a tiny model
# Documents that cross the borders of parts and are longer than the windows of tiny models.
PACKED = [[7, 13], [12, 8]]
PLAIN = [[WIDTH], [WIDTH]]
# Relative to the largest value: fp32 operations inside of fp64 (norms, rotations) leave less.
TOLERANCE = 1e-5
MOST_CLASSES = 4  # of modules that may get full rows; models need one or two


@dataclass(frozen=True)
class CallConvention:
    """How a model is called with its part.

    `positions`: with `position_ids`; `behind`: which start behind the padding id, as RoBERTa's do;
    `registry`: all modules use the attention registry, also those that would not by default.
    """

    positions: bool = True
    behind: bool = False
    registry: bool = True


CONVENTIONS = (CallConvention(), CallConvention(behind=True), CallConvention(positions=False))


@dataclass(frozen=True)
class ContextSupport:
    """How to call a model, which classes of modules get full rows, and whether packing works."""

    convention: CallConvention
    whole: dict[str, CallShapes]
    packed: bool
    trouble: str = ""  # why packed documents do not work


def examine(model: Any) -> ContextSupport:
    """What sharded sequences need of a model; raises CannotParallelize if it cannot have them."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet():
        try:
            tiny = _tiny(model)
            vocabulary = tiny.config.get_text_config(decoder=True).vocab_size
            ids = torch.randint(FIRST, vocabulary - 1, (2, WIDTH))
            tiny(input_ids=ids, use_cache=False)
        except Exception as error:
            raise CannotParallelize(
                "", f"no tiny model of this class runs here to be tried ({error})"[:160]
            ) from error
        refusals: list[CannotParallelize] = []
        for most_classes in (0, MOST_CLASSES):
            for plain in CONVENTIONS:
                convention = replace(plain, registry=most_classes == 0)
                try:
                    return _examine(tiny, ids, convention, most_classes)
                except CannotParallelize as refusal:
                    refusals.append(refusal)
    raise refusals[0]


def _examine(
    model: Any, ids: torch.Tensor, convention: CallConvention, most_classes: int
) -> ContextSupport:
    """Tries a convention, with full rows for at most so many classes of modules."""
    gathered: list[str] = []
    while True:
        try:
            calls = _try(model, ids, PLAIN, convention, gathered)
            break
        except CannotParallelize as refusal:
            kind = _part_of_block(model, refusal.module)
            if kind is None or kind in gathered or len(gathered) == most_classes:
                raise
            gathered.append(kind)
    try:
        _try(model, ids, PACKED, convention, gathered)
    except CannotParallelize as refusal:
        return ContextSupport(convention, calls, False, str(refusal))
    return ContextSupport(convention, calls, True)


def _part_of_block(model: nn.Module, name: str) -> str | None:
    """The class of the direct child of a block that contains a module."""
    for block, _ in find_blocks(model):
        if name.startswith(block + "."):
            part = name.removeprefix(block + ".").split(".")[0]
            return type(model.get_submodule(f"{block}.{part}")).__name__
    return None


def _tiny(model: Any) -> Any:
    """A tiny fp64 model of the class, with perturbed initial weights (as in trial.py)."""
    torch.manual_seed(0)
    kind: Any = next(
        c for c in type(model).__mro__ if c.__module__.split(".")[0] not in ("torch", "shardwise")
    )
    with torch.device("cpu"):
        tiny = from_config(kind, shrink(model.config)).double()
    set_experts_of(tiny.config, "eager")  # grouped matmuls do not support fp64
    for parameter in tiny.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    tiny.tie_weights()
    return tiny.train()


def first_position(model: Any, convention: CallConvention) -> int:
    """The position of a document's first token."""
    pad = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    if convention.behind and pad is not None:
        return int(pad) + 1
    return 0


def _try(
    model: Any,
    ids: torch.Tensor,
    lengths: list[list[int]],
    convention: CallConvention,
    gathered: list[str],
) -> dict[str, CallShapes]:
    """How modules with full rows were called; raises CannotParallelize with a module's name."""
    documents = Documents.of_lengths(lengths)
    batch = MicroBatch(ids, ids, None, None, documents=documents)
    reference = _logits_of_documents(model, ids, documents).view(*ids.shape, -1)
    configs = [(module, module.config) for module in model.modules() if hasattr(module, "config")]
    recorder = _Recorder(model)
    hooks = Positions(model)
    try:
        ask_registry(model, convention)
        with recorder.hooks(), recorder.full_rows(gathered):
            for rank, ranks in [(0, 1), *((rank, RANKS) for rank in range(RANKS))]:
                part, layout = split_batch(batch, ranks, rank, zigzag=True)
                recorder.begin(layout)
                mask = ContextRows(layout, recorder.attend, ids.device)
                inputs: dict[str, Any] = {"attention_mask": mask}
                if convention.positions:
                    assert part.position_ids is not None
                    inputs["position_ids"] = part.position_ids + first_position(model, convention)
                logits = model(input_ids=part.input_ids, use_cache=False, **inputs).logits
                if not _close(logits, layout.take(reference)):
                    what = "documents in a row than for each alone"
                    if ranks > 1:
                        what = "a part of a row than for the whole"
                    problem = f"predicts something else for {what}"
                    raise CannotParallelize(recorder.first_block, problem)
    except CannotParallelize as refusal:
        if refusal.module:
            raise
        raise CannotParallelize(recorder.inside, refusal.why) from None
    # From the model's own code, given a mask that is no tensor or positions it does not support.
    except Exception as error:
        raise CannotParallelize(
            recorder.inside, f"{type(error).__name__}: {error}"[:160]
        ) from error
    finally:
        hooks.remove()
        for module, config in configs:
            module.config = config
    return {kind: CallShapes(*recorder.calls[kind]) for kind in gathered}


def _logits_of_documents(model: Any, ids: torch.Tensor, documents: Documents) -> torch.Tensor:
    """Logits of all tokens, (tokens, vocabulary), from one forward per document."""
    inputs = [ids]
    if not documents.alone:
        inputs = [document[None] for document in ids.flatten().split(documents.lengths)]
    outputs = [model(input_ids=document, use_cache=False) for document in inputs]
    return torch.cat([output.logits.flatten(0, 1) for output in outputs])


def ask_registry(model: Any, convention: CallConvention) -> None:
    """Installs our attention; with `convention.registry`, for all modules, by selecting "sdpa".

    The model gets its own copy of the config, since others may build from the original.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        if convention.registry and is_config(getattr(module, "config", None)):
            module.config = copy.deepcopy(module.config, copies)
            set_attention_of(module.config, "sdpa")
    if not install(model):
        raise CannotParallelize(
            "", "its attention is set to a kernel of its own: leave attn_implementation out"
        )


@dataclass
class _Recorder:
    """Records the outputs of modules for full rows, and compares them with those for a part."""

    model: nn.Module
    calls: dict[str, tuple[dict[str, int | None], dict[str, int | None]]] = field(
        default_factory=dict
    )
    _keys: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _outputs: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    _arguments: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    _names: list[str] = field(default_factory=list)
    _count: Counter[str] = field(default_factory=Counter)
    _layout: Any = None

    @property
    def inside(self) -> str:
        """The module whose forward is running, or in which an error was raised."""
        return self._names[-1] if self._names else ""

    @property
    def first_block(self) -> str:
        return next((name for name, _ in find_blocks(self.model)), "")

    def begin(self, layout: SequenceLayout) -> None:
        """Starts a forward: one of full rows is recorded, one of a part is compared."""
        self._layout = layout
        self._count.clear()

    def _next(self, name: str) -> int:
        self._count[name] += 1
        return self._count[name] - 1

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Hooks every module while the context is open."""
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
            self._outputs[name].append(output.clone())  # some are changed in place later
            return
        recorded = self._outputs[name]
        call = self._next(name)
        if call < len(recorded) and not _close(output, self._layout.take(recorded[call])):
            raise CannotParallelize(
                name,
                "mixes positions, or counts them by their place, in another way than by attention",
            )

    @contextmanager
    def full_rows(self, kinds: list[str]) -> Iterator[None]:
        """Gives modules of some classes full rows while the context is open."""
        modules = list(modules_of(self.model, kinds))
        for kind, name, module in modules:
            self.calls[kind] = ({}, {})
            module.forward = self._with_full_rows(kind, name, module.forward)
        try:
            yield
        finally:
            for _, _, module in modules:
                module.__dict__.pop("forward", None)

    def _with_full_rows(
        self, kind: str, name: str, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        """As in gather.py, with recorded arguments in the place of other ranks' parts."""

        def call(*args: Any, **kwargs: Any) -> Any:
            arguments, results = self.calls[kind]
            recording = self._layout.ranks == 1
            if recording:
                self._arguments[name].append({})
                recorded = self._arguments[name][-1]
            else:
                recorded = self._arguments[name][self._next(f"full rows {name}")]

            def argument(place: str, leaf: Any) -> Any:
                if isinstance(leaf, (ContextRows, ContextMask)):
                    leaf = leaf.full
                if recording:
                    recorded[place] = leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
                    return leaf
                return self._recorded(recorded[place], leaf, place, arguments)

            def result(place: str, leaf: Any) -> Any:
                if recording or not isinstance(leaf, torch.Tensor) or WIDTH not in leaf.shape:
                    return leaf
                if leaf.shape.count(WIDTH) > 1:
                    results[place] = None
                    return None
                dim = leaf.shape.index(WIDTH)
                results[place] = dim
                return self._layout.take(leaf, dim=dim)

            return call_changed(forward, args, kwargs, argument, result)

        return call

    def _recorded(self, full: Any, part: Any, place: str, dims: dict[str, int | None]) -> Any:
        """The recorded argument, if the ranks' parts would make it up."""
        if isinstance(part, int) and (part, full) == (self._layout.width, WIDTH):
            dims[place] = None
            return full
        if not isinstance(part, torch.Tensor) or not isinstance(full, torch.Tensor):
            return part
        sizes = zip(part.shape, full.shape, strict=True)
        cut = [dim for dim, (part_size, full_size) in enumerate(sizes) if part_size != full_size]
        expected = full
        if cut:
            expected = self._layout.take(full, dim=cut[0])
        if len(cut) == 1:
            dims[place] = cut[0]
        if len(cut) > 1 or not _close(part, expected):
            raise CannotParallelize(
                "", "is given what depends on more than its tokens and positions"
            )
        return full

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
        mask: ContextMask,
        plain: Any,
    ) -> torch.Tensor:
        """Implements `Attends`: records the keys of full rows, and reads them for a part."""
        layout = mask.layout
        if layout.ranks == 1:
            self._keys.append((key.clone(), value.clone()))
        call = self._next("")
        if call >= len(self._keys):
            raise CannotParallelize("", "attends more often to a part of a row than to the whole")
        recorded = self._keys[call]
        for local, full in zip((key, value), recorded, strict=True):
            if not _close(local, layout.take(full, dim=2)):
                raise CannotParallelize(
                    "", "its keys depend on more than their own tokens and positions"
                )
        out = torch.zeros(*query.shape[:3], value.shape[-1], dtype=wide(query.dtype))
        lse = torch.full(query.shape[:3], float("-inf"), dtype=out.dtype)
        for rank in range(layout.ranks):
            block = block_of(layout, mask.rule, scores, rank)
            if block is None:
                continue
            at = block.piece.queries
            visible = (layout.take(x, rank, dim=2)[:, :, block.piece.keys] for x in recorded)
            partial = block.forward(query[:, :, at], *visible)
            out[:, :, at], lse[:, :, at] = merge(out[:, :, at], lse[:, :, at], *partial)
        if scores.sinks is not None:
            out, _ = add_attention_sinks(out, lse, scores.sinks)
        return out


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point() or a.shape != b.shape:
        return torch.equal(a, b)
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max())
