"""Encodes text, and maps character positions to tokens.

[Note: words] A byte-level tokenizer splits text into words by a pattern before it merges the bytes of each. Words
repeat, and a lookup is several times faster than merging again: so ASCII text is split here, by the same patterns for
ASCII, and each new word is tokenised once. The pattern of a tokenizer is found by trial: one is used only if it gives
the tokenizer's own tokens for a thousand generated strings, and one text in 64 is still tokenised both ways and
compared. Other text, and tokenizers that no pattern fits (SentencePiece, those that merge across blanks, those whose
special tokens absorb blanks), are encoded by the tokenizer itself.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np

BATCH = 32  # texts that are tokenised in one call; more at a time is slower (their encodings leave the cache)
PATTERNS = [
    # GPT-2 and those that took its cut over
    r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+",
    # the same, each digit by itself
    r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s+(?=[0-9])|\s+(?!\S)|\s+",
    # Llama 3, Qwen and other heirs of GPT-4; digits in any grouping stay together
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]+| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
KEPT = 1 << 18  # words
CHECKED = 64  # one text in so many is tokenised both ways
PROBES = 1000
WORDS = ["the", "The", "don't", "IT'S", "I'll", "2024", "1,000.5", "http://a.b/c?d=e", "foo_bar", "C++", "\n\n", "\t"]
ASCII = [chr(c) for c in range(1, 128)] + list("abcXYZ019 .,'\"-_<>|\n\n\r\t   ") * 6
Piece = tuple[list[int], list[int]]  # token ids, and at which character of the piece each begins


class Encoded:
    """Tokens of a text, encoded by the tokenizer in one call."""

    def __init__(self, encoding: Any, length: int) -> None:
        self._encoding, self._length = encoding, length
        self.ids = np.array(encoding.ids, dtype=np.int32)

    def first_from(self, place: int) -> int:
        """Index of the first token that begins at this character or later; zero-width tokens count where they stand."""
        encoding = self._encoding
        if place >= self._length:
            return len(encoding)
        token = encoding.char_to_token(place)
        if token is None:  # characters that the normaliser took away: no token covers them
            begins = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)[:, 0]
            late = np.flatnonzero(begins >= place)
            return int(late[0]) if len(late) else len(encoding)
        begin, _ = encoding.token_to_chars(token)
        return int(token) if begin >= place else int(token) + 1

    def edge(self, place: int) -> tuple[int, int]:
        """Returns (`first_from`, `reaches`)."""
        return self.first_from(place), self.reaches(place)

    def reaches(self, place: int) -> int:
        """End of the token that spans this character from before it; the character itself if none does."""
        token = self._encoding.char_to_token(place) if place < self._length else None
        begin, end = (place, place) if token is None else self._encoding.token_to_chars(token)
        return int(end) if begin < place else place


class Joined:
    """Tokens of a text, concatenated from those of its words."""

    def __init__(self, texts: list[str], pieces: list[Piece]) -> None:
        self._texts, self._pieces = texts, pieces
        self._lists = [ids for ids, _ in pieces]
        self.ids = np.array(list(chain.from_iterable(self._lists)), dtype=np.int32)
        self._places: list[int] = []
        self._tokens: list[int] = []

    def first_from(self, place: int) -> int:
        """Index of the first token that begins at this character or later."""
        index, inside = self._locate(place)
        return self._tokens[index] + sum(begin < inside for begin in self._pieces[index][1])

    def edge(self, place: int) -> tuple[int, int]:
        """Returns (`first_from`, `reaches`); fast at word boundaries, where most answers begin and end."""
        index, inside = self._locate(place)
        return (self.first_from(place), self.reaches(place)) if inside else (self._tokens[index], place)

    def reaches(self, place: int) -> int:
        """End of the token that spans this character from before it; the character itself if none does."""
        index, inside = self._locate(place)
        begins = self._pieces[index][1]
        length = len(self._texts[index])
        if inside >= length or inside in begins:
            return place
        return self._places[index] + min((b for b in begins if b > inside), default=length)

    def _locate(self, place: int) -> tuple[int, int]:
        """The word that contains a character, and the offset within it."""
        if not self._places:
            self._places = list(accumulate(map(len, self._texts), initial=0))
            self._tokens = list(accumulate(map(len, self._lists), initial=0))
        index = min(bisect_right(self._places, place), len(self._pieces)) - 1
        return index, place - self._places[index]


class Encoder:
    """Encodes texts with the backend of a fast tokenizer, without adding special tokens."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._known: dict[str, Piece] = {}
        self._count = 0
        self._words = next((c for c in map(partial(_AsciiSplitter, inner), PATTERNS) if c.fits(inner)), None)

    @property
    def by_words(self) -> bool:
        """Whether ASCII text is encoded word by word; see [Note: words]."""
        return self._words is not None

    def encode(self, texts: Sequence[str]) -> Iterator[Encoded | Joined]:
        """Yields the tokens of each text."""
        for at in range(0, len(texts), BATCH):
            batch = texts[at : at + BATCH]
            plain = [self._words is not None and text != "" and text.isascii() for text in batch]
            by_words = self._encode_by_words([t for t, p in zip(batch, plain, strict=True) if p])[::-1]
            unsplit = self._encode_unsplit([t for t, p in zip(batch, plain, strict=True) if not p])[::-1]
            for p in plain:
                yield by_words.pop() if p else unsplit.pop()

    def _encode_unsplit(self, texts: Sequence[str]) -> list[Encoded]:
        if not texts:
            return []
        encodings = self._inner.encode_batch(list(texts), add_special_tokens=False)
        return [Encoded(e, len(t)) for e, t in zip(encodings, texts, strict=True)]

    def _encode_by_words(self, texts: Sequence[str]) -> list[Joined]:
        if not texts:
            return []
        assert self._words is not None
        cut = [self._words(text) for text in texts]
        ids_of = self._add_words({piece for pieces in cut for piece in pieces})
        joined = []
        for text, pieces in zip(texts, cut, strict=True):
            encoded = Joined(pieces, [ids_of[piece] for piece in pieces])
            if self._count % CHECKED == 0:
                reference = self._inner.encode(text, add_special_tokens=False).ids
                assert reference == encoded.ids.tolist(), f"words and whole differ: {text!r}"
            self._count += 1
            joined.append(encoded)
        return joined

    def _add_words(self, pieces: set[str]) -> dict[str, Piece]:
        """Tokens of all cached words, after adding these."""
        if len(self._known) > KEPT:
            self._known = {}
        new = [piece for piece in pieces if piece not in self._known]
        encodings = self._inner.encode_batch(new, add_special_tokens=False)
        for piece, encoding in zip(new, encodings, strict=True):
            self._known[piece] = (encoding.ids, [begin for begin, _ in encoding.offsets])
        return self._known


