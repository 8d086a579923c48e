"""Tokenizers and chat templates of the families that differ: ChatML, Llama 3, Mistral, and some with quirks."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from support.tiny import CHATML, PAIRS

SYSTEM_FIRST = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
# The prompt ends with a space, which the tokenizer would rather have at the beginning of the answer's first word.
SPACED = MISTRAL.replace("' [/INST]'", "' [/INST] '").replace("' ' + m", "m")
# The content is stripped, and two special tokens with a space between them end the turn.
STRIPPING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'].strip() }}"
    "{{ ' <|im_end|> <|endoftext|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What is rendered of an answer begins with words that the generation prompt does not have.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Earlier answers are shortened, as templates do that drop the thoughts of past turns.
REWRITING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] if loop.last else m['content'][:3])"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHOUTING = CHATML.replace("m['content']", "m['content'].upper()")
ENDLESS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
]


@lru_cache
def _byte_level(trim_offsets: bool) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    text = [m["content"] for line in PAIRS.read_text().splitlines() for m in json.loads(line)["messages"]]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    if trim_offsets:
        raw.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, show_progress=False, initial_alphabet=alphabet
    )
    raw.train_from_iterator(text, trainer)
    raw.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return str(raw.to_str())


@lru_cache
def _sentence_piece() -> str:
    """As Llama 2 and Mistral have it: words begin with ▁, bytes stand in for what the vocabulary lacks."""
    from tokenizers import Tokenizer, models, normalizers, trainers

    text = [m["content"] for line in PAIRS.read_text().splitlines() for m in json.loads(line)["messages"]]
    raw = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", *SPECIAL, *(f"<0x{n:02X}>" for n in range(256))]
    words = [word for line in text for word in line.split()]
    raw.train_from_iterator(words, trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False))
    values = json.loads(raw.to_str())
    values["added_tokens"] = [t for t in values["added_tokens"] if not t["content"].startswith("<0x")]
    return json.dumps(values)


def chat_tokenizer(
    template: str | None, eos: str = "<|im_end|>", bos: str | None = None, kind: str = "bytes", adds_bos: bool = False
) -> Any:
    """A small tokenizer with a template.

    kind is bytes, trimmed (offsets without leading spaces), eating (special tokens take the space behind them along, as
    Phi-3's do) or pieces (words carry their space).
    """
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer.from_str(_sentence_piece() if kind == "pieces" else _byte_level(kind == "trimmed"))
    if kind == "eating":
        values = json.loads(raw.to_str())
        values["added_tokens"] = [t | {"rstrip": t["special"]} for t in values["added_tokens"]]
        raw = Tokenizer.from_str(json.dumps(values))
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, raw.token_to_id(bos))]
        )
    wrapped: Any = PreTrainedTokenizerFast
    fast = wrapped(tokenizer_object=raw, eos_token=eos, bos_token=bos, pad_token="<|endoftext|>")
    fast.chat_template = template
    return fast
