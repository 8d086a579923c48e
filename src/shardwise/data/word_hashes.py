"""Hashed words of rows, shared by near-duplicate search, decontamination and filters.

A word is a run of letters and digits in lower case (NFKC). Scripts without spaces between words (Chinese, Japanese,
Thai, Khmer, …) and runs of more than 40 characters are split by character, so that an insertion there shifts nothing. A
word is hashed together with its role: a translation pair is not a duplicate of the same pair reversed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np

from shardwise.core.words import words_of
from shardwise.data.examples import Example, Message


def parts(example: Example) -> list[tuple[str, str]]:
    """Turns of an example as (role, text): a prompt is the user's, a target the assistant's, plain text has no role."""
    turns = [(str(m.get("role", "")), _content(m)) for m in example.messages]
    if example.kind == "preference":
        turns += [("assistant", _content(m)) for m in example.chosen]
        turns += [("rejected", _content(m)) for m in example.rejected]
    elif example.kind == "kto":
        role = "assistant" if example.label else "rejected"
        turns += [(role, _content(m)) for m in example.chosen]
    elif example.kind == "pair":
        turns += [("user", example.prompt), ("assistant", example.text)]
    elif example.kind == "segments":
        turns += [("assistant" if learned else "user", text) for text, learned in example.segments]
    elif example.kind == "tokens":
        turns.append(("", " ".join(map(str, example.tokens))))
    elif example.kind == "label":
        turns += [("", text) for text in (example.text, example.second) if text]
    elif example.text:
        turns.append(("", example.text))
    return turns


def text_of(example: Example) -> str:
    """The full text of an example."""
    return "\n".join(text for _, text in parts(example))


def _content(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(p.get("text") or "") if isinstance(p, dict) else str(p) for p in content)
    text = ""
    if content is not None:
        text = content if isinstance(content, str) else dumped(content)
    calls = message.get("tool_calls")
    return f"{text}\n{dumped(calls)}" if calls else text


def dumped(value: Any) -> str:
    """Canonical JSON of a value, independent of key order."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def hashed_words(
    examples: Sequence[Example], fill: int = 0, roles: bool = False, signs: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Word hashes (uint64) of all examples, concatenated, and the number of each example's words.

    System prompts are ignored: rows that share one are not duplicates for that. An example with some words but fewer
    than `fill` is padded, so that it has one n-gram. `roles`: the same word by another role is different. `signs`:
    arithmetic signs count as words.
    """
    words: list[bytes] = []
    salts: list[int] = []
    lengths: list[int] = []
    counts = np.zeros(len(examples), dtype=np.int64)
    for index, example in enumerate(examples):
        begin = len(words)
        for role, text in parts(example):
            if role == "system":
                continue
            tokens = words_of(text, signs)
            words += tokens
            salts.append(crc32(role.encode("utf-8", "surrogatepass")) if roles else 0)
            lengths.append(len(tokens))
        count = len(words) - begin
        if 0 < count < fill:
            words += [b""] * (fill - count)
            salts.append(0)
            lengths.append(fill - count)
        counts[index] = len(words) - begin
    hashes = np.fromiter(map(crc32, words), dtype=np.uint64, count=len(words))
    salt = np.repeat(np.array(salts, dtype=np.uint64), lengths)
    return mix(hashes | salt << np.uint64(32)), counts


def ngrams(hashes: np.ndarray, counts: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes (uint64) of all n-grams, none across examples, and the number of each example's n-grams."""
    many = np.maximum(counts - n + 1, 0)
    if not many.any():
        return np.empty(0, dtype=np.uint64), many
    last = len(hashes) - n + 1
    grams = np.zeros(last, dtype=np.uint64)
    for offset in range(n):
        grams *= np.uint64(0x9E3779B97F4A7C15)
        grams += hashes[offset : last + offset]
    left = np.repeat(np.cumsum(counts), counts)[:last] - np.arange(last)  # words to the end of its example
    return mix(grams[left >= n]), many


def mix(values: np.ndarray) -> np.ndarray:
    """Mixes every bit into all 64 (the finaliser of splitmix64)."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
