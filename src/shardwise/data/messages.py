"""Normalises conversations to the message format that chat templates take.

Accepts OpenAI messages (text parts, tool calls, the older function_call, weights) and ShareGPT turns. What cannot be
trained on as text (images, audio, video) is rejected, never dropped.
"""

from __future__ import annotations

import json
from typing import Any

from shardwise.data.examples import BadRow, Message, Raw

ROLES = {name: name for name in ("system", "user", "assistant", "tool")}
ROLES |= dict.fromkeys(["human", "prompter", "customer", "instruction"], "user")
ROLES |= dict.fromkeys(["gpt", "bot", "model", "ai", "chatgpt", "bard", "bing", "chatbot", "claude"], "assistant")
ROLES |= dict.fromkeys(["developer"], "system")
ROLES |= dict.fromkeys(["function", "observation", "tool_response", "function_response", "ipython"], "tool")
CALLS = {"function_call", "tool_call", "tool_calls"}  # ShareGPT turns whose text is a call as JSON
KEPT = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")  # strings that templates know
TEXT_PARTS = {"text", "input_text", "output_text"}
MEDIA = ("image", "audio", "video", "file")


class Misfit(Exception):
    """A value in a row does not fit: location within the row, problem, remedy."""

    def __init__(self, problem: str, remedy: str, place: str = "") -> None:
        super().__init__(problem, remedy, place)
        self.problem = problem
        self.remedy = remedy
        self.place = place

    def in_row(self, raw: Raw) -> BadRow:
        """Converts it to a BadRow."""
        return BadRow(f"{raw.where} {self.place}".rstrip(), raw.number, self.problem, self.remedy)


def absent(value: Any) -> bool:
    """Whether a value is missing: null, or the NaN that pandas writes for it."""
    return value is None or value != value


def checked_text(text: str) -> str:
    r"""Returns the text; raises Misfit if it has a lone surrogate (`\ud83d` in JSON), which no tokenizer accepts."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}"
            problem = f"holds half of a surrogate pair ({half} at character {error.start + 1})"
            raise Misfit(problem, "write the whole character, or delete the row") from None
    return text


def checked_json(value: Any) -> Any:
    """Returns a JSON value; raises Misfit if a string in it has a lone surrogate."""
    try:
        checked_text(json.dumps(value, ensure_ascii=False, default=str))
    except (ValueError, RecursionError):
        raise Misfit("holds a value that cannot be written as JSON", "mend or delete the row") from None
    return value


def from_json(value: Any, name: str) -> Any:
    """Decodes a value stored as a JSON string, as CSV columns and the tools of many datasets are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        remedy = "write it with json.dumps" if value.lstrip()[:2] in ("[{", "{'", "['") else "mend or delete the row"
        raise Misfit(f"{name} is a string, and not JSON ({str(error)[:80]})", remedy) from None


def read_messages(
    value: Any, name: str = "messages", role_key: str = "role", content_key: str = "content"
) -> tuple[tuple[Message, ...], tuple[int | None, ...]]:
    """Returns the messages and their weights; the weights are empty if no message has one."""
    value = from_json(value, f'"{name}"')
    if not isinstance(value, list) or not value:
        problem = f'"{name}" must be a list with at least one message'
        raise Misfit(problem, f'write "{name}": [{{"{role_key}": "user", "{content_key}": "…"}}, …]')
    messages: list[Message] = []
    weights: list[int | None] = []
    weighted = False
    for index, message in enumerate(value):
        try:
            if type(message) is not dict:
                raise Misfit(_NEEDS.format(role_key, content_key), "mend or delete the row")
            role, content = message.get(role_key), message.get(content_key)
            if len(message) == 2 and type(content) is str and type(role) is str and role in ROLES:
                messages.append(
                    {"role": ROLES[role], "content": content if content.isascii() else checked_text(content)}
                )
                weights.append(None)
                continue
            messages.append(_message(message, role, content, role_key, content_key))
            weights.append(weight := _weight(message.get("weight")))
            weighted = weighted or weight is not None
        except Misfit as error:
            raise Misfit(error.problem, error.remedy, f"message {index + 1}") from None
    return tuple(messages), tuple(weights) if weighted else ()


_NEEDS = "a message needs {} and {}, both strings"


