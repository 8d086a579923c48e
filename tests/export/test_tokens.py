"""Vocabularies in GGUF files: read back, they give the same tokens for text of any kind."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.gguf_models import family_folder, spm_tokenizer, unigram_tokenizer
from support.tiny import CHATML
from transformers import AutoTokenizer

from shardwise.config.schema import Model
from shardwise.export.gguf_file import plan_gguf, write_gguf
from shardwise.export.vocabulary import BYTE, CONTROL, UNKNOWN, UNUSED, Vocabulary, vocabulary_of
from shardwise.nn.models.source import find_model

TEXTS = [
    "Plain words, twice  spaced, and\ttabs.\n\nParagraphs.",
    "Zürich, São Paulo, naïve café — ‘quoted’… 100 €",
    "東京タワーは333メートルです。 Привет, мир! שלום مرحبا नमस्ते",
    "🙂👩‍👩‍👧 e\u0301 \u200b \ufeff ﬁ ½",
    "def f(x):\n    return x**2 + 3*x - 12345  # comment",
]


def read_back(folder: Path, file: Path) -> Any:
    source = find_model(Model(name=str(folder)))
    write_gguf(plan_gguf(source, "f16"), file, "model")
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "bloom", "starcoder2"])
def test_byte_level(models: Path, tmp_path: Path, name: str) -> None:
    folder = family_folder(models, name)
    back, own = read_back(folder, tmp_path / "model.gguf"), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert back(text, add_special_tokens=False)["input_ids"] == own(text, add_special_tokens=False)["input_ids"]
    assert back.chat_template == own.chat_template == CHATML


def test_qwen(models: Path, tmp_path: Path) -> None:
    """With Qwen's own way to cut text, which is what transformers makes of such files."""
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

    folder = Path(shutil.copytree(family_folder(models, "qwen2"), tmp_path / "model"))
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    cut = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
           r"\s+(?!\S)|\s+")  # fmt: skip
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(cut), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.normalizer = normalizers.NFC()
    raw.save(str(folder / "tokenizer.json"))
    back, own = read_back(folder, tmp_path / "model.gguf"), AutoTokenizer.from_pretrained(folder)
    assert plan_gguf(find_model(Model(name=str(folder))), "f16").vocabulary.pre == "qwen2"
    chat = "<|im_start|>user\nHi there 12<|im_end|>\n"
    for text in [*TEXTS, chat]:
        assert back(text, add_special_tokens=False)["input_ids"] == own(text, add_special_tokens=False)["input_ids"]


def vocabulary_model(models: Path, tmp_path: Path, name: str, make: Any) -> tuple[Path, Any]:
    """A family's model with another tokenizer, its vocabulary as large as that."""
    from support.gguf_models import MODELS

    folder = tmp_path / name
    own = make(tmp_path / "tokenizer")
    MODELS["other"] = MODELS[name] | {"vocab_size": len(own) + 3}
    try:
        made = family_folder(tmp_path, "other")
    finally:
        del MODELS["other"]
    for file in made.glob("tokenizer*"):
        file.unlink()
    (made / "chat_template.jinja").unlink()
    own.save_pretrained(made)
    made.rename(folder)
    return folder, own


def test_sentencepiece_words(models: Path, tmp_path: Path) -> None:
    folder, own = vocabulary_model(models, tmp_path, "llama", spm_tokenizer)
    back = read_back(folder, tmp_path / "model.gguf")
    for text in TEXTS:
        ids = own(text, add_special_tokens=False)["input_ids"]
        assert back(text, add_special_tokens=False)["input_ids"] == ids and own.decode(ids) == text
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    types, tokens = fields["tokenizer.ggml.token_type"].contents(), fields["tokenizer.ggml.tokens"].contents()
    assert fields["tokenizer.ggml.model"].contents() == "llama" and fields["tokenizer.ggml.add_space_prefix"].contents()
    assert types[0] == UNKNOWN and types[tokens.index("<0x41>")] == BYTE and types[-3:] == [UNUSED] * 3


def test_scores_order_as_merges_do(tmp_path: Path) -> None:
    """SentencePiece's own way, joining the best pair again and again, gives the tokenizer's tokens."""
    own = spm_tokenizer(tmp_path)
    words: Vocabulary = vocabulary_of(own, len(own), "--gguf")
    assert words.scores is not None
    known = {token: score for token, score in zip(words.tokens, words.scores, strict=True)}
    for text in TEXTS[:2] + TEXTS[4:]:
        parts = list("▁" + text.replace(" ", "▁"))
        while True:
            joined = ["".join(pair) for pair in pairwise(parts)]
            pairs = [(known[word], -i) for i, word in enumerate(joined) if word in known]
            if not pairs:
                break
            at = -max(pairs)[1]
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        ids = own.convert_tokens_to_ids([p for p in parts if p in known])
        got = [i for i in own(text, add_special_tokens=False)["input_ids"] if words.types[i] != BYTE]
        assert ids == got


def test_unigram(models: Path, tmp_path: Path) -> None:
    folder, own = vocabulary_model(models, tmp_path, "t5", unigram_tokenizer)
    back = read_back(folder, tmp_path / "model.gguf")
    for text in TEXTS[:2] + TEXTS[4:]:
        one = " ".join(text.split())  # T5 knows single spaces alone
        assert back(one)["input_ids"] == own(one)["input_ids"]


def test_special_tokens(models: Path, tmp_path: Path) -> None:
    own = AutoTokenizer.from_pretrained(family_folder(models, "llama"))
    words = vocabulary_of(own, 520, "--gguf")
    assert words.ids == {"bos": own.eos_token_id, "eos": own.eos_token_id, "padding": own.pad_token_id}
    assert [words.types[i] for i in (0, 1, 2)] == [CONTROL] * 3 and words.tokens[519] == "[PAD519]"
    assert not words.add_bos and not words.add_eos and not words.add_space_prefix
    assert words.tokens[:515] == own.convert_ids_to_tokens(list(range(515)))


def test_a_beginning_that_the_tokenizer_adds(tmp_path: Path) -> None:
    from tokenizers import processors

    own = spm_tokenizer(tmp_path)
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    words = vocabulary_of(own, len(own), "--gguf")
    assert words.add_bos and words.add_eos and words.ids == {"bos": 1, "eos": 2, "unknown": 0}
