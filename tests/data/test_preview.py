"""What is shown of an example is what its tokens say: every character once, masks apart, and nothing that acts."""

from __future__ import annotations

import io
import random
import re
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.bills import HOSTILE
from support.chat import chat_tokenizer
from support.tiny import CHATML

from shardwise.core.printable import ASCII, one_line, several_lines, visible
from shardwise.foresight.data_report.preview import Preview, Sample, TextSpan, TokenBytes, shortened, shown, spans

TEXTS = [
    "plain words, and more",
    "naïve — 日本語 العربية 👩‍👩‍👧 e\u0301 𝔘",
    "� is a character too",
    "  leading, trailing  \n\ttab \n\n end ",
    "\x00\x1b[31m\x7f\x85\u202e\ufeff",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer(CHATML)


def sample(tokenizer: Any, text: str, learned_from: int = 0, **changes: Any) -> Sample:
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False))
    return Sample("source", "file.jsonl:1", tokens, np.arange(len(tokens)) >= learned_from, **changes)


def word_pieces() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "play", "##ing", "##ed", "the", "end", ".", "é"]
    raw = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]")


@pytest.mark.parametrize("kind", ["bytes", "trimmed", "pieces"])
@pytest.mark.parametrize("text", TEXTS)
def test_every_character_once(kind: str, text: str) -> None:
    tokenizer = chat_tokenizer(CHATML, kind=kind)
    one = sample(tokenizer, text)
    found = spans(TokenBytes(tokenizer), one.tokens, one.learned)
    written = "".join(span.text for span in found)
    assert written.removeprefix(" " if kind == "pieces" else "") == text
    assert sum(span.tokens for span in found) == len(one.tokens) and not any(span.broken for span in found)


def test_words_that_go_on() -> None:
    tokenizer = word_pieces()
    one = sample(tokenizer, "the playing played end.")
    assert (
        "".join(s.text for s in spans(TokenBytes(tokenizer), one.tokens, one.learned)).strip()
        == "the playing played end ."
    )


def test_characters_cut_in_half(tokenizer: Any) -> None:
    """Half learned, half not: bytes, each with its own mask. Not a character at all: bytes too."""
    pieces = TokenBytes(tokenizer)
    one = sample(tokenizer, "a👍b")
    assert len(one.tokens) == 6, "this tokenizer has no token for it"
    whole = spans(pieces, one.tokens, one.learned)
    assert [(s.text, s.tokens) for s in whole] == [("a", 1), ("👍", 4), ("b", 1)]
    cut = spans(pieces, one.tokens, np.arange(6) >= 3)
    assert [(s.text, s.learned) for s in cut] == [
        ("a", False), ("<0xF0>", False), ("<0x9F>", False), ("<0x91>", True), ("<0x8D>", True), ("b", True),
    ]  # fmt: skip
    torn = spans(pieces, one.tokens[[0, 2, 1, 5]], np.ones(4, dtype=bool))
    assert "".join(s.text for s in torn) == "a<0x9F><0xF0>b"
    last = spans(pieces, one.tokens[:3], np.ones(3, dtype=bool))
    assert "".join(s.text for s in last) == "a<0xF0><0x9F>"


def test_masks_follow_the_tokens(tokenizer: Any) -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello 👍<|im_end|>\n"
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False))
    rng = random.Random(0)
    for _ in range(50):
        learned = np.array([rng.random() < 0.5 for _ in tokens])
        found = spans(TokenBytes(tokenizer), tokens, learned)
        flat = [span.learned for span in found for _ in range(span.tokens)]
        assert flat == learned.tolist()
    assert [s.text for s in found if s.special] == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>"]


def test_tokens_that_nobody_knows(tokenizer: Any) -> None:
    found = spans(TokenBytes(tokenizer), [10**6], [True])
    assert [span.text for span in found] == ["<token 1000000>"]


@pytest.mark.parametrize("text", [*TEXTS, "x" * 3000, "👍" * 500])
@pytest.mark.parametrize("most", [3, 30, 400])
def test_long_examples_lose_their_middle(tokenizer: Any, text: str, most: int) -> None:
    one = sample(tokenizer, text * 3, learned_from=4 if text[0] == "👍" else 5)
    found = shortened(TokenBytes(tokenizer), one, most)
    gaps = [span for span in found if span.left_out]
    assert sum(span.tokens for span in found) == len(one.tokens)
    assert len(gaps) == (len(one.tokens) > most)
    assert sum(span.tokens for span in found if not span.left_out) <= max(most, 0) or not gaps
    if gaps:
        first = sum(span.tokens for span in found[: found.index(gaps[0])])
        learned = int(one.learned[first : first + gaps[0].tokens].sum())
        assert gaps[0].text == f"{gaps[0].tokens:,} tokens left out, {learned:,} of them learned"
    assert not any(span.broken for span in found), "a cut never falls into a character"


