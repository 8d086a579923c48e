"""Rotary embeddings in GGUF's terms: base, scaling and, for scalings without settings of their own, factors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from shardwise.core.errors import UserError

# What llama.cpp takes for granted in these architectures; it has keys for some, which others read.
YARN = {"attention_factor": None, "mscale": None, "mscale_all_dim": None, "beta_fast": 32, "beta_slow": 1,
        "truncate": True}  # fmt: skip
FACTORS = {"llama3": ("llama", "mistral"), "longrope": ("phi3",)}  # scalings by tensor, and the models that have them


def _parameters(config: Any, layers: str = "full_attention") -> dict[str, Any]:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    return dict(rope[layers]) if layers in rope else rope


def theta_of(config: Any, layers: str = "full_attention") -> float:
    """Returns the base of the frequencies."""
    return float(_parameters(config, layers).get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def scaling_of(config: Any) -> str:
    """Returns the kind of scaling, "default" for none."""
    return str(_parameters(config).get("rope_type") or "default")


def rope_settings(config: Any) -> dict[str, Any]:
    """Returns the scaling as settings of the file; raises UserError for one that GGUF cannot express."""
    rope = _parameters(config)
    kind = scaling_of(config)
    if kind == "default" or (kind == "llama3" and config.model_type in FACTORS[kind]):
        return {}
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if kind == "yarn" and all(rope.get(key) in (None, usual) for key, usual in YARN.items()):
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": int(original or config.max_position_embeddings),
        }
    if kind == "longrope" and config.model_type in FACTORS[kind] and original:
        scale = config.max_position_embeddings / original
        # As phi-3 has it; llama.cpp multiplies the rotated vectors by it.
        factor = rope.get("attention_factor") or (
            1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))
        )
        return {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": int(original),
            "rope.scaling.attn_factor": float(factor),
        }
    raise UserError("--gguf", f"rope_type: {kind}", f"a GGUF file of {config.model_type} cannot say this scaling",
                    "export it as a Hugging Face folder instead")  # fmt: skip


def rope_tensors(config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields divisors of the frequencies, for scalings that are stored as tensors."""
    rope = _parameters(config)
    kind = scaling_of(config)
    if kind == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        steps = torch.arange(len(scaled), dtype=torch.float64) / len(scaled)
        yield "rope_freqs.weight", (theta_of(config) ** -steps / scaled).float()
    if kind == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"], dtype=torch.float32)
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"], dtype=torch.float32)
