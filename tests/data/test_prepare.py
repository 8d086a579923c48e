"""From sources to arrays in the cache: once, whole, counted, and apart from what is held out."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chat import chat_tokenizer
from support.tiny import CHATML

from shardwise.config.schema import Data
from shardwise.core.errors import UserError
from shardwise.data import prepare, tokenise
from shardwise.data.prepare import Prepared, prepare_data
from shardwise.data.store import TokenStore, fail

Write = Callable[..., str]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer(CHATML)


def qa(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def data(train: Any, **settings: Any) -> Data:
    return Data.model_validate({"train": train, "sequence_length": 64, **settings})


def documents(store: TokenStore) -> list[tuple[list[int], list[bool]]]:
    """Tokens and what is learned of each document."""
    found = []
    for chunk in range(store.wait()["chunks"]):
        for index in range(len(store.table(chunk))):
            tokens, learned = store.document(chunk, index)
            found.append((tokens.tolist(), learned.tolist()))
    return found


def trained(prepared: Prepared) -> list[tuple[list[int], list[bool]]]:
    return [d for source in prepared.train for d in documents(source.store)]


def evaluated(prepared: Prepared) -> list[tuple[list[int], list[bool]]]:
    held = [d for source in prepared.train for d in documents(source.held_out)]
    return held + [d for source in prepared.eval for d in documents(source.store)]


def texts(found: list[tuple[list[int], list[bool]]], tokenizer: Any) -> list[str]:
    return [tokenizer.decode(tokens) for tokens, _ in found]


def facts(prepared: Prepared, index: int = 0) -> dict[str, Any]:
    known = prepared.train[index].facts
    assert known is not None
    return known


def mistake(settings: Data, tokenizer: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        prepare_data(settings, tokenizer, 0)
    return caught.value


def test_documents_and_facts(write: Write, tokenizer: Any) -> None:
    chats = write("a.jsonl", [qa("q1", "a1"), qa("q2", "a2")])
    words = write("b.txt", "some text")
    prepared = prepare_data(data([chats, words]), tokenizer, 0)
    assert texts(trained(prepared), tokenizer) == [
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n",
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\na2<|im_end|>\n",
        "some text<|im_end|>",
    ]
    assert evaluated(prepared) == [] and prepared.complete
    first, second = facts(prepared), facts(prepared, 1)
    assert (first["rows"], first["documents"], second["documents"]) == (2, 2, 1)
    assert (first["format"], second["format"]) == ("chat", "text") and "messages" in first["reason"]
    everything = trained(prepared)
    assert first["tokens"] + second["tokens"] == sum(len(tokens) for tokens, _ in everything)
    assert first["supervised"] + second["supervised"] == sum(sum(learned) for _, learned in everything)
    assert max(first["largest_token"], second["largest_token"]) == max(max(tokens) for tokens, _ in everything)
    table = prepared.train[0].store.table(0)
    assert table["row"].tolist() == [0, 1] and table["supervised"].tolist() == [sum(x) for _, x in everything[:2]]


@pytest.mark.parametrize("length", [8, 9, 16, 64, 200, 201, 202])
def test_long_text_is_split_and_each_token_learned_once(write: Write, tokenizer: Any, length: int) -> None:
    text = "".join(chr(ord("a") + n * n % 26) for n in range(400))
    whole = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    prepared = prepare_data(data(write("a.txt", text), sequence_length=length), tokenizer, 0)
    pieces = trained(prepared)
    assert max(len(t) for t, _ in pieces) <= length and min(len(t) for t, _ in pieces) >= 2
    assert [t for tokens, learned in pieces for t, one in zip(tokens, learned, strict=True) if one] == whole[1:]
    assert not any(learned[0] for _, learned in pieces)
    # The first token of a piece is the last of the piece before it, which predicts the next.
    assert all(a[-1] == b[0] for (a, _), (b, _) in pairwise(pieces))
    assert facts(prepared)["supervised"] == len(whole) - 1


# --- too long ----------------------------------------------------------------------------------------------------


@pytest.fixture
def long_rows(write: Write) -> str:
    middle, longest = "word " * 30, "word " * 60
    return write("a.jsonl", [qa("q", "short"), qa("q", middle), qa("q", longest), qa(middle * 2, "never reached")])


def fates(prepared: Prepared) -> list[tuple[str, str]]:
    lines = (prepared.train[0].folder / "fates.jsonl").read_text().splitlines()
    return [(row["fate"], row["where"].rpartition(":")[2]) for row in map(json.loads, lines)]


def test_too_long_is_an_error_that_says_how_long(long_rows: str, tokenizer: Any) -> None:
    error = mistake(data(long_rows), tokenizer)
    assert (error.field, error.value) == ("data.train.0", f"{long_rows}:2")
    assert "more than data.sequence_length = 64" in error.problem and "2 more of the" in error.problem
    longest = int(error.problem.rpartition("up to ")[2].removesuffix(" tokens"))
    assert f"raise data.sequence_length to {longest}" in error.remedy
    assert facts(prepare_data(data(long_rows, sequence_length=longest), tokenizer, 0))["documents"] == 4
    assert "raise" in mistake(data(long_rows, sequence_length=longest - 1), tokenizer).remedy


def test_too_long_dropped(long_rows: str, tokenizer: Any) -> None:
    prepared = prepare_data(data(long_rows, over_length="drop"), tokenizer, 0)
    assert (facts(prepared)["rows"], facts(prepared)["documents"]) == (4, 1)
    assert facts(prepared)["fates"] == {"dropped": 3}
    assert fates(prepared) == [("dropped", "2"), ("dropped", "3"), ("dropped", "4")]


def test_too_long_truncated(long_rows: str, tokenizer: Any) -> None:
    prepared = prepare_data(data(long_rows, over_length="truncate"), tokenizer, 0)
    # Of the last row nothing that is learned is left: it counts as dropped, not as truncated.
    assert (facts(prepared)["documents"], facts(prepared)["fates"]) == (3, {"truncated": 2, "dropped": 1})
    assert [len(t) for t, _ in trained(prepared)][1:] == [64, 64]
    assert sorted(fates(prepared)) == [("dropped", "4"), ("truncated", "2"), ("truncated", "3")]


def test_too_long_split(long_rows: str, tokenizer: Any) -> None:
    whole = trained(prepare_data(data(long_rows, sequence_length=2000), tokenizer, 0))
    prepared = prepare_data(data(long_rows, over_length="split"), tokenizer, 0)
    assert facts(prepared)["fates"]["split"] == 3
    assert sum(sum(x) for _, x in trained(prepared)) == sum(sum(x) for _, x in whole), "learned once, and all of it"


def test_long_text_as_asked(write: Write, tokenizer: Any) -> None:
    path = write("a.txt", "word " * 500)
    assert facts(prepare_data(data(path), tokenizer, 0))["fates"] == {}
    assert facts(prepare_data(data(path, over_length="truncate"), tokenizer, 0))["fates"] == {"truncated": 1}
    assert "more than data.sequence_length" in mistake(data(path, over_length="error"), tokenizer).problem


def test_nothing_left(long_rows: str, write: Write, tokenizer: Any) -> None:
    error = mistake(data(long_rows, sequence_length=8, over_length="drop"), tokenizer)
    assert "none of its 4 rows has a token to learn (4 dropped)" in error.problem
    assert mistake(data(write("a.txt", "")), tokenizer).problem == "holds no rows"


def test_source_without_rows(write: Write, tokenizer: Any) -> None:
    good, empty = write("a.jsonl", [qa("q", "a")]), write("b.jsonl", "\n\n")
    for settings, field in [
        (data([good, empty]), "data.train.1"),
        (data(empty), "data.train.0"),
        (data(good, eval=[empty]), "data.eval.0"),
    ]:
        error = mistake(settings, tokenizer)
        assert (error.field, error.value, error.problem) == (field, empty, "holds no rows")


def test_bad_rows(write: Write, tokenizer: Any) -> None:
    path = write("a.jsonl", '{"messages": 3}\n{broken\n' + json.dumps(qa("q", "a")) + "\n")
    error = mistake(data(path), tokenizer)
    assert error.value in (f"{path}:1", f"{path}:2") and "on_bad_row: skip" in error.remedy
    prepared = prepare_data(data(path, on_bad_row="skip"), tokenizer, 0)
    assert facts(prepared)["fates"] == {"skipped": 2} and facts(prepared)["documents"] == 1
    assert fates(prepared) == [("skipped", "1"), ("skipped", "2")]


# --- evaluation --------------------------------------------------------------------------------------------------


@pytest.fixture
def many(write: Write) -> list[str]:
    return [write(f"{name}.jsonl", [{"text": f"{name} {n}"} for n in range(40)]) for name in ("x", "y")]


def test_held_out_rows(many: list[str], tokenizer: Any) -> None:
    first = prepare_data(data(many, eval="10%"), tokenizer, 0)
    train, held = set(texts(trained(first), tokenizer)), set(texts(evaluated(first), tokenizer))
    assert not train & held and len(train | held) == 80
    assert [facts(first, i)["held_out"] for i in (0, 1)] == [4, 4]
    assert [facts(first, i)["documents"] for i in (0, 1)] == [36, 36]
    assert {t[0] for t in held} == {"x", "y"}  # of each source its share


def test_held_out_rows_are_the_seeds(
    many: list[str], tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def held(seed: int, **settings: Any) -> list[str]:
        return texts(evaluated(prepare_data(data(many, eval="10%", **settings), tokenizer, seed)), tokenizer)

    first = held(0)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "other"))
    assert held(0) == first and held(0, sequence_length=32) == first and held(1) != first


@pytest.mark.parametrize(("share", "count"), [("1%", 1), ("50%", 20), ("99.9%", 39)])
def test_at_least_one_row_on_either_side(many: list[str], tokenizer: Any, share: str, count: int) -> None:
    prepared = prepare_data(data(many[0], eval=share), tokenizer, 0)
    assert facts(prepared)["held_out"] == count and facts(prepared)["documents"] == 40 - count


@pytest.mark.parametrize("share", [0.001, 0.02, 0.1, 1 / 3, 0.37, 0.5, 0.9])
def test_the_share_is_kept_at_any_place(share: float) -> None:
    spec = tokenise.Spec("data.train.0", 0, data("x").train[0], data("x"), 5, share)
    chosen = np.array([tokenise.held_out(row, spec) for row in range(20_000)])
    ends = np.cumsum(chosen)
    expected = share * np.arange(1, 20_001)
    assert np.abs(ends - expected).max() <= 2, "in every stretch of rows, not only over all"


def test_pieces_of_a_text_stay_on_one_side(write: Write, tokenizer: Any) -> None:
    paths = [write(f"texts/{c}.txt", c * 300) for c in "ab"]
    prepared = prepare_data(data(str(Path(paths[0]).parent), eval="50%", sequence_length=16), tokenizer, 0)
    assert len(set("".join(texts(trained(prepared), tokenizer))) & set("ab")) == 1


def test_evaluation_with_sources_of_its_own(many: list[str], tokenizer: Any) -> None:
    prepared = prepare_data(data(many[0], eval=many[1]), tokenizer, 0)
    assert facts(prepared)["documents"] == 40 and facts(prepared)["held_out"] == 0
    assert len(evaluated(prepared)) == 40 and all(t.startswith("y") for t in texts(evaluated(prepared), tokenizer))


def test_nothing_to_hold_out(write: Write, tokenizer: Any) -> None:
    error = mistake(data(write("book.txt", "word " * 900), eval="2%"), tokenizer)
    assert (error.field, error.value) == ("data.eval", 0.02) and "single row" in error.problem


# --- the cache ---------------------------------------------------------------------------------------------------


@pytest.fixture
def renderings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by one whenever a source is tokenised."""
    made: list[str] = []
    real = tokenise.ChunkMaker

    def counted(reader: Any, *args: Any) -> Any:
        made.append(reader.spec.field)
        return real(reader, *args)

    monkeypatch.setattr(tokenise, "ChunkMaker", counted)
    return made


