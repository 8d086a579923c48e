"""What `data.refine` leaves out: passages of the eval sources, filtered rows, lengths; settings that make no sense."""

from __future__ import annotations

import pickle
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpus import documents, edited, examples

from shardwise.config.load import load_run
from shardwise.config.schema import Refine
from shardwise.core.errors import UserError
from shardwise.data.examples import BadRow, Document, Example, Raw
from shardwise.data.refine import EvalNgrams, RowRules, length_fate

PASSAGE = "the quick brown fox jumps over the lazy dog again"


def passages(folder: Path, words: int, *texts: str) -> EvalNgrams:
    made = EvalNgrams.from_examples(examples(list(texts), "eval.jsonl"), words, folder / "passages")
    return pickle.loads(pickle.dumps(made))  # as in a worker


def text(value: str) -> Example:
    return Example("t:1", 0, "text", text=value)


def test_a_passage_is_found_whatever_its_case_and_punctuation(tmp_path: Path) -> None:
    found = passages(tmp_path, 8, "unrelated words in another row of this evaluation file", f"Before it. {PASSAGE}!")
    assert (
        found.hit(text("So: THE quick, brown fox — jumps over the 'lazy' dog"))
        == "8 words in a row are in eval.jsonl:2"
    )
    assert found.hit(text("the quick brown fox jumps over a lazy dog again")) is None
    assert found.hit(text("jumps over the lazy dog")) is None
    assert found.hit(text("")) is None


def test_who_says_it_does_not_matter_but_system_prompts_do_not_count(tmp_path: Path) -> None:
    ask = Example("e:1", 0, "chat", messages=({"role": "user", "content": PASSAGE},))
    prompt = {"role": "system", "content": "You are a careful and honest helper to all people"}
    system = Example("e:2", 1, "chat", messages=(prompt, *ask.messages))
    found = EvalNgrams.from_examples([ask, system], 8, tmp_path / "p")
    said = Example("t:1", 0, "chat", messages=({"role": "assistant", "content": PASSAGE},))
    assert found.hit(said) == "8 words in a row are in e:1"
    assert found.hit(text("You are a careful and honest helper to all people")) is None
    assert found.hit(Example("t:2", 1, "pair", prompt="x the quick brown fox", text="jumps over the lazy dog"))
    prefers = Example(
        "t:3", 2, "preference", messages=(), chosen=({"content": "no"},), rejected=({"content": PASSAGE},)
    )
    assert found.hit(prefers)


def test_short_eval_rows_are_found_whole_only(tmp_path: Path) -> None:
    found = passages(tmp_path, 8, "What is 2 + 2?", "", "Yes.")
    assert found.hit(text("what is 2 2")) == "all its words are in eval.jsonl:1"
    assert found.hit(text("What is 2 + 2? It is 4, of course, as everyone knows.")) is None
    assert found.hit(text("Yes")) and not found.hit(text("Yes yes")) and not found.hit(text(""))


def test_no_eval_rows(tmp_path: Path) -> None:
    assert passages(tmp_path, 5).hit(text(PASSAGE)) is None


@pytest.mark.parametrize("words", [9, 13])
def test_passages_against_a_plain_search(tmp_path: Path, words: int) -> None:
    draw = random.Random(8)
    held = documents(120, 3)
    train = documents(300, 4)
    for index in range(0, 300, 3):
        taken = draw.choice(held).split()
        begin = draw.randrange(len(taken))
        train[index] += " " + edited(" ".join(taken[begin : begin + draw.randint(3, 30)]), 0.02, draw)

    def grams(value: str) -> set[tuple[str, ...]]:
        found = re.findall("[a-z0-9]+", value.lower())
        return {tuple(found[i : i + words]) for i in range(len(found) - words + 1)}

    every = set().union(*map(grams, held))
    expected = [not every.isdisjoint(grams(value)) for value in train]
    hits = passages(tmp_path, words, *held).hits(examples(train))
    assert [hit is not None for hit in hits] == expected
    assert 20 < sum(expected) < 300
    for value, hit in zip(train, hits, strict=True):  # the row that is named has the passage
        if hit is not None:
            row = int(hit.rpartition(":")[2]) - 1
            assert not grams(held[row]).isdisjoint(grams(value))


def test_rules_say_which_rows_go_and_why(tmp_path: Path) -> None:
    rules = RowRules(Refine(filter="score > 1", decontaminate=8), passages(tmp_path, 8, PASSAGE))
    rows = [{"score": 5}, {"score": 0}, {"score": 3}, {"score": "3"}]
    said = ["fine", "fine", PASSAGE, PASSAGE]
    pairs = [(Raw(f"a:{i}", i, r), Example(f"a:{i}", i, "text", text=t)) for i, (r, t) in enumerate(zip(rows, said))]  # noqa: B905
    fates = pickle.loads(pickle.dumps(rules)).judge(pairs)
    assert fates[:3] == [None, ("filtered", "score > 1"), ("contaminated", "8 words in a row are in eval.jsonl:1")]
    assert isinstance(fates[3], BadRow) and fates[3].where == "a:3" and "float(score)" in fates[3].remedy
    assert RowRules(Refine()).judge(pairs) == [None] * 4


@pytest.mark.parametrize(
    ("length", "fate"), [(0, "too short"), (9, "too short"), (10, None), (20, None), (21, "too long")]
)
def test_lengths(length: int, fate: str | None) -> None:
    document = Document("a:1", 0, np.zeros(length, dtype=np.int64), np.ones(length, dtype=bool))
    found = length_fate(document, Refine(min_tokens=10, max_tokens=20))
    assert (found and found.fate) == fate
    assert found is None or f"{length} tokens" in found.reason
    assert length_fate(document, Refine()) is None


@pytest.mark.parametrize(
    ("refine", "field", "problem"),
    [
        ({"min_tokens": 9, "max_tokens": 3}, "max_tokens", "below min_tokens"),
        ({"similarity": 0.9}, "similarity", "no effect"),
        ({"duplicates": "exact", "similarity": 0.9}, "similarity", "no effect"),
        ({"duplicates": "near", "similarity": 0.3}, "similarity", "at least 0.5"),
        ({"duplicates": "near", "similarity": 1.1}, "similarity", "at most 1"),
        ({"duplicates": "all"}, "duplicates", "'keep', 'exact' or 'near'"),
        ({"decontaminate": 8}, "decontaminate", "data.eval names none"),
        ({"filter": "len("}, "filter", "not an expression"),
        ({"filter": ""}, "filter", "is empty"),
    ],
)
def test_settings_that_make_no_sense(refine: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        load_run({"model": "smollm2-135m-instruct", "data": {"train": "a.jsonl", "refine": refine}})
    section = "advanced.data" if field == "similarity" else "data.refine"
    assert caught.value.field == f"{section}.{field}" and problem in str(caught.value)


def test_settings_that_do() -> None:
    data = {
        "train": "a.jsonl",
        "eval": "b.jsonl",
        "refine": {"decontaminate": 8, "duplicates": "near", "similarity": 0.7},
    }
    run = load_run({"model": "smollm2-135m-instruct", "data": data}).run
    again = load_run(run.model_dump(mode="json")).run  # as a checkpoint keeps it
    assert again.data.refine == run.data.refine and run.data.refine.decontaminate == 8
