"""Makes text from data files safe to display: nothing in it can move the cursor, hide, or reverse the line.

A data file may contain anything, and so may file names and the messages that quote them. Characters that would control
a terminal or a browser, or be invisible, are replaced by a mark: <U+001B> for an escape, <U+202E> for a directional
override. Letters, symbols and spaces stay.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

JOINERS = "\u200c\u200d"  # within words of Persian or Hindi, and within emoji
_HIDDEN = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp")
_TRAILING = re.compile(r"[ ]+(?=[\r\n]|$)")


@dataclass(frozen=True)
class Marks:
    """How invisible characters are written."""

    newline: str = "⏎"
    tab: str = "⇥   "
    space: str = "·"


UNICODE, ASCII = Marks(), Marks("\\n", "\\t  ", "_")


def visible(text: str, trailing: set[int] | None = None, marks: Marks = UNICODE) -> list[tuple[str, bool]]:
    """The text in pieces, each with whether it is a mark; a newline is a mark followed by a real newline.

    `trailing` holds the positions of spaces that end a line; default: computed here.
    """
    if trailing is None:
        trailing = trailing_spaces(text)
    pieces: list[tuple[str, bool]] = []
    plain: list[str] = []
    for index, character in enumerate(text):
        mark = _mark(character, index in trailing, marks)
        if mark is None:
            plain.append(character)
            continue
        if plain:
            pieces.append(("".join(plain), False))
            plain = []
        pieces.append((mark, True))
        if character == "\n":
            plain.append("\n")
    if plain:
        pieces.append(("".join(plain), False))
    return pieces


def one_line(text: object, marks: Marks = UNICODE) -> str:
    """A name, a path or a reason on one line, safe to print."""
    return "".join(piece for piece, _ in visible(str(text), set(), marks)).replace("\n", "")


def several_lines(text: object) -> str:
    """A message that quotes data: its newlines stay, everything else is made safe."""
    return "\n".join(one_line(line) for line in str(text).split("\n"))


def trailing_spaces(text: str) -> set[int]:
    """Positions of the spaces that end a line or the text."""
    return {place for match in _TRAILING.finditer(text) for place in range(*match.span())}


def _mark(character: str, trailing: bool, marks: Marks) -> str | None:
    if character == "\n":
        return marks.newline
    if character == "\t":
        return marks.tab
    if character == " ":
        return marks.space if trailing else None
    code = ord(character)
    if character in JOINERS or (32 <= code < 127) or unicodedata.category(character) not in _HIDDEN:
        return None
    return f"<U+{code:04X}>"


def counted(number: int, singular: str, plural: str) -> str:
    """A number with its noun in singular or plural."""
    return f"{number:,} {singular if number == 1 else plural}"