def test_the_second_call_tokenises_nothing(write: Write, tokenizer: Any, renderings: list[str]) -> None:
    path, said = write("a.jsonl", [qa("q", "a")]), []
    first = prepare_data(data(path), tokenizer, 0, said.append)
    second = prepare_data(data(path), tokenizer, 0, said.append)
    assert renderings == ["data.train.0"] and said == ["reading and tokenising the data"]
    assert trained(first) == trained(second) and first.fingerprint == second.fingerprint
    assert facts(first) == facts(second)


def test_a_changed_file_is_noticed(write: Write, tokenizer: Any, renderings: list[str]) -> None:
    path = write("a.jsonl", [qa("q", "a")])
    first = prepare_data(data(path), tokenizer, 0)
    write("a.jsonl", [qa("q", "b")])  # as long as before
    second = prepare_data(data(path), tokenizer, 0)
    assert len(renderings) == 2 and first.fingerprint != second.fingerprint
    assert "b<|im_end|>" in texts(trained(second), tokenizer)[0]


def test_a_new_file_of_a_pattern_is_noticed(write: Write, tokenizer: Any) -> None:
    pattern = str(Path(write("d/a.txt", "one")).parent / "*.txt")
    assert len(trained(prepare_data(data(pattern), tokenizer, 0))) == 1
    write("d/b.txt", "two")
    assert len(trained(prepare_data(data(pattern), tokenizer, 0))) == 2


