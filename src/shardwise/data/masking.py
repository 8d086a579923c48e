"""Selects the tokens of a text to mask, and their replacements.

Word boundaries come from the vocabulary alone: a token begins a word unless it is a continuation (WordPiece's ##
prefix), or, where blanks are part of tokens (Ġ of byte-level tokenizers, ▁ of SentencePiece), if it begins with one.
Punctuation that touches a word is then part of it. Other tokenizers have one word per token.

Of the selected tokens 80% become the mask, 10% a random token, and 10% stay, as in BERT: a model that saw only masks
would learn nothing about the unmasked text it is used on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

MASKED, REPLACED = 0.8, 0.1  # shares; the rest stays
_BLANKS = "ĠĊĉčĎċ▁ \n\t"  # space, newline, tab, … as byte-level tokenizers write them; SentencePiece's; plain ones


def word_starts(tokenizer: Any) -> np.ndarray:
    """For each token of the vocabulary, whether it begins a word."""
    words = [str(w or "") for w in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
    values = json.loads(tokenizer.backend_tokenizer.to_str())
    model = values.get("model") or {}
    if model.get("type") == "WordPiece":
        prefix = model.get("continuing_subword_prefix") or "##"
        return np.array([not word.startswith(prefix) for word in words])
    around = json.dumps([values.get(key) for key in ("pre_tokenizer", "normalizer")], ensure_ascii=False)
    if "ByteLevel" in around or "▁" in around:
        return np.array([word[:1] in _BLANKS for word in words])
    return np.ones(len(words), dtype=bool)


@dataclass(frozen=True)
class Masker:
    """Masks a fraction `share` of a text's tokens, in whole words if `starts` gives word boundaries."""

    mask: int
    ordinary: np.ndarray  # tokens that may stand in for others
    share: float
    starts: np.ndarray | None

    @classmethod
    def of(cls, tokenizer: Any, share: float, whole_words: bool, vocabulary: int) -> Masker:
        """Builds a Masker for a model with the first `vocabulary` tokens of a tokenizer."""
        assert tokenizer.mask_token_id is not None, "the renderer refuses such tokenizers"
        special = set(tokenizer.all_special_ids)
        ordinary = np.array([i for i in range(min(vocabulary, len(tokenizer))) if i not in special], dtype=np.int64)
        starts = word_starts(tokenizer) if whole_words else None
        return cls(int(tokenizer.mask_token_id), ordinary, share, starts)

    def __call__(
        self, tokens: np.ndarray, maskable: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the masked tokens and which positions are predicted: at least one, only of the `maskable` ones."""
        chosen = self.choose(tokens, maskable, rng)
        draw = rng.random(len(tokens))
        replacement = self.ordinary[rng.integers(len(self.ordinary), size=len(tokens))]
        masked = np.where(chosen & (draw < MASKED), self.mask, tokens)
        return np.where(chosen & (draw >= 1 - REPLACED), replacement, masked), chosen

    def choose(self, tokens: np.ndarray, maskable: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Selects the positions to predict."""
        places = np.flatnonzero(maskable)
        count = min(len(places), max(1, round(self.share * len(places))))
        chosen = np.zeros(len(tokens), dtype=bool)
        words = self._words(tokens, places)
        sizes = [len(w) for w in words]
        order = rng.permutation(len(words)).tolist()
        left = count
        for number in order:
            if sizes[number] <= left:
                chosen[words[number]] = True
                left -= sizes[number]
                if not left:
                    break
        if left == count and count:
            # No word is short enough: one of them all the same, unless that would leave less than half of the text.
            short = next((n for n in order if 2 * sizes[n] <= len(places)), None)
            chosen[rng.permutation(places)[:count] if short is None else words[short]] = True
        return chosen

    def _words(self, tokens: np.ndarray, places: np.ndarray) -> list[np.ndarray]:
        """Positions of each word; a token that may not be masked ends a word."""
        if not len(places):
            return []
        first = np.ones(len(places), dtype=bool) if self.starts is None else self.starts[tokens[places]]
        first = first | (np.diff(places, prepend=-2) > 1)
        return np.split(places, np.flatnonzero(first)[1:])
