"""Private names of transformers and datasets under public ones.

Neither library is imported before something asks for what is in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def is_pretrained(model: Any) -> bool:
    """Whether a model is transformers' own."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def is_config(config: Any) -> bool:
    """Whether an object is a config of transformers, which names implementations."""
    library: Any = sys.modules.get("transformers.configuration_utils")
    return library is not None and isinstance(config, library.PreTrainedConfig)


def attention_of(config: Any) -> str | None:
    """The name of the attention that a config asks for; None until a model is built from it."""
    return config._attn_implementation  # type: ignore[no-any-return]


def set_attention_of(config: Any, name: str | None) -> None:
    """Names the attention of a config, and of the configs in it."""
    config._attn_implementation = name


def experts_of(config: Any) -> str | None:
    """The name of the way in which stacks of experts compute."""
    return config._experts_implementation  # type: ignore[no-any-return]


def set_experts_of(config: Any, name: str) -> None:
    """Names the way in which stacks of experts compute."""
    config._experts_implementation = name


def from_config(kind: Any, config: Any) -> Any:
    """A model of a class, whose weights are drawn; the public way goes by classes of tasks."""
    return kind._from_config(config)


def init_weights(owner: Any, module: nn.Module) -> None:
    """Draws the weights of one module, by the rules of the model that it belongs to."""
    owner._init_weights(module)


def unsplittable(model: nn.Module) -> set[str]:
    """Names of the classes that a model calls its blocks; none where it is not transformers' or names none."""
    return set(model._no_split_modules or ()) if is_pretrained(model) else set()  # type: ignore[arg-type]


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """The tensor-parallel plan that a model publishes: styles by patterns of names."""
    return dict(model._tp_plan or {}) if is_pretrained(model) else {}  # type: ignore[arg-type]


def is_stateful(model: nn.Module) -> bool:
    """Whether a model carries a state from token to token that is no cache of keys and values."""
    return bool(model._is_stateful)


def set_conversions(model: nn.Module, rules: list[Any]) -> None:
    """The rules that transformers undoes when it saves the model."""
    model._weight_conversions = rules  # type: ignore[assignment]


def apply_gate(experts: Any, inside: torch.Tensor) -> torch.Tensor:
    """The gate of a stack of experts: activation and product of the two halves."""
    return experts._apply_gate(inside)  # type: ignore[no-any-return]


@contextmanager
def grouped_product_as(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Within it stacks of experts compute their grouped products by what `change` makes of transformers' own."""
    from transformers.integrations import moe

    own: Any = moe._grouped_mm
    moe._grouped_mm = change(own)
    try:
        yield
    finally:
        moe._grouped_mm = own


def dataset_fingerprint(dataset: Any) -> str:
    """What the datasets library knows a dataset by: it changes with its files and with what was done to it."""
    return str(dataset._fingerprint)
