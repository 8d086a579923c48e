"""Tokens by words are the tokenizer's own tokens, at the same places, for any text and any tokenizer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from shardwise.data import encode
from shardwise.data.encode import Encoded, Encoder

GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "the quick brown fox's 12345 jumps, over\n\nthe (lazy) dog! don't",
    "def f(x):\n    return x + 1  # why?\n" * 3,
]


def byte_level(kind: str) -> Tokenizer:
    """A small BPE with one of the usual ways to cut text."""
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(pattern=Regex(GPT4), behavior="isolated")
    made.pre_tokenizer = {
        "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "digits": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        "gpt4": pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        "prefix": pre_tokenizers.ByteLevel(add_prefix_space=True),
        "whole": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        "metaspace": pre_tokenizers.Metaspace(),
    }[kind]
    if kind == "gpt4":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["<|s|>", "<|e|>"])
    made.train_from_iterator(CORPUS * 20, trainer)
    return made


def texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    letters = "aZ9 .,'\"-<|>\n\r\t\x00\x1c\x7fé中🙂\u00a0\u2028\u0301"
    words = ["the", "fox's", "12345", "don't", "<|s|>", "<|e|>", "<|s", "  ", "\n\n", "(lazy)", "I'LL"]
    made = []
    for _ in range(count):
        parts = [rng.choice(words) if rng.random() < 0.6 else "".join(rng.choices(letters, k=rng.randint(1, 5)))
                 for _ in range(rng.randint(0, 20))]  # fmt: skip
        text = rng.choice([" ", ""]).join(parts)
        made.append(text if rng.random() < 0.3 else text.encode("ascii", "ignore").decode())
    return made


@pytest.mark.parametrize(
    ("kind", "by_words"),
    [("gpt2", True), ("digits", True), ("gpt4", True), ("prefix", False), ("whole", False), ("metaspace", False)],
)
def test_the_same_tokens_at_the_same_places(kind: str, by_words: bool) -> None:
    inner, sample = byte_level(kind), texts(400, 1)
    made = Encoder(inner)
    assert made.by_words == by_words
    rng = random.Random(2)
    for again in range(2):  # the second time from what is known
        for text, found in zip(sample, made.encode(sample), strict=True):
            plain = Encoded(inner.encode(text, add_special_tokens=False), len(text))
            assert found.ids.tolist() == plain.ids.tolist(), (again, text)
            for place in [0, len(text), *(rng.randint(0, len(text)) for _ in range(6))]:
                assert found.edge(place) == plain.edge(place), (place, text)


def test_special_tokens_that_swallow_blanks_are_left_to_the_tokenizer() -> None:
    inner = byte_level("gpt2")
    inner.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    assert not Encoder(inner).by_words


def test_it_forgets_when_it_knows_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "KEPT", 50)
    inner, sample = byte_level("gpt2"), texts(300, 3)
    made = Encoder(inner)
    found = [e.ids.tolist() for e in made.encode(sample)]
    assert found == [e.ids for e in inner.encode_batch(sample, add_special_tokens=False)]
    assert len(made._known) < 2000


def test_a_difference_is_noticed() -> None:
    """The check that one text in 64 goes through is not for show."""
    made: Any = Encoder(byte_level("gpt2"))
    assert made.by_words
    list(made.encode(["the dog"]))
    made._known["the"] = ([1, 2, 3], [0, 1, 2])
    made._count = encode.CHECKED
    with pytest.raises(AssertionError, match="differ"):
        list(made.encode(["the dog"]))