def test_everything_that_shapes_the_tokens_is_in_the_key(write: Write, tokenizer: Any, renderings: list[str]) -> None:
    path = write("a.jsonl", [qa("q", "a"), qa("q2", "a2")])
    other = chat_tokenizer(CHATML.replace("m['role'] + '\n'", "m['role'] + '\n\n'"))
    variants = [
        (data(path), tokenizer, 0),
        (data(path), other, 0),
        (data(path), chat_tokenizer(CHATML, bos="<s>"), 0),
        (data(path), chat_tokenizer(CHATML, kind="pieces"), 0),
        (data(path, sequence_length=65), tokenizer, 0),
        (data(path, loss_on="all"), tokenizer, 0),
        (data(path, over_length="drop"), tokenizer, 0),
        (data(path, eval="50%"), tokenizer, 0),
        (data(path, eval="50%"), tokenizer, 1),
        (data(path, refine={"min_tokens": 2}), tokenizer, 0),
        (data({"path": path, "format": "chat"}), tokenizer, 0),
        (data(path, on_bad_row="skip"), tokenizer, 0),
    ]
    prints = [prepare_data(*variant).fingerprint for variant in variants]
    assert len(renderings) == len(variants) and len(set(prints)) == len(variants)
    # An evaluation file, another seed without a share held out: the training tokens are shared, the order is not.
    prepare_data(data(path, eval=path), tokenizer, 0)
    seeded = prepare_data(data(path), tokenizer, 1)
    assert len(renderings) == len(variants) and seeded.fingerprint not in prints


