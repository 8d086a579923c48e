"""Models judged by another one, in the manner of MT-bench: several turns, a grade, or pairs shown in both orders.

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
    """The questions of a file: turns (or a single prompt), category, reference."""
    return [_question(number, row) for number, row in enumerate(read_rows(task.path, "path", task.limit))]


def _question(number: int, row: EvalRow) -> JudgeQuestion:
    turns = row.get({}, "turns") or row.need({}, "prompt", ("question", "instruction"))
    turns = [turns] if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise row.wrong("its turns are no list of questions", 'write {"turns": ["first question", "second"]}')
    given = row.get({}, "reference")
    references = [given] if isinstance(given, str) else list(given or [])
    padded = tuple([*references, *[None] * len(turns)][: len(turns)])
    category = row.get({}, "category")
    name = row.get({}, "question_id", ("id",))
    return JudgeQuestion(
        str(number if name is None else name), tuple(turns), None if category is None else str(category), padded
    )


class Store:
    """A file of JSON lines by key, appended to by several threads; a line cut off by a crash is left out."""

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, threading.Lock()
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
        """What was kept under a key."""
        return self._known.get(key)

    def put(self, key: str, entry: dict[str, Any]) -> None:
        """Keeps an entry, on disk before this returns."""
        with self._lock:
            self._known[key] = {"key": key, **entry}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self._known[key], ensure_ascii=False) + "\n")


def key_of(*parts: Any) -> str:
    """A name for what was asked."""
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()[:32]


def identity_of(model: Any) -> str:
    """Changes when the model's weights do: a fingerprint of some values of each of them."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        some = flat[:: max(1, len(flat) // 32)][:64].float().cpu().numpy()
        digest.update(name.encode() + some.tobytes())
    return digest.hexdigest()[:16]


def collect_answers(
    task: JudgeTask,
    label: str,
    model: Any,
    tokenizer: Any,
    folder: Path,
    bar: Bar,
) -> dict[str, list[str]]:
    """The model's answers to every turn, by question; those of an earlier run are reused."""
    questions, store, who = read_judged(task), Store(folder / ANSWERS), identity_of(model)
    keys = {q.id: key_of(who, q.turns, task.max_tokens) for q in questions}
    missing = [q for q in questions if store.get(keys[q.id]) is None]
    advance, size = bar(len(missing)), BATCH.get(model.device.type, 4)
    for at in range(0, len(missing), size):
        batch = missing[at : at + size]
        said: dict[str, list[str]] = {q.id: [] for q in batch}
        for turn in range(max(len(q.turns) for q in batch)):
            asked = [q for q in batch if turn < len(q.turns)]
            conversations = [_conversation(q.turns[: turn + 1], said[q.id]) for q in asked]
            outputs = replies(model, tokenizer, conversations, Sampling(max_tokens=task.max_tokens), size)
            for question, output in zip(asked, outputs, strict=True):
                said[question.id].append(output)
        for q in batch:
            store.put(keys[q.id], {"model": label, "question": q.id, "turns": q.turns, "answers": said[q.id]})
        advance(len(batch))
    return {q.id: list((store.get(keys[q.id]) or {})["answers"]) for q in questions}


def _conversation(questions: Sequence[str], answers: Sequence[str]) -> list[dict[str, str]]:
    turns = [{"role": "user", "content": q} for q in questions]
    for place, answer in enumerate(answers):
        turns.insert(2 * place + 1, {"role": "assistant", "content": answer})
    return turns


def judge_all(
    task: JudgeTask,
    answers: dict[str, dict[str, list[str]]],
    folder: Path,
    bar: Bar,
    endpoint: Endpoint | None = None,
) -> dict[str, TaskResult]:
    """What the judge says of each model's answers; in pairs, of each but the first against the first."""
    place = Endpoint(task.url, task.model, task.key, task.judge_tokens, task.retries, task.timeout)
    court = _Court(task, endpoint or place, Store(folder / JUDGEMENTS))
    questions = read_judged(task)
    first, *others = answers
    if task.mode == "single":
        cases = [
            JudgeCase(single_prompt(e), q.id, turn, (label,))
            for label in answers
            for q in questions
            for turn, e in enumerate(_exchanges(q, answers[label][q.id]), 1)
        ]
        court.hear(cases, bar)
        return {label: court.grades(questions, answers[label]) for label in answers}
    cases = [
        JudgeCase(prompt, q.id, turn, order)
        for other in others
        for q in questions
        for turn, both in enumerate(_pairs(q, answers[first], answers[other]), 1)
        for prompt, order in zip(both, ((first, other), (other, first)), strict=True)
    ]
    court.hear(cases, bar)
    return {other: court.duels(questions, answers[first], answers[other], first) for other in others}


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
    """What is put to the judge, and whose answer to which turn it is about; of a pair, A's first."""

    messages: list[dict[str, str]]
    question: str
    turn: int
    models: tuple[str, ...]


