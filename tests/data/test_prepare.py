"""From sources to arrays in the cache: once, whole, counted, and apart from what is held out."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chat import chat_tokenizer
from support.tiny import CHATML

from shardwise.config.schema import Data
from shardwise.data import prepare
from shardwise.data.prepare import Corpus, Prepared, check_vocabulary, prepare_data
from shardwise.errors import UserError

Write = Callable[..., str]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer(CHATML)


def qa(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def data(train: Any, **settings: Any) -> Data:
    return Data.model_validate({"train": train, "sequence_length": 64, **settings})


def texts(corpus: Corpus | None, tokenizer: Any) -> list[str]:
    assert corpus is not None
    return [tokenizer.decode(corpus.tokens[a:b]) for a, b in zip(corpus.starts, corpus.starts[1:], strict=False)]


def mistake(settings: Data, tokenizer: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        prepare_data(settings, tokenizer, 0)
    return caught.value


def test_documents_and_bill(write: Write, tokenizer: Any) -> None:
    chats = write("a.jsonl", [qa("q1", "a1"), qa("q2", "a2")])
    words = write("b.txt", "some text")
    prepared = prepare_data(data([chats, words]), tokenizer, 0)
    assert texts(prepared.train, tokenizer) == [
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n",
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\na2<|im_end|>\n",
        "some text<|im_end|>",
    ]
    assert prepared.eval is None and prepared.train.source.tolist() == [0, 0, 1]
    first, second = prepared.bills
    assert (first.path, first.rows, first.documents, second.documents) == (chats, 2, 2, 1)
    assert first.tokens + second.tokens == len(prepared.train.tokens) == prepared.train.lengths.sum()
    assert prepared.train.supervised.tolist() == [
        prepared.train.learned[a:b].sum()
        for a, b in zip(prepared.train.starts, prepared.train.starts[1:], strict=False)
    ]
    assert first.supervised + second.supervised == prepared.train.supervised.sum()
    assert prepared.largest_token == prepared.train.tokens.max()


@pytest.mark.parametrize("length", [8, 9, 16, 64, 200, 201, 202])
def test_long_text_is_split_and_each_token_learned_once(write: Write, tokenizer: Any, length: int) -> None:
    text = "".join(chr(ord("a") + n * n % 26) for n in range(400))
    whole = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    prepared = prepare_data(data(write("a.txt", text), sequence_length=length), tokenizer, 0)
    corpus = prepared.train
    assert corpus.lengths.max() <= length and corpus.lengths.min() >= 2
    assert corpus.tokens[corpus.learned].tolist() == whole[1:]
    assert not corpus.learned[corpus.starts[:-1]].any()
    # The first token of a piece is the last of the piece before it, which predicts the next.
    assert [corpus.tokens[s] for s in corpus.starts[1:-1]] == [corpus.tokens[s - 1] for s in corpus.starts[1:-1]]
    assert prepared.bills[0].supervised == len(whole) - 1


# --- too long ----------------------------------------------------------------------------------------------------


@pytest.fixture
def long_rows(write: Write) -> str:
    middle, longest = "word " * 30, "word " * 60
    return write("a.jsonl", [qa("q", "short"), qa("q", middle), qa("q", longest), qa(middle * 2, "never reached")])


def test_too_long_is_an_error_that_says_how_long(long_rows: str, tokenizer: Any) -> None:
    error = mistake(data(long_rows), tokenizer)
    assert (error.field, error.value) == ("data.train.0", f"{long_rows}:2")
    assert "more than data.sequence_length = 64" in error.problem and "so do 2 more" in error.problem
    longest = int(error.problem.rpartition("with ")[2].rstrip(")"))
    assert f"raise data.sequence_length to {longest}" in error.remedy
    assert prepare_data(data(long_rows, sequence_length=longest), tokenizer, 0).bills[0].documents == 4
    assert "raise" in mistake(data(long_rows, sequence_length=longest - 1), tokenizer).remedy


def test_too_long_dropped(long_rows: str, tokenizer: Any) -> None:
    prepared = prepare_data(data(long_rows, over_length="drop"), tokenizer, 0)
    (bill,) = prepared.bills
    assert (bill.rows, bill.documents, bill.dropped, bill.truncated) == (4, 1, 3, 0)


def test_too_long_truncated(long_rows: str, tokenizer: Any) -> None:
    prepared = prepare_data(data(long_rows, over_length="truncate"), tokenizer, 0)
    (bill,) = prepared.bills
    # Of the last row nothing that is learned is left: it counts as dropped, not as truncated.
    assert (bill.rows, bill.documents, bill.dropped, bill.truncated) == (4, 3, 1, 2)
    assert prepared.train.lengths.tolist()[1:] == [64, 64]


def test_text_is_never_too_long(write: Write, tokenizer: Any) -> None:
    assert prepare_data(data(write("a.txt", "word " * 500), over_length="error"), tokenizer, 0).bills[0].truncated == 0


def test_nothing_left(long_rows: str, write: Write, tokenizer: Any) -> None:
    assert (
        "no example to train on" in mistake(data(long_rows, sequence_length=8, over_length="drop"), tokenizer).problem
    )
    assert "no example to train on" in mistake(data(write("a.txt", "")), tokenizer).problem


def test_source_without_rows(write: Write, tokenizer: Any) -> None:
    good, empty = write("a.jsonl", [qa("q", "a")]), write("b.jsonl", "\n\n")
    for settings, field in [
        (data([good, empty]), "data.train.1"),
        (data(empty), "data.train.0"),
        (data(good, eval=[empty]), "data.eval.0"),
    ]:
        error = mistake(settings, tokenizer)
        assert (error.field, error.value, error.problem) == (field, empty, "holds no rows")


# --- evaluation --------------------------------------------------------------------------------------------------


@pytest.fixture
def many(write: Write) -> list[str]:
    return [write(f"{name}.jsonl", [{"text": f"{name} {n}"} for n in range(40)]) for name in ("x", "y")]


def test_held_out_rows(many: list[str], tokenizer: Any) -> None:
    first = prepare_data(data(many, eval="10%"), tokenizer, 0)
    train, held = set(texts(first.train, tokenizer)), set(texts(first.eval, tokenizer))
    assert not train & held and len(train | held) == 80
    assert [b.held_out for b in first.bills] == [4, 4] and [b.documents for b in first.bills] == [36, 36]
    assert {t[0] for t in held} == {"x", "y"}  # of each source its share
    assert first.eval is not None and first.eval.source.tolist() == [0] * 4 + [1] * 4


def test_held_out_rows_are_the_seeds(
    many: list[str], tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def held(seed: int, **settings: Any) -> list[str]:
        return texts(prepare_data(data(many, eval="10%", **settings), tokenizer, seed).eval, tokenizer)

    first = held(0)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "other"))
    assert held(0) == first and held(0, sequence_length=32) == first and held(1) != first


@pytest.mark.parametrize(("share", "count"), [("1%", 1), ("50%", 20), ("99.9%", 39)])
def test_at_least_one_row_on_either_side(many: list[str], tokenizer: Any, share: str, count: int) -> None:
    prepared = prepare_data(data(many[0], eval=share), tokenizer, 0)
    assert prepared.bills[0].held_out == count and len(prepared.train) == 40 - count


def test_pieces_of_a_text_stay_on_one_side(write: Write, tokenizer: Any) -> None:
    paths = [write(f"{c}.txt", c * 300) for c in "ab"]
    prepared = prepare_data(data(str(Path(paths[0]).parent), eval="50%", sequence_length=16), tokenizer, 0)
    assert len(set("".join(texts(prepared.train, tokenizer))) & set("ab")) == 1


def test_evaluation_with_sources_of_its_own(many: list[str], tokenizer: Any) -> None:
    prepared = prepare_data(data(many[0], eval=many[1]), tokenizer, 0)
    assert len(prepared.train) == 40 and prepared.bills[0].held_out == 0
    assert all(t.startswith("y") for t in texts(prepared.eval, tokenizer))
    assert prepared.eval_bills[0].documents == 40 and prepared.eval_bills[0].tokens == prepared.eval.lengths.sum()


def test_nothing_to_hold_out(write: Write, tokenizer: Any) -> None:
    error = mistake(data(write("book.txt", "word " * 900), eval="2%"), tokenizer)
    assert (error.field, error.value) == ("data.eval", 0.02) and "single row" in error.problem


# --- the cache ---------------------------------------------------------------------------------------------------


@pytest.fixture
def renderings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by one whenever a source is tokenised."""
    made: list[str] = []
    real = prepare.render_rows

    def counted(rows: Any, tokenizer: Any, loss_on: str, field: str) -> Iterator[Any]:
        made.append(field)
        return real(rows, tokenizer, loss_on, field)

    monkeypatch.setattr(prepare, "render_rows", counted)
    return made


