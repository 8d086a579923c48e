"""Models judged by another model, in the manner of MT-bench: several turns, a grade, or pairs in both orders.

Answers and judgements are appended to files as they come and looked up there first, so that a second run asks only for
what is missing. A pair is judged twice, with the places swapped: a judge that contradicts itself has found no winner.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.evaluate.bars import Bar
from shardwise.evaluate.client import Endpoint
from shardwise.evaluate.figures import Figure, TaskResult, ratio
from shardwise.evaluate.rows import EvalRow, read_rows
from shardwise.evaluate.settings import JudgeTask
from shardwise.evaluate.verdicts import JudgedTurns, pair_prompt, read_rating, read_verdict, single_prompt
from shardwise.nn.generate import Sampling, replies

ANSWERS, JUDGEMENTS = "answers.jsonl", "judgements.jsonl"
BATCH = {"cuda": 32, "cpu": 4}


@dataclass(frozen=True)
class JudgeQuestion:
    """Turns that are put to a model one after the other."""

    id: str
    turns: tuple[str, ...]
    category: str | None
    references: tuple[str | None, ...]


def read_judged(task: JudgeTask) -> list[JudgeQuestion]:
    """Returns the questions of a file: turns (or a single prompt), category, reference."""
    return [_question(number, row) for number, row in enumerate(read_rows(task.path, "path", task.limit))]


def _question(number: int, row: EvalRow) -> JudgeQuestion:
    turns = row.get({}, "turns") or row.need({}, "prompt", ("question", "instruction"))
    turns = [turns] if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise row.wrong("its turns are no list of questions", 'write {"turns": ["first question", "second"]}')
    reference_value = row.get({}, "reference")
    references = [reference_value] if isinstance(reference_value, str) else list(reference_value or [])
    padded = tuple([*references, *[None] * len(turns)][: len(turns)])
    category = row.get({}, "category")
    name = row.get({}, "question_id", ("id",))
    return JudgeQuestion(
        str(number if name is None else name), tuple(turns), None if category is None else str(category), padded
    )


class Store:
    """A file of JSON lines by key, appended to by several threads; a line truncated by a crash is ignored."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, Any]] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                self._known[entry["key"]] = entry
            except (ValueError, KeyError, TypeError):
                continue
        if text and not text.endswith("\n"):
            file.write_text(text + "\n", encoding="utf-8")

    def get(self, key: str) -> dict[str, Any] | None:
        """Returns the entry under a key, or None."""
        return self._known.get(key)

    def put(self, key: str, entry: dict[str, Any]) -> None:
        """Stores an entry; it is on disk when this returns."""
        with self._lock:
            self._known[key] = {"key": key, **entry}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self._known[key], ensure_ascii=False) + "\n")


def key_of(*parts: Any) -> str:
    """Returns a hash of the request."""
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()[:32]


def identity_of(model: Any) -> str:
    """Returns a fingerprint of some values of each weight, which changes when the weights do."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sampled = flat[:: max(1, len(flat) // 32)][:64].float().cpu().numpy()
        digest.update(name.encode() + sampled.tobytes())
    return digest.hexdigest()[:16]


def collect_answers(
    task: JudgeTask,
    label: str,
    model: Any,
    tokenizer: Any,
    folder: Path,
    bar: Bar,
) -> dict[str, list[str]]:
    """Returns the model's answers to every turn, by question; those of an earlier run are reused."""
    questions = read_judged(task)
    store = Store(folder / ANSWERS)
    model_id = identity_of(model)
    keys = {q.id: key_of(model_id, q.turns, task.max_tokens) for q in questions}
    missing = [q for q in questions if store.get(keys[q.id]) is None]
    advance = bar(len(missing))
    size = BATCH.get(model.device.type, 4)
    for start in range(0, len(missing), size):
        batch = missing[start : start + size]
        answers: dict[str, list[str]] = {q.id: [] for q in batch}
        for turn in range(max(len(q.turns) for q in batch)):
            active = [q for q in batch if turn < len(q.turns)]
            conversations = [_conversation(q.turns[: turn + 1], answers[q.id]) for q in active]
            outputs = replies(model, tokenizer, conversations, Sampling(max_tokens=task.max_tokens), size)
            for question, output in zip(active, outputs, strict=True):
                answers[question.id].append(output)
        for q in batch:
            store.put(keys[q.id], {"model": label, "question": q.id, "turns": q.turns, "answers": answers[q.id]})
        advance(len(batch))
    return {q.id: list((store.get(keys[q.id]) or {})["answers"]) for q in questions}


