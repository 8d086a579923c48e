"""Shows examples as the model will see them: token by token, what is learned apart from what is not.

[Note: halves of characters] A token need not be a whole character: byte-level tokenizers cut an emoji in four. Tokens
are therefore turned into bytes one by one, and the bytes of neighbours into characters; a character belongs to all the
tokens that make it up. Where one half of it is learned and the other is not, or the bytes are no character at all, they
are shown as <0xF0>. Decoding a token on its own, or a growing prefix, would show � instead, which a text may also hold.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from shardwise.core.printable import ASCII, UNICODE, Marks, one_line, trailing_spaces, visible

MOST_TOKENS = 400  # of an example in the terminal; more are left out in its middle
EDGE = 8  # tokens read beyond a cut, so that it does not fall into a character
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_STYLES = {
    (False, False): "dim",
    (True, False): "green underline",
    (False, True): "magenta",
    (True, True): "bold magenta underline",
}


@dataclass(frozen=True)
class Sample:
    """A real example: of which source, from where, its tokens, which of them are learned, and what became of it."""

    name: str
    where: str
    tokens: np.ndarray
    learned: np.ndarray
    note: str = ""


@dataclass(frozen=True)
class TextSpan:
    """A stretch of an example: its text, whether it is learned, whether it is a special token, how many tokens."""

    text: str
    learned: bool
    special: bool
    tokens: int
    broken: bool = False  # bytes that are no character, spelled out
    left_out: bool = False  # the place of an elision; its text says how much

    @property
    def kind(self) -> tuple[bool, ...]:
        """What spans that are shown alike have in common."""
        return self.learned, self.special, self.broken, self.left_out


class TokenBytes:
    """The bytes of each token of a tokenizer, as it stands within a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        values = json.loads(tokenizer.backend_tokenizer.to_str())
        around = [values.get(key) for key in ("decoder", "pre_tokenizer", "normalizer")]
        self._bytes = _byte_alphabet() if "ByteLevel" in _types(around) else None
        self._blank = "▁" if "▁" in json.dumps(around, ensure_ascii=False) else None
        self._fallback = bool((values.get("model") or {}).get("byte_fallback"))
        self._special = {int(i): str(t.content) for i, t in tokenizer.added_tokens_decoder.items()}
        self._shown = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self._shown |= set(tokenizer.all_special_ids)

    def special(self, token: int) -> bool:
        """Whether it is a token of the template's or the tokenizer's own, not text."""
        return token in self._shown

    def written(self, token: int) -> bytes:
        """What it writes."""
        if token in self._special:
            return self._special[token].encode("utf-8", "surrogatepass")
        word: str | None = self._tokenizer.convert_ids_to_tokens(token)
        if word is None:
            return f"<token {token}>".encode()
        if self._bytes is not None and all(character in self._bytes for character in word):
            return bytes([self._bytes[character] for character in word])
        if self._fallback and (match := _BYTE.fullmatch(word)):
            return bytes([int(match[1], 16)])
        if self._blank is not None:
            return word.replace(self._blank, " ").encode()
        # Twice, less once: what it writes when something stands before it (a space, or no ##).
        once, twice = (self._decode([token] * n) for n in (1, 2))
        return (twice[len(once) :] if twice.startswith(once) and len(twice) > len(once) else once).encode()

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


