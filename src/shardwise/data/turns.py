"""Locates the answers in one rendered conversation; see [Note: assistant mask] in template.py."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.data.examples import Message
from shardwise.data.row_warnings import END_ADDED, END_NEXT, END_ONCE, END_PLAIN
from shardwise.data.turn_ends import End, TurnSuffixes, alike, find_end

if TYPE_CHECKING:
    from shardwise.data.template import ChatTemplate
    from shardwise.data.template_probe import TemplateStyle

Span = tuple[int, int]
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields
LEADING_TAGS = re.compile(r"\A(<[^<>]{1,40}>)+")
ROLES = ("user", "assistant", "tool", "system")  # of a message that may follow an answer
# Settings with which templates ask for an answer in another way: finished answers may stand behind either.
TEMPLATE_OPTIONS: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False}, {"thinking": False})


class RowFault(Exception):
    """A conversation that cannot be trained on; `message` is the index of the message at fault."""

    def __init__(self, problem: str, remedy: str, message: int | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy
        self.message = message


class TemplateFault(Exception):
    """A template that does not show what the assistant said."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


@dataclass(frozen=True)
class Mask:
    """The text to tokenise, the spans to train on, and notes about them."""

    text: str
    spans: list[Span]
    notes: tuple[str, ...] = ()