def _message(message: dict[str, Any], role: Any, content: Any, role_key: str, content_key: str) -> Message:
    if not isinstance(role, str) or (role not in ROLES and role.lower() not in ROLES and role not in CALLS):
        known = ", ".join(sorted({"system", "user", "assistant", "tool"}))
        raise Misfit(f"unknown {role_key} {role!r:.60}", f"use one of {known}")
    if role in CALLS:
        return {"role": "assistant", "content": "", "tool_calls": read_calls(content)}
    speaker = ROLES.get(role) or ROLES[role.lower()]
    calls = message.get("tool_calls")
    if absent(calls) and not absent(message.get("function_call")):
        calls = [message["function_call"]]
    read: Message = {"role": speaker, "content": _content(content, speaker, bool(calls), role_key, content_key)}
    if not absent(calls) and calls not in ([], ""):
        if speaker != "assistant":
            raise Misfit(f"a {speaker} message has tool calls; only the assistant can call", "mend or delete the row")
        read["tool_calls"] = read_calls(calls)
    for key in KEPT:
        if isinstance(extra := message.get(key), str) and key not in (role_key, content_key):
            read[key] = checked_text(extra)
    return read


def _content(content: Any, speaker: str, calls: bool, role_key: str, content_key: str) -> str:
    if isinstance(content, str):
        return checked_text(content)
    if isinstance(content, list) and (speaker != "tool" or all(isinstance(p, dict) and "type" in p for p in content)):
        return checked_text(_joined([_part(part) for part in content]))
    if isinstance(content, dict) and ("type" in content or speaker != "tool"):
        return checked_text(_part(content))
    if speaker == "tool" and isinstance(content, (dict, list)):
        return checked_text(json.dumps(checked_json(content), ensure_ascii=False, default=str))
    if absent(content) and calls:
        return ""
    raise Misfit(_NEEDS.format(role_key, content_key), "give it a text, or delete the row")


def _joined(parts: list[str]) -> str:
    """Joins text parts, with newlines unless they contain the separating blank themselves."""
    text = ""
    for part in parts:
        text += f"\n{part}" if text[-1:].strip() and part[:1].strip() else part
    return text


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and (kind in TEXT_PARTS if isinstance(kind, str) else False):
        if isinstance(text := part.get("text"), str):
            return text
        raise Misfit("a part of type text has no text", "mend or delete the row")
    words: list[str] = []
    if isinstance(kind, str):
        words = [kind]
    elif isinstance(part, dict):
        words = [str(key) for key in part]
    if medium := next((m for m in MEDIA for word in words if m in word.lower()), None):
        problem = f"the message holds {'an' if medium[0] in 'ia' else 'a'} {medium}; only text can be learned"
        raise Misfit(problem, "leave such rows out (data.on_bad_row: skip)")
    description = f"type {kind!r:.40}" if kind is not None else "no known type"
    raise Misfit(
        f"the content has a part of {description}; only text can be learned", 'use {"type": "text", "text": "…"}'
    )


def _weight(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return int(value)
    if absent(value):
        return None
    raise Misfit(f"weight must be 0 or 1, this is {value!r:.40}", "use 1 to learn the message, 0 to leave it unlearned")


def _items(value: Any) -> list[Any]:
    """A list as it is, a single object as a list of one; anything else as a list of None, which callers reject."""
    if isinstance(value, dict):
        return [value]
    return value if isinstance(value, list) else [None]


def read_calls(value: Any) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, as templates expect."""
    value = from_json(value, "tool_calls")
    calls = []
    for call in _items(value):
        call = from_json(call, "a tool call")
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(call, dict):
            raise Misfit("a tool call needs the name of a function", '{"function": {"name": "…", "arguments": {…}}}')
        arguments = function.get("arguments", function.get("parameters"))
        arguments = {} if absent(arguments) or arguments == "" else from_json(arguments, "arguments")
        if not isinstance(arguments, dict):
            problem = f"the arguments of {function['name']!r:.60} must be an object"
            raise Misfit(problem, 'write them as {"name": value}, or as a string of that JSON')
        read = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        calls.append(({"id": call["id"]} if isinstance(call.get("id"), str) else {}) | read)
    if not calls:
        raise Misfit("a tool call needs the name of a function", '{"function": {"name": "…", "arguments": {…}}}')
    return list(checked_json(calls))


def read_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Tool definitions of a row: a list, or a JSON string of one."""
    if absent(value) or value == "":
        return ()
    value = from_json(value, "tools")
    if absent(value):
        return ()
    tools = []
    for tool in _items(value):
        tool = from_json(tool, "a tool")
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            problem = "tools must be a list of definitions with a name each"
            raise Misfit(problem, '[{"type": "function", "function": {"name": "…", "parameters": {…}}}]')
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tuple(checked_json(tools))
