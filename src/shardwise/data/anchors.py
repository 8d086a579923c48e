"""From places in a text to tokens without offsets, where special tokens say enough.

Asking the tokenizer for offsets costs a third more (measured on SmolLM2's). A chat has special tokens at every turn,
and nothing else in it spells one, so the k-th in the text is the k-th among the ids. A place is then the special token
before it and the few words from there on ("assistant" and a newline): if the ids behind that token are those of the
words, the place is where they end, since byte-level tokens stand for their bytes and for nothing else. If they are not
(the answer shares a token with the words), or the tokenizer is of another kind, offsets decide.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwise.data.template import Span, any_of

LONGEST = 64  # characters from a special token to a place


class Anchors:
    """Finds tokens by the special tokens around them."""

    def __init__(self, tokenizer: Any, encoder: Any) -> None:
        special = [t for t in tokenizer.added_tokens_decoder.items() if t[1].special]
        inner = json.loads(encoder.to_str())
        self.usable = (
            bool(special)
            and all(t.content.strip() == t.content and not (t.lstrip or t.rstrip or t.single_word) for _, t in special)
            and _keeps_text(inner["normalizer"])
            and _byte_level(inner["pre_tokenizer"])
        )
        self._encoder = encoder
        self._marks = any_of({t.content for _, t in special})
        self._is_mark = np.zeros(len(tokenizer) + 1, dtype=bool)
        self._is_mark[[index for index, _ in special]] = True
        self._words: dict[str, list[int]] = {}

    def token_spans(self, text: str, ids: np.ndarray, spans: Sequence[Span]) -> list[Span] | None:
        """Tokens of each span of characters; None where only offsets can tell."""
        ends = [m.end() for m in self._marks.finditer(text)]
        places = np.flatnonzero(self._is_mark[ids])
        if len(ends) != len(places):
            return None
        found: list[int] = []
        for place in (edge for span in spans for edge in span):
            index = bisect_right(ends, place) - 1
            if index < 0 or place - ends[index] > LONGEST:
                return None
            token = int(places[index]) + 1
            if place != ends[index]:
                words = self._ids(text[ends[index] : place])
                if ids[token : token + len(words)].tolist() != words:
                    return None
                token += len(words)
            found.append(token)
        return list(zip(found[::2], found[1::2], strict=True))

    def _ids(self, words: str) -> list[int]:
        if words not in self._words:
            if len(self._words) > 1000:
                self._words.clear()
            self._words[words] = list(self._encoder.encode(words, add_special_tokens=False).ids)
        return self._words[words]


def _keeps_text(normalizer: Any) -> bool:
    """Whether text reaches the words as it is (or composed, which no header's last letter takes part in unseen)."""
    if normalizer is None or normalizer["type"] == "NFC":
        return True
    return normalizer["type"] == "Sequence" and all(map(_keeps_text, normalizer["normalizers"]))


def _byte_level(stage: Any) -> bool:
    """Whether tokens are bytes, with no blank put in front."""
    if stage is None:
        return False
    if stage["type"] == "Sequence":
        return any(map(_byte_level, stage["pretokenizers"])) and all(
            _byte_level(s) or s["type"] in ("Split", "Digits") for s in stage["pretokenizers"]
        )
    return bool(stage["type"] == "ByteLevel" and not stage["add_prefix_space"])
