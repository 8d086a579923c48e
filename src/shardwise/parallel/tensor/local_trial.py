"""Tries on a tiny model which blocks compute the same as local blocks (local_blocks.py).

Two ranks are played by two threads whose collectives meet in memory, so that the answer is the same
everywhere, without processes. Outputs, gradients of inputs and of every parameter are compared with
the block itself.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from shardwise.core.compat.torch_private import tree_flatten, tree_leaves, tree_unflatten
from shardwise.nn.adapters.layers import features, is_linear, is_transposed
from shardwise.nn.models.build import find_blocks
from shardwise.nn.tiny.case import TinyCase
from shardwise.parallel.tensor.local_blocks import (
    LocalConfig,
    LocalRun,
    TensorRanks,
    along_sequence,
    gather_inputs,
    own_rows,
    part_sizes,
)
from shardwise.parallel.tensor.roles import Roles, pattern_of

SIZE = 2
TOLERANCE = (
    1e-4  # of the largest value; norms compute in single precision, errors are 1e-2 and more
)
NOISE = 1e-3  # of the largest gradient: smaller ones are compared with that
PATIENCE = 60.0  # seconds that one thread waits for the other

Kind = tuple[Any, ...]
CONFIG = "config"  # among shares: the counts of heads in a module's config
# By module within the block: counts it sees its share of, and vectors with a value for each head.
Shares = Mapping[str, tuple[str, ...]]
Fused = Mapping[str, int]  # layers that are cut part by part, and their number of parts


@dataclass(frozen=True)
class LocalKind:
    """How blocks of a kind may run locally, or why not (`refusal`)."""

    shares: Shares
    refusal: str = ""
    fused: Fused = field(default_factory=dict)

    def sizes(self, block: nn.Module, name: str) -> tuple[int, ...]:
        """The parts of a fused projection of a block; none for other modules."""
        if name not in self.fused:
            return ()
        outputs, read = _outputs_and_read(block, name)
        return part_sizes(self.fused[name], outputs, read)

    def is_even(self, block: nn.Module, ranks: int) -> bool:
        """Whether the ranks divide each part of a block's fused projections."""
        for name in self.fused:
            sizes = self.sizes(block, name)
            outputs, _ = _outputs_and_read(block, name)
            if sum(sizes) != outputs or any(size <= 0 or size % ranks for size in sizes):
                return False
        return True


def kind_of(block: nn.Module) -> Kind:
    """What blocks that compute alike have in common."""
    return tuple((pattern_of(name), _class_of(m)) for name, m in block.named_modules())


def _class_of(module: nn.Module) -> str:
    # Expert parallelism has made a subclass of a stack of experts.
    is_spread = "expert_mesh" in vars(module)
    return (type(module).__bases__[-1] if is_spread else type(module)).__name__


def norm_width(module: nn.Module) -> int:
    """How many features a norm has a weight for; 0 for other modules."""
    own = list(module.parameters(recurse=False))
    is_norm = own and all(p.ndim == 1 for p in own) and next(module.children(), None) is None
    return own[0].shape[0] if is_norm else 0


