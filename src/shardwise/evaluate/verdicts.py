"""Prompts for a judge, and parsing of its verdict; a text without a clear verdict is none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["A", "B", "tie"]
_RATING = re.compile(r"^\W*rating\W*:[^\w+-]*([+-]?\d+(?:\.\d+)?)(?:\s*/\s*10)?\W*$", re.IGNORECASE | re.MULTILINE)
_WINNER = re.compile(r"^\W*verdict\W*:\W*(?:assistant\s+)?(A|B|tie|draw)\W*$", re.IGNORECASE | re.MULTILINE)

_SINGLE = (
    "You grade the work of an AI assistant. Read the conversation below and assess the assistant's final reply: is it "
    "correct, does it do what was asked, is it complete, clear and no longer than it needs to be? Earlier turns are "
    "context. Say first, in a few sentences, what is good and what is wrong. Then close with one line of the form\n"
    "Rating: N\nwhere N is a whole number from 1 (useless) to 10 (could not be better)."
)
_PAIR = (
    "You compare two AI assistants who were given the same questions. Assess the final reply of each, with earlier "
    "turns as context: correctness first, then whether it does what was asked, completeness and clarity. Neither the "
    "order in which they are shown nor the length of a reply is a merit. Say first, in a few sentences, how they "
    "differ. Then close with one line, one of\nVerdict: A\nVerdict: B\nVerdict: tie"
)
# Said again behind the conversation: small judges forget what stood before it, and an answer that is judged should not
# have the last word.
_SINGLE_END = "Assess the assistant's final reply, then close with one line of the form\nRating: N"
_PAIR_END = "Compare the two final replies, then close with one line: Verdict: A, Verdict: B or Verdict: tie."


@dataclass(frozen=True)
class JudgedTurns:
    """Questions of a conversation up to a turn, the answers to them, and a reference for the last answer."""

    questions: Sequence[str]
    answers: Sequence[str]
    reference: str | None = None


def single_prompt(exchange: JudgedTurns) -> list[dict[str, str]]:
    """Returns the judge's prompt about one model's answer."""
    return _messages(_SINGLE, [_reference(exchange), _conversation_text(exchange, "Assistant"), _SINGLE_END])


def pair_prompt(first: JudgedTurns, second: JudgedTurns) -> list[dict[str, str]]:
    """Returns the judge's prompt about two answers; `first` is shown as A."""
    parts = [
        _reference(first),
        _conversation_text(first, "Assistant A"),
        _conversation_text(second, "Assistant B"),
        _PAIR_END,
    ]
    return _messages(_PAIR, parts)


def read_rating(text: str) -> float | None:
    """Returns the grade, 1 to 10; None if there is none or several different ones."""
    ratings = {float(value) for value in _RATING.findall(text)}
    value = ratings.pop() if len(ratings) == 1 else None
    return value if value is not None and 1 <= value <= 10 else None


def read_verdict(text: str) -> Verdict | None:
    """Returns which answer is better; None if the text does not say so, or says two things."""
    winners = {word.lower() for word in _WINNER.findall(text)}
    verdicts: dict[str, Verdict] = {"a": "A", "b": "B", "tie": "tie", "draw": "tie"}
    return verdicts[winners.pop()] if len(winners) == 1 else None


def _reference(exchange: JudgedTurns) -> str:
    if exchange.reference is None:
        return ""
    return f"<reference>\nA good reply to the last question:\n{exchange.reference}\n</reference>"


def _conversation_text(exchange: JudgedTurns, who: str) -> str:
    turns = zip(exchange.questions, exchange.answers, strict=True)
    lines = [f"### User\n{question}\n\n### {who}\n{answer}" for question, answer in turns]
    return f"<conversation with {who}>\n" + "\n\n".join(lines) + f"\n</conversation with {who}>"


def _messages(task: str, parts: Sequence[str]) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": task},
        {"role": "user", "content": "\n\n".join(part for part in parts if part)},
    ]
