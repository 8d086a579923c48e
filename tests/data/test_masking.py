"""Masks: whole words, the right shares, never a special token, the same on any number of ranks."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support.encoders import make_tokenizer, sentences

from shardwise.core.errors import UserError
from shardwise.core.labels import IGNORE
from shardwise.data.masking import Masker, word_starts
from shardwise.data.packing import DOCUMENT
from shardwise.data.render import Renderer
from shardwise.data.row_renderers import special_ids
from shardwise.data.rows import MaskedLayout
from shardwise.data.store import LEARNED

tokenizer_of = cache(make_tokenizer)


def words_of(kind: str, text: str) -> tuple[np.ndarray, list[Any]]:
    """Tokens of a text, and for each the word that it is of (None: a special token), found without our table."""
    tokenizer = tokenizer_of(kind)
    encoding = tokenizer.backend_tokenizer.encode(text)
    if kind == "wordpiece":
        return np.array(encoding.ids), encoding.word_ids
    words: list[Any] = []
    for (begin, end), special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
        inside = begin + len(text[begin:end]) - len(text[begin:end].lstrip())
        words.append(None if special else len(text[: inside + 1].split()))  # which of those between blanks
    return np.array(encoding.ids), words


def any_text(draw: random.Random) -> str:
    words = " ".join(sentences()).split()
    odd = ["(re-)sharding,", "naïve", "x=1;y=2", "🙂🙂", "don't", "Ġ", "##ing", "a.b.c", "…"]
    return " ".join(draw.choices(words, k=draw.randint(1, 60)) + draw.choices(odd, k=draw.randint(0, 4)))


@pytest.mark.parametrize("kind", ["wordpiece", "bytes"])
def test_words_are_masked_whole(kind: str) -> None:
    draw = random.Random(1)
    masker = Masker.of(tokenizer_of(kind), 0.15, True, 400)
    special = special_ids(tokenizer_of(kind))
    seen = 0
    for number in range(300):
        tokens, words = words_of(kind, any_text(draw))
        may = ~np.isin(tokens, special)
        chosen = masker.choose(tokens, may, np.random.default_rng(number))
        assert chosen.any() and not (chosen & ~may).any()
        lengths = {w: sum(v == w for v, m in zip(words, may, strict=True) if m) for w in words if w is not None}
        hit = {w for w, c in zip(words, chosen, strict=True) if c}
        if min(n for n in lengths.values() if n) * 2 > may.sum():
            continue  # nothing but one long word
        assert chosen.sum() == sum(lengths[w] for w in hit), "all pieces of a word or none"
        wanted = max(1, round(0.15 * may.sum()))
        fits = [n for n in lengths.values() if 0 < n <= wanted]
        assert chosen.sum() <= wanted or (not fits and len(hit) == 1)
        seen += len(hit) > 1
    assert seen > 100


def test_a_text_of_one_long_word_is_masked_in_part() -> None:
    masker = Masker.of(tokenizer_of("wordpiece"), 0.15, True, 400)
    starts = masker.starts
    assert starts is not None
    tokens = np.full(100, np.flatnonzero(~starts)[0])
    chosen = masker.choose(tokens, np.ones(100, dtype=bool), np.random.default_rng(0))
    assert chosen.sum() == 15


def test_table_of_words() -> None:
    for kind, begins, goes_on in (("wordpiece", "the", "##s"), ("bytes", "Ġthe", "the"), ("unigram", "▁the", "s")):
        tokenizer = tokenizer_of(kind)
        table = word_starts(tokenizer)
        assert len(table) == len(tokenizer)
        assert table[tokenizer.convert_tokens_to_ids(begins)] and not table[tokenizer.convert_tokens_to_ids(goes_on)]


def test_shares() -> None:
    tokenizer = tokenizer_of("wordpiece")
    masker = Masker.of(tokenizer, 0.15, False, 400)
    rng = np.random.default_rng(0)
    tokens = rng.choice(masker.ordinary, 200_000)
    seen, chosen = masker(tokens, np.ones(len(tokens), dtype=bool), rng)
    assert chosen.sum() == 30_000 and (seen[~chosen] == tokens[~chosen]).all()
    masked, kept = (seen[chosen] == masker.mask).mean(), (seen[chosen] == tokens[chosen]).mean()
    assert abs(masked - 0.8) < 0.01 and abs(kept - 0.1) < 0.01
    assert not np.isin(seen[chosen & (seen != masker.mask)], special_ids(tokenizer)).any()
    assert seen.max() < 400
    small = Masker.of(tokenizer, 0.15, False, 50)
    assert small.ordinary.max() == 49, "no token that the model does not know"


def test_a_tokenizer_without_a_mask() -> None:
    with pytest.raises(UserError, match="no mask token"):
        Renderer(tokenizer_of("unigram"), "assistant", "data.train.0", "masked")


class _Rows:
    packing, source_count = False, 2

    def marked(self, source: int, chunk: int, index: int) -> np.ndarray:
        tokenizer = tokenizer_of("wordpiece")
        tokens = np.array(tokenizer(sentences()[10 * source + index])["input_ids"], dtype=np.uint32)
        return np.where(np.isin(tokens, special_ids(tokenizer)), tokens, tokens | LEARNED)


def test_masks_follow_from_the_row_alone() -> None:
    places = np.array([(s, 0, i, 0, 0) for s in (0, 1) for i in range(4)], dtype=DOCUMENT)
    rows = [places[i : i + 1] for i in range(8)]
    layout = MaskedLayout(0, Masker.of(tokenizer_of("wordpiece"), 0.15, True, 400), seed=3)
    whole = layout.collate(_Rows(), rows, 0)
    assert whole.units.tolist() == [int((whole.labels[whole.sources == s] != IGNORE).sum()) for s in (0, 1)]
    for i in range(8):
        alone = layout.collate(_Rows(), rows[i : i + 1], 0)
        width = alone.input_ids.shape[1]
        assert torch.equal(alone.input_ids[0], whole.input_ids[i, :width])
        assert torch.equal(alone.labels[0], whole.labels[i, :width]) and (whole.labels[i, width:] == IGNORE).all()
        assert whole.attention_mask[i].sum() == width
    assert not torch.equal(layout.collate(_Rows(), rows, 1).labels, whole.labels), "another epoch, other masks"
    other = MaskedLayout(0, Masker.of(tokenizer_of("wordpiece"), 0.15, True, 400), seed=4)
    assert not torch.equal(other.collate(_Rows(), rows, 0).labels, whole.labels)
