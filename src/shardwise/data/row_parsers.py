"""One reader per format, from a row and its column mapping to an example; raises Misfit.

[Note: prompts] Strings under prompt and completion are concatenated without a chat template: whether they are turns of
a dialogue or two halves of a document cannot be seen. Message lists there are a chat whose prompt is not trained on.
`format: alpaca` with `fields` makes chat turns of strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from shardwise.data.examples import Example, Message, Raw
from shardwise.data.labels import label_name
from shardwise.data.line_files import type_name
from shardwise.data.messages import Misfit, absent, checked_text, from_json, read_messages, read_tools

Columns = dict[str, str]


def look_up(value: Any, path: str) -> Any:
    """Value of a row under a column, or under a nested path a.b.0; None if there is none."""
    if path in value:
        return value[path]
    if "." not in path:
        return None
    for part in path.split("."):
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.lstrip("-").isdecimal() and -len(value) <= int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def has_messages(value: Any, role_key: str) -> bool:
    """Whether a value is a list of messages, or one as a JSON string."""
    if isinstance(value, str) and value.lstrip()[:1] == "[" and f'"{role_key}"' in value[:2000]:
        return True
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and role_key in value[0]


def _get(raw: Raw, columns: Columns, name: str, usual: str | None = None) -> Any:
    return look_up(raw.value, columns.get(name, usual or name))


def _string(raw: Raw, columns: Columns, name: str, fmt: str) -> str:
    value = _get(raw, columns, name)
    if isinstance(value, str):
        return checked_text(value)
    column = columns.get(name, name)
    keys = ", ".join(sorted(map(str, raw.value))[:8]) or "none"
    problem = f"its keys: {keys}" if absent(value) else f"it is {type_name(value)}"
    remedy = f'give each row a text under "{column}", or say with fields which column is the {name}'
    raise Misfit(f'the row has no string under "{column}" ({problem}), which {fmt} needs', remedy)


def _optional(raw: Raw, columns: Columns, name: str) -> str:
    value = _get(raw, columns, name) if name in columns else None
    if absent(value):
        return ""
    if not isinstance(value, str):
        raise Misfit(f'"{columns[name]}" must be a string, it is {type_name(value)}', "mend or delete the row")
    return checked_text(value)


def _with_system(raw: Raw, columns: Columns, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    system = _optional(raw, columns, "system")
    if not system.strip():
        return messages
    if messages and messages[0]["role"] == "system":
        if messages[0]["content"] == system:
            return messages
        raise Misfit(f'has a system message besides the column "{columns["system"]}"', "keep one of them")
    return ({"role": "system", "content": system}, *messages)


def _chat(raw: Raw, columns: Columns, name: str = "messages", keys: tuple[str, str] = ("role", "content")) -> Example:
    value = raw.value
    column = columns.get(name, name)
    content = value[column] if column in value else look_up(value, column)
    if content is None and columns.get(name) not in value:
        listed = ", ".join(sorted(map(str, value))[:8]) or "none"
        raise Misfit(f'the row has no "{column}" (its keys: {listed})', "mend or delete the row")
    messages, weights = read_messages(content, column, columns.get(keys[0], keys[0]), columns.get(keys[1], keys[1]))
    if "system" in columns:
        before = len(messages)
        messages = _with_system(raw, columns, messages)
        if weights and len(messages) > before:
            weights = (None, *weights)
    tools = read_tools(_get(raw, columns, "tools")) if "tools" in columns else ()
    # As Example(…), whose frozen fields are set one by one: 1.9 µs against 0.5, of the 8 that a short row takes.
    example = object.__new__(Example)
    example.__dict__.update(
        where=raw.where, number=raw.number, kind="chat", messages=messages, tools=tools, weights=weights
    )
    return example


def _sharegpt(raw: Raw, columns: Columns) -> Example:
    return _chat(raw, columns, "conversations", ("from", "value"))


def _alpaca(raw: Raw, columns: Columns) -> Example:
    question = _string(raw, columns, "instruction", "alpaca")
    answer = _string(raw, columns, "output", "alpaca")
    if (extra := _optional(raw, columns, "input")).strip():
        question = f"{question}\n\n{extra}" if question.strip() else extra
    turns: list[Message] = []
    history = _get(raw, columns, "history") if "history" in columns else None
    if not absent(history) and history != "":
        history = from_json(history, '"history"')
        if not isinstance(history, list):
            raise Misfit('"history" must be a list of pairs', "write [[question, answer], …]")
        for pair in history:
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(p, str) for p in pair):
                raise Misfit('"history" must hold pairs of a question and an answer', "write [[question, answer], …]")
            turns += [{"role": r, "content": checked_text(p)} for r, p in zip(("user", "assistant"), pair, strict=True)]
    turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Example(raw.where, raw.number, "chat", _with_system(raw, columns, tuple(turns)))


def _as_messages(value: Any, role: str, column: str) -> tuple[Message, ...]:
    """Messages from a list, or from a string as one message of this role."""
    if isinstance(value, str) and not has_messages(value, "role"):
        return ({"role": role, "content": checked_text(value)},)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, (str, list)):
        raise Misfit(f'"{column}" must be a string or a list of messages', "mend or delete the row")
    return read_messages(value, column)[0]


def _prompt(raw: Raw, columns: Columns) -> Example:
    prompt, completion = _get(raw, columns, "prompt"), _get(raw, columns, "completion")
    lists = [isinstance(v, (list, dict)) for v in (prompt, completion)]
    if not any(lists):
        text = _string(raw, columns, "prompt", "prompt–completion")
        for extra in ("system", "tools"):
            if (
                extra in columns
                and not absent(look_up(raw.value, columns[extra]))
                and look_up(raw.value, columns[extra])
            ):
                problem = f'has "{columns[extra]}", which strings without a chat template have no place for'
                raise Misfit(problem, "use format: alpaca, message lists, or rows without it")
        answer = _string(raw, columns, "completion", "prompt–completion")
        return Example(raw.where, raw.number, "pair", prompt=text, text=answer)
    history = _with_system(raw, columns, _as_messages(prompt, "user", columns.get("prompt", "prompt")))
    answered = _as_messages(completion, "assistant", columns.get("completion", "completion"))
    tools = read_tools(_get(raw, columns, "tools")) if "tools" in columns else ()
    weights = (*(0 for _ in history), *(None for _ in answered))
    return Example(raw.where, raw.number, "chat", (*history, *answered), tools, weights)


def _pair(raw: Raw, columns: Columns) -> Example:
    prompt = _string(raw, columns, "source", "a pair")
    text = _string(raw, columns, "target", "a pair")
    return Example(raw.where, raw.number, "pair", prompt=prompt, text=text)


def _text(raw: Raw, columns: Columns) -> Example:
    return Example(raw.where, raw.number, "text", text=_string(raw, columns, "text", "text"))


_LEARN = ("label", "learn", "train", "loss", "weight")


def _segments(raw: Raw, columns: Columns) -> Example:
    value = from_json(_get(raw, columns, "segments"), '"segments"')
    if not isinstance(value, list) or not value:
        problem = f'"{columns.get("segments", "segments")}" must be a list with at least one segment'
        raise Misfit(problem, 'write [{"text": "…", "label": false}, {"text": "…", "label": true}]')
    key = columns.get("text", "text")
    flags = (columns["label"],) if "label" in columns else _LEARN
    segments = []
    for index, segment in enumerate(value):
        place = f"segment {index + 1}"
        if not isinstance(segment, dict) or not isinstance(segment.get(key), str):
            raise Misfit(f'a segment needs a string under "{key}"', "mend or delete the row", place)
        learned = next((segment[f] for f in flags if segment.get(f) is not None), None)
        if (flag := flag_of(learned)) is None:
            problem = f"whether a segment is learned must be true or false, this is {learned!r:.40}"
            raise Misfit(problem, f'add "{flags[0]}": true or false', place)
        segments.append((checked_text(segment[key]), flag))
    return Example(raw.where, raw.number, "segments", segments=tuple(segments))


_FLAGS = {True: True, False: False, "true": True, "false": False, "True": True, "False": False, "1": True, "0": False}


def flag_of(value: Any) -> bool | None:
    """Boolean from JSON, CSV or a 0/1 column; None if it is neither true nor false."""
    return _FLAGS.get(value) if isinstance(value, (bool, int, float, str)) else None


def _integers(raw: Raw, columns: Columns, name: str) -> list[int] | None:
    value = _get(raw, columns, name) if name in columns or name == "input_ids" else None
    value = from_json(value, f'"{name}"')
    if value is None and name != "input_ids":
        return None
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise Misfit(f'"{columns.get(name, name)}" must be a list of whole numbers', "mend or delete the row")
    return value


def _tokens(raw: Raw, columns: Columns) -> Example:
    ids = _integers(raw, columns, "input_ids")
    assert ids is not None
    if ids and not (min(ids) >= 0 and max(ids) < 1 << 31):
        wrong = next(i for i in ids if not 0 <= i < 1 << 31)
        raise Misfit(f"{wrong!r:.40} is no token id", "ids go from 0 to the size of the vocabulary")
    labels, loss = _integers(raw, columns, "labels"), _integers(raw, columns, "loss_mask")
    attention = _integers(raw, columns, "attention_mask")
    for name, values in (("labels", labels), ("loss_mask", loss), ("attention_mask", attention)):
        if values is not None and len(values) != len(ids):
            problem = f'"{columns[name]}" has {len(values)} entries, input_ids {len(ids)}'
            raise Misfit(problem, "give one for each token")
        if values is not None and name != "labels" and not set(values) <= {0, 1}:
            raise Misfit(f'"{columns[name]}" must hold 0 and 1 only', "mend or delete the row")
    learned = [True] * len(ids) if labels is None and loss is None else [bool(m) for m in loss or [1] * len(ids)]
    for index, label in enumerate(labels or []):
        if label == -100:
            learned[index] = False
        elif label != ids[index]:
            problem = f"label {index + 1} is {label}, the token {ids[index]}: a label is the token itself or -100"
            raise Misfit(problem, "do not shift the labels; that is done in training")
    if attention is not None:  # padding is no token
        ids = [i for i, m in zip(ids, attention, strict=True) if m]
        learned = [i for i, m in zip(learned, attention, strict=True) if m]
    mask = None if labels is None and loss is None else tuple(learned)
    return Example(raw.where, raw.number, "tokens", tokens=tuple(ids), learned=mask)


_SPEAKERS = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")


def _preference(raw: Raw, columns: Columns) -> Example:
    prompt = _get(raw, columns, "prompt") if "prompt" in columns else None
    answers = []
    for name in ("chosen", "rejected"):
        value = _get(raw, columns, name)
        if isinstance(value, str) and value.startswith("\n\nHuman:"):
            value = _transcript(value)
        answers.append(_as_messages(value, "assistant", columns.get(name, name)))
    chosen, rejected = answers
    history: tuple[Message, ...] = () if absent(prompt) else _as_messages(prompt, "user", columns["prompt"])
    if history and all(a[: len(history)] == history for a in answers):
        chosen, rejected = chosen[len(history) :], rejected[len(history) :]
    elif not history or any(a[0]["role"] != "assistant" for a in answers):
        shared = _shared(chosen, rejected)
        if not shared:
            remedy = "add a prompt, or let both begin with the same messages"
            raise Misfit("chosen and rejected answer nothing: there is no prompt and no common beginning", remedy)
        # A prompt beside whole conversations repeats one of their messages.
        if isinstance(prompt, str) and not any(prompt.strip() == str(m["content"]).strip() for m in shared):
            problem = "the prompt is not in the messages with which chosen and rejected begin"
            raise Misfit(problem, "keep the prompt or the messages")
        history = shared
        chosen = chosen[len(shared) :]
        rejected = rejected[len(shared) :]
    _check_answers(chosen, rejected)
    tools = read_tools(_get(raw, columns, "tools")) if "tools" in columns else ()
    history = _with_system(raw, columns, history)
    return Example(raw.where, raw.number, "preference", history, tools, chosen=chosen, rejected=rejected)


def _transcript(text: str) -> list[Message]:
    parts = _SPEAKERS.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = zip(parts[1::2], parts[2::2], strict=True)
    return [{"role": roles[speaker], "content": words.strip()} for speaker, words in turns]


def _shared(first: tuple[Message, ...], second: tuple[Message, ...]) -> tuple[Message, ...]:
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return first[:count]


def _check_answers(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> None:
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer or answer[0]["role"] != "assistant":
            problem = f"what is {name} does not go on with an answer of the assistant"
            raise Misfit(problem, "let chosen and rejected differ from an assistant message on")
    if chosen == rejected:
        raise Misfit("chosen and rejected are the same", "delete the row")


def _kto(raw: Raw, columns: Columns) -> Example:
    label = _get(raw, columns, "label")
    if (flag := flag_of(label)) is None:
        raise Misfit(f"label must be true or false, this is {label!r:.40}", "mend or delete the row")
    prompt, completion = _get(raw, columns, "prompt"), _get(raw, columns, "completion")
    history = _with_system(raw, columns, _as_messages(prompt, "user", columns.get("prompt", "prompt")))
    answer = _as_messages(completion, "assistant", columns.get("completion", "completion"))
    if answer[0]["role"] != "assistant":
        raise Misfit("the completion must be the assistant's", "mend or delete the row")
    tools = read_tools(_get(raw, columns, "tools")) if "tools" in columns else ()
    return Example(raw.where, raw.number, "kto", history, tools, chosen=answer, label=flag)


def _label(raw: Raw, columns: Columns) -> Example:
    text = _string(raw, columns, "text", "a label row")
    second = _optional(raw, columns, "second")
    value = _get(raw, columns, "label")
    column = columns.get("label", "label")
    if (name := label_name(value)) is None:
        reason = "it has none" if absent(value) or value == "" else f"this is {value!r:.40}"
        problem = f'"{column}" must be a word, a whole number or true/false: {reason}'
        raise Misfit(problem, "mend or delete the row")
    return Example(raw.where, raw.number, "label", text=text, second=second, category=checked_text(name))


READERS: dict[str, Callable[[Raw, Columns], Example]] = {
    "chat": _chat,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt": _prompt,
    "pair": _pair,
    "text": _text,
    "segments": _segments,
    "tokens": _tokens,
    "preference": _preference,
    "kto": _kto,
    "label": _label,
}
