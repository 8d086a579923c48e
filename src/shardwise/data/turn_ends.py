"""Determines where an answer ends: everything the model must produce to end its turn, and nothing of the next turn.

[Note: end of turn] Texts that the template itself writes around sentinels decide:
  last     what follows the answer if it is the last message and no further answer is asked for
  gaps     text between the answer and the content of a next message, by the role of that message
  opening  text before the first message of a conversation, where there is no turn to end yet
What `last` and a gap have in common ends the turn, up to and including the last complete marker in it; blanks behind
that are not trained on. A marker that opens turns is never part of it, and neither is plain text that may belong to the
next turn.

Where they have nothing in common, the answer has its own end at this position or none:
  - another end (gpt-oss returns, but ends answers that others follow): what ends messages of other roles and is in
    every gap;
  - the last answer is left open: what the gap has before the opening of the next turn;
  - only the marker of the next role separates the turns (GLM): no end, unless the model's generation config lists it
    among the stop tokens; then the model itself has to produce it;
  - the end is written once, behind the last answer: earlier ones are trained on without an end.
A template that ends the last answer with no marker at all is rejected: a model would not be taught to stop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class End:
    """What ends an answer at one position; `added` is text that the template omits behind the last answer."""

    text: str = ""
    added: str = ""


@dataclass(frozen=True)
class Opening:
    """How turns open and close, seen on a conversation of sentinels.

    seen      markers that open turns; those of them that never close one are `markers`
    user      text before a user's content that is the same at the beginning of a conversation and after an answer
    closings  what ends messages of other roles, if they are the last
    """

    seen: frozenset[str] = frozenset()
    markers: frozenset[str] = frozenset()
    user: str = ""
    closings: tuple[str, ...] = ()


@dataclass(frozen=True)
class TurnSuffixes:
    """Text that a template writes behind one answer: as the last message, and before a next one of each role."""

    last: str | None
    gaps: Mapping[str, str] = field(default_factory=dict)


class Markers:
    """The special and added tokens of a tokenizer, as found in text."""

    def __init__(self, tokenizer: Any, stops: Iterable[str] = ()) -> None:
        self.words = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        self.words |= set(tokenizer.all_special_tokens)
        self.special = any_of(self.words)
        self.all = any_of(self.words | set(tokenizer.get_added_vocab()))
        self.tags = re.compile(f"{self.all.pattern}|<[^<>\\s]{{1,40}}>")  # as tokens or as plain text
        self.stops = frozenset(stops) | ({tokenizer.eos_token} if tokenizer.eos_token else frozenset())

    def inside(self, text: str) -> list[str]:
        """Markers in a text, in order."""
        return self.all.findall(text)

    def leading(self, text: str) -> list[str]:
        """Markers at the beginning of a text, before anything else."""
        markers, at = [], 0
        while mark := self.all.match(text, at):
            markers.append(mark[0])
            at = mark.end()
        return markers

    def cut(self, text: str, place: int, pattern: re.Pattern[str] | None = None) -> int:
        """The position, or the beginning of the marker that contains it."""
        matches = (pattern or self.all).finditer(text)
        return next((m.start() for m in matches if m.start() < place < m.end()), place)

    def alike(self, first: str, second: str, pattern: re.Pattern[str] | None = None) -> int:
        """Length of the common prefix of two texts, not ending inside a marker."""
        place = alike(first, second)
        return min(self.cut(first, place, pattern), self.cut(second, place, pattern))

    def split_last(self, text: str) -> tuple[str, str]:
        """The last marker of a text, and the text behind it."""
        last = next(reversed(list(self.all.finditer(text))), None)
        return (last[0], text[last.end() :]) if last else ("", text)

    def through_last(self, text: str) -> str:
        """The text up to and including its last marker; empty if it has none."""
        return text[: max((m.end() for m in self.all.finditer(text)), default=0)]


def any_of(words: set[str]) -> re.Pattern[str]:
    """Pattern that matches any of the words, the longest first; matches nothing if there are none."""
    solid = sorted((w for w in words if w.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, solid)) or "(?!)")


def alike(first: str, second: str) -> int:
    """Length of the common prefix of two texts."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


def find_opening(markers: Markers, before: Mapping[str, str], gap: str, closings: Iterable[str]) -> Opening:
    """How turns open, from the texts around sentinels.

    `before`: text before the first message by its role; `gap`: text between an answer and a user's message.
    """
    first = next((before[role] for role in ("system", "user") if before.get(role, "").strip()), "")
    user = before.get("user", "")
    opening = set(markers.leading(first))
    closings = tuple(filter(None, closings))
    if (last := markers.inside(user)[-1:]) and last == markers.inside(gap)[-1:]:
        # It stands right before what users say, and does not end what they said.
        opening |= set(last) - {mark for closing in closings for mark in markers.inside(closing)}
    never = frozenset(opening) - markers.stops
    return Opening(frozenset(opening), never, _common_end(markers, user, gap), closings)


