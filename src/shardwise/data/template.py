"""Where in a rendered conversation the answers lie, for any chat template.

[Note: assistant mask] Chat templates rarely mark what the assistant said, and some rewrite turns that lie further back
(they drop old thoughts). So each place is found in the rendering of the whole conversation:
  - The end of a message: the conversation is rendered again with a stamp, text that nobody writes, at the end of each
    content. If the second rendering without its stamps is the first, the stamps stood where the contents end.
  - The beginning of an answer: what the template writes after the message before it when asked for the generation
    prompt must stand there in the whole rendering too. What comes next is what the model has to write.
  - The end of turn: the first special token behind the answer, which is learned; a newline behind it is not.
Where one of these cannot be told, nothing is guessed: the row or the template is refused.

[Note: shapes] That takes some renderings per conversation. Conversations with the same roles mostly differ in their
contents alone, so the search is done once for each sequence of roles, on stamps, and gives the text between contents.
For each conversation this is put together with its contents; only if the result is its rendering, to the character,
are the places taken over. So the quick way is checked for every row and costs one rendering.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.data.examples import Message

Span = tuple[int, int]
SHAPES = 1024  # sequences of roles that are remembered
SAYING = ("tool_calls", "reasoning_content", "reasoning", "thinking")  # fields that say something, like the content
WATCHED = {*SAYING, "name"}  # ids only serve to match calls


# What a template raises that cannot do with a conversation, or that the sandbox stops.
REFUSALS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


class RowFault(Exception):
    """A conversation that cannot be learned from; `message` is the one to blame, counted from 0."""

    def __init__(self, problem: str, remedy: str, message: int | None = None) -> None:
        super().__init__(problem)
        self.problem, self.remedy, self.message = problem, remedy, message


class TemplateFault(Exception):
    """A template that leaves open what the assistant said."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


@dataclass(frozen=True)
class _Manner:
    """How a template treats a plain answer.

    header   what it writes before an answer although it has no generation prompt
    forced   the end of the generation prompt that finished answers lack (`<think>` of some reasoning models)
    closing  what ends a turn, up to and with its special token
    """

    header: str = ""
    forced: str = ""
    closing: str = ""


@dataclass(frozen=True)
class _Shape:
    """A rendering without its contents: the text around them, which content goes where, and the places to learn."""

    literals: tuple[str, ...]
    order: tuple[int, ...]
    trims: tuple[Callable[[str], str] | None, ...]
    places: tuple[tuple[int, int, int, int], ...]  # literal and offset in it, of the beginning and of the end

    def fit(self, text: str, messages: Sequence[Message]) -> list[Span] | None:
        """The spans, if these contents make exactly this text."""
        parts, starts, at = [self.literals[0]], [0], len(self.literals[0])
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
        return [(starts[a] + b, starts[c] + d) for a, b, c, d in self.places]


