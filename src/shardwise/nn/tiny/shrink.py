"""Shrinks a config to a tiny model of the same class, which computes as the large one does and runs in a second.

Nothing is known of single architectures except for a few keys without which they break. A config's numbers are set by
what their names mean; layer types, switches and activation functions stay. Names differ between families, their
meanings hardly do.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator
from typing import Any

WIDTH, HEADS, GROUPS, HEAD, INNER, LAYERS, EXPERTS, VOCABULARY, POSITIONS = 32, 4, 2, 8, 64, 4, 4, 96, 128

MEANINGS: list[tuple[int, tuple[str, ...]]] = [
    (WIDTH, (
        "hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size", "emb_dim", "model_dim",
        "projection_dim", "encoder_hidden_size", "lru_width", "time_mix_extra_dim",
        "query_pre_attn_scalar", "conv_dim", "hidden_dim_base", "embed_dim", "hidden_size_global", "ple_embed_dim",
        "adapter_in_dim", "adapter_out_dim", "adapter_input_size",
        "embedding_dim", "output_dim", "output_channels", "nemo_conv_channels", "ext_pw_out_channel",
        "depthwise_separable_out_channel", "downsample_hidden_size",
        "d_latents",
    )),
    (INNER, (
        "intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size", "hidden_dim", "encoder_ffn_dim",
        "decoder_ffn_dim", "ffn_embed_dim", "shared_intermediate_size", "d_inner", "mlp_hidden_size",
        "dense_intermediate_size", "intermediate_size_mlp", "block_ff_dim", "dense_ffn_hidden_size",
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "attention_hidden_size", "dff",
        "dim_ff", "mlp_dim", "feed_forward_size", "mamba_d_ssm",
    )),
    (HEADS, (
        "num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads",
        "linear_num_value_heads", "num_attention_heads_per_layer", "linear_num_heads",
    )),
    (GROUPS, (
        "num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_query_groups", "linear_num_key_heads",
        "num_key_value_groups", "kv_n_heads", "num_global_key_value_heads",
        "swa_num_key_value_heads", "num_filters",
    )),
    (HEAD, (
        "head_dim", "d_kv", "d_head", "qk_nope_head_dim", "v_head_dim", "kv_channels", "linear_key_head_dim",
        "linear_value_head_dim", "index_head_dim", "attention_head_size", "global_head_dim",
        "swa_head_dim", "dim_head", "linear_head_dim", "indexer_head_dim",
    )),
    (LAYERS, (
        "num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers", "decoder_layers", "num_blocks",
        "num_self_attends_per_block",
    )),
    (2, (
        "num_encoder_layers", "encoder_layers", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k",
        "moe_k", "num_selected_experts", "top_k_experts", "altup_num_inputs", "first_k_dense_replace_layers",
        "num_hidden_groups_inner", "attn_layer_period", "expert_layer_period", "indexer_compress_ratio",
        "zero_expert_num",
    )),
    (EXPERTS, (
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "expert_num",
    )),
    (16, (
        "moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "q_lora_rank", "kv_lora_rank",
        "o_lora_rank", "expert_intermediate_size", "moe_latent_size", "attention_head_dim",
        "embedding_rank", "hc_lowrank",
        "num_latents",
    )),
    (4, ("rotary_dim", "qk_rope_head_dim", "laurel_rank", "mamba_dt_rank", "time_step_rank")),
    (1, (
        "n_group", "num_expert_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_experts",
        "mamba_n_groups", "n_groups", "num_nextn_predict_layers_used", "num_hidden_groups", "inner_group_num",
        "attn_layer_offset", "expert_layer_offset", "indexer_kv_heads",
    )),
    (8, (
        "mamba_d_state", "state_size", "ssm_state_size", "mamba_n_heads", "mamba_num_heads", "mamba_d_head",
        "mamba_head_dim", "chunk_size", "mamba_chunk_size", "sliding_window", "index_topk", "attention_window",
        "hidden_size_per_layer_input", "attention_chunk_size", "window_size", "local_attention", "block_size",
        "indexer_budget", "local_attn_chunk_length", "lsh_attn_chunk_length",
    )),
    (VOCABULARY, (
        "vocab_size", "vocab_size_per_layer_input", "entity_vocab_size", "pronunciation_vocab_size", "shape_vocab_size",
        "src_vocab_size", "tgt_vocab_size", "ngram_vocab_size_base", "encoder_hash_byte_group_vocab",
    )),
    (POSITIONS, (
        "max_position_embeddings", "n_positions", "n_ctx", "max_source_positions", "max_target_positions",
        "max_sequence_length", "max_seq_len",
    )),
    (8, ("expert_capacity",)),  # fewer tokens than a batch has: who is left out depends on the rows beside
    (0, ("num_kv_shared_layers", "num_nextn_predict_layers", "num_mtp_modules")),
]  # fmt: skip
SIZES = {name: value for value, names in MEANINGS for name in names}
# How many experts a layer has, and how a token's are chosen among them.
ROUTING = frozenset((
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "expert_num", "num_experts_per_tok",
    "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "num_selected_experts", "top_k_experts", "n_group",
    "num_expert_group", "topk_group", "zero_expert_num",
))  # fmt: skip
DEPTHS = {name for name, size in SIZES.items() if size == LAYERS and "layer" in name}
DEPTHS |= {"encoder_layers", "num_encoder_layers"}
OPTIONAL = {  # None is a choice: it stays
    "sliding_window", "q_lora_rank", "n_inner", "encoder_hidden_size", "o_lora_rank", "attention_chunk_size",
    "attention_window", "num_experts", "num_local_experts",
}  # fmt: skip
# Of sparse attention, which takes the keys with the largest sums over these heads: with few of them many sums are zero,
# and which of equal keys is taken depends on what else is in the row.
INDEX_HEADS, FEW_TIES = ("index_n_heads", "indexer_n_heads"), 16
CAPS, CAP = ("softcap", "soft_cap", "logit_cap"), 2.0  # of scores and logits: low enough to bite
NOISE = ("jitter_noise", "router_jitter_noise", "input_jitter_noise")
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}


def shrink(config: Any, layers: int = LAYERS, keep: Container[str] = ()) -> Any:
    """Returns a config of the same class with some ten thousand parameters; `layers` of each kind of stack.

    `keep`: sizes that stay unchanged.
    """
    kind = type(config)
    values = {name: value for name, value in _values(config) if not _is_fixed(kind, name)}
    changed: dict[str, Any] = {}
    for name, old in values.items():
        if name in keep and isinstance(old, int):
            changed[name] = old
        elif name in SIZES:
            if (old is None and name in OPTIONAL) or isinstance(old, dict):
                continue
            size = layers if SIZES[name] == LAYERS and "layer" in name else SIZES[name]
            if old == 1 and ("top" in name or ("exp" in name and "moe" not in kind.model_type)):
                size = 1
            changed[name] = [size for _ in range(layers)] if isinstance(old, (list, tuple)) else size
        elif name in INDEX_HEADS:
            changed[name] = min(old or FEW_TIES, FEW_TIES)
        elif ("drop" in name and isinstance(old, float)) or name in NOISE:
            changed[name] = 0.0
        elif _is_cap(name, old):
            changed[name] = CAP
        elif name == "depths" and isinstance(old, (list, tuple)):
            changed[name] = [1 for _ in old]
        elif name in SPECIAL:
            changed[name] = SPECIAL[name]
        elif name in ("rope_parameters", "rope_scaling"):
            changed[name] = _rope(old, values.get("layer_types"))
        elif isinstance(old, (list, tuple)) and old and len(old) == _depth(config) and len(old) > 1:
            changed[name] = _kinds(list(old), layers)
    _keep_ratios(config, changed, layers)
    inner = {name: shrink(getattr(config, name), layers, keep) for name in _inner(config)}
    result = kind(**{**_switches(config), **{k: v for k, v in changed.items() if v is not None}, **inner})
    if hasattr(result, "use_cache"):
        result.use_cache = False
    attention: Any = getattr(result, "attn_config", None)
    if hasattr(attention, "kv_n_heads"):
        # dbrx cannot do without, whatever its class says
        attention.rope_theta = 10000.0
        attention.clip_qkv = 8
    if getattr(result, "is_encoder_decoder", False):
        # Bert2Bert and its kin hide what is padding from their decoders, so that it cannot be the start as well.
        result.decoder_start_token_id = 1 if kind.model_type == "encoder-decoder" else 0
    return result


def first_layers(config: Any, layers: int) -> Any:
    """Returns the config with the first layers only; widths are unchanged."""
    return type(config).from_dict(_cut(config.to_dict(), layers))


def with_low_caps(config: Any) -> Any:
    """Returns the config with softcaps low enough to act on fresh weights, whose scores and logits are small."""
    config = copy.deepcopy(config)
    for part in (config, *(getattr(config, name) for name in _inner(config))):
        for name, value in part.to_dict().items():
            if _is_cap(name, value):
                setattr(part, name, CAP)
    return config


def _is_cap(name: str, value: Any) -> bool:
    return isinstance(value, float) and any(word in name for word in CAPS)


def depths_of(config: Any) -> set[int]:
    """Returns the number of layers of each stack of a model."""
    values = config.to_dict()
    depths = {v for n, v in values.items() if n in DEPTHS and isinstance(v, int) and not isinstance(v, bool)}
    return depths.union(*(depths_of(getattr(config, n)) for n in _inner(config)))


def _cut(values: dict[str, Any], layers: int) -> dict[str, Any]:
    depths = {n: v for n, v in values.items() if n in DEPTHS and isinstance(v, int) and not isinstance(v, bool)}
    cut = {n: _cut(v, layers) if n.endswith("_config") and isinstance(v, dict) else v for n, v in values.items()}
    for name, value in values.items():
        if (
            isinstance(value, list)
            and len(value) > layers
            and len(value) in depths.values()
            and name != "architectures"
        ):
            cut[name] = value[:layers]
    return cut | {name: min(layers, value) for name, value in depths.items()}


def _values(config: Any) -> Iterator[tuple[str, Any]]:
    """Every setting, and what older names stand for if the config itself has only those."""
    values = config.to_dict()
    yield from values.items()
    aliases = getattr(type(config), "attribute_map", None) or {}
    yield from ((name, values.get(real)) for name, real in aliases.items() if real not in values)


def _is_fixed(kind: type, name: str) -> bool:
    attribute = getattr(kind, name, None)
    return isinstance(attribute, property) and attribute.fset is None


def _inner(config: Any) -> list[str]:
    return [n for n in getattr(type(config), "sub_configs", None) or {} if getattr(config, n, None) is not None]


def _switches(config: Any) -> dict[str, Any]:
    """Settings that are no size and not the class's default: flags, names of functions, small numbers; copied."""
    values = config.to_dict()
    defaults = type(config)().to_dict()
    skipped = {"model_type", "transformers_version", "architectures", "_name_or_path", "dtype", *_inner(config)}
    changed = {n: v for n, v in values.items() if n not in skipped and n not in SIZES and v != defaults.get(n)}
    return {n: copy.deepcopy(v) for n, v in changed.items() if isinstance(v, (bool, str, float)) and n[0] != "_"}


