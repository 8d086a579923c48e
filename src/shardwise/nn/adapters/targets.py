"""From patterns to modules: what is adapted, trained in full, or frozen, and what is not covered."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shardwise.core.errors import UserError
from shardwise.nn.adapters.layers import is_linear

# Keys and values, also where one layer makes them together with the queries; the last layer of a feed-forward part.
KEYS_AND_VALUES = (
    "k_proj", "v_proj", "key", "value", "k", "v", "key_proj", "value_proj", "query_key_value", "qkv_proj", "kv_b_proj",
    "c_attn", "Wqkv",
)  # fmt: skip
FEEDFORWARD = (
    "down_proj", "fc2", "w2", "wo", "dense_4h_to_h", "fc_out", "mlp.c_proj", "output.dense", "ff.layer_2", "lin2",
)  # fmt: skip


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted name, or its suffix from some dot on, matches a pattern."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns every linear layer except the output head."""
    head = output_head(model)
    return {name: m for name, m in model.named_modules() if is_linear(m) and m is not head}


def output_head(model: Any) -> nn.Module | None:
    """Returns the layer that computes logits, if the model has one."""
    getter = getattr(model, "get_output_embeddings", None)
    return getter() if getter is not None else None


def find_targets(model: nn.Module, patterns: Sequence[str], field: str) -> list[str]:
    """Returns the linear layers that match the patterns, in the model's order; every pattern must match some."""
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if is_linear(module)]
    targets: set[str] = set()
    for pattern in patterns:
        matched = [name for name in linear if matches(name, pattern)]
        if not matched:
            others = [name for name in modules if name and matches(name, pattern)]
            raise _nothing(field, pattern, linear, others, modules)
        targets |= set(matched)
    for name in targets:
        _refuse_shared(model, modules[name], name, field)
    return [name for name in linear if name in targets]


def find_modules(model: nn.Module, patterns: Sequence[str], field: str) -> list[str]:
    """Returns the modules with parameters that match the patterns, none within another, in the model's order."""
    modules = {n: m for n, m in model.named_modules() if n and any(True for _ in m.parameters())}
    chosen: set[str] = set()
    for pattern in patterns:
        matched = [name for name in modules if matches(name, pattern)]
        if not matched:
            raise _nothing(field, pattern, list(modules), [], modules)
        chosen |= set(matched)
    return [n for n in modules if n in chosen and not any(inside(n, [other]) and n != other for other in chosen)]


def find_parameters(named: Mapping[str, nn.Parameter], patterns: Sequence[str], field: str) -> list[str]:
    """Returns the parameters that match the patterns, by their own names or those of modules around them."""
    chosen: set[str] = set()
    for pattern in patterns:
        matched = [name for name in named if any(matches(part, pattern) for part in _prefixes(name))]
        if not matched:
            prefixes = list(dict.fromkeys(part for name in named for part in _prefixes(name)))
            modules = [name.rpartition(".")[0] or name for name in named]
            raise _nothing(field, pattern, prefixes, [], {}, "matches no parameter that is trained", modules)
        chosen |= set(matched)
    return [name for name in named if name in chosen]


def ia3_targets(model: nn.Module, targets: Sequence[str] | None, feedforward: Sequence[str] | None) -> dict[str, bool]:
    """Returns the layers that get IA3 factors, and whether those scale their inputs."""
    scaled = _given_or_known(model, targets, KEYS_AND_VALUES, "method.target_modules")
    inner = _given_or_known(model, feedforward, FEEDFORWARD, "advanced.method.feedforward_modules")
    chosen = dict.fromkeys(scaled, False) | dict.fromkeys(inner, True)
    return {name: chosen[name] for name, _ in model.named_modules() if name in chosen}


def with_tied(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Returns these modules and those that share a parameter with them: PEFT needs both named."""
    shared = {id(p) for name in names for p in model.get_submodule(name).parameters()}
    tied = [n for n, m in model.named_modules() if any(id(p) in shared for p in m.parameters(recurse=False))]
    return tuple(dict.fromkeys([*names, *(n for n in tied if not inside(n, names))]))


def inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a name is one of these modules or within one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def uncovered(model: nn.Module, covered: Iterable[str]) -> tuple[str, ...]:
    """Returns the matrices outside these modules, with layer numbers as `*`: what a method does not train."""
    names = tuple(covered)
    remaining = [n for n, p in model.named_parameters() if p.ndim > 1 and not inside(n, names)]
    return tuple(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name).removesuffix(".weight") for name in remaining))


def shortest(names: Sequence[str], others: Iterable[str], dotted: bool = True) -> list[str]:
    """Returns suffixes that match these names and no others, for readers that compare the ends of names (PEFT).

    `dotted`: the reader compares whole parts; otherwise any end of the text.
    """
    other_names = [o for o in others if o not in set(names)]
    separator = "." if dotted else ""
    suffixes: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        ends = (".".join(parts[-size:]) for size in range(1, len(parts) + 1))
        unambiguous = (end for end in ends if not any(o == end or o.endswith(separator + end) for o in other_names))
        suffixes[next(unambiguous, name)] = None
    return list(suffixes)


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:size]) for size in range(1, len(parts) + 1)]


def _given_or_known(
    model: nn.Module, patterns: Sequence[str] | None, default_patterns: Sequence[str], field: str
) -> list[str]:
    if patterns is not None:
        return find_targets(model, patterns, field) if patterns else []
    known_layers = [
        name for name in linear_modules(model) if any(matches(name, pattern) for pattern in default_patterns)
    ]
    if not known_layers:
        problem = "this model names its layers in a way that is not known"
        raise UserError(field, None, problem, f"name them, e.g. {_some(linear_modules(model))}")
    return known_layers


def _refuse_shared(model: nn.Module, module: Any, name: str, field: str) -> None:
    owners = [n for n, m in model.named_modules() for p in m.parameters(recurse=False) if p is module.weight]
    if len(owners) > 1:
        other = next(n for n in owners if n != name)
        problem = f"shares its weight with {other}, which an update of {name} alone would tear apart"
        raise UserError(field, name, problem, "leave it out, or train it whole with method.modules_to_save")


def _nothing(
    field: str,
    pattern: str,
    candidates: Sequence[str],
    others: Sequence[str],
    modules: Mapping[str, nn.Module],
    problem: str = "matches nothing in this model",
    examples: Sequence[str] = (),
) -> UserError:
    if field == "method.target_modules" and pattern in (
        "linear",
        "all-linear",
        "all",
    ):  # as others write it, or in a list
        return UserError(field, pattern, problem, "write target_modules: linear for every linear layer but the head")
    if others:
        problem = f"matches {others[0]} ({type(modules[others[0]]).__name__}), which is no linear layer"
        return UserError(field, pattern, problem, f"name linear layers, e.g. {_some(candidates)}")
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in candidates))
    close_matches = difflib.get_close_matches(pattern.rpartition(".")[2], ends, n=3, cutoff=0.5)
    close_matches = close_matches or difflib.get_close_matches(pattern, list(candidates), n=3, cutoff=0.5)
    remedy = (
        f"did you mean {' or '.join(close_matches)}?"
        if close_matches
        else f"name some that are there, e.g. {_some(examples or candidates)}"
    )
    return UserError(field, pattern, problem, remedy)


def _some(names: Iterable[str]) -> str:
    return ", ".join(list(dict.fromkeys(name.rpartition(".")[2] for name in names))[:6])