class ChatTemplate:
    """A tokenizer's template: renders conversations and finds what is to be learned in them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        special |= set(tokenizer.all_special_tokens)
        self._special = any_of(special)
        self._marks = any_of(special | set(tokenizer.get_added_vocab()))
        self._known: _Manner | None = None
        self._shapes: dict[tuple[tuple[str, ...], tuple[int, ...]], _Shape | None] = {}

    # --- rendering ---------------------------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = (), prompt: bool = False) -> str:
        """The conversation as text; `prompt` adds what asks for the next answer."""
        return str(self._apply(list(messages), tools, prompt))

    def render_many(self, conversations: Sequence[Sequence[Message]]) -> list[str | RowFault]:
        """Conversations without tools, in one call where none of them is refused."""
        try:
            return list(self._apply([list(c) for c in conversations], (), False)) if conversations else []
        except RowFault:
            return [self._one(c) for c in conversations]

    def _one(self, messages: Sequence[Message]) -> str | RowFault:
        try:
            return self.render(messages)
        except RowFault as fault:
            return fault

    def _apply(self, messages: list[Any], tools: Sequence[Any], prompt: bool) -> Any:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
            )
        except (*REFUSALS, TemplateError) as error:
            problem = f"the chat template refuses this conversation ({error})"
            raise RowFault(problem, "mend the roles and their order") from None

    def check_spelling(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> None:
        """[Note: markup in content] A message that spells a special token would be tokenised as that token.

        That would make turns that nobody took, or an answer that ends half-way. The tokenizer cannot be told which
        occurrence is text, so the row is refused.
        """
        for index, message in enumerate(messages):
            plain = len(message) == 2 and isinstance(message.get("content"), str)
            for text in (message["content"],) if plain else _strings(message):
                if found := self._special.search(text):
                    problem = f"the content spells {found[0]}, which the tokenizer reads as markup"
                    raise RowFault(problem, "write it differently (a space inside will do) or delete the row", index)
        for text in _strings(list(tools)):
            if found := self._special.search(text):
                problem = f"the tools spell {found[0]}, which the tokenizer reads as markup"
                raise RowFault(problem, "write it differently (a space inside will do) or delete the row")

    def unwritten(self, text: str, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[str]:
        """The fields that have no part in `text`, the conversation's rendering: without them it is the same."""
        names = dict.fromkeys(k for m in messages if len(m) > 2 for k in m if k in WATCHED and m[k])
        found = ["tools"] if tools and self._one(messages) == text else []
        for name in names:
            bare = [{key: value for key, value in m.items() if key != name} for m in messages]
            try:
                found += [name] if self.render(bare, tools) == text else []
            except RowFault:
                continue  # the template asks for it
        return found

    # --- finding -----------------------------------------------------------------------------------------------------

    def spans(
        self, text: str, messages: Sequence[Message], wanted: tuple[int, ...], tools: Sequence[Any] = ()
    ) -> list[Span]:
        """Where in `text`, their rendering, the wanted messages and their ends of turn lie."""
        if not tools and all(isinstance(m.get("content"), str) and not m.get("tool_calls") for m in messages):
            key = tuple([m["role"] for m in messages]), wanted
            if key not in self._shapes:
                if len(self._shapes) >= SHAPES:
                    self._shapes.clear()
                self._shapes[key] = self._shape(*key)
            shape = self._shapes[key]
            if shape is not None and (found := shape.fit(text, messages)) is not None:
                return found
        return self.search(text, messages, wanted, tools)

    def check(self) -> None:
        """Raises TemplateFault where a plain answer could not be told apart or would not end."""
        self._manner()

    def search(
        self, text: str, messages: Sequence[Message], wanted: tuple[int, ...], tools: Sequence[Any] = ()
    ) -> list[Span]:
        """What `spans` gives, by [Note: assistant mask] alone."""
        return _Search(self, text, list(messages), list(tools)).spans(wanted)

    def end_of_turn(self, closing: str, calls: bool = False) -> int | None:
        """Where, in what follows an answer, its end of turn ends.

        After words it comes next, or blanks first. After tool calls (and in templates that write something more) it is
        the token that ends plain answers, or the tokenizer's eos; else, after calls, any special token.
        """
        blank = len(closing) - len(closing.lstrip())
        if not calls and (mark := self._marks.match(closing, blank)):
            return mark.end()
        known = self._marks.findall(self._known.closing)[-1:] if self._known else []
        ends = [closing.find(e) + len(e) for e in [*known, self.tokenizer.eos_token] if e and e in closing]
        if ends:
            return min(ends)
        if calls and (mark := self._special.search(closing)):
            return mark.end()
        return None

    def _manner(self) -> _Manner:
        if self._known is None:
            self._known = self._learn_manner()
        return self._known

    def _learn_manner(self) -> _Manner:
        """Looks at one question and one answer that cannot be mistaken for anything else."""
        question, answer = stamps("", 2)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for lead in ([], [{"role": "system", "content": "Be kind."}]):
            try:
                text = self.render([*lead, *turns])
                asked, ready = self.render([*lead, turns[0]]), self.render([*lead, turns[0]], prompt=True)
                break
            except RowFault:
                continue
        else:
            return _Manner()  # a template with wishes of its own; each row is searched without this knowledge
        if text.count(answer) != 1:
            raise changes_text()
        closing = text.partition(answer)[2]
        end = self.end_of_turn(closing)
        if end is None:
            raise no_end()
        closing = closing[:end].lstrip()
        if text.count(question) != 1 or ready.count(question) != 1:
            return _Manner(closing=closing)
        gap = text.partition(question)[2].partition(answer)[0]
        prompt = ready.partition(question)[2]
        if gap.startswith(prompt):
            header = gap[len(prompt) :]
            return _Manner(header=header if header.strip() and asked == ready else "", closing=closing)
        return _Manner(forced=prompt[len(gap) :] if prompt.startswith(gap) else "", closing=closing)

    def _shape(self, roles: tuple[str, ...], wanted: tuple[int, ...]) -> _Shape | None:
        marks = stamps("", len(roles))
        messages: list[Message] = [{"role": r, "content": m} for r, m in zip(roles, marks, strict=True)]
        pads = [m | {"content": f"\n {m['content']} \n"} for m in messages]
        try:
            text, padded = self.render(messages), self.render(pads)
            found = self.search(text, messages, wanted)
        except (RowFault, TemplateFault):
            return None  # each row will meet the same fault, and can be named
        if any(text.count(m) != 1 or padded.count(m) != 1 for m in marks):
            return None
        order = sorted(range(len(roles)), key=lambda i: text.index(marks[i]))
        literals, starts, at = [], [0], 0
        for index in order:
            place = text.index(marks[index])
            literals.append(text[at:place])
            at = place + len(marks[index])
            starts.append(at)
        literals.append(text[at:])

        def locate(position: int) -> tuple[int, int]:
            index = max(n for n, start in enumerate(starts) if start <= position)
            return index, position - starts[index]

        places = tuple((*locate(a), *locate(b)) for a, b in found)
        if any(b > len(literals[a]) or d > len(literals[c]) for a, b, c, d in places):
            return None
        return _Shape(tuple(literals), tuple(order), tuple(_trim(padded, marks[i]) for i in order), places)


