"""Makes text from data files fit to be shown: nothing in it can move the cursor, hide, or turn the line around.

A data file may hold anything, and so may the names of files and the reasons that quote them. What would act on a
terminal or a browser, or would not be seen, is replaced by a mark: <U+001B> for an escape, <U+202E> for an override of
the direction of writing. What stays is letters, signs and spaces.
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
    """How the invisible is written."""

    newline: str = "⏎"
    tab: str = "⇥   "
    space: str = "·"


UNICODE, ASCII = Marks(), Marks("\\n", "\\t  ", "_")


def visible(text: str, trailing: set[int] | None = None, marks: Marks = UNICODE) -> list[tuple[str, bool]]:
    """The text in pieces, each with whether it is a mark; a newline is a mark with a real newline behind it.

    `trailing` holds the places of spaces that end a line; default: found here.
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
    """A message of ours that quotes data: its newlines stay, everything else is made safe."""
    return "\n".join(one_line(line) for line in str(text).split("\n"))


def trailing_spaces(text: str) -> set[int]:
    """Places of the spaces that end a line or the text."""
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


def counted(number: int, one: str, several: str) -> str:
    """A number with the word that goes with it."""
    return f"{number:,} {one if number == 1 else several}"