class Turns:
    """Locates the spans of one conversation."""

    def __init__(self, template: ChatTemplate, text: str, messages: list[Message], tools: list[Any]) -> None:
        self.template = template
        self.text = text
        self.messages = messages
        self.tools = tools
        *self.stamps, self.next = stamps(text, len(messages) + 1)
        self.ends: dict[int, int] = {}  # message → where its content ends
        self.inside: dict[int, bool] = {}  # whether its stamp stood before the blanks at its end, or behind them
        self.words: dict[int, Span] = {}  # where what a message says itself stands
        self.added = ""
        self.notes: dict[str, None] = {}

    def mask(self, trained: tuple[int, ...]) -> Mask:
        """Returns the spans of the `trained` messages."""
        self.template.manner()  # a fault of the template goes before one of the row
        try:
            return self._mask(trained)
        except TemplateFault as fault:
            if self.tools or any(m.get("tool_calls") or m["role"] == "tool" for m in self.messages):
                raise RowFault(fault.problem, fault.remedy) from None  # other rows may have none
            raise

    def _mask(self, trained: tuple[int, ...]) -> Mask:
        self._find_ends(trained)
        spans = [self._answer(i) if self.messages[i]["role"] == "assistant" else self._other(i) for i in trained]
        for index, span in zip(trained, spans, strict=True):
            self._check_others(index, span)
        return Mask(self.text + self.added, spans, tuple(self.notes))

    def _check_others(self, index: int, span: Span) -> None:
        """Raises if another role's content lies within an answer."""
        if any(span[0] < place <= span[1] for i, place in self.ends.items() if i != index):
            raise rewrites_turns()

    def _answer(self, index: int) -> Span:
        message = self.messages[index]
        if message.get("tool_calls"):
            return self._calls(index)
        if index not in self.ends:
            raise self._missing_end_fault(index)
        place = self.ends[index]
        begin = self._begin(index, place - len(content_text(message)), place)
        if not _same_words(self.text[begin:place], message["content"]):
            raise _other_words(index)
        self._check_one_turn(index, begin, place)
        self.words[index] = max(begin, place - len(content_text(message))), place
        end = self._end(index, place)
        return (begin, end) if end > place or self.text[begin:end].strip() else (begin, begin)

    def _calls(self, index: int) -> Span:
        place = len(self.text) - len(self._text_behind_calls(self.messages, index, None))
        begin = self._begin(index, place, place)
        if content_text(self.messages[index]):
            if self._find_end(index) is None:
                problem = "the chat template leaves out the content of a message with tool calls"
                raise RowFault(problem, "put it in a message of its own, or use another template", index)
            if self.ends[index] > place:
                problem = "the chat template writes the content of a message with tool calls behind them, as a new turn"
                raise RowFault(problem, "put it in a message of its own, or use another template", index)
        self._check_one_turn(index, begin, place)
        self.words[index] = begin, place
        return begin, self._end(index, place, self.text[begin:place])

    def _other(self, index: int) -> Span:
        """Span of a message that is not the assistant's: its content, and the end of turn if answers have the same."""
        if index not in self.ends:
            raise self._missing_end_fault(index)
        place = self.ends[index]
        words = content_text(self.messages[index])
        if not self.text[:place].rstrip().endswith(words):
            raise _other_words(index)
        begin = len(self.text[:place].rstrip()) - len(words)
        self.words[index] = begin, place
        blank = len(self.text) - len(self.text[place:].lstrip())
        closing = self.template.manner().end.text
        return begin, blank + len(closing) if closing and self.text.startswith(closing, blank) else place

    # --- ends of contents --------------------------------------------------------------------------------------------

    def _find_ends(self, trained: tuple[int, ...]) -> None:
        # A stamp in an empty content may change what the template does: only where it is needed.
        spoken = {
            i for i, m in enumerate(self.messages) if content_text(m) or (i in trained and not m.get("tool_calls"))
        }
        needed = {i for i in trained if not self.messages[i].get("tool_calls")}
        for inside in (True, False):
            if (ends := self._stamped(spoken, inside)) and needed <= ends.keys():
                self._note_ends(ends, inside)
                return
        for index in spoken:  # together they change the rendering; each alone may not
            self._find_end(index)

    def _find_end(self, index: int) -> int | None:
        """End of one message's content, found with a stamp in it alone if not known yet."""
        for inside in (True, False):
            if index not in self.ends:
                self._note_ends(self._stamped({index}, inside), inside)
        return self.ends.get(index)

    def _note_ends(self, ends: dict[int, int], inside: bool) -> None:
        self.ends |= ends
        self.inside |= dict.fromkeys(ends, inside)

    def _stamped(self, which: Iterable[int], inside: bool) -> dict[int, int]:
        """Ends of these messages' contents; empty if the stamps change more than they add."""
        try:
            marked = self._render(self._stamp(self.messages, which, inside))
        except RowFault:
            return {}
        places = sorted((marked.find(self.stamps[i]), i) for i in which if self.stamps[i] in marked)
        ends = {}
        bare = []
        at = 0
        for place, index in places:
            bare.append(marked[at:place])
            ends[index] = sum(map(len, bare))
            at = place + len(self.stamps[index])
        return ends if "".join([*bare, marked[at:]]) == self.text else {}

    def _stamp(self, messages: list[Message], which: Iterable[int], inside: bool) -> list[Message]:
        stamped = list(messages)
        for index in which:
            content = str(messages[index].get("content") or "")
            end = len(content.rstrip()) if inside else len(content)
            stamped[index] = messages[index] | {"content": content[:end] + self.stamps[index] + content[end:]}
        return stamped

    def _missing_end_fault(self, index: int) -> Exception:
        """The error for an answer whose end is not found: text is cut or changed, possibly only in earlier turns."""
        if not content_text(self.messages[index]):
            problem = "the chat template writes an empty message otherwise than one with words"
            return RowFault(problem, "give it some words, or delete the row", index)
        cut = self.messages[: index + 1]
        alone = Turns(self.template, self._render(cut), cut, self.tools)
        if index < len(self.messages) - 1 and alone._find_end(index) is not None:
            return rewrites_turns()
        return _other_words(index)

    # --- beginning ---------------------------------------------------------------------------------------------------

    def _begin(self, index: int, words: int, limit: int) -> int:
        """Beginning of an answer, behind its generation prompt; `words` is where its content begins."""
        if index == 0:
            remedy = 'begin with a user or system message, or give this one "weight": 0, so that it is not trained on'
            raise RowFault("the conversation begins with the assistant", remedy)
        manner = self.template.manner()
        for options in TEMPLATE_OPTIONS:
            for place, prompt in self._prompts(index, manner, options):
                for forced in ("", *manner.forced):
                    end = place + len(prompt) - len(forced)
                    fits = prompt.endswith(forced) and self.text.startswith(prompt[: end - place], place)
                    if end <= limit and fits and not manner.opens(self.text[end:words]):
                        return end
        for place, prompt in self._prompts(index, manner, {}):
            for find in (self._tag_boundary, self._ignoring_blanks) if place else ():
                if (behind := find(index, place, prompt, words)) is not None:
                    return behind
        if self.messages[index - 1]["role"] == "assistant":
            problem = "nothing that the chat template writes asks for a second answer in a row"
            raise RowFault(problem, "join the two, or put a user message between them", index)
        raise rewrites_turns()

    def _tag_boundary(self, index: int, place: int, prompt: str, words: int) -> int | None:
        """Where a prompt and the text before an answer differ, if only in tags (`<think>`, `<|START_RESPONSE|>`)."""
        markers = self.template.markers
        manner = self.template.manner()
        written = self.text[place : max(place, words)]
        shared = markers.alike(prompt, written, markers.tags)
        lead = written[shared:]
        addressed = manner.names_assistant(markers, prompt[:shared])
        return place + shared if addressed and lead.strip() and self._is_tags(index, lead) else None

    def _ignoring_blanks(self, index: int, place: int, prompt: str, words: int) -> int | None:
        """End of a prompt that is rendered with different blanks."""
        pattern = r"\s*".join(map(re.escape, "".join(prompt.split())))
        match = re.compile(rf"\s*{pattern}").match(self.text, place, words)
        if match is None or self.template.manner().opens(self.text[match.end() : words]):
            return None
        blanks = prompt[len(prompt.rstrip()) :]
        return match.end() + (len(blanks) if self.text[match.end() : words].startswith(blanks) else 0)

    def _is_tags(self, index: int, lead: str) -> bool:
        """Whether the text before an answer is only tags and the answer's own reasoning."""
        for thought in (self.messages[index].get(field) for field in THOUGHTS):
            lead = lead.replace(thought.strip(), "") if isinstance(thought, str) else lead
        return not self.template.markers.tags.sub("", lead).strip() and not self.template.manner().opens(lead)

    def _prompts(self, index: int, manner: TemplateStyle, options: dict[str, Any]) -> Iterator[tuple[int, str]]:
        """Yields generation prompts and their positions: the full one, then its end (earlier turns may change)."""
        before = self.messages[:index]
        for prompted, header in ((True, manner.header), (False, manner.added)):
            if not prompted and (options or not header):
                continue  # some templates ask for no answer here, and write its header all the same
            yield 0, self._render(before, prompted, options) + header
            for near in range(index - 1, max(index - 3, -1), -1):
                if (place := self._find_end(near)) is not None:
                    stamped = self._stamp(before, {near}, self.inside[near])
                    prompt = self._render(stamped, prompted, options).partition(self.stamps[near])[2] + header
                    if prompt:
                        yield place, prompt

    def _check_one_turn(self, index: int, begin: int, place: int) -> None:
        """Raises if the template renders one message as several turns, whose headers would be trained on."""
        ends = self.template.manner().stops
        if any(mark in ends for mark in self.template.markers.inside(self.text[begin:place])):
            raise self._several_turns_fault(index)

    def _several_turns_fault(self, index: int) -> RowFault:
        problem = "the chat template writes this message as several turns"
        return RowFault(problem, "make a message of each of its parts, or use another template", index)

    # --- end ---------------------------------------------------------------------------------------------------------

    def _end(self, index: int, place: int, calls: str = "") -> int:
        """End of turn of the answer whose content ends at `place`."""
        rest = self.text[place:]
        blank = len(rest) - len(rest.lstrip())
        following = self._following(index, place)
        follows = None if following is None else str(following["role"])
        end = self.template.ends.quick(rest[blank:], follows, bool(calls))
        if end is None:
            around = self._around(index, place, following, bool(calls))
            manner = self.template.manner()
            end = find_end(self.template.markers, manner.opening, around, follows, calls, manner.known)
            if end is None or (calls and not end.text):
                raise no_end()
            if any(header.strip() in end.text for header in manner.headers()):
                raise self._several_turns_fault(index)
            written = end.text.removesuffix(end.added)
            if not rest.startswith(written, blank) or (end.added and rest[blank + len(written) :].strip()):
                raise rewrites_turns()
            self.template.ends.note(end, around, follows, bool(calls))
        self._note(end)
        if end.added:
            self.added = end.added
            return len(self.text) + len(end.added)
        return place + blank + len(end.text) if end.text else place

    def _following(self, index: int, place: int) -> Message | None:
        """The message rendered next; a template may move a system message to the front."""
        for number, message in enumerate(self.messages[index + 1 :], index + 1):
            end = self._find_end(number) if content_text(message) else None
            if end is None and self._is_dropped(number):
                continue
            if end is None or end > place:
                return message
        return None

    def _is_dropped(self, index: int) -> bool:
        """Whether the rendering is the same without a message."""
        if self.messages[index]["role"] != "system" or index == 0:
            return False
        try:
            return self._render([*self.messages[:index], *self.messages[index + 1 :]]) == self.text
        except RowFault:
            return False

    def _note(self, end: End) -> None:
        marks = self.template.markers.inside(end.text)
        if not end.text:
            self.notes[END_ONCE] = None
        elif not marks:
            self.notes[END_PLAIN + end.text.strip()] = None
        elif marks[-1] in self.template.manner().opening.seen:
            self.notes[END_NEXT + marks[-1]] = None
        elif end.added:
            self.notes[END_ADDED + end.text.strip()] = None

    def _around(self, index: int, place: int, following: Message | None, calls: bool) -> TurnSuffixes:
        context = self.messages[: index + 1]
        gaps = {}
        for role in ROLES:
            probe: Message = {"role": role, "content": self.next}
            if following is not None and role == following["role"]:
                probe = {k: v for k, v in following.items() if k != "tool_calls"} | probe
            elif role == "tool" and calls:
                probe |= {"tool_call_id": str(context[-1]["tool_calls"][0].get("id", "")), "name": "name"}
            if (gap := self._text_behind(context, index, probe, calls)) is not None:
                gaps[role] = gap
        if following is not None and following["role"] not in gaps:
            # The template refuses it as the last message: what stands before its words.
            at = self._find_end(self.messages.index(following))
            if at is None:
                raise rewrites_turns()
            gaps[str(following["role"])] = self.text[place : at - len(content_text(following))]
        return TurnSuffixes(self._text_behind(context, index, None, calls), gaps)

    def _text_behind(self, context: list[Message], index: int, following: Message | None, calls: bool) -> str | None:
        """Text behind an answer, up to the content of the following message."""
        messages = context if following is None else [*context, following]
        try:
            if calls:
                return self._text_behind_calls(messages, index, following)
            text = self._render(self._stamp(messages, {index}, self.inside[index]))
        except RowFault:
            return None
        _, complete, rest = text.partition(self.stamps[index])
        if following is not None:
            rest, reached, _ = rest.partition(self.next)
            complete = complete and reached
        return rest if complete else None

    def _text_behind_calls(self, messages: list[Message], index: int, following: Message | None) -> str:
        """Text behind the last character that changes with the arguments (results may repeat the name)."""
        *marks, _ = stamps(self.text, len(messages[index]["tool_calls"]) + 1)
        calls = [_changed_call(call, mark) for call, mark in zip(messages[index]["tool_calls"], marks, strict=True)]
        changed = [*messages[:index], messages[index] | {"tool_calls": calls}, *messages[index + 1 :]]
        original = self.text if messages is self.messages else self._render(messages)
        altered = self._render(changed)
        if following is not None:
            original, altered = (text.partition(self.next)[0] for text in (original, altered))
        if not all(mark in altered for mark in marks):
            problem = "the chat template does not write the assistant's tool calls"
            raise RowFault(problem, "use a template that knows tools, or leave such rows out", index)
        return original[len(original) - alike(original[::-1], altered[::-1]) :]

    def _render(self, messages: list[Message], prompt: bool = False, options: Mapping[str, Any] | None = None) -> str:
        return self.template.render(messages, self.tools, prompt, options)