class _Search:
    """The places of one conversation."""

    def __init__(self, template: ChatTemplate, text: str, messages: list[Message], tools: list[Any]) -> None:
        self.template, self.text, self.messages, self.tools = template, text, messages, tools
        self.stamps = stamps(text, len(messages))
        self.ends: dict[int, int] = {}  # message → where its content ends
        self.inside: dict[int, bool] = {}  # whether its stamp stood before the blanks at its end, or behind them

    def spans(self, wanted: tuple[int, ...]) -> list[Span]:
        self._find_ends(wanted)
        return [self._answer(i) if self.messages[i]["role"] == "assistant" else self._other(i) for i in wanted]

    def _answer(self, index: int) -> Span:
        manner, message = self.template._manner(), self.messages[index]
        begin = self._begin(index, manner)
        if message.get("tool_calls"):
            if _said(message) and index not in self.ends:
                problem = "the chat template leaves out the content of a message with tool calls"
                raise RowFault(problem, "put it in a message of its own, or use another template", index)
            return begin, self._end_of_calls(index)
        if index not in self.ends:
            raise self._lost(index)
        place = self.ends[index]
        if not _same_words(self.text[begin:place], message["content"]):
            raise _other_words(index)
        return begin, self._end(index, place, manner)

    def _other(self, index: int) -> Span:
        """A message that is not the assistant's: its content, and the end of turn if it is that of answers."""
        if index not in self.ends:
            raise self._lost(index)
        place, words = self.ends[index], _said(self.messages[index])
        if not self.text[:place].rstrip().endswith(words):
            raise _other_words(index)
        begin = len(self.text[:place].rstrip()) - len(words)
        closing = self.template._manner().closing
        blank = len(self.text) - len(self.text[place:].lstrip())
        return begin, blank + len(closing) if closing and self.text.startswith(closing, blank) else place

    # --- ends of contents --------------------------------------------------------------------------------------------

    def _find_ends(self, wanted: tuple[int, ...]) -> None:
        # A stamp in an empty content may change what the template does: only where it is needed.
        everyone = {i for i, m in enumerate(self.messages) if _said(m) or (i in wanted and not m.get("tool_calls"))}
        needed = {i for i in wanted if not self.messages[i].get("tool_calls")}
        for inside in (True, False):
            if needed <= (found := self._stamped(everyone, inside)).keys():
                self._note(found, inside)
                return
        for index in needed:  # together they change the rendering; each alone may not
            self._find_end(index)

    def _find_end(self, index: int) -> int | None:
        """Where the content of one message ends, found with a stamp in it alone if it is not known yet."""
        for inside in (True, False):
            if index not in self.ends:
                self._note(self._stamped({index}, inside), inside)
        return self.ends.get(index)

    def _note(self, found: dict[int, int], inside: bool) -> None:
        self.ends |= found
        self.inside |= dict.fromkeys(found, inside)

    def _stamped(self, which: Iterable[int], inside: bool) -> dict[int, int]:
        """Where the contents of these messages end; nothing if the stamps change more than they add."""
        try:
            marked = self._render(self._stamp(self.messages, which, inside))
        except RowFault:
            return {}
        places = sorted((marked.find(self.stamps[i]), i) for i in which if self.stamps[i] in marked)
        found, bare, at = {}, [], 0
        for place, index in places:
            bare.append(marked[at:place])
            found[index] = sum(map(len, bare))
            at = place + len(self.stamps[index])
        return found if "".join([*bare, marked[at:]]) == self.text else {}

    def _stamp(self, messages: list[Message], which: Iterable[int], inside: bool) -> list[Message]:
        stamped = list(messages)
        for index in which:
            content = str(messages[index].get("content") or "")
            end = len(content.rstrip()) if inside else len(content)
            stamped[index] = messages[index] | {"content": content[:end] + self.stamps[index] + content[end:]}
        return stamped

    def _lost(self, index: int) -> Exception:
        """Why an answer's end is not there: words are cut or changed, or only so once more turns follow."""
        cut = self.messages[: index + 1]
        alone = _Search(self.template, self._render(cut), cut, self.tools)
        if index < len(self.messages) - 1 and alone._find_end(index) is not None:
            return rewrites_turns()
        return _other_words(index)

    # --- beginning and end of a turn ---------------------------------------------------------------------------------

    def _begin(self, index: int, manner: _Manner) -> int:
        if index == 0:
            remedy = 'begin with a user or system message, or give this one "weight": 0, so that it is not learned'
            raise RowFault("the conversation begins with the assistant", remedy)
        limit = self.ends.get(index, len(self.text))
        for place, prompt in self._prompts(index, manner):
            for forced in ("", manner.forced):
                end = place + len(prompt) - len(forced)
                if end <= limit and prompt.endswith(forced) and self.text[place:end] == prompt[: end - place]:
                    return end
        raise rewrites_turns()

    def _prompts(self, index: int, manner: _Manner) -> Iterator[tuple[int, str]]:
        """What asks for an answer, and where it stands: all of it, or as earlier turns may be rewritten, its end."""
        yield 0, self._render(self.messages[:index], prompt=True) + manner.header
        for near in range(index - 1, max(index - 3, -1), -1):
            if (place := self._find_end(near)) is not None:
                stamped = self._stamp(self.messages[:index], {near}, self.inside[near])
                prompt = self._render(stamped, prompt=True).partition(self.stamps[near])[2] + manner.header
                if prompt:
                    yield place, prompt

    def _end(self, index: int, place: int, manner: _Manner) -> int:
        rest = self.text[place:]
        blank = len(rest) - len(rest.lstrip())
        if manner.closing and rest.startswith(manner.closing, blank):
            return place + blank + len(manner.closing)
        # An end that the template keeps for this place. What it writes after the last message of all is an end for
        # sure; between turns the next one's beginning must not be taken for it.
        last = rest
        if index < len(self.messages) - 1:
            cut = self.messages[: index + 1]
            last = self._render(self._stamp(cut, {index}, self.inside[index])).partition(self.stamps[index])[2]
        end = self.template.end_of_turn(last)
        if end is None:
            raise no_end()
        if rest.startswith(last[:end]):
            return place + end
        end = self.template.end_of_turn(rest)
        if end is None:
            raise no_end()
        return place + end

    def _end_of_calls(self, index: int) -> int:
        """Behind the last word that changes when the calls do, the end of turn is the first that the template has."""
        call, name = stamps(self.text, 2)
        changed = list(self.messages)
        calls = [_renamed(c, f"{name}{n}.", call) for n, c in enumerate(self.messages[index]["tool_calls"])]
        changed[index] = self.messages[index] | {"tool_calls": calls}
        other = self._render(changed)
        if not all(f"{name}{n}." in other for n in range(len(calls))):
            problem = "the chat template does not write the assistant's tool calls"
            raise RowFault(problem, "use a template that knows tools, or leave such rows out", index)
        rest = self.text[len(self.text) - _common_end(self.text, other) :]
        last = rest
        if index < len(self.messages) - 1:
            cut = self._render(self.messages[: index + 1])
            last = cut[len(cut) - _common_end(cut, self._render(changed[: index + 1])) :]
        end = self.template.end_of_turn(last, calls=True)
        if end is None:
            raise no_end()
        if not rest.startswith(last[:end]):
            raise rewrites_turns()
        return len(self.text) - len(rest) + end

    def _render(self, messages: list[Message], prompt: bool = False) -> str:
        return self.template.render(messages, self.tools, prompt)


