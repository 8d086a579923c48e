"""Turns rows into tokens and a mask of those to learn.

[Note: assistant mask] Chat templates rarely mark what the assistant said. We render the conversation up to just before
and just after each assistant message and compare: the text between the two is the turn. This is right for any template
whose rendering only ever grows; one that rewrites earlier turns has no unique answer and is refused. From the turn we
keep what follows the generation prompt, up to and including the first special token after the content (the end of
turn), so that a trailing newline is not learned. Characters become tokens through the tokenizer's own offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.data.rows import Row
from shardwise.errors import UserError

BATCH = 256


@dataclass(frozen=True)
class Document:
    """Token ids and, for each, whether it is learned (the first never is: nothing predicts it)."""

    where: str
    tokens: np.ndarray
    learned: np.ndarray


def render_rows(rows: Iterable[Row], tokenizer: Any, loss_on: str, field: str) -> Iterator[Document]:
    """Documents in the order of the rows, tokenised in batches."""
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH:
            yield from _render_batch(batch, tokenizer, loss_on, field)
            batch = []
    if batch:
        yield from _render_batch(batch, tokenizer, loss_on, field)


def _render_batch(rows: list[Row], tokenizer: Any, loss_on: str, field: str) -> Iterator[Document]:
    texts, spans = [], []
    for row in rows:
        if row.messages is None:
            texts.append(row.text or "")
            spans.append(None)
        else:
            text, turns = _render_chat(row, tokenizer, loss_on, field)
            texts.append(text)
            spans.append(turns)
    # A chat template writes BOS itself; adding special tokens again would double it.
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    for row, ids, offsets, turns in zip(rows, encoded["input_ids"], encoded["offset_mapping"], spans, strict=True):
        if turns is None:
            ids = ([tokenizer.bos_token_id] if _adds_bos(tokenizer) else []) + ids
            ids += [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
            learned = np.ones(len(ids), dtype=bool)
        else:
            learned = _mask(np.asarray(offsets, dtype=np.int64).reshape(-1, 2), turns)
        learned[:1] = False
        yield Document(row.where, np.asarray(ids, dtype=np.int32), learned)


def _adds_bos(tokenizer: Any) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def _mask(offsets: np.ndarray, turns: list[tuple[int, int]]) -> np.ndarray:
    """Tokens that lie within a turn; one that straddles its start belongs to the prompt and is not learned."""
    learned = np.zeros(len(offsets), dtype=bool)
    for start, stop in turns:
        learned |= (offsets[:, 0] >= start) & (offsets[:, 1] <= stop) & (offsets[:, 1] > offsets[:, 0])
    return learned


def _render_chat(row: Row, tokenizer: Any, loss_on: str, field: str) -> tuple[str, list[tuple[int, int]]]:
    messages = list(row.messages or ())
    whole = _apply(tokenizer, messages, row, field)
    if loss_on == "all":
        return whole, [(0, len(whole))]
    turns = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if index == 0:
            raise UserError(field, row.where, "the conversation begins with the assistant", "begin with a user or system message")
        before = _apply(tokenizer, messages[:index], row, field, prompt=True)
        after = _apply(tokenizer, messages[: index + 1], row, field)
        if not (whole.startswith(after.rstrip()) and after.startswith(before)):
            raise UserError(field, row.where, "the chat template rewrites earlier turns, so what the assistant said cannot be told apart",
                            "use data.loss_on: all, or one assistant message per row")  # fmt: skip
        turns.append((len(before), _end_of_turn(whole, len(before), message["content"], tokenizer, row, field)))
    if not turns:
        raise UserError(field, row.where, "the conversation has no assistant message, so nothing would be learned",
                        "add one, delete the row, or use data.loss_on: all")  # fmt: skip
    return whole, turns


def _end_of_turn(whole: str, start: int, content: str, tokenizer: Any, row: Row, field: str) -> int:
    at = whole.find(content.strip(), start)
    if at < 0:
        raise UserError(field, row.where, "the chat template changes the assistant's text, so it cannot be found in the rendering",
                        "use data.loss_on: all, or another template")  # fmt: skip
    end = at + len(content.strip())
    marks = [(p, len(t)) for t in _marks(tokenizer) if (p := whole.find(t, end)) >= 0]
    if not marks or whole[end : min(marks)[0]].strip():
        raise UserError(field, row.where, "the chat template ends the assistant's turn with no special token, so the model would never learn to stop",
                        "use a tokenizer whose template ends turns with its eos token")  # fmt: skip
    position, length = min(marks)
    return position + length


def _marks(tokenizer: Any) -> list[str]:
    return sorted(set(tokenizer.all_special_tokens) | set(tokenizer.get_added_vocab()), key=len, reverse=True)


def _apply(tokenizer: Any, messages: list[dict[str, str]], row: Row, field: str, prompt: bool = False) -> str:
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
    except TemplateError as error:
        raise UserError(field, row.where, f"the chat template refuses this conversation ({error})", "mend the roles and their order") from None


def check_template(tokenizer: Any, field: str) -> None:
    """Chat data needs a chat template; say so before any row is read."""
    if not tokenizer.chat_template:
        raise UserError(field, None, "the data are conversations, but the tokenizer has no chat template",
                        "train an instruct model, set model.tokenizer to one that has a template, or use rows with text")  # fmt: skip