def _types(value: Any) -> set[str]:
    """All `type`s within a part of tokenizer.json."""
    if isinstance(value, list):
        return set().union(*map(_types, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    return {str(value.get("type"))} | set().union(*(_types(v) for v in value.values()))


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte: printable Latin-1 for itself, the others from U+0100 on, in order."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def spans(
    pieces: TokenBytes, tokens: Sequence[int] | np.ndarray, learned: Sequence[bool] | np.ndarray
) -> list[TextSpan]:
    """An example as stretches of text, one per token or per group of tokens that make up a character."""
    found: list[TextSpan] = []
    for special, group in _runs(pieces, tokens, learned):
        if special:
            texts = [(pieces.written(token).decode("utf-8", "backslashreplace"), mask) for token, mask in group]
            found += [TextSpan(text, mask, True, 1) for text, mask in texts]
        else:
            found += _characters([(pieces.written(token), mask) for token, mask in group])
    return found


def _runs(pieces: TokenBytes, tokens: Any, learned: Any) -> Iterator[tuple[bool, list[tuple[int, bool]]]]:
    run: list[tuple[int, bool]] = []
    kind = False
    for token, mask in zip(tokens, learned, strict=True):
        special = pieces.special(int(token))
        if run and special != kind:
            yield kind, run
            run = []
        kind = special
        run.append((int(token), bool(mask)))
    if run:
        yield kind, run


def _characters(group: list[tuple[bytes, bool]]) -> list[TextSpan]:
    found: list[TextSpan] = []
    waiting: list[tuple[bytes, bool]] = []  # tokens whose last character is not whole yet
    for index, (data, mask) in enumerate(group):
        waiting.append((data, mask))
        whole = b"".join(part for part, _ in waiting)
        decoder = codecs.getincrementaldecoder("utf-8")("strict")
        try:
            text = decoder.decode(whole, final=index + 1 == len(group))
        except UnicodeDecodeError:
            found += [_spelled(part, learned) for part, learned in waiting]
        else:
            if decoder.getstate()[0]:
                continue
            if len({learned for _, learned in waiting}) > 1:
                found += [_spelled(part, learned) for part, learned in waiting]
            else:
                found.append(TextSpan(text, mask, False, len(waiting)))
        waiting = []
    return found


def _spelled(data: bytes, learned: bool) -> TextSpan:
    """Bytes that are no text on their own: what can be read of them, the rest by number."""
    text = data.decode("utf-8", "surrogateescape")
    shown = "".join(f"<0x{ord(c) - 0xDC00:02X}>" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in text)
    return TextSpan(shown, learned, False, 1, broken=True)


def shortened(pieces: TokenBytes, sample: Sample, most: int) -> list[TextSpan]:
    """The spans of an example, its middle left out (and counted) where it has more than `most` tokens."""
    tokens, learned = sample.tokens, sample.learned
    if len(tokens) <= most:
        return spans(pieces, tokens, learned)
    first, last = most - most // 3, most // 3
    head = _within(spans(pieces, tokens[: first + EDGE], learned[: first + EDGE]), first)
    tail = _within(spans(pieces, tokens[-last - EDGE :], learned[-last - EDGE :])[::-1], last)[::-1]
    start, stop = sum(s.tokens for s in head), len(tokens) - sum(s.tokens for s in tail)
    text = f"{stop - start:,} tokens left out, {int(np.sum(learned[start:stop])):,} of them learned"
    return [*head, TextSpan(text, False, False, stop - start, left_out=True), *tail]


def _within(parts: list[TextSpan], most: int) -> list[TextSpan]:
    kept, total = [], 0
    for part in parts:
        total += part.tokens
        if total > most:
            break
        kept.append(part)
    return kept


def shown(parts: Iterable[TextSpan], marks: Marks = UNICODE) -> Iterator[tuple[str, TextSpan, bool]]:
    """Safe text to show, with its span and whether it is a mark for something invisible; equal neighbours are one."""
    parts = list(parts)
    # Seen as one text, in which a special token ends the line: a space before it is one that nobody sees.
    whole = "".join("\n" * len(p.text) if p.special or p.left_out else p.text for p in parts)
    trailing, place = trailing_spaces(whole), 0
    flat: list[tuple[str, TextSpan, bool]] = []
    for part in parts:
        here = {t - place for t in range(place, place + len(part.text)) if t in trailing and not part.special}
        place += len(part.text)
        flat += [(piece, part, mark) for piece, mark in visible(part.text, here, marks)]
    for (*_, mark), group in groupby(flat, lambda item: (*item[1].kind, item[2])):
        found = list(group)
        yield "".join(piece for piece, _, _ in found), found[0][1], mark


def describe(sample: Sample) -> str:
    """The line above an example: where it is from, its tokens, and what became of it."""
    total, learned = len(sample.tokens), int(np.sum(sample.learned))
    share = f" ({learned / total:.0%})" if total else ""
    return f"{total:,} tokens, {learned:,} learned{share}" + (f"; {sample.note}" if sample.note else "")


class Preview:
    """Prints examples: coloured and underlined on a terminal, with brackets where there is no colour."""

    def __init__(self, tokenizer: Any, console: Console, most: int = MOST_TOKENS) -> None:
        self._pieces, self._console, self._most = TokenBytes(tokenizer), console, most
        ascii_only = console.options.ascii_only
        self._marks = ASCII if ascii_only else UNICODE
        self._coloured = console.is_terminal and not console.no_color and console.color_system is not None
        self._brackets = ("[[", "]]") if ascii_only else ("⟦", "⟧")
        self._elision = "..." if ascii_only else "…"

    def legend(self) -> Text:
        """What the colours or brackets mean."""
        marks = self._marks
        line = Text("learned tokens are ")
        if self._coloured:
            line.append("green and underlined", style=_STYLES[True, False]).append(", the others ")
            line.append("dim", style=_STYLES[False, False]).append(", special tokens ")
            line.append("magenta", style=_STYLES[False, True])
        else:
            line.append("between {} and {}".format(*self._brackets))
        line.append(f"; {marks.newline} newline, {marks.tab.strip()} tab, {marks.space} space at the end of a line")
        return line

    def print(self, samples: Iterable[Sample]) -> None:
        """Prints the legend once, then every example."""
        wrap = not self._console.is_terminal  # in a pipe lines are not broken: grep and diff want them whole
        self._console.print(self.legend(), soft_wrap=wrap, highlight=False)
        for sample in samples:
            head = Text(f"{one_line(sample.name)}  {one_line(sample.where)}", style="bold")
            head.append(f"  {one_line(describe(sample))}", style="not bold")
            self._console.print()
            self._console.print(head, soft_wrap=wrap, highlight=False)
            body = self.text(sample)
            self._console.print(
                body if wrap else Padding(body, (0, 0, 0, 2), expand=False), soft_wrap=wrap, highlight=False
            )

    def text(self, sample: Sample) -> Text:
        """One example, styled."""
        text = Text(overflow="fold", no_wrap=False)
        inside = False
        for piece, span, mark in shown(shortened(self._pieces, sample, self._most), self._marks):
            learned = span.learned and not span.left_out
            if not self._coloured:
                if learned != inside:
                    text.append(self._brackets[learned is False])
                    inside = learned
                for bracket in self._brackets:
                    if not self._console.options.ascii_only:
                        piece = piece.replace(bracket, f"<U+{ord(bracket):04X}>")
            if span.left_out:
                text.append(f"\n{self._elision} {piece} {self._elision}\n", style="italic yellow")
            else:
                style = "cyan" if mark or span.broken else _STYLES[span.learned, span.special]
                text.append(piece, style=f"{style} underline" if learned and self._coloured else style)
        if inside:
            text.append(self._brackets[1])
        text.rstrip()  # the newline that ends most examples has its mark already
        return text