def rewrites_turns() -> TemplateFault:
    """Earlier turns look otherwise once more of them follow."""
    problem = "the chat template rewrites earlier turns, so what the assistant said cannot be told apart"
    return TemplateFault(problem, "use data.loss_on: all, or one assistant message per row")


def changes_text() -> TemplateFault:
    """The answer is not what the row has."""
    problem = "the chat template changes the assistant's text, so it cannot be found in the rendering"
    return TemplateFault(problem, "use data.loss_on: all, or another template")


def no_end() -> TemplateFault:
    """Nothing would teach the model to stop."""
    problem = "the chat template ends the assistant's turn with no special token, so it would never learn to stop"
    return TemplateFault(problem, "use a tokenizer whose template ends turns with its eos token")


def any_of(words: set[str]) -> re.Pattern[str]:
    """Matches any of the words, the longest where several begin at the same place; nothing if there are none."""
    solid = sorted((w for w in words if w.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, solid)) or "(?!)")


def stamps(text: str, count: int) -> list[str]:
    """Words that the text does not have, with both cases of letters so that a change of case shows."""
    free = [c for c in map(chr, range(0xE000, 0xE000 + 6400)) if c not in text][:2]
    first, last = free if len(free) == 2 else ("\U000f0000", "\U000f0001")
    return [f"{first}qXa{n}Xq{last}" for n in range(count)]


