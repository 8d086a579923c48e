"""Loads GGUF files through transformers: with what it reads by itself, or with what the file means (gguf_rules.py).

transformers reads fewer settings from a file than llama.cpp does, and drops tensors for which a model with those
settings has no place: biases, scalings and caps would silently be lost.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.nn.models.gguf_rules import GgufFile
from shardwise.nn.models.source import quiet


def load_gguf(file: Path, model_class: Any, settings: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
    """Returns the model of a file in fp32, and those settings that transformers reads differently by itself.

    `made` is one of its auto classes. Without settings it is given nothing but the file.
    """
    from transformers import AutoConfig

    arguments = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "trust_remote_code": False}
    # Its bar over the tensors is tqdm's own, which writes to stderr and cannot be turned off from outside.
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        if settings is None:
            return model_class.from_pretrained(**arguments, dtype=torch.float32).eval(), {}
        config = AutoConfig.from_pretrained(**arguments)
        differing = {key: value for key, value in settings.items() if not alike(getattr(config, key, value), value)}
        for key, value in differing.items():
            setattr(config, key, value)
        return model_class.from_pretrained(**arguments, config=config, dtype=torch.float32).eval(), differing


def unread_tensors(model: Any, file: GgufFile) -> list[str]:
    """Returns the tensors of a file for which the model that transformers made of it has no place."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    mapped = get_gguf_hf_weights_map(model, TENSOR_PROCESSORS.get(file.arch, TensorProcessor)(model.config.to_dict()))
    stacked = {name.removesuffix(".weight") for name in mapped}
    return [name for name in file.shapes if name not in mapped and name.removesuffix(".weight") not in stacked]


def alike(left: Any, right: Any) -> bool:
    """Whether two settings are equal, up to how files round numbers; a share of 1 equals none."""
    if isinstance(left, dict) and isinstance(right, dict):
        defaults = {"partial_rotary_factor": 1.0}
        return all(
            alike(left.get(key, defaults.get(key)), right.get(key, defaults.get(key))) for key in {*left, *right}
        )
    if isinstance(left, float) and isinstance(right, (int, float)):
        return abs(left - right) <= 1e-6 * abs(left)
    return bool(left == right)