def find_end(
    markers: Markers,
    opening: Opening,
    around: TurnSuffixes,
    role: str | None,
    calls: str = "",
    known: Iterable[str] = (),
) -> End | None:
    """The end of an answer before a message of this role (None: of the last answer); None if there is none.

    `calls` is the text of its tool calls: the marker that closes those does not end the turn. `known` are markers that
    end answers without calls.
    """
    ends = _Ends(markers, opening, around, calls, markers.stops.union(known))
    return ends.at_last() if role is None else End(ends.before(role))


class _Ends:
    def __init__(
        self, markers: Markers, opening: Opening, around: TurnSuffixes, calls: str, known: frozenset[str]
    ) -> None:
        self.markers = markers
        self.opening = opening
        self.calls = calls
        self.known = known
        self.last = (around.last or "").lstrip()
        self.gaps = {role: gap.lstrip() for role, gap in around.gaps.items()}

    def before(self, role: str) -> str:
        gap = self.gaps[role]
        for candidate in self._candidates(gap):
            if self._ends(candidate):
                return candidate
        plain = self._agreed(self.last, gap)
        return "" if self.calls else plain

    def at_last(self) -> End | None:
        ends = [end for role in self.gaps if self._ends(end := self.before(role))]
        if shared := min((e for e in ends if self.last.startswith(e)), key=len, default=""):
            return End(shared)
        own = self.markers.through_last(self._unopened(self.last))
        if self._ends(own):
            return End(own)
        following = "tool" if self.calls else "user"
        end = self.before(following) if following in self.gaps else ""
        return End(end, end[len(self.last) :]) if self._ends(end) and end.startswith(self.last) else None

    def _candidates(self, gap: str) -> Iterator[str]:
        yield self._agreed(self.last, gap)
        if len(self.gaps) > 1:
            for closing in self.opening.closings:
                candidate = self._agreed(closing.lstrip(), gap)
                if candidate and all(other.startswith(candidate) for other in self.gaps.values()):
                    yield candidate
        yield self._through_stop(gap)
        if not self._ends(self.markers.through_last(self._unopened(self.last))):
            yield self._before_opening(gap)

    def _agreed(self, last: str, gap: str) -> str:
        shared = self._unopened(last[: self.markers.alike(last, gap)])
        if marked := self.markers.through_last(shared):
            return marked
        plain = shared.rstrip()
        rest = last[len(plain) :].lstrip()
        if rest and not self.markers.all.match(rest):
            return ""  # they agree by chance: within the template's own words
        return plain if len(plain) <= len(gap) - len(self.opening.user) else ""

    def _unopened(self, text: str) -> str:
        """The text before the first marker that opens a turn."""
        opened = (m.start() for m in self.markers.all.finditer(text) if m[0] in self.opening.markers)
        return text[: next(opened, len(text))]

    def _through_stop(self, gap: str) -> str:
        """The text up to and including a stop token, if nothing else separates the turns."""
        for mark in self.markers.all.finditer(gap):
            if mark[0] in self.markers.stops:
                return gap[: mark.end()]
            if mark[0] in self.opening.markers:
                break
        return ""

    def _before_opening(self, gap: str) -> str:
        """The part of a gap before the next turn, if it is known for certain how that opens."""
        opening = self.opening.user
        if not opening.strip() or not gap.endswith(opening):
            return ""
        return self.markers.through_last(self._unopened(gap[: len(gap) - len(opening)]))

    def _ends(self, text: str) -> bool:
        """Whether a turn can end with this text: it has a marker other than one that closes tool calls."""
        marks = self.markers.inside(text)
        if not self.calls:
            return bool(marks)
        inner = {_core(m) for m in self.markers.inside(self.calls)}
        return any(m in self.known or (self.markers.special.fullmatch(m) and _core(m) not in inner) for m in marks)


def _core(marker: str) -> str:
    """The words of a marker without what distinguishes the opening from the closing one of a pair."""
    words = re.findall(r"[^\W\d_]+", marker.lower())
    return "".join(w for w in words if w not in ("begin", "end", "start", "stop", "close", "open"))


def _common_end(markers: Markers, first: str, second: str) -> str:
    """The common suffix of two texts, from a complete marker or word on."""
    length = alike(first[::-1], second[::-1])
    for text in (first, second):
        place = len(text) - length
        inside = next((m.end() for m in markers.all.finditer(text) if m.start() < place < m.end()), place)
        length = len(text) - inside
    return second[len(second) - length :]
