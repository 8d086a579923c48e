"""Probes how a chat template renders a plain answer: what asks for it, how it ends, how other turns open.

Done once per template, on questions and answers that cannot be mistaken for anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from shardwise.data.examples import Message
from shardwise.data.turn_ends import End, Markers, Opening, TurnSuffixes, find_end, find_opening
from shardwise.data.turns import ROLES, RowFault, changes_text, no_end, stamps

if TYPE_CHECKING:
    from shardwise.data.template import ChatTemplate

SYSTEM: Message = {"role": "system", "content": "Be kind."}
TOOL = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class TemplateStyle:
    """How a template renders a plain answer.

    header   what it writes before an answer although it has no generation prompt
    added    what asking for an answer adds to a conversation
    forced   ends of the generation prompt that finished answers lack (`<think>` of some reasoning models)
    end      how the last answer ends
    stops    markers at which an answer ends for certain; `known`: all that end answers
    """

    header: str = ""
    added: str = ""
    forced: tuple[str, ...] = ()
    opening: Opening = field(default_factory=Opening)
    end: End = field(default_factory=End)
    stops: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()

    def headers(self) -> list[str]:
        """Texts that answers open with, as far as known."""
        written = (self.header, self.added, *(self.added.removesuffix(f) for f in self.forced))
        return [header for header in written if header.strip()]

    def opens(self, text: str) -> bool:
        """Whether a text begins with the header of an answer, ignoring blanks."""
        return "".join(text.split()).startswith(tuple("".join(header.split()) for header in self.headers()))

    def names_assistant(self, markers: Markers, text: str) -> bool:
        """Whether a text before an answer has what distinguishes an assistant's turn from a user's."""
        (mark, name), (user_mark, user_name) = markers.split_last(text), markers.split_last(self.opening.user)
        if name.strip():
            return (mark, name.strip()) != (user_mark, user_name.strip())
        others = {*markers.inside(self.opening.user), *self.known, *markers.inside(" ".join(self.opening.closings))}
        return bool(mark) and mark not in others


def look_at(template: ChatTemplate) -> TemplateStyle:
    """Probes a template; raises TemplateFault if a plain answer cannot be located or has no end."""
    lost = False
    for form in template.forms():
        template.form = form
        for tools in ((), (TOOL,)):
            for lead in ([], [SYSTEM]):
                try:
                    style = _look(template, lead, tools)
                except RowFault:
                    continue
                if style is not None:
                    return style
                lost = True
    template.form = template.forms()[0]
    if lost:
        raise changes_text()
    return TemplateStyle()  # a template with wishes of its own; each row is searched without this knowledge


def _look(template: ChatTemplate, lead: list[Message], tools: Sequence[Any]) -> TemplateStyle | None:
    """The style seen after these messages; None if the answer is not rendered verbatim."""
    look = _Look(template, lead, tools)
    text = look.render(look.turns)
    if text.count(look.answer) != 1:
        return None
    unprompted, prompted = look.render([*lead, look.asks]), look.render([*lead, look.asks], True)
    if not text.count(look.question) == prompted.count(look.question) == 1:
        unprompted = prompted = ""  # questions are rewritten once they are answered: nothing is known of prompts
    prompt = prompted.partition(look.question)[2]
    markers = template.markers
    around = TurnSuffixes(text.partition(look.answer)[2], look.gaps())
    before = look.openings(text)
    gap = around.gaps.get("user", "")
    asks = unprompted != prompted or look.asks_for(prompt, find_opening(markers, before, gap, ()), around.last or "")
    # What stands behind a question ends it, unless it asks for an answer each time.
    closings = [unprompted.partition(look.question)[2]] if unprompted != prompted or not asks else []
    opening = find_opening(markers, before, gap, closings)
    end = find_end(markers, opening, around, None)
    if end is None:
        raise no_end()
    middle = find_end(markers, opening, around, "user") if "user" in around.gaps else None
    stops = markers.stops.union(markers.inside(end.text)[-1:])
    written = [w for t in (text, look.tried(look.longer)) if (w := _between(t, look.question, look.answer)) is not None]
    first = written[0] if written else ""  # nothing where the question is dropped once it is answered
    header = first.removeprefix(prompt) if not asks and first.startswith(prompt) else ""
    return TemplateStyle(
        header=header if header.strip() else "",
        added=prompted[len(unprompted) :] if prompted.startswith(unprompted) else "",
        forced=tuple(sorted({prompt[len(w) :] for w in written if prompt.startswith(w)} - {""})),
        opening=opening,
        end=end,
        stops=stops,
        known=stops.union(markers.inside(middle.text)[-1:] if middle else ()),
    )


class _Look:
    """Conversations of sentinels after some first messages."""

    def __init__(self, template: ChatTemplate, lead: list[Message], tools: Sequence[Any]) -> None:
        self.template = template
        self.lead = lead
        self.tools = tools
        self.question, self.answer, self.second, third = stamps("", 4)
        self.asks: Message = {"role": "user", "content": self.question}
        self.turns = [*lead, self.asks, {"role": "assistant", "content": self.answer}]
        self.longer = [*self.turns, self._again("user"), {"role": "assistant", "content": third}]

    def render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        return self.template.render(messages, self.tools, prompt)

    def tried(self, messages: Sequence[Message]) -> str:
        """The rendering; empty if the template rejects these messages."""
        try:
            return self.render(messages)
        except RowFault:
            return ""

    def gaps(self) -> dict[str, str]:
        """Text between an answer and the next message, by its role."""
        rendered = {role: self.tried([*self.turns, self._again(role)]) for role in ROLES}
        gaps = {role: _between(text, self.answer, self.second) for role, text in rendered.items()}
        return {role: gap for role, gap in gaps.items() if gap is not None}

    def openings(self, text: str) -> dict[str, str]:
        """Text before the first message, by its role."""
        before = {"user": text.partition(self.question)[0]}
        first = self.tried([self._again("system"), *self.turns[len(self.lead) :]])
        return before | ({"system": first.partition(self.second)[0]} if self.second in first else {})

    def asks_for(self, prompt: str, opening: Opening, last: str) -> bool:
        """Whether a template asks for an answer after a question even without a generation prompt."""
        gap = _between(self.tried([*self.lead, self.asks, self._again("user")]), self.question, self.second)
        if gap is not None:
            return not gap.startswith(prompt)
        markers = self.template.markers
        ends = takewhile(lambda mark: mark not in opening.markers, markers.inside(last))
        return TemplateStyle(opening=opening, known=frozenset(ends)).names_assistant(markers, prompt)

    def _again(self, role: str) -> Message:
        return {"role": role, "content": self.second}


def _between(text: str, before: str, after: str) -> str | None:
    _, has_before, rest = text.partition(before)
    gap, has_after, _ = rest.partition(after)
    return gap if has_before and has_after else None