def rewrites_turns() -> TemplateFault:
    """Fault of a template that renders earlier turns differently once more follow."""
    problem = "the chat template rewrites earlier turns, so what the assistant said cannot be told apart"
    return TemplateFault(problem, "use data.loss_on: all, or one assistant message per row")


def changes_text() -> TemplateFault:
    """Fault of a template that does not render the answer verbatim."""
    problem = "the chat template changes the assistant's text, so it cannot be found in the rendering"
    return TemplateFault(problem, "use data.loss_on: all, or another template")


def no_end() -> TemplateFault:
    """Fault of a template under which a model would not learn to stop."""
    problem = (
        "the chat template ends the assistant's turn with no special token, so the model would never learn to stop"
    )
    return TemplateFault(problem, "use a tokenizer whose template ends turns with its eos token")


def stamps(text: str, count: int) -> list[str]:
    """Strings that do not occur in the text, in mixed case so that a change of case shows."""
    free = [c for c in map(chr, range(0xE000, 0xE000 + 6400)) if c not in text][:2]
    first, last = free if len(free) == 2 else ("\U000f0000", "\U000f0001")
    return [f"{first}qXa{n}Xq{last}" for n in range(count)]


def content_text(message: Message) -> str:
    """Content of a message, stripped."""
    content = message.get("content")
    return content.strip() if isinstance(content, str) else ""


