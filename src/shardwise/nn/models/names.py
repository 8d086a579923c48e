"""Maps the tensors of a model's files to its parameters, and trained ones back to the names of the files.

While it loads, transformers renames tensors, converts some (the matrices of single experts become one stack), and drops
those that it builds nothing for. A `TensorNames` says what becomes of each. The rules are transformers' own, applied to
one tensor at a time, so that exports never hold more than what is converted together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.core.compat.hf_private import set_conversions


@dataclass(frozen=True)
class TensorPart:
    """Tensors of the model that are converted to tensors of files together.

    Without `converts` they are the same tensor.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    converts: bool = False


@dataclass(frozen=True)
class TensorNames:
    """Mapping between the tensors of files and those of a model."""

    model: Any
    same: dict[str, str]  # in the files: in the model, the same tensor
    converted: tuple[str, ...]  # in the files; the model has what is made of them
    extra: dict[str, str]  # in the files: what transformers would call it, if the model had it
    parts: list[TensorPart] = field(default_factory=list)

    def back(self, part: TensorPart, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors of files that a part writes."""
        if not part.converts:
            return dict.fromkeys(part.writes, tensors[part.reads[0]])
        return _reverted(self.model, {name: tensors[name] for name in part.reads})

    @property
    def lost(self) -> set[str]:
        """Tensors of the files that are trained and would be missing from an export."""
        return {*self.same, *self.converted} - {name for part in self.parts for name in part.writes}


def link(model: Any, stored: Collection[str] | None) -> TensorNames:
    """Returns what becomes of each tensor of the files; without files, how transformers would name them on save.

    `model` may be on `meta`; its class must be transformers' own (FSDP puts another one in front).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    state = model.state_dict()
    prefix = model.base_model_prefix
    rules = get_model_conversion_mapping(model, add_legacy=stored is not None)
    same: dict[str, str] = {}
    extra: dict[str, str] = {}
    converted: list[str] = []
    for key in sorted(stored or (), key=natural_order):
        model_name, conversion = _renamed(key, rules, base_model_prefix=prefix, meta_state_dict=state)
        if model_name not in state and key in state:
            model_name, conversion = _renamed(key, [], base_model_prefix=prefix, meta_state_dict=state)
        if model_name not in state:
            extra[key] = model_name
        elif conversion is None:
            same[key] = model_name
        else:
            converted.append(key)
    # As `save_pretrained` does: a prefix is put back only where the files had it.
    rules_used = [r for r in rules if (r.was_used() if stored is not None else not isinstance(r, PrefixChange))]
    set_conversions(model, rules_used)
    names = TensorNames(model, same, tuple(converted), extra)
    names.parts.extend(_parts(model, same, rules_used, fresh=stored is None))
    return names


def _parts(model: Any, same: dict[str, str], rules: list[Any], fresh: bool) -> list[TensorPart]:
    """Each tensor of the model once, by its first name; tied ones are written under all the names that files have."""
    reversed_rules = [rule.reverse_transform() for rule in rules[::-1]]
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    state = model.state_dict(keep_vars=True)
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in state.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    stored: dict[str, list[str]] = {}
    for key, model_name in same.items():
        stored.setdefault(by_tensor[id(state[model_name])][0], []).append(key)
    converted_together: dict[str, list[str]] = {}
    result: list[TensorPart] = []
    for names in by_tensor.values():
        saved = next((name for name in names if name not in ties), names[0])  # of tied ones, as transformers chooses
        key, conversion = _renamed(saved, reversed_rules, reverse=True)
        if names[0] in stored:
            result.append(TensorPart((names[0],), tuple(stored[names[0]])))
        elif conversion is None:
            result.append(TensorPart((names[0],), (key if fresh else saved,)))
        else:
            converted_together.setdefault(key, []).append(names[0])
    for members in converted_together.values():
        writes = _reverted(model, {name: torch.empty_like(state[name], device="meta") for name in members})
        result.append(TensorPart(tuple(members), tuple(writes), converts=True))
    return result


def natural_order(name: str) -> Any:
    """Sort key that puts layer 10 after layer 9."""
    from transformers.core_model_loading import dot_natural_key

    return dot_natural_key(name)


def _renamed(key: str, rules: list[Any], **options: Any) -> tuple[str, str | None]:
    """transformers' name of a tensor, and the pattern of the conversion that it goes through."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    name, conversion = rename_source_key(key, renamings, converters, **options)
    return str(name), conversion


def _reverted(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, tensors))
