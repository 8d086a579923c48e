"""The judge against an endpoint of our own: grades, swapped pairs, retries, resuming, words that say nothing."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from support.evaluation import Mock, endpoint, no_bar, write_lines

from shardwise.core.errors import RunFailed, UserError
from shardwise.evaluate.client import Endpoint
from shardwise.evaluate.command import evaluate
from shardwise.evaluate.judge import JUDGEMENTS, collect_answers, judge_all
from shardwise.evaluate.settings import JudgeTask
from shardwise.evaluate.verdicts import read_rating, read_verdict

ROWS: list[dict[str, Any]] = [
    {"question_id": 1, "category": "law", "turns": ["Who?", "And then?"], "reference": ["nobody", "nothing"]},
    {"question_id": 2, "category": "art", "turns": ["Which colour?", "Why?"]},
    {"question_id": 3, "category": "art", "turns": ["One turn only."]},
]
FIRST = {"1": ["f11", "f12"], "2": ["f21", "f22"], "3": ["f31"]}
OTHER = {"1": ["o11", "o12"], "2": ["o21", "o22"], "3": ["o31"]}


def _task(folder: Path, mock: Mock, **more: Any) -> JudgeTask:
    path = write_lines(folder / "questions.jsonl", ROWS)
    return JudgeTask(path=path, url=mock.url, model="judge", max_tokens=6, **more)


def _seen(body: dict[str, Any]) -> str:
    return str(body["messages"][1]["content"])


@pytest.mark.parametrize(
    ("text", "rating"),
    [
        ("Good.\nRating: 7", 7.0),
        ("**Rating: 8/10**", 8.0),
        ("Rating: [[9]]", 9.0),
        ("rating: 4.5", 4.5),
        ("Rating: 11", None),
        ("Rating: 0", None),
        ("Rating: -3", None),
        ("I give it a 7.", None),
        ("Rating: 3\nno, rather\nRating: 8", None),
        ("Rating: 3\nas said\nRating: 3", 3.0),
        ("Rating: N", None),
        ("The Rating: 5 would be unfair", None),
        ("", None),
    ],
)
def test_ratings(text: str, rating: float | None) -> None:
    assert read_rating(text) == rating


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("B errs.\nVerdict: A", "A"),
        ("Verdict: [[b]]", "B"),
        ("**Verdict:** tie.", "tie"),
        ("Verdict: Assistant B", "B"),
        ("Verdict: A\nVerdict: B", None),
        ("Verdict: A or B", None),
        ("Verdict: A, Verdict: B or Verdict: tie.", None),  # our own words, echoed
        ("A is better", None),
    ],
)
def test_verdicts(text: str, verdict: str | None) -> None:
    assert read_verdict(text) == verdict


def test_grades(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> str:
        last = re.findall(r"### Assistant\n(\w+)", _seen(body))[-1]
        return "I cannot say." if last == "f21" else f"Fine.\nRating: {int(last[2]) + 4}"

    with endpoint(answer) as mock:
        told = judge_all(_task(tmp_path, mock), {"first": FIRST}, tmp_path, no_bar)["first"]
    figures = {f.name: f.value for f in told.figures}
    assert figures["grade, turn 1"] == 5.0 and figures["grade, turn 2"] == 6.0
    assert figures["grade"] == pytest.approx((5.5 + 6.0 + 5.0) / 3)  # of the second question one turn could be read
    assert {n: f.value for n, f in told.groups.items()} == {"art": 5.5, "law": 5.5}
    assert told.notes == [
        '1 of 5 judgements have no clear verdict and are left out (see "verdict": null in judgements.jsonl)'
    ]
    kept = [json.loads(line) for line in (tmp_path / JUDGEMENTS).read_text().splitlines()]
    (unread,) = [entry for entry in kept if entry["verdict"] is None]
    assert (unread["question"], unread["turn"], unread["models"]) == ("2", 1, ["first"])
    assert sorted(entry["verdict"] for entry in kept if entry is not unread) == [5.0, 5.0, 6.0, 6.0]
    assert len(mock.requests) == 5 and {r["model"] for r in mock.requests} == {"judge"}
    assert all(_seen(r).endswith("Rating: N") for r in mock.requests)  # the form is the last that a judge reads
    referenced = [_seen(r) for r in mock.requests if "nobody" in _seen(r) or "nothing" in _seen(r)]
    assert len(referenced) == 2
    second = next(_seen(r) for r in mock.requests if "f12" in _seen(r))
    assert second.index("Who?") < second.index("f11") < second.index("And then?") < second.index("f12")


def test_pairs_are_swapped(tmp_path: Path) -> None:
    """The judge prefers the other model's f1x rival, ties in the second question and always takes A in the third."""

    def answer(body: dict[str, Any]) -> str:
        text = _seen(body)
        a = re.findall(r"### Assistant A\n(\w+)", text)[-1]
        if "31" in a:
            return "Verdict: A"
        if a[1] == "2":
            return "no idea" if a[2] == "2" and a[0] == "o" else "Verdict: tie"
        return "Verdict: A" if a.startswith("o") else "Verdict: B"

    with endpoint(answer) as mock:
        told = judge_all(_task(tmp_path, mock, mode="pairwise"), {"first": FIRST, "other": OTHER}, tmp_path, no_bar)
    assert list(told) == ["other"] and len(mock.requests) == 10
    assert all(_seen(r).endswith("Verdict: A, Verdict: B or Verdict: tie.") for r in mock.requests)
    figures = {f.name: f.value for f in told["other"].figures}
    assert (figures["win"], figures["tie"], figures["loss"]) == (2, 2, 0)
    assert figures["win rate"] == pytest.approx((1.0 + 0.5 + 0.5) / 3)
    notes = "\n".join(told["other"].notes)
    assert "1 of 4 comparisons turned with the order" in notes and "1 of 10 judgements have no clear verdict" in notes
    kept = [json.loads(line) for line in (tmp_path / JUDGEMENTS).read_text().splitlines()]
    third = {tuple(entry["models"]): entry["verdict"] for entry in kept if entry["question"] == "3"}
    assert third == {("first", "other"): "A", ("other", "first"): "A"}


