"""How the tensors of a model's files become its parameters, and how trained ones go back under the names of the files.

While it loads, transformers renames tensors, converts some (the matrices of single experts become one stack), and drops
those that it builds nothing for. A `TensorNames` says what becomes of each. The rules are transformers' own, asked for
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
    """Tensors of the model that become tensors of files together; without `converts` each file name is the same one."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    converts: bool = False


@dataclass(frozen=True)
class TensorNames:
    """The tensors of files and those of a model."""

    model: Any
    same: dict[str, str]  # in the files: in the model, the same tensor
    converted: tuple[str, ...]  # in the files; the model has what is made of them
    extra: dict[str, str]  # in the files: what transformers would call it, if the model had it
    parts: list[TensorPart] = field(default_factory=list)

    def back(self, part: TensorPart, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of files that a part writes."""
        if not part.converts:
            return dict.fromkeys(part.writes, tensors[part.reads[0]])
        return _reverted(self.model, {name: tensors[name] for name in part.reads})

    @property
    def lost(self) -> set[str]:
        """Tensors of the files that training touches and that would not come back."""
        return {*self.same, *self.converted} - {name for part in self.parts for name in part.writes}


def link(model: Any, stored: Collection[str] | None) -> TensorNames:
    """What becomes of each tensor of the files; without files, how transformers would name them when it saves.

    `model` may be on `meta`; its class must be transformers' own (FSDP puts another one in front).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    state, prefix = model.state_dict(), model.base_model_prefix
    rules = get_model_conversion_mapping(model, add_legacy=stored is not None)
    same: dict[str, str] = {}
    extra: dict[str, str] = {}
    converted: list[str] = []
    for key in sorted(stored or (), key=natural_order):
        made, by = _renamed(key, rules, base_model_prefix=prefix, meta_state_dict=state)
        if made not in state and key in state:
            made, by = _renamed(key, [], base_model_prefix=prefix, meta_state_dict=state)
        if made not in state:
            extra[key] = made
        elif by is None:
            same[key] = made
        else:
            converted.append(key)
    # As `save_pretrained` does: a prefix is put back only where the files had it.
    kept = [r for r in rules if (r.was_used() if stored is not None else not isinstance(r, PrefixChange))]
    set_conversions(model, kept)
    found = TensorNames(model, same, tuple(converted), extra)
    found.parts.extend(_parts(model, same, kept, fresh=stored is None))
    return found


def _parts(model: Any, same: dict[str, str], rules: list[Any], fresh: bool) -> list[TensorPart]:
    """Each tensor of the model once, by its first name; tied ones are written under all the names that files have."""
    reversed_rules = [rule.reverse_transform() for rule in rules[::-1]]
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    state = model.state_dict(keep_vars=True)
    alike: dict[int, list[str]] = {}
    for name, tensor in state.items():
        alike.setdefault(id(tensor), []).append(name)
    stored: dict[str, list[str]] = {}
    for key, made in same.items():
        stored.setdefault(alike[id(state[made])][0], []).append(key)
    together: dict[str, list[str]] = {}
    result: list[TensorPart] = []
    for names in alike.values():
        saved = next((name for name in names if name not in ties), names[0])  # of tied ones, as transformers chooses
        key, by = _renamed(saved, reversed_rules, reverse=True)
        if names[0] in stored:
            result.append(TensorPart((names[0],), tuple(stored[names[0]])))
        elif by is None:
            result.append(TensorPart((names[0],), (key if fresh else saved,)))
        else:
            together.setdefault(key, []).append(names[0])
    for members in together.values():
        writes = _reverted(model, {name: torch.empty_like(state[name], device="meta") for name in members})
        result.append(TensorPart(tuple(members), tuple(writes), converts=True))
    return result


def natural_order(name: str) -> Any:
    """Sorts layer 10 behind layer 9."""
    from transformers.core_model_loading import dot_natural_key

    return dot_natural_key(name)


def _renamed(key: str, rules: list[Any], **more: Any) -> tuple[str, str | None]:
    """What transformers calls a tensor, and the pattern of the conversion that it goes through."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    name, by = rename_source_key(key, renamings, converters, **more)
    return str(name), by


def _reverted(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, tensors))
