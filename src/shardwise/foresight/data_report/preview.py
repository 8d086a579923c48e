"""Shows examples as the model sees them: token by token, loss tokens marked.

[Note: halves of characters] A token need not be a whole character: byte-level tokenizers split an emoji in four. Tokens
are therefore turned into bytes one by one, and the bytes of neighbours into characters; a character belongs to all the
tokens that make it up. Where one half of it is trained on and the other is not, or the bytes are no character at all,
they are shown as <0xF0>. Decoding a token on its own, or a growing prefix, would show � instead, which a text may also
hold.
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
    """An example: its source and place, its tokens, the loss mask, and a note."""

    name: str
    where: str
    tokens: np.ndarray
    learned: np.ndarray
    note: str = ""


@dataclass(frozen=True)
class TextSpan:
    """A span of an example: its text, whether it is trained on, whether it is special, its number of tokens."""

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
    """The bytes of each token of a tokenizer, as they appear within a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        values = json.loads(tokenizer.backend_tokenizer.to_str())
        components = [values.get(key) for key in ("decoder", "pre_tokenizer", "normalizer")]
        self._bytes = _byte_alphabet() if "ByteLevel" in _types(components) else None
        self._blank = "▁" if "▁" in json.dumps(components, ensure_ascii=False) else None
        self._fallback = bool((values.get("model") or {}).get("byte_fallback"))
        self._special = {int(i): str(t.content) for i, t in tokenizer.added_tokens_decoder.items()}
        self._shown = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self._shown |= set(tokenizer.all_special_ids)

    def special(self, token: int) -> bool:
        """Whether a token is special: the template's or the tokenizer's own, not text."""
        return token in self._shown

    def written(self, token: int) -> bytes:
        """Returns the bytes that a token decodes to."""
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
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def spans(
    pieces: TokenBytes, tokens: Sequence[int] | np.ndarray, learned: Sequence[bool] | np.ndarray
) -> list[TextSpan]:
    """Returns an example as spans of text, one per token or per group of tokens that make up a character."""
    result: list[TextSpan] = []
    for special, group in _runs(pieces, tokens, learned):
        if special:
            texts = [(pieces.written(token).decode("utf-8", "backslashreplace"), mask) for token, mask in group]
            result += [TextSpan(text, mask, True, 1) for text, mask in texts]
        else:
            result += _characters([(pieces.written(token), mask) for token, mask in group])
    return result


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
    result: list[TextSpan] = []
    pending: list[tuple[bytes, bool]] = []  # tokens whose last character is not whole yet
    for index, (data, mask) in enumerate(group):
        pending.append((data, mask))
        data_so_far = b"".join(part for part, _ in pending)
        decoder = codecs.getincrementaldecoder("utf-8")("strict")
        try:
            text = decoder.decode(data_so_far, final=index + 1 == len(group))
        except UnicodeDecodeError:
            result += [_spelled(part, learned) for part, learned in pending]
        else:
            if decoder.getstate()[0]:
                continue
            if len({learned for _, learned in pending}) > 1:
                result += [_spelled(part, learned) for part, learned in pending]
            else:
                result.append(TextSpan(text, mask, False, len(pending)))
        pending = []
    return result


def _spelled(data: bytes, learned: bool) -> TextSpan:
    """Bytes that are no text on their own: readable characters, and the rest by number."""
    text = data.decode("utf-8", "surrogateescape")
    spelled_text = "".join(f"<0x{ord(c) - 0xDC00:02X}>" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in text)
    return TextSpan(spelled_text, learned, False, 1, broken=True)