def test_a_judge_of_whom_nothing_can_be_read(tmp_path: Path, llama: str, other: str, capsys: Any) -> None:
    """No grade is made up: the table says so, and results.json is JSON that any reader takes."""
    with endpoint(lambda _: "Both are wonderful!") as mock:
        tasks = [_task(tmp_path, mock, name="grades"), _task(tmp_path, mock, name="pairs", mode="pairwise")]
        evaluate([llama, other], tasks, tmp_path / "out", False)
    told = " ".join(capsys.readouterr().out.split())
    assert "nothing to measure" in told and "nan" not in told
    assert "5 of 5 judgements have no clear verdict" in told and "10 of 10 judgements" in told

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    results = json.loads((tmp_path / "out" / "results.json").read_text(), parse_constant=refuse)["results"]
    grade, pair = results[other][0]["figures"]["grade"], results[other][1]["figures"]["win rate"]
    assert grade["value"] is None and grade["count"] == 0 and pair["value"] is None


def test_grades_of_different_questions_are_not_compared(tmp_path: Path, llama: str, other: str, capsys: Any) -> None:
    heard: list[int] = []

    def answer(_: dict[str, Any]) -> str:
        heard.append(1)
        return "Rating: 4" if len(heard) > 2 else "Fine."  # nothing of the first model's first question can be read

    with endpoint(answer) as mock:
        evaluate([llama, other], [_task(tmp_path, mock, concurrency=1)], tmp_path / "out", False)
    assert "different questions, so they are not compared" in " ".join(capsys.readouterr().out.split())