def arrays(prepared: Prepared) -> list[Any]:
    return [a.tolist() for a in (prepared.train.tokens, prepared.train.learned, prepared.train.starts)]


def test_the_second_call_tokenises_nothing(write: Write, tokenizer: Any, renderings: list[str]) -> None:
    path, said = write("a.jsonl", [qa("q", "a")]), []
    first = prepare_data(data(path), tokenizer, 0, said.append)
    second = prepare_data(data(path), tokenizer, 0, said.append)
    assert renderings == ["data.train.0"] and said == ["reading and tokenising the data"]
    assert arrays(first) == arrays(second) and first.fingerprint == second.fingerprint
    assert first.bills == second.bills


def test_a_changed_file_is_noticed(write: Write, tokenizer: Any, renderings: list[str]) -> None:
    path = write("a.jsonl", [qa("q", "a")])
    first = prepare_data(data(path), tokenizer, 0)
    write("a.jsonl", [qa("q", "b")])  # as long as before
    second = prepare_data(data(path), tokenizer, 0)
    assert len(renderings) == 2 and first.fingerprint != second.fingerprint
    assert "b<|im_end|>" in texts(second.train, tokenizer)[0]


def test_a_new_file_of_a_pattern_is_noticed(write: Write, tokenizer: Any) -> None:
    pattern = str(Path(write("d/a.txt", "one")).parent / "*.txt")
    assert len(prepare_data(data(pattern), tokenizer, 0).train) == 1
    write("d/b.txt", "two")
    assert len(prepare_data(data(pattern), tokenizer, 0).train) == 2