def shared_counts(module: nn.Module, shares: tuple[str, ...], ranks: int) -> dict[str, Any]:
    """Attributes of a module of which it sees its share, with that share."""
    values: dict[str, Any] = {}
    for name in shares:
        if name == CONFIG:
            config: Any = module.config
            counts = {n: v // ranks for n, v in _head_counts(vars(config)).items()}
            values[name] = LocalConfig(config, counts)
        elif name not in module._parameters:
            values[name] = vars(module)[name] // ranks
    return values


def try_locally(case: TinyCase, roles: Roles) -> dict[Kind, LocalKind]:
    """Every kind of block of a class of models, and whether it may run locally."""
    model = case.model()
    blocks: dict[Kind, tuple[str, nn.Module]] = {}
    for name, block in find_blocks(model):
        blocks.setdefault(kind_of(block), (name, block))
    calls = _calls(model, case, [block for _, block in blocks.values()])
    may_return_more = _reads_hidden_states_alone(model, case)
    kinds = {}
    for kind, (name, block) in blocks.items():
        cuts = _cuts(name, block, roles)
        if isinstance(cuts, str):
            kinds[kind] = LocalKind({}, cuts)
        elif block not in calls:
            kinds[kind] = LocalKind({}, "a block that does not run")
        elif kind_of(block) != kind:  # BigBird, for short rows
            kinds[kind] = LocalKind({}, "a block whose modules are exchanged as it runs")
        else:
            kinds[kind] = _try(block, cuts, may_return_more, *calls[block])
    return kinds


def _calls(model: Any, case: TinyCase, blocks: list[nn.Module]) -> dict[nn.Module, tuple[Any, Any]]:
    """The arguments that blocks are first called with."""
    calls: dict[nn.Module, tuple[Any, Any]] = {}

    def record(block: nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(block, (args, kwargs))

    handles = [block.register_forward_pre_hook(record, with_kwargs=True) for block in blocks]
    try:
        model(**case.inputs(), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _reads_hidden_states_alone(model: Any, case: TinyCase) -> bool:
    """Whether a model ignores what else its blocks return, such as attention weights."""

    def spoil(block: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, tuple):
            return output
        first, *rest = output
        return (first, *(x * torch.nan if isinstance(x, torch.Tensor) else x for x in rest))

    handles = [block.register_forward_hook(spoil) for _, block in find_blocks(model)]
    try:
        with torch.no_grad():
            return bool(model(**case.inputs(), use_cache=False)[0].isfinite().all())
    except Exception:  # whatever a model's own code may raise
        return False
    finally:
        for handle in handles:
            handle.remove()


def _cuts(name: str, block: nn.Module, roles: Roles) -> dict[str, str] | str:
    """How layers of a block are cut, by their names in it; or why it cannot run locally."""
    by_pattern = {role.name: role for role in roles.parts}
    cuts: dict[str, str] = {}
    for inner, module in block.named_modules():
        pattern = pattern_of(f"{name}.{inner}" if inner else name)
        if pattern in roles.plain:
            return f"{inner or 'its code'} {roles.plain[pattern]}"
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        role = by_pattern.get(pattern)
        cut = role.cut if role is not None else "whole"
        is_cut = cut in ("column", "row") and is_linear(module)
        if is_cut or cut == "experts":
            cuts[inner] = cut
        elif max(p.ndim for p in own) > 2:
            return f"{inner} is not cut into columns or rows"
    return cuts if "row" in cuts.values() else "no layer of it is sharded"


def _try(
    block: nn.Module, cuts: Mapping[str, str], may_return_more: bool, args: Any, kwargs: Any
) -> LocalKind:
    leaves, spec = tree_flatten((args, kwargs))
    depend = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
    if len(depend) != 1 or leaves[depend[0]].ndim != 3:
        return LocalKind({}, "it reads more than hidden states")
    if leaves[depend[0]].shape[1] % SIZE:
        return LocalKind({}, "the tiny model's rows are odd")
    call = _BlockCall(leaves, spec, depend[0], may_return_more)
    try:
        expected = call.run(block)
    except _NotOne as refusal:
        return LocalKind({}, str(refusal))
    why = "its code does not compute on parts"
    for fused, shares in product(_possible_parts(block, cuts), _possible_shares(block, cuts)):
        plan = _Plan(cuts, LocalKind(shares, fused=fused))
        try:
            ranks = _run_ranks(block, plan, call)
        except Exception as error:  # whatever a model's own code may raise on parts
            why = f"{type(error).__name__} on parts: {(str(error).splitlines() or [''])[0][:80]}"
            continue
        if why_not := _difference(block, plan, expected, ranks):
            why = why_not
            continue
        return plan.kind
    return LocalKind({}, why)


@dataclass(frozen=True)
class _Plan:
    """How a block's layers are cut, and what its modules see."""

    cuts: Mapping[str, str]
    kind: LocalKind


def _possible_parts(block: nn.Module, cuts: Mapping[str, str]) -> list[Fused]:
    """How many parts the column layers may have that are the only ones of their modules."""
    choices: dict[str, list[int]] = {}
    for name, cut in cuts.items():
        owner = name.rpartition(".")[0]
        columns = [n for n, c in cuts.items() if c == "column" and n.rpartition(".")[0] == owner]
        if cut == "column" and len(columns) == 1:
            outputs, read = _outputs_and_read(block, name)
            choices[name] = [
                count for count in (2, 3)
                if 0 < read < outputs and not (outputs - read) % ((count - 1) * SIZE)
            ]  # fmt: skip
    options = [[(name, 1), *((name, n) for n in counts)] for name, counts in choices.items()]
    return [{name: n for name, n in chosen if n > 1} for chosen in product(*options)]


def _outputs_and_read(block: nn.Module, name: str) -> tuple[int, int]:
    """A layer's outputs, and the inputs of the other layer of its module (0: it is not one)."""
    layer = block.get_submodule(name)
    owner = block.get_submodule(name.rpartition(".")[0])
    others = [m for m in owner.children() if is_linear(m) and m is not layer]
    return features(layer)[1], features(others[0])[0] if len(others) == 1 else 0


def _possible_shares(block: nn.Module, cuts: Mapping[str, str]) -> Iterator[Shares]:
    """What modules may have to see their share of: nothing; counts of heads; of widths, too."""
    heads: dict[str, tuple[str, ...]] = {}
    widths: dict[str, tuple[str, ...]] = {}
    owners = {name.rpartition(".")[0] for name in cuts}
    for owner in owners:
        module = block.get_submodule(owner)
        sizes = _cut_sizes(module, owner, cuts)
        counts = _even_counts(vars(module))
        own_heads = tuple(n for n in counts if _counts_heads(n))
        heads[owner] = own_heads
        widths[owner] = (
            *own_heads,
            *(n for n, v in counts.items() if v in sizes and n not in own_heads),
        )
    basic: list[dict[str, tuple[str, ...]]] = [{}]
    if any(heads.values()):
        basic.append(heads)
    if widths != heads:
        basic.append(widths)
    vectors = {owner: _own_vectors(block.get_submodule(owner)) for owner in owners}
    configs = {owner: _own_config(block.get_submodule(owner)) for owner in owners}
    none: dict[str, tuple[str, ...]] = {}
    more = [none, *(x for x in (vectors, configs) if any(x.values()))]
    for extra, shares in product(more, basic):
        every = {o: (*shares.get(o, ()), *extra.get(o, ())) for o in sorted(owners)}
        yield {owner: names for owner, names in every.items() if names}


def _even_counts(values: Mapping[str, Any]) -> dict[str, int]:
    return {n: v for n, v in values.items() if type(v) is int and v % SIZE == 0 and v > 0}


def _head_counts(values: Mapping[str, Any]) -> dict[str, int]:
    return {n: v for n, v in values.items() if type(v) is int and v > 0 and _counts_heads(n)}


def _own_vectors(module: nn.Module) -> tuple[str, ...]:
    """Vectors of a module that is no layer, which may have a value for each head."""
    if is_linear(module):
        return ()
    return tuple(
        name for name, p in module.named_parameters(recurse=False)
        if p.ndim == 1 and len(p) % SIZE == 0
    )  # fmt: skip


def _own_config(module: nn.Module) -> tuple[str, ...]:
    config = vars(module).get(CONFIG)
    return (CONFIG,) if config is not None and _head_counts(vars(config)) else ()


def _counts_heads(name: str) -> bool:
    return "head" in name and not any(word in name for word in ("dim", "size", "groups"))


def _cut_sizes(module: nn.Module, owner: str, cuts: Mapping[str, str]) -> set[int]:
    sizes = set()
    for name, child in module.named_children():
        cut = cuts.get(f"{owner}.{name}" if owner else name)
        if cut in ("column", "row"):
            weight: Any = child.weight
            sizes.add(weight.shape[_weight_dim(child, cut)])
    return sizes


def _weight_dim(module: Any, cut: str) -> int:
    return int((cut == "column") == is_transposed(module))


class _NotOne(Exception):
    """A block returns more than hidden states."""


@dataclass(frozen=True)
class _BlockCall:
    """A block's arguments, which of them are the hidden states, and whether it may return more."""

    leaves: list[Any]
    spec: Any
    hidden: int
    may_return_more: bool

    def run(self, block: nn.Module, part: slice | None = None) -> dict[str, torch.Tensor]:
        """Output and gradients for (a part of) the hidden states; of parameters by name."""
        hidden = self.leaves[self.hidden].detach()
        weights = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view(hidden.shape)
        if part is not None:
            hidden = hidden[:, part]
            weights = weights[:, part]
        hidden = hidden.clone().requires_grad_()
        leaves = [x.detach() if isinstance(x, torch.Tensor) else x for x in self.leaves]
        leaves[self.hidden] = hidden * 1  # blocks may write into their input
        args, kwargs = tree_unflatten(leaves, self.spec)
        with torch.enable_grad():
            outputs = [
                x for x in tree_leaves(block(*args, **kwargs)) if isinstance(x, torch.Tensor)
            ]
            outputs = [x for x in outputs if x.requires_grad]
            if self.may_return_more:
                outputs = outputs[:1]
            if len(outputs) != 1 or outputs[0].shape != hidden.shape:
                raise _NotOne("it returns more than hidden states")
            (outputs[0] * weights).sum().backward()
        values = {"output": outputs[0].detach(), "input": _gradient(hidden)}
        for name, parameter in block.named_parameters():
            values[f".{name}"] = _gradient(parameter)
        return values


def _gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


class _Meeting:
    """Collectives of threads."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(SIZE, timeout=PATIENCE)
        self._given: list[Any] = [None] * SIZE

    def all(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[rank] = x.detach()
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        return given

    def leave(self) -> None:
        """After a failure: nobody comes any more."""
        self._barrier.abort()

    def ranks(self, rank: int) -> TensorRanks:
        def scatter(x: torch.Tensor) -> torch.Tensor:
            return torch.stack(self.all(rank, x)).sum(0).chunk(SIZE)[rank].clone()

        both = along_sequence(SIZE, lambda x: torch.cat(self.all(rank, x)), scatter)
        return TensorRanks(SIZE, rank, *both, lambda x: torch.stack(self.all(rank, x)).sum(0))


def _run_ranks(block: nn.Module, plan: _Plan, call: _BlockCall) -> list[dict[str, torch.Tensor]]:
    meeting = _Meeting()
    rows, width = call.leaves[call.hidden].shape[:2]
    width //= SIZE

    def run(rank: int) -> dict[str, torch.Tensor]:
        try:
            local = LocalRun(meeting.ranks(rank))
            local.rows = rows
            local.width = width
            own = _local_copy(block, plan, local)
            return call.run(own, slice(rank * width, (rank + 1) * width))
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(SIZE) as pool:
        futures = [pool.submit(run, rank) for rank in range(SIZE)]
        errors = [future.exception() for future in futures]
        for error in errors:  # the cause, not that the other thread left
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]


def _local_copy(block: nn.Module, plan: _Plan, run: LocalRun) -> nn.Module:
    own = copy.deepcopy(block)
    for name, module in own.named_modules():
        cut = plan.cuts.get(name)
        forward: Any = module.forward
        if cut == "experts":
            _cut_experts(module, run.ranks)
            module.forward = partial(run.experts, module, forward)
        elif cut is not None:
            _cut_parameters(module, cut, plan.kind.sizes(block, name), run.ranks)
            module.forward = partial(getattr(run, cut), forward)
        elif width := norm_width(module):
            module.forward = partial(run.norm, width, forward)
        if reads_hidden_states(name, module, plan.cuts):
            module.register_forward_pre_hook(partial(gather_inputs, run), with_kwargs=True)
    for name, shares in plan.kind.shares.items():
        module = own.get_submodule(name)
        vars(module).update(shared_counts(module, shares, SIZE))
        for key in shares:
            if key in module._parameters:
                part: Any = module._parameters[key]
                part = part.detach().chunk(SIZE)[run.ranks.rank].clone()
                setattr(module, key, nn.Parameter(part))
    return own


def _cut_experts(module: nn.Module, ranks: TensorRanks) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = parameter.detach().chunk(SIZE)[ranks.rank].clone()
        setattr(module, name, nn.Parameter(part))


def reads_hidden_states(name: str, module: nn.Module, cuts: Mapping[str, str]) -> bool:
    """Whether a module inside a block has layers that read all of the sequence."""
    if not name:
        return False
    return any(cuts.get(f"{name}.{child}") == "column" for child, _ in module.named_children())


def _cut_parameters(module: Any, cut: str, sizes: tuple[int, ...], ranks: TensorRanks) -> None:
    dim = _weight_dim(module, cut)
    full = module.weight.detach()
    rows = own_rows(sizes or (full.shape[dim],), SIZE, ranks.rank)
    module.weight = nn.Parameter(full.index_select(dim, rows))
    if is_transposed(module):
        module.nf = module.weight.shape[1]
    bias = getattr(module, "bias", None)
    if bias is None:
        return
    if cut == "column":
        module.bias = nn.Parameter(bias.detach()[rows])
    elif ranks.rank:
        module.bias = nn.Parameter(torch.zeros_like(bias))


def _difference(
    block: nn.Module,
    plan: _Plan,
    expected: Mapping[str, torch.Tensor],
    ranks: list[dict[str, torch.Tensor]],
) -> str:
    """What is not the same on parts, "" if nothing is."""
    largest = max(float(x.abs().max()) for name, x in expected.items() if name.startswith("."))
    for name, value in expected.items():
        parts = [rank[name] for rank in ranks]
        if not name.startswith("."):
            own = torch.cat(parts, 1)
            scale = float(value.abs().max())
        else:
            own = _joined(block, name[1:], plan, parts)
            scale = max(float(value.abs().max()), NOISE * largest)
        if own.shape != value.shape or float((own - value).abs().max()) > TOLERANCE * scale:
            return f"the {name.lstrip('.')} would differ"
    return ""


def _joined(block: nn.Module, name: str, plan: _Plan, parts: list[torch.Tensor]) -> torch.Tensor:
    """A parameter's gradient from those of its parts."""
    owner, _, leaf = name.rpartition(".")
    cut = plan.cuts.get(owner)
    if cut == "experts" or leaf in plan.kind.shares.get(owner, ()):
        return torch.cat(parts)
    if cut is None:
        return torch.stack(parts).sum(0)
    if leaf != "weight" and cut == "row":
        return parts[0]
    dim = _weight_dim(block.get_submodule(owner), cut) if leaf == "weight" else 0
    joined = torch.cat(parts, dim)
    if sizes := plan.kind.sizes(block, owner):
        order = torch.cat([own_rows(sizes, SIZE, rank) for rank in range(SIZE)])
        return joined.index_select(dim, order.argsort())
    return joined