def test_packing_shares_the_tokens_but_not_the_fingerprint(write: Write, tokenizer: Any, renderings: list[str]) -> None:
    path = write("a.jsonl", [qa("q", "a")])
    packed, plain = (prepare_data(data(path, packing=p), tokenizer, 0).fingerprint for p in (True, False))
    assert packed != plain and len(renderings) == 1


def test_a_mistake_is_told_again_and_mended(write: Write, tokenizer: Any) -> None:
    path = write("a.jsonl", [qa("q", "a"), {"nothing": 1}])
    assert mistake(data(path), tokenizer).value == mistake(data(path), tokenizer).value == f"{path}:2"
    write("a.jsonl", [qa("q", "a")])
    assert len(trained(prepare_data(data(path), tokenizer, 0))) == 1


def _prepare_slowly(path: str, log: str, barrier: Any, answers: Any) -> None:
    real = tokenise.ChunkMaker.__call__

    def slow(self: Any, task: Any) -> Any:
        with open(log, "a") as f:
            f.write("tokenised\n")
        time.sleep(0.5)
        return real(self, task)

    tokenise.ChunkMaker.__call__ = slow  # type: ignore[method-assign]
    barrier.wait(20)
    result = prepare_data(data(path), chat_tokenizer(CHATML), 0)
    answers.put(json.dumps(trained(result)))


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
    assert first == second == json.dumps(trained(prepare_data(data(path), tokenizer, 0)))
    assert Path(log).read_text() == "tokenised\n"  # the other waited