def shortened(pieces: TokenBytes, sample: Sample, limit: int) -> list[TextSpan]:
    """Returns the spans of an example, its middle elided (and counted) beyond `most` tokens."""
    tokens = sample.tokens
    learned = sample.learned
    if len(tokens) <= limit:
        return spans(pieces, tokens, learned)
    head_tokens = limit - limit // 3
    tail_tokens = limit // 3
    head = _within(spans(pieces, tokens[: head_tokens + EDGE], learned[: head_tokens + EDGE]), head_tokens)
    tail = _within(spans(pieces, tokens[-tail_tokens - EDGE :], learned[-tail_tokens - EDGE :])[::-1], tail_tokens)[
        ::-1
    ]
    start = sum(s.tokens for s in head)
    stop = len(tokens) - sum(s.tokens for s in tail)
    text = f"{stop - start:,} tokens left out, {int(np.sum(learned[start:stop])):,} of them learned"
    return [*head, TextSpan(text, False, False, stop - start, left_out=True), *tail]


def _within(parts: list[TextSpan], limit: int) -> list[TextSpan]:
    result = []
    total = 0
    for part in parts:
        total += part.tokens
        if total > limit:
            break
        result.append(part)
    return result


def shown(parts: Iterable[TextSpan], marks: Marks = UNICODE) -> Iterator[tuple[str, TextSpan, bool]]:
    """Yields safe text with its span and whether it marks something invisible; equal neighbours are merged."""
    parts = list(parts)
    # Seen as one text, in which a special token ends the line: a space before it is one that nobody sees.
    full_text = "".join("\n" * len(p.text) if p.special or p.left_out else p.text for p in parts)
    trailing = trailing_spaces(full_text)
    offset = 0
    flat: list[tuple[str, TextSpan, bool]] = []
    for part in parts:
        own_trailing = {
            t - offset for t in range(offset, offset + len(part.text)) if t in trailing and not part.special
        }
        offset += len(part.text)
        flat += [(piece, part, mark) for piece, mark in visible(part.text, own_trailing, marks)]
    for (*_, mark), group in groupby(flat, lambda item: (*item[1].kind, item[2])):
        items = list(group)
        yield "".join(piece for piece, _, _ in items), items[0][1], mark


def describe(sample: Sample) -> str:
    """Returns the line above an example: its tokens, loss tokens, and note."""
    total = len(sample.tokens)
    learned = int(np.sum(sample.learned))
    share = f" ({learned / total:.0%})" if total else ""
    return f"{total:,} tokens, {learned:,} learned{share}" + (f"; {sample.note}" if sample.note else "")


class Preview:
    """Prints examples: coloured and underlined on a terminal, with brackets where there is no colour."""

    def __init__(self, tokenizer: Any, console: Console, most: int = MOST_TOKENS) -> None:
        self._pieces = TokenBytes(tokenizer)
        self._console = console
        self._most = most
        ascii_only = console.options.ascii_only
        self._marks = ASCII if ascii_only else UNICODE
        self._coloured = console.is_terminal and not console.no_color and console.color_system is not None
        self._brackets = ("[[", "]]") if ascii_only else ("⟦", "⟧")
        self._elision = "..." if ascii_only else "…"

    def legend(self) -> Text:
        """Returns what the colours or brackets mean."""
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
        """Returns one example as styled text."""
        text = Text(overflow="fold", no_wrap=False)
        in_brackets = False
        for piece, span, mark in shown(shortened(self._pieces, sample, self._most), self._marks):
            learned = span.learned and not span.left_out
            if not self._coloured:
                if learned != in_brackets:
                    text.append(self._brackets[learned is False])
                    in_brackets = learned
                for bracket in self._brackets:
                    if not self._console.options.ascii_only:
                        piece = piece.replace(bracket, f"<U+{ord(bracket):04X}>")
            if span.left_out:
                text.append(f"\n{self._elision} {piece} {self._elision}\n", style="italic yellow")
            else:
                style = "cyan" if mark or span.broken else _STYLES[span.learned, span.special]
                text.append(piece, style=f"{style} underline" if learned and self._coloured else style)
        if in_brackets:
            text.append(self._brackets[1])
        text.rstrip()  # the newline that ends most examples has its mark already
        return text
