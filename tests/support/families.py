"""Configs of tiny models of many architectures: two layers, a few hundred thousand parameters at most."""

from __future__ import annotations

from typing import Any

VOCABULARY = 515  # of support.tiny's tokenizer
COMMON: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
    max_position_embeddings=256,
)  # fmt: skip
GROUPED: dict[str, Any] = COMMON | dict(num_key_value_heads=2)
EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
OLD: dict[str, Any] = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=256)
NO_IDS: dict[str, Any] = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)

CAUSAL: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED | dict(head_dim=8),
    "gemma": GROUPED | dict(head_dim=8, **NO_IDS),
    "gemma2": GROUPED | dict(head_dim=8, query_pre_attn_scalar=8, **NO_IDS),
    "gemma3_text": GROUPED | dict(head_dim=8, query_pre_attn_scalar=8, **NO_IDS),
    "phi": COMMON,
    "phi3": GROUPED | NO_IDS,
    "falcon": COMMON | dict(new_decoder_architecture=False, multi_query=True, parallel_attn=True),
    "gpt2": OLD | dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "gpt_neox": COMMON,
    "gptj": OLD | dict(rotary_dim=4),
    "opt": COMMON | dict(ffn_dim=64, word_embed_proj_dim=32, dropout=0.0, **NO_IDS),
    "stablelm": COMMON | dict(num_key_value_heads=4),
    "starcoder2": GROUPED | NO_IDS,
    "olmo": COMMON | NO_IDS,
    "olmo2": COMMON | NO_IDS,
    "cohere": GROUPED | dict(logit_scale=1.0, **NO_IDS),
    "granite": GROUPED,
    "smollm3": GROUPED | NO_IDS,
    "glm": GROUPED | dict(head_dim=8, **NO_IDS),
    "mixtral": GROUPED | dict(num_local_experts=4),
    "qwen2_moe": GROUPED | EXPERTS | dict(shared_expert_intermediate_size=32),
    "qwen3_moe": GROUPED | EXPERTS | dict(head_dim=8),
    "olmoe": COMMON | dict(num_experts=4, num_experts_per_tok=2),
    "gpt_oss": GROUPED | dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2, **NO_IDS),
}
MASKED: dict[str, dict[str, Any]] = {
    "bert": COMMON,
    "roberta": COMMON | dict(max_position_embeddings=258),
    "distilbert": dict(
        dim=32, hidden_dim=64, n_layers=2, n_heads=4, vocab_size=VOCABULARY, max_position_embeddings=256
    ),
    "electra": COMMON | dict(embedding_size=32),
    "mpnet": COMMON | dict(max_position_embeddings=258),
}
STACKS: dict[str, Any] = dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=VOCABULARY, max_position_embeddings=256, pad_token_id=0,
    bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
)  # fmt: skip
T5: dict[str, Any] = dict(
    d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=VOCABULARY, pad_token_id=0,
    decoder_start_token_id=0, eos_token_id=2,
)  # fmt: skip
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": T5,
    "mt5": T5,
    "bart": STACKS,
    "mbart": STACKS,
    "pegasus": {key: value for key, value in STACKS.items() if key != "bos_token_id"},
}
OF = {"causal": CAUSAL, "masked": MASKED, "seq2seq": SEQ2SEQ}


def config_of(kind: str) -> dict[str, Any]:
    """A model's config by its type, as `model.config` takes it."""
    return {"model_type": kind} | next(table[kind] for table in OF.values() if kind in table)