def _said(message: Message) -> str:
    content = message.get("content")
    return content.strip() if isinstance(content, str) else ""


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


def _same_words(turn: str, content: str) -> bool:
    """A template may trim blanks and drop thoughts, which end with a tag; anything else changes the answer."""
    got, said = "".join(turn.split()), "".join(content.split())
    return got.endswith(said) or (said.endswith(got) and said[: len(said) - len(got)].endswith((">", "]")))


def _other_words(index: int) -> RowFault:
    problem = "the chat template changes the text of this message, so it cannot be found in the rendering"
    return RowFault(problem, "write it otherwise, use data.loss_on: all, or another template", index)


def _renamed(call: Any, name: str, stamp: str) -> Any:
    """A tool call with another name and other arguments; its id stays, of which some templates ask a length."""
    if not isinstance(call, dict):
        return call
    inner = call["function"] if isinstance(call.get("function"), dict) else call
    other = inner | {"name": f"{inner.get('name', '')}{name}"}
    if "arguments" in inner:
        other["arguments"] = _changed(inner["arguments"], stamp)
    return call | {"function": other} if inner is not call else other


def _changed(value: Any, stamp: str) -> Any:
    if isinstance(value, dict):
        return {key: _changed(item, stamp) for key, item in value.items()} or {stamp: stamp}
    if isinstance(value, list):
        return [_changed(item, stamp) for item in value] or [stamp]
    return f"{value}{stamp}" if isinstance(value, str) else stamp


def _common_end(one: str, other: str) -> int:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _trim(padded: str, mark: str) -> Callable[[str], str] | None:
    """What the template does to blanks around a content, seen on one that had some."""
    at = padded.index(mark)
    left, right = padded[max(at - 2, 0) : at] != "\n ", padded[at + len(mark) :][:2] != " \n"
    if left and right:
        return str.strip
    return str.lstrip if left else str.rstrip if right else None
