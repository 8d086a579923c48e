"""Splits a text into words: runs of letters and digits in lower case, or characters in scripts without spaces."""

from __future__ import annotations

import re
import unicodedata

_UNSPACED = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f"
    "\U00020000-\U0003ffff"
)


# \w leaves out the marks that carry the vowels of Indic scripts, Arabic and Hebrew.
_MARKS = "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff"


UNSPACED = re.compile(rf"([{_UNSPACED}])")


WORD = re.compile(rf"[\w{_MARKS}{_UNSPACED}]+|[-+*/=<>^%]")


LONGEST = 40  # characters of a word


# 12 + 35 and 12 - 35 differ in nothing but the sign between them.
SIGNS = b"-+*/=<>^%"


_PLAIN = bytes(c if chr(c).isalnum() or c in b"_" + SIGNS else 32 for c in range(128)).ljust(256)


def words_of(text: str, signs: bool = False) -> list[bytes]:
    """The words of a text; with `signs`, arithmetic signs too."""
    if text.isascii():  # four times as fast as a pattern
        plain = text.lower().encode().translate(_PLAIN)
        for sign in SIGNS:
            if sign in plain:
                plain = plain.replace(bytes([sign]), b" %c " % sign if signs else b" ")
        words = plain.split()
    else:
        text = unicodedata.normalize("NFKC", text).lower()
        if UNSPACED.search(text):
            text = UNSPACED.sub(r" \1 ", text)
        joined = "\n".join(WORD.findall(text)).encode("utf-8", "surrogatepass")
        words = joined.split(b"\n") if joined else []
        if not signs:
            words = [word for word in words if word not in SIGNS]
    if words and max(map(len, words)) > LONGEST:
        return [piece for word in words for piece in _pieces(word)]
    return words


def _pieces(word: bytes) -> list[bytes]:
    text = word.decode("utf-8", "surrogatepass")
    return [c.encode("utf-8", "surrogatepass") for c in text] if len(text) > LONGEST else [word]
