"""What rows are compared by: the words they say, hashed. Near duplicates, decontamination and filters share it.

A word is a run of letters and digits in lower case (NFKC). Scripts that do not put spaces between words (Chinese,
Japanese, Thai, Khmer, …) and runs of more than 40 characters count by character, so that an insertion there shifts
nothing. A word is hashed together with who says it: a translation pair is not a repeat of the same pair turned round.
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
    """Who says what, in order: (role, text); a prompt is the user's, a target the assistant's, a text no one's."""
    found = [(str(m.get("role", "")), _content(m)) for m in example.messages]
    if example.kind == "preference":
        found += [("assistant", _content(m)) for m in example.chosen]
        found += [("rejected", _content(m)) for m in example.rejected]
    elif example.kind == "kto":
        said = "assistant" if example.label else "rejected"
        found += [(said, _content(m)) for m in example.chosen]
    elif example.kind == "pair":
        found += [("user", example.prompt), ("assistant", example.text)]
    elif example.kind == "segments":
        found += [("assistant" if learned else "user", text) for text, learned in example.segments]
    elif example.kind == "tokens":
        found.append(("", " ".join(map(str, example.tokens))))
    elif example.kind == "label":
        found += [("", text) for text in (example.text, example.second) if text]
    elif example.text:
        found.append(("", example.text))
    return found


def text_of(example: Example) -> str:
    """Everything an example says, as one text."""
    return "\n".join(text for _, text in parts(example))


def _content(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(p.get("text") or "") if isinstance(p, dict) else str(p) for p in content)
    said = content if isinstance(content, str) else "" if content is None else dumped(content)
    calls = message.get("tool_calls")
    return f"{said}\n{dumped(calls)}" if calls else said


def dumped(value: Any) -> str:
    """A value as JSON, the same whatever the order of its keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def hashed_words(
    examples: Sequence[Example], fill: int = 0, roles: bool = False, signs: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Hashes (uint64) of the words of all examples one after the other, and how many each example has.

    System prompts are left out: rows that share one are not the same for that. An example with some words but fewer
    than `fill` is filled up, so that it has one n-gram. `roles`: the same word said by another is another. `signs`:
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
            found = words_of(text, signs)
            words += found
            salts.append(crc32(role.encode("utf-8", "surrogatepass")) if roles else 0)
            lengths.append(len(found))
        count = len(words) - begin
        if 0 < count < fill:
            words += [b""] * (fill - count)
            salts.append(0)
            lengths.append(fill - count)
        counts[index] = len(words) - begin
    hashes = np.fromiter(map(crc32, words), dtype=np.uint64, count=len(words))
    said = np.repeat(np.array(salts, dtype=np.uint64), lengths)
    return mix(hashes | said << np.uint64(32)), counts


def ngrams(hashes: np.ndarray, counts: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes (uint64) of every n words in a row, none across examples, and how many each example has."""
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
    """Spreads every bit over all 64 (the finaliser of splitmix64)."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