# --- a process of its own ----------------------------------------------------------------------------------------


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any size of data is tokenised by a process of its own, in small chunks."""
    monkeypatch.setattr(prepare, "INLINE", -1)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_process_of_its_own_makes_the_same(
    write: Write, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int
) -> None:
    path = write("a.jsonl", [qa(f"q{n}", f"a{n}") for n in range(5000)])
    said: list[tuple[int, int, int | None, int]] = []
    settings = data(path, eval="10%", workers=workers)
    apart = prepare_data(settings, tokenizer, 0, progress=lambda *figures: said.append(figures))
    assert len({told for told in said if told[1]}) == apart.train[0].store.wait()["chunks"] > 1, (
        "told again only while one takes long"
    )
    assert said[-1] == (0, 5000, 5000, facts(apart)["tokens"]) and said[0][1] < 5000
    monkeypatch.setattr(prepare, "INLINE", 1 << 30)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "inline"))
    inline = prepare_data(settings, tokenizer, 0)
    assert trained(inline) == trained(apart) and evaluated(inline) == evaluated(apart)
    assert inline.fingerprint == apart.fingerprint


@pytest.mark.usefixtures("apart")
def test_a_mistake_in_a_process_of_its_own(write: Write, tokenizer: Any) -> None:
    path = write("a.jsonl", [qa("q", "a")] * 3000 + [{"messages": []}])
    assert mistake(data(path), tokenizer).value == f"{path}:3001"
    assert mistake(data(path), tokenizer).value == f"{path}:3001", "and again, from what is there"
    write("a.jsonl", [qa("q", "a")] * 3000)
    assert len(trained(prepare_data(data(path), tokenizer, 0))) == 3000


@pytest.mark.usefixtures("apart")
def test_a_run_can_begin_with_the_first_window(write: Write, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("a.jsonl", [qa(f"q{n}", f"a{n}") for n in range(60_000)])
    prepared = prepare_data(data(path, packing_window=100, workers=1), tokenizer, 0, early=True)
    assert prepared.train[0].store.has(0) and not prepared.complete
    prepared.wait()
    assert prepared.complete and facts(prepared)["documents"] == 60_000


# --- model and data ----------------------------------------------------------------------------------------------


def test_a_token_without_an_embedding(write: Write, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = data(write("a.jsonl", [qa("q", "a")]), eval=write("b.txt", "zz 🙂"))
    prepared = prepare_data(settings, tokenizer, 0)
    largest = max(max(tokens) for tokens, _ in trained(prepared) + evaluated(prepared))
    prepare_data(settings, tokenizer, 0, vocabulary=largest + 1)
    for fresh in (False, True):  # found in the cache, and while it is made
        if fresh:
            monkeypatch.setenv("SHARDWISE_CACHE", str(Path(settings.train[0].path).parent / "fresh"))
        with pytest.raises(UserError) as caught:
            prepare_data(settings, tokenizer, 0, vocabulary=largest)
        assert caught.value.field == "model.tokenizer" and "vocab_size" in caught.value.remedy


def test_chats_need_a_template_and_texts_do_not(write: Write) -> None:
    bare = chat_tokenizer(None)
    error = mistake(data(write("a.jsonl", [qa("q", "a")])), bare)
    assert error.field == "model.tokenizer" and "no chat template" in error.problem
    assert len(trained(prepare_data(data(write("a.txt", "words")), bare, 0))) == 1


def test_litter_of_dead_processes_goes(tokenizer: Any, write: Write, cache: Path) -> None:
    """What is done of a source stays, and so does the work of one that holds its lock."""
    from filelock import FileLock

    key, busy = "a" * 24, "b" * 24
    root = cache / "data"
    names = [f"tokenise-{key}-x", f"refine-{key}-y", f"tokenise-{busy}-z", key, "tokenise-new"]
    for name in names:
        (root / name).mkdir(parents=True)
    long_ago = time.time() - 3600
    for name in names:
        os.utime(root / name, (long_ago, long_ago))
    (root / f"tokenise-{key}-new").mkdir()
    with FileLock(root / f"{busy}.lock"):
        prepare_data(data(write("a.jsonl", [qa("q", "a")] * 3)), tokenizer, 0)
    left = {p.name for p in root.iterdir() if p.is_dir()}
    assert names[2] in left and key in left and f"tokenise-{key}-new" in left
    assert not {names[0], names[1]} & left


def test_ctrl_c_ends_the_process_that_tokenises(
    tokenizer: Any, write: Write, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "INLINE", 0)
    monkeypatch.setattr(prepare, "_follow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare_data(data(write("a.jsonl", [qa("q", "a")] * 3)), tokenizer, 0)
    assert not [p for p in (cache / "data").glob("*-*") if p.is_dir()]


def test_last_words_of_a_process_are_heard(tmp_path: Path) -> None:
    """It says why it fails and goes while a reader looks: that is not a death without a reason."""

    def goes() -> bool:
        fail(tmp_path, UserError("data.train.0", "a.jsonl:3", "is bad", "mend it"))
        return False

    with pytest.raises(UserError, match="is bad"):
        TokenStore(tmp_path, goes).ready(0)


def test_ranks_are_handed_what_the_launcher_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank reads no byte of the sources: the launcher has hashed and counted them."""
    from support.tiny import tiny_run, tokenizer_folder

    from shardwise.config.load import load_run
    from shardwise.foresight.prepare import prepare_run, read_resolved_run, write_resolved_run

    tokenizer_folder(tmp_path / "tokenizer")
    run = tiny_run(tmp_path, data__temperature=2.0)
    rows = run["data"]["train"]
    run["data"]["train"] = [{"path": rows, "weight": 1.0}, {"path": rows, "name": "again", "weight": 3.0}]
    job = prepare_run(load_run(run))
    write_resolved_run(job, tmp_path / "job.json")
    for name in ("content_digest", "count_rows"):
        monkeypatch.setattr(prepare, name, lambda *_: pytest.fail("the sources are read again"))
    again = read_resolved_run(tmp_path / "job.json")
    assert again.data.fingerprint == job.data.fingerprint and again.data.counts == job.data.counts
    assert again.data.counts[0] is not None
