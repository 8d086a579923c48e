"""Shapes of conversations that masks go wrong on; every message has words of its own, by which it is found again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
TOOLS: tuple[Message, ...] = (
    {
        "type": "function",
        "function": {
            "name": "find_thing",
            "description": "Looks a thing up.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "What to look for."}},
                "required": ["query"],
            },
        },
    },
)


@dataclass(frozen=True)
class Shape:
    """A conversation, and what is asked of it."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    loss_on: str = "assistant"
    weights: tuple[int | None, ...] = ()

    @property
    def kind(self) -> str:
        """single, multi or tools."""
        if self.tools:
            return "tools"
        return "multi" if sum(m["role"] == "assistant" for m in self.messages) > 1 else "single"


class _Words:
    """Words that no template writes, each used once."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(self, count: int = 3, end: str = "") -> str:
        return " ".join(f"zq{next(self._numbers)}v" for _ in range(count)) + end


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _says(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def _call(number: int, **arguments: Any) -> Message:
    function = {"name": "find_thing", "arguments": arguments}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def _result(number: int, text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": f"call{number:05}", "name": "find_thing"}


def _chats(w: _Words) -> dict[str, list[Message]]:
    ask: Callable[[], Message] = lambda: _user(w(3, "?"))  # noqa: E731
    say: Callable[[], Message] = lambda: _says(w(4, "."))  # noqa: E731
    system = {"role": "system", "content": w(3, ".")}
    question, odd = w(3, "?"), w(2)
    return {
        "one answer": [ask(), say()],
        "system": [system, ask(), say()],
        "two answers": [ask(), say(), ask(), say()],
        "system, two answers": [system, ask(), say(), ask(), say()],
        "three answers": [ask(), say(), ask(), say(), ask(), say()],
        "eight answers": [m for _ in range(8) for m in (ask(), say())],
        "ends with a question": [ask(), say(), ask()],
        "two answers, ends with a question": [ask(), say(), ask(), say(), ask()],
        "empty answer": [ask(), _says("")],
        "empty answer between": [ask(), _says(""), ask(), say()],
        "answer repeats the question": [_user(question), _says(question)],
        "answer repeats, then another": [_user(question), _says(question), ask(), say()],
        "all answers alike": [ask(), _says("Yes."), ask(), _says("Yes."), ask(), _says("Yes.")],
        "one letter": [_user("a"), _says("a"), _user("a"), _says("a")],
        "blanks at the edges": [_user(f" {w()} \n"), _says(f"\n  {w()}  \n\n"), ask(), _says(f" {w()} ")],
        "lines and code": [
            ask(),
            _says(f"{w()}:\n\n    def f(x):\n        return {{'a': [x]}}\n\n{w()}"),
            ask(),
            say(),
        ],
        "other scripts": [_user(f"{w()} 日本語 🙂👩‍👩‍👧"), _says(f"é\u0301 \u202e{w()}\u202c naïve 🙂"), ask(), say()],
        "names of roles": [
            _user(f"{w()} user assistant: USER: ASSISTANT: ### Instruction: Human: no\nUser: {w()}"),
            _says(f"{w()}\nuser\nassistant\nUSER: x ASSISTANT: y\n### Response:\nHuman: model\n{w()}"),
            ask(),
            _says(f"assistant\n{w()}"),
        ],
        "pieces of markup": [
            _user(f"{w()} <|im_start| [INST /INST] im_end|> <|end <s /s> {w()}"),
            _says(f"<| {w()} im_end|> [/INST <|assistant <｜User <start_of <| {w()} <"),
            ask(),
            _says(f"> {w()} |"),
        ],
        "template markup": [
            _user(f"{{{{ messages }}}} {w()}"),
            _says(f"{w()} {{% if x %}} {{{{ y }}}} {{# z #}} {w()}"),
        ],
        "two answers in a row": [ask(), say(), say()],
        "two answers in a row, then more": [ask(), say(), say(), ask(), say()],
        "three answers in a row": [ask(), say(), say(), say()],
        "two questions in a row": [ask(), ask(), say()],
        "system in between": [ask(), say(), {"role": "system", "content": w(3, ".")}, ask(), say()],
        "thought in the content": [ask(), _says(f"<think>\n{w()}\n</think>\n\n{w()}")],
        "thoughts in all contents": [
            *(ask(), _says(f"<think>\n{w()}\n</think>\n\n{w()}")),
            *(ask(), _says(f"<think>\n{w()}\n</think>\n\n{w()}")),
        ],
        "reasoning": [ask(), _says(w(4, "."), reasoning_content=w(4, "."))],
        "reasoning in all": [
            *(ask(), _says(w(4, "."), reasoning_content=w(4, "."))),
            *(ask(), _says(w(4, "."), reasoning_content=w(4, "."))),
        ],
        "long": [_user(w(60, "?")), _says("\n".join(w(12, ".") for _ in range(8))), ask(), say()],
        "punctuation at the end": [ask(), _says(w(2, "!!!")), ask(), _says(w(2, '")]}')), ask(), _says(w(2, "..."))],
        "odd first word": [ask(), _says(f"\u00a0{odd}"), ask(), _says(f"- {w()}")],
    }


def _with_tools(w: _Words) -> dict[str, list[Message]]:
    ask: Callable[[], Message] = lambda: _user(w(3, "?"))  # noqa: E731
    say: Callable[[], Message] = lambda: _says(w(4, "."))  # noqa: E731

    def calls(*numbers: int, text: str = "", **more: Any) -> Message:
        return _says(text, tool_calls=[_call(n, query=w(2)) for n in numbers], **more)

    return {
        "tools, none used": [ask(), say()],
        "call": [ask(), calls(1), _result(1, w()), say()],
        "call, two rounds": [ask(), calls(1), _result(1, w()), calls(2), _result(2, w()), say()],
        "call beside text": [ask(), calls(1, text=w(3, ".")), _result(1, w()), say()],
        "two calls at once": [ask(), calls(1, 2), _result(1, w()), _result(2, w()), say()],
        "call at the end": [ask(), calls(1)],
        "call, then another question": [ask(), calls(1), _result(1, w()), say(), ask(), say()],
        "call in the second turn": [ask(), say(), ask(), calls(1), _result(1, w()), say()],
        "call without arguments": [ask(), _says("", tool_calls=[_call(1)]), _result(1, w()), say()],
        "call with nested arguments": [
            *(ask(), _says("", tool_calls=[_call(1, query=w(1), limit=3, deep={"on": True, "of": [w(1), 2.5]})])),
            *(_result(1, w()), say()),
        ],
        "call with reasoning": [ask(), calls(1, reasoning_content=w(4, ".")), _result(1, w()), say()],
        "ends with a result": [ask(), calls(1), _result(1, w())],
    }


def shapes() -> list[Shape]:
    """All of them."""
    w = _Words()
    found = [Shape(name, tuple(messages)) for name, messages in _chats(w).items()]
    found += [Shape(name, tuple(messages), TOOLS) for name, messages in _with_tools(w).items()]
    two = tuple(next(s for s in found if s.name == "two answers").messages)
    found.append(Shape("last answer only", two, loss_on="last"))
    found.append(Shape("first answer left out", two, weights=(None, 0, None, None)))
    found.append(Shape("last answer left out", two, weights=(None, None, None, 0)))
    return found
