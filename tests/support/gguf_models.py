"""One tiny model of each family that can become a GGUF file, with random weights, norms and biases included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.tiny import PAIRS, tokenizer_folder

SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=515, max_position_embeddings=128,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
GEMMA = SIZES | dict(head_dim=32, query_pre_attn_scalar=32, sliding_window=16)

GPT2 = dict(model_type="gpt2", n_embd=64, n_layer=3, n_head=4, vocab_size=515, n_positions=128)
FALCON = dict(model_type="falcon", hidden_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=515,
              max_position_embeddings=128, multi_query=True, new_decoder_architecture=False, bias=False)  # fmt: skip
MAMBA = dict(model_type="mamba", hidden_size=64, num_hidden_layers=3, vocab_size=515, state_size=8)
T5 = dict(model_type="t5", d_model=64, d_ff=96, d_kv=16, num_layers=3, num_heads=4, vocab_size=515,
          feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0)  # fmt: skip


def rope(kind: str, theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return dict(rope_type=kind, rope_theta=theta, **more)


LLAMA3 = rope("llama3", 500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)  # fmt: skip
YARN = rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=32)
LONG = rope("longrope", short_factor=[1 + n / 8 for n in range(8)], long_factor=[2.0 + n for n in range(8)],
            original_max_position_embeddings=32)  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(SIZES, model_type="llama", rms_norm_eps=1e-5),
    "llama-tied": dict(SIZES, model_type="llama", tie_word_embeddings=True),
    "llama-biased": dict(SIZES, model_type="llama", attention_bias=True, mlp_bias=True, head_dim=32),
    "llama3-rope": dict(SIZES, model_type="llama", rope_parameters=LLAMA3),
    "llama-linear": dict(SIZES, model_type="llama", rope_parameters=rope("linear", factor=4.0)),
    "mistral": dict(SIZES, model_type="mistral", sliding_window=None, head_dim=16),
    "qwen2": dict(SIZES, model_type="qwen2", rope_parameters=YARN),
    "qwen3": dict(SIZES, model_type="qwen3", head_dim=32),
    "qwen2_moe": dict(SIZES | EXPERTS, model_type="qwen2_moe", shared_expert_intermediate_size=64,
                      norm_topk_prob=False),
    "qwen3_moe": dict(SIZES | EXPERTS, model_type="qwen3_moe", head_dim=32, norm_topk_prob=True),
    "gpt2": GPT2,
    "gpt2-untied": dict(GPT2, tie_word_embeddings=False),
    "falcon": FALCON,
    "phi3": dict(SIZES, model_type="phi3", pad_token_id=0, sliding_window=64),
    "bloom": dict(model_type="bloom", hidden_size=64, n_layer=3, n_head=4, vocab_size=515),
    "stablelm": dict(SIZES, model_type="stablelm", use_qkv_bias=True, partial_rotary_factor=0.5),
    "starcoder2": dict(SIZES, model_type="starcoder2", rope_theta=50000.0, sliding_window=None),
    "nemotron": dict(SIZES, model_type="nemotron", partial_rotary_factor=0.5, head_dim=16),
    "gemma2": dict(GEMMA, model_type="gemma2"),
    "gemma3_text": dict(GEMMA, model_type="gemma3_text", num_hidden_layers=7),
    "mamba": MAMBA,
    "t5": T5,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "llama-attention-bias": dict(SIZES, model_type="llama", attention_bias=True, tie_word_embeddings=True),
    "llama-mlp-bias": dict(SIZES, model_type="llama", mlp_bias=True),
    "llama-head-dim": dict(SIZES, model_type="llama", head_dim=48, num_key_value_heads=1),
    "llama-biased-rope": dict(SIZES, model_type="llama", attention_bias=True, rope_parameters=LLAMA3),
    "mistral-window": dict(SIZES, model_type="mistral", sliding_window=32, head_dim=16),
    "qwen2-tied": dict(SIZES, model_type="qwen2", tie_word_embeddings=True),
    "qwen3-128": dict(SIZES, model_type="qwen3", head_dim=128),
    "qwen2_moe-tied": dict(SIZES | EXPERTS, model_type="qwen2_moe", shared_expert_intermediate_size=64,
                           norm_topk_prob=False, tie_word_embeddings=True),
    "qwen2_moe-no-bias": dict(SIZES | EXPERTS, model_type="qwen2_moe", shared_expert_intermediate_size=64,
                              norm_topk_prob=False, qkv_bias=False),
    "gpt2-inner": dict(GPT2, n_inner=96),
    "falcon-inner": dict(FALCON, ffn_hidden_size=96, rope_theta=50000.0),
    "phi3-partial": dict(SIZES, model_type="phi3", pad_token_id=0, sliding_window=None, partial_rotary_factor=0.5),
    "phi3-longrope": dict(SIZES, model_type="phi3", pad_token_id=0, sliding_window=None, rope_parameters=LONG,
                          original_max_position_embeddings=32),
    "phi3-head-dim": dict(SIZES, model_type="phi3", pad_token_id=0, sliding_window=None, head_dim=32),
    "bloom-6-heads": dict(model_type="bloom", hidden_size=96, n_layer=3, n_head=6, vocab_size=515),
    "stablelm-tied": dict(SIZES, model_type="stablelm", tie_word_embeddings=True, partial_rotary_factor=0.25),
    "stablelm-parallel": dict(SIZES, model_type="stablelm", use_parallel_residual=True, partial_rotary_factor=0.25),
    "starcoder2-usual": dict(SIZES, model_type="starcoder2", rope_theta=10000.0, sliding_window=32),
    "nemotron-biased": dict(SIZES, model_type="nemotron", head_dim=16, attention_bias=True, mlp_bias=True),
    "nemotron-head-dim": dict(SIZES, model_type="nemotron", head_dim=32),
    "nemotron-tied": dict(SIZES, model_type="nemotron", head_dim=16, tie_word_embeddings=True),
    "gemma2-usual": dict(GEMMA, model_type="gemma2", head_dim=256, query_pre_attn_scalar=256),
    "gemma2-caps": dict(GEMMA, model_type="gemma2", head_dim=256, query_pre_attn_scalar=256,
                        attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "gemma3-usual": dict(GEMMA, model_type="gemma3_text", head_dim=256, query_pre_attn_scalar=256,
                         num_hidden_layers=7),
    "gemma3-linear": dict(GEMMA, model_type="gemma3_text", head_dim=256, query_pre_attn_scalar=256, num_hidden_layers=7,
                          rope_parameters=dict(full_attention=rope("linear", 1e6, factor=8.0),
                                               sliding_attention=rope("default"))),
    "mamba-wide": dict(MAMBA, expand=3),
    "t5-decoder": dict(T5, num_decoder_layers=2),
}  # fmt: skip
# Who reads a file as the model, where not both do. llama.cpp: compared with its own logits (docs/export.md).
ONLY_LLAMA_CPP = {
    "llama-biased", "llama3-rope", "llama-linear", "qwen2", "qwen3", "stablelm", "starcoder2", "gemma2", "gemma3_text",
    "t5", "llama-attention-bias", "llama-mlp-bias", "llama-biased-rope", "gpt2-inner", "phi3-partial", "phi3-longrope",
    "nemotron-biased", "gemma2-caps", "gemma3-linear", "t5-decoder",
}  # fmt: skip
ONLY_TRANSFORMERS = {"mamba-wide"}
NOBODY = {"phi3-head-dim", "nemotron-head-dim"}


def family_folder(root: Path, name: str) -> Path:
    """The model's folder as the project writes them: parameters under the model's own names."""
    import torch
    from transformers import AutoConfig

    from shardwise.nn.models.source import write_plain
    from shardwise.nn.models.tasks import auto_class, task_of

    folder = root / name
    if not folder.exists():
        folder.mkdir(parents=True)
        values = dict((MODELS | VARIANTS)[name])
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        torch.manual_seed(0)
        model = auto_class(task_of(config)).from_config(config)
        with torch.no_grad():
            matrix = 0.02 if name.startswith("t5") else 0.15  # T5 does not scale its attention, which would saturate
            for parameter in model.parameters():  # norms of 1 and biases of 0 would hide mistakes
                parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else matrix))
        write_plain(model, folder)
        tokenizer_folder(folder)
    return folder


def spm_tokenizer(folder: Path) -> Any:
    """A tokenizer as those made from SentencePiece are: words with ▁, bytes for the rest, every split of a word."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(texts(), trainers.BpeTrainer(vocab_size=900, show_progress=False))
    known = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(word for word, _ in known)]
    ids = {word: index for index, word in enumerate(words)}
    merges = [
        (word[:cut], word[cut:])
        for word, _ in known
        for cut in range(1, len(word))
        if word[:cut] in ids and word[cut:] in ids
    ]
    raw = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)
    return fast


def unigram_tokenizer(folder: Path) -> Any:
    """A tokenizer as T5's is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "</s>", "<unk>"]
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=500, special_tokens=special, unk_token="<unk>", show_progress=False)
    raw.train_from_iterator(texts(), trainer)
    raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)
    return fast


def texts() -> list[str]:
    """What tokenizers are trained on."""
    return [m["content"] for line in PAIRS.read_text().splitlines() for m in json.loads(line)["messages"]]