def test_failures_are_retried_and_what_was_judged_is_kept(tmp_path: Path) -> None:
    seen: dict[str, int] = {}
    lock = threading.Lock()

    def flaky(body: dict[str, Any]) -> str | int:
        with lock:
            seen[_seen(body)] = tries = seen.get(_seen(body), 0) + 1
        return "Rating: 6" if tries > 2 else (429 if tries == 1 else 503)

    pauses: list[float] = []
    with endpoint(flaky) as mock:
        task = _task(tmp_path, mock, concurrency=2)
        place = Endpoint(mock.url, "judge", retries=2, sleep=pauses.append)
        told = judge_all(task, {"first": FIRST}, tmp_path / "a", no_bar, place)
        assert told["first"].figures[0].value == 6.0 and len(mock.requests) == 15
        assert pauses.count(0.0) == 5 and all(1.0 <= p <= 2.0 for p in pauses if p)  # Retry-After, then our own
        assert mock.most_at_once <= 2

        mock.answer, mock.requests[:] = (lambda body: 500 if "f31" in _seen(body) else "Rating: 3"), []
        place = Endpoint(mock.url, "judge", retries=1, sleep=pauses.append)
        with pytest.raises(RunFailed, match="2 attempts"):
            judge_all(_task(tmp_path, mock, concurrency=1), {"first": FIRST}, tmp_path / "b", no_bar, place)
        kept = (tmp_path / "b" / JUDGEMENTS).read_text().splitlines()
        assert len(kept) == 4
        with (tmp_path / "b" / JUDGEMENTS).open("a") as file:
            file.write('{"key": "cut o')  # as a crash leaves it
        mock.answer, mock.requests[:] = (lambda _: "Rating: 9"), []
        place = Endpoint(mock.url, "judge", retries=1)  # the one before asks no more
        told = judge_all(task, {"first": FIRST}, tmp_path / "b", no_bar, place)
        assert len(mock.requests) == 1 and told["first"].figures[0].value == pytest.approx((3 + 3 + 9) / 3)
        judge_all(task, {"first": FIRST}, tmp_path / "b", no_bar, place)
        assert len(mock.requests) == 1


def test_what_the_endpoint_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with endpoint(lambda _: 401) as mock:
        with pytest.raises(UserError, match="status 401") as caught:
            Endpoint(mock.url, "judge", key="MY_KEY").ask([])
        assert "$MY_KEY" in str(caught.value) and len(mock.requests) == 1
        mock.answer = lambda _: "yes"
        monkeypatch.setenv("MY_KEY", "secret-7")
        assert Endpoint(f"{mock.url}/chat/completions/", "judge", key="MY_KEY").ask([]) == "yes"
        assert mock.headers[-1]["Authorization"] == "Bearer secret-7"
    with pytest.raises(RunFailed, match="1 attempt "):
        Endpoint(mock.url, "judge", retries=0).ask([])  # nobody is there any more
    for url, problem in (("nowhere", "no address"), ("http://me:pass@host/v1", "name or password")):
        with pytest.raises(UserError, match=problem) as caught:
            Endpoint(url, "judge")
        assert "pass@" not in str(caught.value)


def test_answers_are_kept_by_weights(loaded: Any, other: str, tmp_path: Path) -> None:
    from shardwise.export.inference import load_for_inference

    with endpoint(lambda _: "Rating: 5") as mock:
        task = _task(tmp_path, mock)
        said = collect_answers(task, "it", *loaded, tmp_path, no_bar)
        assert [len(v) for v in said.values()] == [2, 2, 1]
        lines = (tmp_path / "answers.jsonl").read_text()
        assert collect_answers(task, "same", *loaded, tmp_path, no_bar) == said
        assert (tmp_path / "answers.jsonl").read_text() == lines
        collect_answers(task, "it", *load_for_inference(other), tmp_path, no_bar)
        assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 6


def test_the_command(llama: str, other: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-8")
    with endpoint(lambda _: "Verdict: tie") as mock:
        tasks = [_task(tmp_path, mock, mode="pairwise")]
        evaluate([llama, other], tasks, tmp_path / "out", True)
        told = json.loads(capsys.readouterr().out)
        assert told["results"][other][0]["figures"]["tie"]["value"] == 5
        asked = len(mock.requests)
        evaluate([llama, other], tasks, tmp_path / "out", False)
        assert len(mock.requests) == asked and "tie" in capsys.readouterr().out
        with pytest.raises(UserError, match="pairs need two models"):
            evaluate([llama], tasks, tmp_path / "out", False)
        with pytest.raises(UserError, match="--output FOLDER"):
            evaluate([llama, other], tasks, None, False)
    everything = "".join(f.read_text() for f in (tmp_path / "out").iterdir() if f.is_file())
    assert "secret-8" not in everything