def _rope(old: Any, kinds: Any) -> Any:
    """Scaled positions as plain ones: at 128 of them nothing is scaled; layer types may have their own."""
    if old == {} and kinds:
        plain = {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [1, 1, HEAD // 2 - 2]}
        return {kind: dict(plain) for kind in kinds}
    if isinstance(old, dict) and any(isinstance(v, dict) for v in old.values()):
        result = copy.deepcopy(old)
        for parameters in (v for v in result.values() if isinstance(v, dict)):
            if HEAD * parameters.get("partial_rotary_factor", 1.0) < 4:
                parameters["partial_rotary_factor"] = 0.5
        return result
    if not isinstance(old, dict):
        return copy.deepcopy(old)
    return {"rope_theta": 10000.0, **old, "rope_type": "default"}


def _depth(config: Any) -> int:
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"):
        if isinstance(value := getattr(config, name, None), int):
            return value
    return 0


def _kinds(old: list[Any], layers: int) -> list[Any]:
    """Each kind of layer once, in order, repeated."""
    kinds = [kind for i, kind in enumerate(old) if kind not in old[:i]]
    return [kinds[i % len(kinds)] for i in range(layers)]


def _keep_ratios(config: Any, changed: dict[str, Any], layers: int) -> None:
    """Keeps relations between sizes of the large model; sets what must be explicit."""
    old = dict(_values(config))
    for name in ("num_key_value_heads", "num_kv_heads", "n_kv_heads"):
        # Latent attention has no groups.
        if name in changed and (old.get(name) == old.get("num_attention_heads") or "kv_lora_rank" in changed):
            changed[name] = HEADS
    if "qk_rope_head_dim" in changed and old.get("head_dim") == old.get("qk_rope_head_dim"):
        changed["head_dim"] = changed["qk_rope_head_dim"]
    if "expand" in old and {"num_heads", "head_dim"} <= changed.keys():
        changed["num_heads"] = WIDTH * int(old["expand"]) // HEAD
    if "embedding_size" in changed and old["embedding_size"] < old.get("hidden_size", 0):
        changed["embedding_size"] = WIDTH // 2  # MobileBERT has a matrix for what is missing
    if "languages" in old and "default_language" in old:
        changed["default_language"] = old["languages"][0]
    if "conv_L_cache" in old and not old.get("layer_types"):
        changed["layer_types"] = _kinds(["conv", "full_attention"], layers)
    if "axial_pos_embds" in old:  # the factors of a fixed length
        changed |= {"axial_pos_embds": False, "hash_seed": 0}
