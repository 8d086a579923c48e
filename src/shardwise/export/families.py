"""Which models can become GGUF files, and what llama.cpp assumes about each architecture.

One row per `model_type`: gguf's name of the architecture, its settings, the layout of its tensors, and what a config
must say because llama.cpp has it built in. What its loader requires of a file is in nn/models/gguf_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from shardwise.core.errors import UserError
from shardwise.export.rope import rope_settings, theta_of

Settings = dict[str, Any]
Layout = Callable[[torch.Tensor, Any], torch.Tensor]


@dataclass(frozen=True)
class Family:
    """One architecture; `layouts` maps patterns of gguf's tensor names to how a tensor is stored there."""

    arch: str
    settings: Callable[[Any], Settings]
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    demands: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    check: Callable[[Any], str | None] = lambda config: None
    twice: Mapping[str, str] = field(default_factory=dict)  # shared tensors that the file must have under two names

    def problem(self, config: Any) -> str | None:
        """Returns why a model of this family cannot be written; None if it can."""
        for key, values in self.demands.items():
            if (value := getattr(config, key, values[0])) not in values:
                accepted = " or ".join(map(repr, values))
                return f"its {key} is {value!r}, but {self.arch} files mean {accepted}"
        return self.check(config)

    def stored(self, name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
        """Returns a tensor as the file stores it."""
        for pattern, layout in self.layouts.items():
            if fnmatchcase(name, pattern):
                tensor = layout(tensor, config)
        return tensor


def head_dim(config: Any) -> int:
    """Width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


WINDOWLESS = ("mistral", "starcoder2", "phi3")  # models with a sliding window, which llama.cpp does not apply


def _decoder(config: Any, eps: str = "rms_norm_eps") -> Settings:
    """Settings that nearly all decoders have."""
    kind = "layer_norm_rms_epsilon" if eps == "rms_norm_eps" else "layer_norm_epsilon"
    return {
        "context_length": _context(config),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        f"attention.{kind}": float(getattr(config, eps)),
        "vocab_size": config.vocab_size,
    }


def _context(config: Any) -> int:
    """Maximum context; the sliding window's length where llama.cpp does not support it for the family."""
    longest = int(config.max_position_embeddings)
    window = getattr(config, "sliding_window", None)
    return min(longest, int(window)) if window and config.model_type in WINDOWLESS else longest


def _rotary(config: Any, share: float = 1.0) -> Settings:
    size = head_dim(config)
    return {"rope.dimension_count": int(size * share), "rope.freq_base": theta_of(config)} | rope_settings(config)


def _share(config: Any) -> float:
    rope = getattr(config, "rope_parameters", None) or {}
    return float(rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0)


def _lengths(config: Any) -> Settings:
    return {"attention.key_length": head_dim(config), "attention.value_length": head_dim(config)}


def _llama(config: Any) -> Settings:
    return _decoder(config) | _rotary(config) | _lengths(config)


def _qwen_moe(config: Any) -> Settings:
    shared = getattr(config, "shared_expert_intermediate_size", None)
    return _llama(config) | {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        **({"expert_shared_feed_forward_length": shared} if shared else {}),
    }


def _gpt2(config: Any) -> Settings:
    return {
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "block_count": config.n_layer,
        "feed_forward_length": config.n_inner or 4 * config.n_embd,
        "attention.head_count": config.n_head,
        "attention.layer_norm_epsilon": float(config.layer_norm_epsilon),
    }


def _falcon(config: Any) -> Settings:
    return {
        "context_length": config.max_position_embeddings,
        "tensor_data_layout": "jploski",
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.ffn_hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 1,
        "attention.layer_norm_epsilon": float(config.layer_norm_epsilon),
        "vocab_size": config.vocab_size,
    } | _rotary(config)


def _bloom(config: Any) -> Settings:
    return {
        "context_length": int(getattr(config, "seq_length", None) or 2048),
        "embedding_length": config.hidden_size,
        "feed_forward_length": 4 * config.hidden_size,
        "block_count": config.n_layer,
        "attention.head_count": config.n_head,
        "attention.head_count_kv": config.n_head,
        "attention.layer_norm_epsilon": float(config.layer_norm_epsilon),
        "vocab_size": config.vocab_size,
    }


def _phi3(config: Any) -> Settings:
    return _decoder(config) | _rotary(config, _share(config)) | _lengths(config) | _window(config)


def _window(config: Any) -> Settings:
    window = getattr(config, "sliding_window", None)
    return {"attention.sliding_window": int(window)} if window else {}


def _stablelm(config: Any) -> Settings:
    parallel = {"use_parallel_residual": bool(config.use_parallel_residual)}
    return _decoder(config, "layer_norm_eps") | _rotary(config, _share(config)) | parallel


def _starcoder2(config: Any) -> Settings:
    return _decoder(config, "norm_epsilon") | _rotary(config)


def _nemotron(config: Any) -> Settings:
    return _decoder(config, "norm_eps") | _rotary(config, _share(config))


def _gemma2(config: Any) -> Settings:
    caps = {
        "attn_logit_softcapping": float(config.attn_logit_softcapping),
        "final_logit_softcapping": float(config.final_logit_softcapping),
    }
    return _llama(config) | _window(config) | caps


def _gemma3(config: Any) -> Settings:
    local = {"rope.freq_base_swa": theta_of(config, "sliding_attention")}
    return _decoder(config) | _rotary(config) | _lengths(config) | _window(config) | local


def _mamba(config: Any) -> Settings:
    return {
        "context_length": 1 << 20,  # it has no limit; llama.cpp wants a number
        "embedding_length": config.hidden_size,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": config.num_hidden_layers,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.intermediate_size,
        "ssm.state_size": config.state_size,
        "ssm.time_step_rank": config.time_step_rank,
        "attention.layer_norm_rms_epsilon": float(config.layer_norm_epsilon),
        "vocab_size": config.vocab_size,
    }


def _t5(config: Any) -> Settings:
    return {
        "context_length": int(getattr(config, "n_positions", None) or 512),
        "embedding_length": config.d_model,
        "feed_forward_length": config.d_ff,
        "block_count": config.num_layers,
        "decoder_block_count": config.num_decoder_layers,
        "attention.head_count": config.num_heads,
        "attention.key_length": config.d_kv,
        "attention.value_length": config.d_kv,
        "attention.layer_norm_epsilon": float(config.layer_norm_epsilon),
        "attention.layer_norm_rms_epsilon": float(config.layer_norm_epsilon),
        "attention.relative_buckets_count": config.relative_attention_num_buckets,
        "decoder_start_token_id": config.decoder_start_token_id or 0,
        "vocab_size": config.vocab_size,
    }


def _paired(heads: str) -> Layout:
    """Interleaves the rotary halves of a head, as llama.cpp rotates them for this architecture."""

    def layout(tensor: torch.Tensor, config: Any) -> torch.Tensor:
        count = getattr(config, heads)
        halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)

    return layout


