"""Locates the assistant's answers in a rendered conversation, for any chat template.

[Note: assistant mask] Chat templates rarely mark what the assistant said, and some rewrite earlier turns (they drop old
thoughts). So each position is constructed from what the template writes, and verified in the rendering of the full
conversation (turns.py):
  - The end of a message: the conversation is rendered again with a stamp, text that nobody writes, at the end of each
    content. If the second rendering without its stamps equals the first, the stamps stood where the contents end.
  - The beginning of an answer: what the template writes after the message before it when asked for the generation
    prompt must also be in the full rendering. What comes next is what the model has to write.
  - The end of turn: what the template writes behind the answer whatever follows it; see [Note: end of turn] in
    turn_ends.py.
Where one of these cannot be decided, nothing is guessed: the row or the template is rejected. `{% generation %}` tags
are compared with the result; see [Note: tags] in generation_tags.py.

[Note: shapes] That takes several renderings per conversation. Conversations with the same roles mostly differ in their
contents alone, so the search is done once for each sequence of roles, on stamps, and gives the text between contents.
For each conversation this is combined with its contents; only if the result equals its rendering, to the character,
are the spans reused. So the fast path is checked for every row and costs one rendering.

[Note: forms] Templates differ in what they take for a message: tool arguments as an object or as JSON, no content as ""
or as None, content as text or as parts. The first form is used in which the template writes what it was given.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.data.examples import Message
from shardwise.data.generation_tags import Tags, held_against
from shardwise.data.row_warnings import END_ONCE
from shardwise.data.template_probe import TOOL, TemplateStyle, look_at
from shardwise.data.turn_ends import End, Markers, TurnSuffixes, any_of
from shardwise.data.turns import THOUGHTS, Mask, RowFault, Span, TemplateFault, Turns, stamps

__all__ = ["SAYING", "ChatTemplate", "Mask", "RowFault", "Span", "TemplateFault"]
SHAPES = 1024  # sequences of roles that are remembered
SAYING = ("tool_calls", *THOUGHTS)  # fields that say something, like the content
WATCHED = {*SAYING, "name"}  # ids only serve to match calls


# What a template raises that cannot do with a conversation, or that the sandbox stops.
REFUSALS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class MessageForm:
    """How messages are passed to the template; see [Note: forms]."""

    parts: bool = False
    json: bool = False
    empty: str | None = ""

    def __call__(self, message: Message) -> Message:
        """Converts a message to this form."""
        if calls := message.get("tool_calls"):
            message = message | {"tool_calls": [self._call(c) for c in calls]} if self.json else message
            if not message.get("content"):
                return message | {"content": self.empty}
        if self.parts:
            message = message | {"content": [{"type": "text", "text": message["content"]}]}
        return message

    @staticmethod
    def _call(call: Any) -> Any:
        inner = call.get("function") if isinstance(call, dict) else None
        if not isinstance(inner, dict) or isinstance(inner.get("arguments"), str):
            return call
        text = json.dumps(inner.get("arguments", {}), ensure_ascii=False)
        return call | {"function": inner | {"arguments": text}}


PLAIN = MessageForm()
CALLS = [PLAIN, MessageForm(empty=None), MessageForm(json=True), MessageForm(json=True, empty=None)]


@dataclass(frozen=True)
class _Shape:
    """A rendering without its contents: the text between them, their order, and the spans to train on."""

    literals: tuple[str, ...]
    order: tuple[int, ...]
    trims: tuple[Callable[[str], str] | None, ...]
    places: tuple[tuple[int, int, int, int], ...]  # literal and offset in it, of the beginning and of the end
    added: str  # behind the rendering
    notes: tuple[str, ...]

    def fit(self, text: str, messages: Sequence[Message]) -> Mask | None:
        """The mask, if these contents reproduce exactly this text; None otherwise."""
        parts = [self.literals[0]]
        starts = [0]
        at = len(self.literals[0])
        for index, trim, literal in zip(self.order, self.trims, self.literals[1:], strict=True):
            content = messages[index]["content"]
            if trim is not None:
                content = trim(content)
            at += len(content)
            starts.append(at)
            at += len(literal)
            parts += (content, literal)
        if at != len(text) or "".join(parts) != text:
            return None
        spans = [(starts[a] + b, starts[c] + d) for a, b, c, d in self.places]
        return Mask(text + self.added, spans, self.notes)


class _KnownEnds:
    """Cache of ends of turn, by the text between the answer and the next content."""

    def __init__(self) -> None:
        self._found: dict[tuple[str | None, bool], dict[str, End]] = {}

    def quick(self, rest: str, follows: str | None, calls: bool) -> End | None:
        """The cached end, if the following text is identical to one seen before."""
        known = self._found.get((follows, calls), {})
        if follows is None:
            return known.get(rest)
        return max(((gap, end) for gap, end in known.items() if rest.startswith(gap)), default=("", None))[1]

    def note(self, end: End, around: TurnSuffixes, follows: str | None, calls: bool) -> None:
        """Adds an end to the cache."""
        tail = (around.last if follows is None else around.gaps[follows]) or ""
        if end.text and (tail.strip() or follows is None):
            known = self._found.setdefault((follows, calls), {})
            if len(known) < SHAPES:
                known[tail.lstrip()] = end


class ChatTemplate:
    """A tokenizer's chat template: renders conversations and finds the spans to train on.

    `stops`: the tokens at which the model's generation config ends an answer.
    """

    def __init__(self, tokenizer: Any, stops: Iterable[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.markers = Markers(tokenizer, stops)
        self.ends = _KnownEnds()
        self.tags = Tags(tokenizer)
        self.form, self._looked = PLAIN, False
        self._calls_form: MessageForm | None = None
        self._known: TemplateStyle | None = None
        self._spelled: re.Pattern[str] | None = None
        self._shapes: dict[tuple[tuple[str, ...], tuple[int, ...]], _Shape | None] = {}

    def forms(self) -> tuple[MessageForm, ...]:
        """The message forms to try; see [Note: forms]."""
        return PLAIN, MessageForm(parts=True)

    # --- rendering ---------------------------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        prompt: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation; `prompt` adds the generation prompt, `options` are further template variables."""
        return str(self._apply([messages], tools, prompt, options or {})[0])

    def render_many(self, conversations: Sequence[Sequence[Message]]) -> list[str | RowFault]:
        """Renders conversations without tools, in one call unless the template rejects one of them."""
        try:
            return list(self._apply(conversations, (), False, {})) if conversations else []
        except RowFault:
            return [self._one(c) for c in conversations]

    def _one(self, messages: Sequence[Message]) -> str | RowFault:
        try:
            return self.render(messages)
        except RowFault as fault:
            return fault

    def _apply(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Any], prompt: bool, options: Mapping[str, Any]
    ) -> list[Any]:
        from jinja2 import TemplateError

        formed = [self._formed(messages) for messages in conversations]
        try:
            rendered: list[Any] = self.tokenizer.apply_chat_template(
                formed, tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt, **options
            )
        except (*REFUSALS, TemplateError) as error:
            problem = f"the chat template refuses this conversation ({error})"
            raise RowFault(problem, "correct the roles and their order") from None
        return rendered

    def _formed(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the form that this template takes."""
        if not self._looked:
            self._looked = True
            with contextlib.suppress(TemplateFault):  # of no matter where everything is trained on
                self.manner()  # which finds the form of contents
        form = self.form
        if form is PLAIN and max(map(len, messages), default=0) > 2 and any("tool_calls" in m for m in messages):
            form = self._form_of_calls()
        return list(messages) if form is PLAIN else [form(m) for m in messages]

    def _form_of_calls(self) -> MessageForm:
        if self._calls_form is None:
            self._calls_form = next((form for form in CALLS if self._takes(form)), PLAIN)
        return self._calls_form

    def _takes(self, form: MessageForm) -> bool:
        """Whether a tool call in this form is rendered as one turn and as JSON."""
        (key,) = stamps("", 1)
        call: dict[str, Any] = {
            "id": "call00001",
            "type": "function",
            "function": {"name": "find", "arguments": {key: key}},
        }
        asks: Message = {"role": "user", "content": "Why?"}
        messages = [asks, {"role": "assistant", "content": "", "tool_calls": [call]}]
        before = self._calls_form
        self._calls_form = form
        try:
            text = self.render(messages, [TOOL])
            begin, end = self.search(text, messages, (1,), [TOOL]).spans[0]
        except (RowFault, TemplateFault):
            return False
        finally:
            self._calls_form = before
        return f"{{'{key}" not in text and "None" not in text[begin:end]

    def check_spelling(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> None:
        """Raises RowFault if a message spells a special token.

        [Note: markup in content] A message that spells a special token would be tokenised as that token. That would
        create turns that nobody took, or an answer that ends half-way. The tokenizer cannot be told which occurrence is
        text, so the row is rejected. Other added tokens count where the template separates turns with them.
        """
        if self._spelled is None:
            self._spelled = self._markup()
        for index, message in enumerate(messages):
            plain = len(message) == 2 and isinstance(message.get("content"), str)
            for text in (message["content"],) if plain else _strings(message):
                if match := self._spelled.search(text):
                    problem = f"the content spells {match[0]}, which the tokenizer reads as markup"
                    raise RowFault(problem, "write it differently (a space inside will do) or delete the row", index)
        for text in _strings(list(tools)):
            if match := self._spelled.search(text):
                problem = f"the tools spell {match[0]}, which the tokenizer reads as markup"
                raise RowFault(problem, "write it differently (a space inside will do) or delete the row")

    def _markup(self) -> re.Pattern[str]:
        try:
            manner = self.manner()
        except TemplateFault:  # of no matter where everything is trained on
            return self.markers.special
        return any_of({*self.markers.words, *manner.opening.seen, *manner.stops, *manner.known})

    def unwritten(self, text: str, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[str]:
        """Fields that do not affect `text`, the conversation's rendering."""
        names = dict.fromkeys(k for m in messages if len(m) > 2 for k in m if k in WATCHED and m[k])
        fields = ["tools"] if tools and self._one(messages) == text else []
        for name in names:
            bare = [{key: value for key, value in m.items() if key != name} for m in messages]
            try:
                fields += [name] if self.render(bare, tools) == text else []
            except RowFault:
                continue  # the template asks for it
        return fields

    # --- finding -----------------------------------------------------------------------------------------------------

    def mask(self, text: str, messages: Sequence[Message], trained: tuple[int, ...], tools: Sequence[Any] = ()) -> Mask:
        """Spans of the `trained` messages and their ends of turn in `text`, the rendering of `messages`."""
        if not tools and all(isinstance(m.get("content"), str) and not m.get("tool_calls") for m in messages):
            key = tuple([m["role"] for m in messages]), trained
            if key not in self._shapes:
                if len(self._shapes) >= SHAPES:
                    self._shapes.clear()
                self._shapes[key] = self._shape(*key)
            shape = self._shapes[key]
            if shape is not None and not self._edges(shape, messages, trained):
                fitted = shape.fit(text, messages)
                if fitted is not None:
                    return fitted
        return self.search(text, messages, trained, tools)

    def _edges(self, shape: _Shape, messages: Sequence[Message], trained: tuple[int, ...]) -> bool:
        """Whether blanks at the edges of contents affect where an answer begins or ends."""
        forced = self.manner().forced  # what the prompt ends with, and an answer may begin with by itself
        if not forced and END_ONCE not in shape.notes:
            return False
        contents = [messages[i]["content"] for i in trained]
        if forced and any(content.lstrip().startswith(forced) for content in contents):
            return True
        return END_ONCE in shape.notes and any(content != content.rstrip() or not content for content in contents)

    def check(self) -> None:
        """Raises TemplateFault if a plain answer cannot be located or has no end."""
        self.manner()

    def search(
        self, text: str, messages: Sequence[Message], trained: tuple[int, ...], tools: Sequence[Any] = ()
    ) -> Mask:
        """`mask` without the fast path, by [Note: assistant mask] alone."""
        turns = Turns(self, text, list(messages), list(tools))
        mask = turns.mask(trained)
        tagged = self.tags.spans(text, self._formed(messages), tools)
        if tagged is None:
            return mask
        others = [place for i, place in turns.ends.items() if messages[i]["role"] != "assistant"]
        return held_against(mask, [turns.words[i] for i in trained], tagged, others)

    def manner(self) -> TemplateStyle:
        """How this template renders a plain answer, probed once."""
        if self._known is None:
            self._known = look_at(self)
        return self._known

    def _shape(self, roles: tuple[str, ...], trained: tuple[int, ...]) -> _Shape | None:
        marks = stamps("", len(roles))
        messages: list[Message] = [{"role": r, "content": m} for r, m in zip(roles, marks, strict=True)]
        pads = [m | {"content": f"\n {m['content']} \n"} for m in messages]
        try:
            text, padded = self.render(messages), self.render(pads)
            mask = self.search(text, messages, trained)
        except (RowFault, TemplateFault):
            return None  # each row will meet the same fault, and can be named
        if any(text.count(m) != 1 or padded.count(m) != 1 for m in marks):
            return None
        order = sorted(range(len(roles)), key=lambda i: text.index(marks[i]))
        literals = []
        starts = [0]
        at = 0
        for index in order:
            place = text.index(marks[index])
            literals.append(text[at:place])
            at = place + len(marks[index])
            starts.append(at)
        literals.append(text[at:])

        def locate(position: int) -> tuple[int, int]:
            index = max(n for n, start in enumerate(starts) if start <= position)
            return index, position - starts[index]

        places = tuple((*locate(a), *locate(b)) for a, b in mask.spans)
        added = mask.text[len(text) :]
        lengths = [*map(len, literals[:-1]), len(literals[-1] + added)]
        if any(b > lengths[a] or d > lengths[c] for a, b, c, d in places):
            return None
        trims = tuple(_trim(padded, marks[i]) for i in order)
        return _Shape(tuple(literals), tuple(order), trims, places, added, mask.notes)


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                yield key
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _trim(padded: str, mark: str) -> Callable[[str], str] | None:
    """How the template trims blanks around a content, seen on a padded one."""
    at = padded.index(mark)
    left, right = padded[max(at - 2, 0) : at] != "\n ", padded[at + len(mark) :][:2] != " \n"
    if left and right:
        return str.strip
    if left:
        return str.lstrip
    return str.rstrip if right else None