def test_what_cannot_be_seen_is_marked() -> None:
    def plain(text: str) -> str:
        return "".join(piece for piece, _ in visible(text))

    assert plain("a  \nb\t \n c ") == "a··⏎\nb⇥   ·⏎\n c·"
    assert plain("\x00\x1b\x7f\x9b") == "<U+0000><U+001B><U+007F><U+009B>"
    assert plain("\u202e\u2066\u200b\ufeff\u2028\ue000\U000e0041\ud83d") == (
        "<U+202E><U+2066><U+200B><U+FEFF><U+2028><U+E000><U+E0041><U+D83D>"
    )
    assert (
        plain("a\r\n") == "a<U+000D>⏎\n" and plain("می‌خواهم 👩‍👧 e\u0301 日\u3000") == "می‌خواهم 👩‍👧 e\u0301 日\u3000"
    )
    assert one_line("a\nb \x1b") == "a⏎b <U+001B>" and several_lines("a\n  → \x1b") == "a\n  → <U+001B>"
    assert "".join(piece for piece, _ in visible("a \t\n", marks=ASCII)) == "a \\t  \\n\n"


def test_a_space_before_a_special_token_is_seen() -> None:
    parts = [TextSpan("Hi ", True, False, 1), TextSpan("<|im_end|>", True, True, 1), TextSpan(" a", False, False, 1)]
    assert "".join(text for text, *_ in shown(parts)) == "Hi·<|im_end|> a"


def preview(tokenizer: Any, *samples: Sample, width: int = 80, terminal: bool = False, **console: Any) -> str:
    class File(io.StringIO):
        encoding = console.pop("encoding", "utf-8")

    out = Console(file=File(), width=width, force_terminal=terminal, legacy_windows=False, **console)
    Preview(tokenizer, out).print(samples)
    return out.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_in_a_pipe_brackets_hold_what_is_learned(tokenizer: Any) -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    prompt = len(tokenizer.encode(text, add_special_tokens=False))
    one = sample(tokenizer, f"{text}Hello ⟦you⟧<|im_end|>", prompt, note="truncated from 90 tokens")
    out = preview(tokenizer, one, width=20)
    assert "⟦Hello <U+27E6>you<U+27E7><|im_end|>⟧" in out and "\x1b" not in out
    assert "truncated from 90 tokens" in out and "learned tokens are between ⟦ and ⟧" in out
    assert out.count("⟦") == out.count("⟧") == 2, "one pair in the legend, one in the example"


def test_in_a_pipe_lines_are_not_broken(tokenizer: Any) -> None:
    assert "w" * 300 in preview(tokenizer, sample(tokenizer, "w" * 300), width=40)


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("colour", ["truecolor", None])
def test_on_a_terminal(tokenizer: Any, width: int, colour: str | None) -> None:
    one = sample(tokenizer, "prompt " * 20 + "<|im_end|>" + "w" * 300, 40)
    out = preview(tokenizer, one, width=width, terminal=True, color_system=colour)
    assert ("\x1b[" in out) == (colour is not None) and ("⟦" in out) == (colour is None)
    if colour is None:
        assert max(map(len, out.splitlines())) <= width
    else:
        assert "\x1b[4;32m" in out, "learned: underlined besides green"


def test_no_color_leaves_the_brackets(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = preview(tokenizer, sample(tokenizer, "hello"), terminal=True, color_system="truecolor")
    assert "⟦hello⟧" in re.sub(r"\x1b\[[0-9;]*m", "", out) and "\x1b[32" not in out


def test_without_unicode(tokenizer: Any) -> None:
    out = preview(tokenizer, sample(tokenizer, "hello \nx"), encoding="ascii")
    assert out.isascii() and "[[hello_\\n" in out


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_acts_on_the_terminal(tokenizer: Any, terminal: bool) -> None:
    one = sample(tokenizer, HOSTILE.replace("\ud83d", ""), 9)
    evil = Sample(HOSTILE, HOSTILE, one.tokens, one.learned, HOSTILE)
    out = preview(tokenizer, evil, terminal=terminal, color_system=None)
    assert not {c for c in out if ord(c) < 32 and c != "\n"} and not {"\x9b", "\u202e", "\u2066", "\u2028"} & set(out)
    assert "[bold]x[/bold]" in out, "markup in data is text"
    out.encode()


def test_nothing_to_show(tokenizer: Any) -> None:
    assert "0 tokens, 0 learned" in preview(tokenizer, sample(tokenizer, ""))