class _Court:
    """Judgements by what was asked, and the figures they come to."""

    def __init__(self, task: JudgeTask, endpoint: Endpoint, store: Store) -> None:
        self._task, self._endpoint, self._store = task, endpoint, store

    def _key(self, messages: list[dict[str, str]]) -> str:
        return key_of(self._task.model, self._task.judge_tokens, messages)

    def hear(self, cases: Iterable[JudgeCase], bar: Bar) -> None:
        """Asks for the judgements that are missing, several at a time."""
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
        told = {"judge": self._task.model, "models": case.models, "question": case.question, "turn": case.turn}
        # The verdict is for people who look for what could not be read; figures come from the words.
        self._store.put(key, {**told, "verdict": verdict, "judgement": text, "messages": case.messages})

    def _text(self, messages: list[dict[str, str]]) -> str:
        return str((self._store.get(self._key(messages)) or {})["judgement"])

    def grades(self, questions: Sequence[JudgeQuestion], answers: dict[str, list[str]]) -> TaskResult:
        """Mean grade over questions (each the mean of its turns), by turn and by category."""
        graded: list[tuple[JudgeQuestion, list[float | None]]] = [
            (q, [read_rating(self._text(single_prompt(e))) for e in _exchanges(q, answers[q.id])]) for q in questions
        ]
        read = [value is not None for _, values in graded for value in values]
        most = max(len(q.turns) for q in questions)
        turns = [[values[n] for _, values in graded if n < len(values)] for n in range(most)]
        figures = [_means("grade", [values for _, values in graded])]
        if most > 1:
            figures += [_means(f"grade, turn {n + 1}", [[v] for v in turn]) for n, turn in enumerate(turns)]
        names = sorted({q.category for q in questions if q.category is not None})
        groups = {c: _means("grade", [values for q, values in graded if q.category == c]) for c in names}
        return TaskResult(self._task.label, "judge", figures, groups, _told_unread(read))

    def duels(
        self, questions: Sequence[JudgeQuestion], first: dict[str, list[str]], other: dict[str, list[str]], against: str
    ) -> TaskResult:
        """Wins, ties and losses against the first model; what the swap contradicts is a tie."""
        scores: dict[str, list[float | None]] = {q.id: [] for q in questions}
        counts = {"win": 0, "tie": 0, "loss": 0}
        read: list[bool] = []
        swayed = 0
        for question in questions:
            for as_a, as_b in _pairs(question, first, other):
                one, two = read_verdict(self._text(as_a)), read_verdict(self._text(as_b))
                read += [one is not None, two is not None]
                if one is None or two is None:
                    scores[question.id].append(None)
                    continue
                won = {("B", "A"): "win", ("A", "B"): "loss"}.get((one, two), "tie")
                swayed += (one, two) in (("A", "A"), ("B", "B"))
                counts[won] += 1
                scores[question.id].append({"win": 1.0, "tie": 0.5, "loss": 0.0}[won])
        heard = sum(counts.values())
        figures = [_means("win rate", list(scores.values()))]
        figures += [Figure(name, float(n), None, heard, name != "loss") for name, n in counts.items()]
        notes = [f"compared with {against}; a tie counts half"]
        if swayed:
            notes.append(f"{swayed} of {heard} comparisons turned with the order of the answers and count as ties")
        return TaskResult(self._task.label, "judge", figures, {}, notes + _told_unread(read, pairs=True))


def _means(name: str, items: Sequence[Sequence[float | None]]) -> Figure:
    """Over questions, each the mean of what could be read of it; a question of which nothing could counts nothing."""
    read = [[v for v in values if v is not None] for values in items]
    return ratio(name, [sum(v) / len(v) if v else 0.0 for v in read], [float(bool(v)) for v in read])


def _told_unread(read: Sequence[bool], pairs: bool = False) -> list[str]:
    if all(read):
        return []
    lost = ", their comparisons with them" if pairs else ""
    what = f"{read.count(False)} of {len(read)} judgements have no clear verdict and are left out{lost}"
    return [f'{what} (see "verdict": null in {JUDGEMENTS})']
