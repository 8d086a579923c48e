"""Turns rows into tokens and a mask of those to learn.

[Note: assistant mask] Chat templates rarely mark what the assistant said. We render the conversation up to just before
and just after each assistant message and compare: the text between the two is the turn. This is right for any template
whose rendering only ever grows; one that rewrites earlier turns has no unique answer and is refused. From the turn we
keep what follows the generation prompt, up to and including the first special token after the content (the end of
turn), so that a trailing newline is not learned. What the template writes after the content is found by rendering an
answer that cannot be mistaken for it. Characters become tokens through the tokenizer's own offsets.

[Note: markup in content] A message that spells a special token (`<|im_end|>`) would be tokenised as that token: turns
that nobody took, or an answer that ends half-way. The tokenizer cannot be told which occurrence is text, so such a row
is refused. Plain text is left as it is: there a special token is what the author of the corpus wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.data.rows import Row
from shardwise.errors import UserError

BATCH = 256
SENTINEL = "qxanswerxq"


@dataclass(frozen=True)
class Document:
    """Token ids and, for each, whether it is learned (the first never is: nothing predicts it)."""

    where: str
    tokens: np.ndarray
    learned: np.ndarray


def render_rows(rows: Iterable[Row], tokenizer: Any, loss_on: str, field: str) -> Iterator[Document]:
    """Documents in the order of the rows, tokenised in batches."""
    renderer = _Renderer(tokenizer, loss_on, field)
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH:
            yield from renderer.render(batch)
            batch = []
    if batch:
        yield from renderer.render(batch)


class _Renderer:
    def __init__(self, tokenizer: Any, loss_on: str, field: str) -> None:
        self.tokenizer, self.loss_on, self.field = tokenizer, loss_on, field
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.first = [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []
        self.last = [eos] if eos is not None else []
        special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        special |= set(tokenizer.all_special_tokens)
        self.special = _any_of(special)
        self.marks = _any_of(special | set(tokenizer.get_added_vocab()))
        self.closing: str | None = None  # what follows an answer; found at the first one, and again where it differs

    def render(self, rows: list[Row]) -> Iterator[Document]:
        texts: list[str] = []
        spans: list[list[tuple[int, int]] | None] = []
        for row in rows:
            text, turns = (row.text or "", None) if row.messages is None else self._chat(row, list(row.messages))
            texts.append(text)
            spans.append(turns)
        # A chat template writes BOS itself; adding special tokens again would double it.
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for row, ids, offsets, turns in zip(rows, encoded["input_ids"], encoded["offset_mapping"], spans, strict=True):
            if turns is None:
                learned_from = len(ids) > 0  # an empty text teaches nothing, not even to end at once
                ids = ids if ids[:1] == self.first else self.first + ids
                ids = ids if ids[-1:] == self.last else ids + self.last
                learned = np.full(len(ids), learned_from)
            else:
                learned = _mask(np.asarray(offsets, dtype=np.int64).reshape(-1, 2), turns)
            learned[:1] = False
            yield Document(row.where, np.asarray(ids, dtype=np.int32), learned)

    def _chat(self, row: Row, messages: list[dict[str, str]]) -> tuple[str, list[tuple[int, int]]]:
        for index, message in enumerate(messages):
            if found := self.special.search(message["content"]):
                problem = f"the content spells {found[0]}, which the tokenizer reads as markup"
                remedy = "write it differently (a space inside will do) or delete the row"
                raise UserError(self.field, f"{row.where} message {index + 1}", problem, remedy)
        whole = self._apply(row, messages)
        if self.loss_on == "all":
            return whole, [(0, len(whole))]
        turns = [self._turn(row, messages, i, whole) for i, m in enumerate(messages) if m["role"] == "assistant"]
        if not turns:
            problem = "the conversation has no assistant message, so nothing would be learned"
            raise UserError(self.field, row.where, problem, "add one, delete the row, or use data.loss_on: all")
        return whole, turns

    def _turn(self, row: Row, messages: list[dict[str, str]], index: int, whole: str) -> tuple[int, int]:
        """Where in the whole rendering one assistant message and its end of turn lie."""
        if index == 0:
            problem = "the conversation begins with the assistant"
            raise UserError(self.field, row.where, problem, "begin with a user or system message")
        before = self._apply(row, messages[:index], prompt=True)
        after = self._apply(row, messages[: index + 1]).rstrip()
        if not (whole.startswith(after) and after.startswith(before)):
            problem = "the chat template rewrites earlier turns, so what the assistant said cannot be told apart"
            raise UserError(self.field, row.where, problem, "use data.loss_on: all, or one assistant message per row")
        return len(before), len(before) + self._end(row, messages[: index + 1], before, after[len(before) :])

    def _end(self, row: Row, messages: list[dict[str, str]], before: str, turn: str) -> int:
        """Where in a turn the first special token after the content ends."""
        if self.closing is None or not turn.endswith(self.closing):
            self.closing = self._closing(row, messages, before)
        close, content = len(turn) - len(self.closing), messages[-1]["content"].strip()
        if not turn.endswith(self.closing) or not turn[:close].rstrip().endswith(content):
            problem = "the chat template changes the assistant's text, so it cannot be found in the rendering"
            raise UserError(self.field, row.where, problem, "use data.loss_on: all, or another template")
        space = len(self.closing) - len(self.closing.lstrip())
        mark = self.marks.match(self.closing, space)
        if mark is None:
            problem = (
                "the chat template ends the assistant's turn with no special token, so it would never learn to stop"
            )
            remedy = "use a tokenizer whose template ends turns with its eos token"
            raise UserError("model.tokenizer", row.where, problem, remedy)
        return close + mark.end()

    def _closing(self, row: Row, messages: list[dict[str, str]], before: str) -> str:
        """What the template writes after an answer, found with an answer that cannot be mistaken for it."""
        spoken = self._apply(row, [*messages[:-1], messages[-1] | {"content": SENTINEL}]).rstrip()
        return spoken[len(before) :].partition(SENTINEL)[2]

    def _apply(self, row: Row, messages: list[dict[str, str]], prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            problem = f"the chat template refuses this conversation ({error})"
            raise UserError(self.field, row.where, problem, "mend the roles and their order") from None


def _any_of(words: set[str]) -> re.Pattern[str]:
    """Matches any of the words, the longest where several begin at the same place; nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)")


def _mask(offsets: np.ndarray, turns: list[tuple[int, int]]) -> np.ndarray:
    """Tokens that lie within a turn; one that straddles its start belongs to the prompt and is not learned."""
    learned = np.zeros(len(offsets), dtype=bool)
    begin, end = offsets[:, 0], offsets[:, 1]
    for start, stop in turns:
        # Tokenizers that trim offsets give a token of spaces no width, at the place where the spaces end; and an end
        # of turn may take the newline behind it along (Phi-3), so that it ends later than its text.
        learned |= (begin >= start) & (end > start) & (begin < stop)
    return learned


def check_template(tokenizer: Any, field: str) -> None:
    """Chat data needs a chat template; say so before any row is read."""
    if not tokenizer.chat_template:
        problem = "the data are conversations, but the tokenizer has no chat template"
        remedy = "train an instruct model, set model.tokenizer to one that has a template, or use rows with text"
        raise UserError(field, None, problem, remedy)