def _conversation(questions: Sequence[str], answers: Sequence[str]) -> list[dict[str, str]]:
    turns = [{"role": "user", "content": q} for q in questions]
    for index, answer in enumerate(answers):
        turns.insert(2 * index + 1, {"role": "assistant", "content": answer})
    return turns


def judge_all(
    task: JudgeTask,
    answers: dict[str, dict[str, list[str]]],
    folder: Path,
    bar: Bar,
    endpoint: Endpoint | None = None,
) -> dict[str, TaskResult]:
    """Returns the judge's results for each model; pairwise, for each but the first against the first."""
    default_endpoint = Endpoint(task.url, task.model, task.key, task.judge_tokens, task.retries, task.timeout)
    judgements = _Judgements(task, endpoint or default_endpoint, Store(folder / JUDGEMENTS))
    questions = read_judged(task)
    first, *others = answers
    if task.mode == "single":
        cases = [
            JudgeCase(single_prompt(e), q.id, turn, (label,))
            for label in answers
            for q in questions
            for turn, e in enumerate(_exchanges(q, answers[label][q.id]), 1)
        ]
        judgements.hear(cases, bar)
        return {label: judgements.grades(questions, answers[label]) for label in answers}
    cases = [
        JudgeCase(prompt, q.id, turn, order)
        for other in others
        for q in questions
        for turn, both in enumerate(_pairs(q, answers[first], answers[other]), 1)
        for prompt, order in zip(both, ((first, other), (other, first)), strict=True)
    ]
    judgements.hear(cases, bar)
    return {other: judgements.duels(questions, answers[first], answers[other], first) for other in others}


def _exchanges(question: JudgeQuestion, answers: Sequence[str]) -> list[JudgedTurns]:
    """The conversation up to each of its turns."""
    counts = range(1, len(question.turns) + 1)
    return [JudgedTurns(question.turns[:n], answers[:n], question.references[n - 1]) for n in counts]


def _pairs(question: JudgeQuestion, first: dict[str, list[str]], other: dict[str, list[str]]) -> list[tuple[Any, Any]]:
    """For each turn both orders: the first model as A, then as B."""
    both = zip(_exchanges(question, first[question.id]), _exchanges(question, other[question.id]), strict=True)
    return [(pair_prompt(a, b), pair_prompt(b, a)) for a, b in both]


@dataclass(frozen=True)
class JudgeCase:
    """A prompt for the judge, and which models' answers to which turn it is about; of a pair, A's first."""

    messages: list[dict[str, str]]
    question: str
    turn: int
    models: tuple[str, ...]