def _same_words(turn: str, content: str) -> bool:
    """Whether a rendered turn has the content's words; a template may only trim blanks and drop reasoning."""
    rendered, expected = "".join(turn.split()), "".join(content.split())
    if rendered.endswith(expected):
        return True
    trimmed = LEADING_TAGS.sub("", rendered)  # where thoughts stood, or nothing
    return expected.endswith(trimmed) and expected[: len(expected) - len(trimmed)].endswith((">", "]"))


def _other_words(index: int) -> RowFault:
    problem = "the chat template changes the text of this message, so it cannot be found in the rendering"
    return RowFault(problem, "write it otherwise, use data.loss_on: all, or another template", index)


def _changed_call(call: Any, stamp: str) -> Any:
    """A copy of a tool call with other arguments."""
    if not isinstance(call, dict):
        return call
    inner = call["function"] if isinstance(call.get("function"), dict) else call
    other = inner | {"arguments": _changed(inner.get("arguments", {}), stamp)}
    return call | {"function": other} if inner is not call else other


def _changed(value: Any, stamp: str) -> Any:
    if isinstance(value, dict):
        return {key: _changed(item, stamp) for key, item in value.items()} or {stamp: stamp}
    if isinstance(value, list):
        return [_changed(item, stamp) for item in value] or [stamp]
    return f"{value}{stamp}" if isinstance(value, str) else stamp