class _AsciiSplitter:
    """Splits ASCII text into special tokens and words."""

    def __init__(self, inner: Any, pattern: str) -> None:
        self._added = list(inner.get_added_tokens_decoder().values())
        marks = sorted((t.content for t in self._added), key=len, reverse=True)
        self._marks = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if marks else None
        # To Python \x1c to \x1f are white space, to tokenizers they are not.
        explicit = pattern.replace(r"[^\s", r"[^\t-\r ").replace(r"\s", r"[\t-\r ]").replace(r"\S", r"[^\t-\r ]")
        self._words = re.compile(explicit)

    def __call__(self, text: str) -> list[str]:
        if self._marks is None:
            return self._words.findall(text)
        pieces: list[str] = []
        for index, part in enumerate(self._marks.split(text)):
            if index % 2:
                pieces.append(part)
            elif part:
                pieces += self._words.findall(part)
        return pieces

    def fits(self, inner: Any) -> bool:
        """Whether a tokenizer gives the same tokens for ASCII text when it is split this way."""
        if any(t.lstrip or t.rstrip or t.single_word or not t.content.strip() for t in self._added):
            return False
        rng = random.Random(0)
        marks = [t.content for t in self._added if t.content.isascii()]
        for _ in range(PROBES):
            parts = []
            for _ in range(rng.randint(1, 12)):
                kind = rng.random()
                if kind < 0.4:
                    parts.append(rng.choice(WORDS))
                elif kind < 0.9 or not marks:
                    parts.append("".join(rng.choices(ASCII, k=rng.randint(1, 6))))
                else:
                    parts.append(rng.choice(marks))
            text = rng.choice([" ", " ", "", "  "]).join(parts)
            pieces = self(text)
            piecewise = [inner.encode(piece, add_special_tokens=False).ids for piece in pieces]
            reference = inner.encode(text, add_special_tokens=False).ids
            if "".join(pieces) != text or list(chain.from_iterable(piecewise)) != reference:
                return False
        return True