class _Judgements:
    """Judgements by prompt, and the figures they add up to."""

    def __init__(self, task: JudgeTask, endpoint: Endpoint, store: Store) -> None:
        self._task = task
        self._endpoint = endpoint
        self._store = store

    def _key(self, messages: list[dict[str, str]]) -> str:
        return key_of(self._task.model, self._task.judge_tokens, messages)

    def hear(self, cases: Iterable[JudgeCase], bar: Bar) -> None:
        """Requests the missing judgements, several at a time."""
        missing = {key: case for case in cases if self._store.get(key := self._key(case.messages)) is None}
        advance = bar(len(missing))
        pool = ThreadPoolExecutor(self._task.concurrency)
        try:
            for done in as_completed([pool.submit(self._ask, key, case) for key, case in missing.items()]):
                done.result()
                advance(1)
        except BaseException:
            self._endpoint.stop.set()  # those under way end and are kept; nothing is begun or tried again
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _ask(self, key: str, case: JudgeCase) -> None:
        text = self._endpoint.ask(case.messages)
        verdict = read_rating(text) if self._task.mode == "single" else read_verdict(text)
        labels = {"judge": self._task.model, "models": case.models, "question": case.question, "turn": case.turn}
        # The verdict is for people who look for what could not be read; figures come from the words.
        self._store.put(key, {**labels, "verdict": verdict, "judgement": text, "messages": case.messages})

    def _text(self, messages: list[dict[str, str]]) -> str:
        return str((self._store.get(self._key(messages)) or {})["judgement"])

    def grades(self, questions: Sequence[JudgeQuestion], answers: dict[str, list[str]]) -> TaskResult:
        """Returns the mean grade over questions (each the mean of its turns), by turn and by category."""
        graded: list[tuple[JudgeQuestion, list[float | None]]] = []
        for question in questions:
            exchanges = _exchanges(question, answers[question.id])
            graded.append((question, [read_rating(self._text(single_prompt(exchange))) for exchange in exchanges]))
        parsed = [value is not None for _, values in graded for value in values]
        most_turns = max(len(q.turns) for q in questions)
        figures = [_means("grade", [values for _, values in graded])]
        for turn in range(most_turns if most_turns > 1 else 0):
            figures.append(
                _means(f"grade, turn {turn + 1}", [[values[turn]] for _, values in graded if turn < len(values)])
            )
        names = sorted({q.category for q in questions if q.category is not None})
        groups = {}
        for name in names:
            groups[name] = _means("grade", [values for question, values in graded if question.category == name])
        return TaskResult(self._task.label, "judge", figures, groups, _unparsed_note(parsed))

    def duels(
        self, questions: Sequence[JudgeQuestion], first: dict[str, list[str]], other: dict[str, list[str]], against: str
    ) -> TaskResult:
        """Returns wins, ties and losses against the first model; verdicts that change with the order are ties."""
        scores: dict[str, list[float | None]] = {q.id: [] for q in questions}
        counts = {"win": 0, "tie": 0, "loss": 0}
        parsed: list[bool] = []
        order_dependent = 0
        for question in questions:
            for as_a, as_b in _pairs(question, first, other):
                first_verdict = read_verdict(self._text(as_a))
                swapped_verdict = read_verdict(self._text(as_b))
                parsed += [first_verdict is not None, swapped_verdict is not None]
                if first_verdict is None or swapped_verdict is None:
                    scores[question.id].append(None)
                    continue
                outcome = {("B", "A"): "win", ("A", "B"): "loss"}.get((first_verdict, swapped_verdict), "tie")
                order_dependent += (first_verdict, swapped_verdict) in (("A", "A"), ("B", "B"))
                counts[outcome] += 1
                scores[question.id].append({"win": 1.0, "tie": 0.5, "loss": 0.0}[outcome])
        compared = sum(counts.values())
        figures = [_means("win rate", list(scores.values()))]
        figures += [Figure(name, float(n), None, compared, name != "loss") for name, n in counts.items()]
        notes = [f"compared with {against}; a tie counts half"]
        if order_dependent:
            notes.append(
                f"{order_dependent} of {compared} comparisons turned with the order of the answers and count as ties"
            )
        return TaskResult(self._task.label, "judge", figures, {}, notes + _unparsed_note(parsed, pairs=True))


def _means(name: str, items: Sequence[Sequence[float | None]]) -> Figure:
    """Mean over questions, each the mean of its parsed values; a question without any does not count."""
    parsed = [[v for v in values if v is not None] for values in items]
    return ratio(name, [sum(v) / len(v) if v else 0.0 for v in parsed], [float(bool(v)) for v in parsed])


def _unparsed_note(parsed: Sequence[bool], pairs: bool = False) -> list[str]:
    if all(parsed):
        return []
    consequence = ", their comparisons with them" if pairs else ""
    summary = f"{parsed.count(False)} of {len(parsed)} judgements have no clear verdict and are left out{consequence}"
    return [f'{summary} (see "verdict": null in {JUDGEMENTS})']