def _one_after_another(tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Bloom's q, k, v per head as all of q, all of k, all of v."""
    heads = tensor.reshape(config.n_head, 3, tensor.shape[0] // config.n_head // 3, *tensor.shape[1:])
    return heads.transpose(0, 1).reshape(tensor.shape)


def _transposed(tensor: torch.Tensor, config: Any) -> torch.Tensor:
    return tensor.T


def _plus_one(tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Norms that multiply by 1 + weight."""
    return tensor.float() + 1


def _flat(tensor: torch.Tensor, config: Any) -> torch.Tensor:
    return tensor.squeeze(0)


PAIRED = {
    "blk.*.attn_q.*": _paired("num_attention_heads"),
    "blk.*.attn_k.*": _paired("num_key_value_heads"),
}
GEMMA_NORMS = {"*norm.weight": _plus_one}
SILU = {"hidden_act": ("silu",)}


def _no_window(config: Any) -> str | None:
    used = getattr(config, "use_sliding_window", False) and getattr(config, "sliding_window", None)
    return "it uses a sliding window, which llama.cpp has not for this family" if used else None


def _gemma_pattern(period: int, largest: int) -> Callable[[Any], str | None]:
    """llama.cpp has built in which layers use full attention, and the attention scale by the model's depth."""

    def check(config: Any) -> str | None:
        if config.model_type == "gemma2" and not (config.attn_logit_softcapping and config.final_logit_softcapping):
            return "it has no caps on its logits, which are built in"
        layers = range(1, config.num_hidden_layers + 1)
        expected = ["full_attention" if n % period == 0 else "sliding_attention" for n in layers]
        if list(config.layer_types) != expected:
            return f"its layer_types are not {period - 1} sliding layers to each full one"
        is_largest = config.num_hidden_layers == largest
        scale = config.hidden_size / config.num_attention_heads if is_largest else config.head_dim
        if abs(config.query_pre_attn_scalar - scale) > 1e-6:
            return f"its query_pre_attn_scalar is {config.query_pre_attn_scalar}, but {scale:g} is built in"
        return None

    return check


def _every_layer_sparse(config: Any) -> str | None:
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        return "some of its layers have no experts"
    return _no_window(config)


LLAMA = Family("llama", _llama, PAIRED, SILU)
OWN_HEAD = {"token_embd.weight": "output.weight"}  # llama.cpp wants one even where it is the embedding

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Family("qwen2", _llama, demands=SILU, check=_no_window),
    "qwen3": Family("qwen3", _llama, demands=SILU | {"attention_bias": (False,)}, check=_no_window),
    "qwen2_moe": Family("qwen2moe", _qwen_moe, {"*ffn_gate_inp_shexp.weight": _flat},
                        SILU | {"norm_topk_prob": (False,)}, _every_layer_sparse, OWN_HEAD),
    "qwen3_moe": Family("qwen3moe", _qwen_moe, {}, SILU | {"norm_topk_prob": (True,), "attention_bias": (False,)},
                        _every_layer_sparse),
    "gpt2": Family("gpt2", _gpt2,
                   {f"blk.*.{part}.weight": _transposed for part in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")},
                   {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
                    "scale_attn_by_inverse_layer_idx": (False,)}),
    "falcon": Family("falcon", _falcon, {},
                     {"new_decoder_architecture": (False,), "multi_query": (True,), "parallel_attn": (True,),
                      "bias": (False,), "alibi": (False,), "activation": ("gelu",), "tie_word_embeddings": (True,)}),
    "phi3": Family("phi3", _phi3, demands=SILU),
    "bloom": Family("bloom", _bloom, {"blk.*.attn_qkv.*": _one_after_another},
                    {"tie_word_embeddings": (True,), "apply_residual_connection_post_layernorm": (False,)}),
    "stablelm": Family("stablelm", _stablelm, {}, SILU | {"qk_layernorm": (False,)}, twice=OWN_HEAD),
    "starcoder2": Family("starcoder2", _starcoder2, {},
                         {"hidden_act": ("gelu_pytorch_tanh",), "use_bias": (True,)}),
    "nemotron": Family("nemotron", _nemotron, {"*norm.weight": _plus_one},
                       {"hidden_act": ("relu2",)}, twice=OWN_HEAD),
    "gemma2": Family("gemma2", _gemma2, GEMMA_NORMS,
                     {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,),
                      "tie_word_embeddings": (True,)},
                     _gemma_pattern(2, 46)),
    "gemma3_text": Family("gemma3", _gemma3, GEMMA_NORMS,
                          {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,),
                           "tie_word_embeddings": (True,), "final_logit_softcapping": (None,),
                           "attn_logit_softcapping": (None,), "use_bidirectional_attention": (False, None)},
                          _gemma_pattern(6, 62)),
    "mamba": Family("mamba", _mamba,
                    {"*ssm_conv1d.weight": lambda t, _: t.squeeze(1), "*ssm_a": lambda t, _: -t.float().exp()},
                    {"hidden_act": ("silu",), "use_bias": (False,), "use_conv_bias": (True,)}),
    "t5": Family("t5", _t5, {}, {"feed_forward_proj": ("gated-gelu",), "relative_attention_max_distance": (128,),
                               "scale_decoder_outputs": (False,)},
                 twice=OWN_HEAD),
}  # fmt: skip


def family_of(config: Any, field_name: str, unreadable: bool = False) -> Family:
    """Returns the family of a model.

    Raises UserError if it has none or, unless `unreadable` files are wanted, if llama.cpp expects something else.
    """
    kind = config.model_type
    family = FAMILIES.get(kind)
    if family is None:
        supported = ", ".join(sorted(FAMILIES))
        raise UserError(field_name, kind, "there is no GGUF export for this architecture", f"these can: {supported}")
    if not unreadable and (problem := family.problem(config)) is not None:
        raise UserError(field_name, kind, f"{problem}; a GGUF file would give other answers",
                        "export it as a Hugging Face folder instead, or pass --allow-unreadable")  # fmt: skip
    return family


def window_of(config: Any) -> str | None:
    """Returns a note about a sliding window that llama.cpp does not apply; None if there is none."""
    window = getattr(config, "sliding_window", None)
    if not window or config.model_type not in WINDOWLESS or window >= config.max_position_embeddings:
        return None
    return f"its context ends at {window} tokens: the sliding window of the model, which llama.cpp does not apply"


def split_experts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of the file: stacked experts hold gate and up in one tensor, the file has one of each."""
    if name.endswith(".experts.gate_up_proj"):
        half = tensor.shape[1] // 2
        stem = name.removesuffix("gate_up_proj")
        yield f"{stem}gate_proj.weight", tensor[:, :half]
        yield f"{stem}up_proj.weight", tensor[:, half:]
    elif name.endswith(".experts.down_proj"):
        yield f"{name}.weight", tensor
    else:
        yield name, tensor
