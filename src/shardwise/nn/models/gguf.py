"""GGUF files through transformers: with what it finds in a file by itself, or with what the file means (gguf_rules.py).

transformers reads fewer settings from a file than llama.cpp does, and drops tensors for which a model with those
settings has no place: biases, scalings and caps would be lost in silence.
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


def load_gguf(file: Path, made: Any, settings: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
    """What transformers makes of a file, in fp32; and those settings that it finds otherwise by itself.

    `made` is one of its auto classes. Without settings it is given nothing but the file.
    """
    from transformers import AutoConfig

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, "trust_remote_code": False}
    # Its bar over the tensors is tqdm's own, which writes to stderr and cannot be turned off from outside.
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        if settings is None:
            return made.from_pretrained(**where, dtype=torch.float32).eval(), {}
        config = AutoConfig.from_pretrained(**where)
        differing = {key: value for key, value in settings.items() if not alike(getattr(config, key, value), value)}
        for key, value in differing.items():
            setattr(config, key, value)
        return made.from_pretrained(**where, config=config, dtype=torch.float32).eval(), differing


def unread_tensors(model: Any, file: GgufFile) -> list[str]:
    """Tensors of a file that a model which transformers made of it has no place for."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    known = get_gguf_hf_weights_map(model, TENSOR_PROCESSORS.get(file.arch, TensorProcessor)(model.config.to_dict()))
    stacked = {name.removesuffix(".weight") for name in known}
    return [name for name in file.shapes if name not in known and name.removesuffix(".weight") not in stacked]


def alike(one: Any, other: Any) -> bool:
    """Whether two settings are the same, numbers as files round them; a share of 1 is none."""
    if isinstance(one, dict) and isinstance(other, dict):
        whole = {"partial_rotary_factor": 1.0}
        return all(alike(one.get(key, whole.get(key)), other.get(key, whole.get(key))) for key in {*one, *other})
    if isinstance(one, float) and isinstance(other, (int, float)):
        return abs(one - other) <= 1e-6 * abs(one)
    return bool(one == other)