def test_everything_that_shapes_the_tokens_is_in_the_key(write: Write, tokenizer: Any, renderings: list[str]) -> None:
    path = write("a.jsonl", [qa("q", "a"), qa("q2", "a2")])
    other = chat_tokenizer(CHATML.replace("m['role'] + '\n'", "m['role'] + '\n\n'"))
    variants = [
        (data(path), tokenizer, 0),
        (data(path), tokenizer, 1),
        (data(path), other, 0),
        (data(path), chat_tokenizer(CHATML, bos="<s>"), 0),
        (data(path), chat_tokenizer(CHATML, kind="pieces"), 0),
        (data(path, sequence_length=65), tokenizer, 0),
        (data(path, loss_on="all"), tokenizer, 0),
        (data(path, over_length="drop"), tokenizer, 0),
        (data(path, eval="50%"), tokenizer, 0),
        (data(path, eval=path), tokenizer, 0),
    ]
    assert len({prepare._key(*variant) for variant in variants}) == len(variants)
    prints = [prepare_data(*variant).fingerprint for variant in variants]
    assert len(renderings) == len(variants) + 1
    # The fingerprint speaks of the training sequences: a rule that met no row, or an evaluation file, changes none.
    same = [index for index, one in enumerate(prints) if one == prints[0]]
    assert same == [0, 3, 7, 9]


def test_packing_shares_the_tokens_but_not_the_fingerprint(write: Write, tokenizer: Any, renderings: list[str]) -> None:
    path = write("a.jsonl", [qa("q", "a")])
    packed, plain = (prepare_data(data(path, packing=p), tokenizer, 0).fingerprint for p in (True, False))
    assert packed != plain and len(renderings) == 1


def test_a_mistake_leaves_nothing_in_the_cache(write: Write, tokenizer: Any, cache: Path) -> None:
    path = write("a.jsonl", [qa("q", "a"), {"nothing": 1}])
    mistake(data(path), tokenizer)
    assert [p for p in (cache / "data").iterdir() if p.suffix != ".lock"] == []
    write("a.jsonl", [qa("q", "a")])
    assert len(prepare_data(data(path), tokenizer, 0).train) == 1


def test_a_broken_off_attempt_is_replaced(write: Write, tokenizer: Any, cache: Path) -> None:
    path = write("a.jsonl", [qa("q", "a")])
    key = prepare._key(data(path), tokenizer, 0)
    left_over = cache / "data" / f"{key}.partial"
    left_over.mkdir(parents=True)
    (left_over / "bill.json").write_text("{")
    assert len(prepare_data(data(path), tokenizer, 0).train) == 1 and not left_over.exists()


def _prepare_slowly(path: str, log: str, barrier: Any, answers: Any) -> None:
    real = prepare.render_rows

    def slow(*args: Any) -> Iterator[Any]:
        with open(log, "a") as f:
            f.write("tokenised\n")
        time.sleep(0.5)
        return real(*args)

    prepare.render_rows = slow
    barrier.wait(20)
    result = prepare_data(data(path), chat_tokenizer(CHATML), 0)
    answers.put(json.dumps(arrays(result)))


def test_two_processes_at_once(write: Write, tmp_path: Path, tokenizer: Any) -> None:
    path, log = write("a.jsonl", [qa(f"q{n}", f"a{n}") for n in range(50)]), str(tmp_path / "log")
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(2), context.SimpleQueue()
    children = [context.Process(target=_prepare_slowly, args=(path, log, barrier, answers)) for _ in range(2)]
    for child in children:
        child.start()
    first, second = answers.get(), answers.get()
    for child in children:
        child.join(20)
    assert [child.exitcode for child in children] == [0, 0]
    assert first == second == json.dumps(arrays(prepare_data(data(path), tokenizer, 0)))
    assert Path(log).read_text() == "tokenised\n"  # the other waited


# --- model and data ----------------------------------------------------------------------------------------------


def test_a_token_without_an_embedding(write: Write, tokenizer: Any) -> None:
    prepared = prepare_data(data(write("a.jsonl", [qa("q", "a")]), eval=write("b.txt", "zz 🙂")), tokenizer, 0)
    assert prepared.eval is not None
    largest = int(max(np.max(prepared.train.tokens), np.max(prepared.eval.tokens)))
    check_vocabulary(prepared, largest + 1, "t")
    with pytest.raises(UserError) as caught:
        check_vocabulary(prepared, largest, "folder")
    assert (caught.value.field, caught.value.value) == ("model.tokenizer", "folder")
    assert "vocab_size" in caught.value.remedy


def test_chats_need_a_template_and_texts_do_not(write: Write) -> None:
    bare = chat_tokenizer(None)
    error = mistake(data(write("a.jsonl", [qa("q", "a")])), bare)
    assert error.field == "model.tokenizer" and "no chat template" in error.problem
    assert len(prepare_data(data(write("a.txt", "words")), bare, 0).train) == 1
