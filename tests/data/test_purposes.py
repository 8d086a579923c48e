"""Rows for encoder–decoders, masked models and classifiers: their tokens, their lengths, their classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from support.encoders import make_tokenizer

from shardwise.config.schema import Data, Source
from shardwise.core.errors import UserError
from shardwise.data.examples import BadRow, Document, Example, Raw, RowOutcomes
from shardwise.data.formats import detect, understand
from shardwise.data.labels import class_of, collect_labels, label_name, ordered
from shardwise.data.prepare import prepare_data
from shardwise.data.render import Renderer
from shardwise.data.row_renderers import note_of, read_and_learned
from shardwise.data.tokenise import Spec, fit

tokenizer_of = cache(make_tokenizer)
LONG = "Sharding divides what every rank would otherwise hold whole, and gathers it again when it is needed. " * 6


def render(kind: str, purpose: Any, *examples: Example, labels: tuple[str, ...] = ()) -> list[Document | BadRow]:
    renderer = Renderer(tokenizer_of(kind), "assistant", "data.train.0", purpose, labels)
    return list(renderer.render(examples))


def fitted(
    kind: str, purpose: Any, limit: int, over: str | None, document: Document
) -> tuple[list[Document], RowOutcomes]:
    spec = Spec("data.train.0", 0, Source(path="x"), Data(train="x", sequence_length=limit, over_length=over), 0, 0.0,
                purpose=purpose)  # fmt: skip
    fates, refused = RowOutcomes(), []
    renderer = Renderer(tokenizer_of(kind), "assistant", "data.train.0", purpose)
    pieces = fit(document, False, spec, fates, refused, renderer)
    for one in refused:
        fates.add("refused", one.where, str(len(one.tokens)))
    return pieces, fates


@pytest.mark.parametrize("kind", ["unigram", "bytes"])
def test_source_and_target_have_their_own_specials(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    (document,) = render(kind, "seq2seq", Example("f:1", 0, "pair", prompt="What is sharding?", text="Dividing."))
    read, learned = read_and_learned(document)
    assert read.tolist() == tokenizer("What is sharding?")["input_ids"] and read[-1] == tokenizer.eos_token_id
    assert learned.tolist() == tokenizer("Dividing.")["input_ids"] and learned[-1] == tokenizer.eos_token_id
    assert document.learned.sum() == len(learned)
    assert note_of(document, "seq2seq", ())[1] == f"source {len(read)} tokens, target {len(learned)}"


def test_targets_end_where_the_tokenizer_ends_nothing() -> None:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("unigram").backend_tokenizer, eos_token="</s>")
    bare.backend_tokenizer.post_processor = processors.Sequence([])
    renderer = Renderer(bare, "assistant", "data.train.0", "seq2seq")
    example = Example("f:1", 0, "pair", prompt="What?", text="Dividing.")
    empty = Example("f:2", 1, "pair", prompt="", text="Dividing.")
    document, bad = renderer.render([example, empty])
    assert document.tokens[-1] == bare.eos_token_id and isinstance(bad, BadRow) and "no token" in bad.problem
    bare.eos_token = None
    with pytest.raises(UserError, match="never learn where a target ends"):
        Renderer(bare, "assistant", "data.train.0", "seq2seq")


def test_conversations_of_one_turn_are_pairs() -> None:
    def chat(*turns: tuple[str, str]) -> Example:
        return Example("f:1", 0, "chat", tuple({"role": r, "content": c} for r, c in turns))

    short = [("user", "What?"), ("assistant", "Dividing.")]
    one, system, several, silent = render(
        "unigram", "seq2seq", chat(*short), chat(("system", "Be brief."), *short), chat(*short, *short),
        chat(("user", "What?"), ("assistant", " ")),
    )  # fmt: skip
    tokenizer = tokenizer_of("unigram")
    assert read_and_learned(one)[0].tolist() == tokenizer("What?")["input_ids"]
    assert read_and_learned(system)[0].tolist() == tokenizer("Be brief.\n\nWhat?")["input_ids"]
    assert isinstance(several, BadRow) and "user, assistant, user, assistant" in several.problem
    assert isinstance(silent, BadRow) and "target is empty" in silent.problem


@pytest.mark.parametrize("kind", ["wordpiece", "bytes"])
def test_texts_to_be_masked(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    (document,) = render(kind, "masked", Example("f:1", 0, "text", text=LONG))
    assert document.tokens.tolist() == tokenizer(LONG)["input_ids"]
    special = np.isin(document.tokens, [tokenizer.cls_token_id, tokenizer.sep_token_id])
    assert special.sum() == 2 and (document.learned == ~special).all()
    pieces, fates = fitted(kind, "masked", 40, None, document)
    assert len(pieces) > 2 and not fates.rows and all(len(p.tokens) <= 40 for p in pieces)
    assert all(p.tokens[0] == tokenizer.cls_token_id and p.tokens[-1] == tokenizer.sep_token_id for p in pieces)
    assert np.array_equal(np.concatenate([p.tokens[1:-1] for p in pieces]), document.tokens[1:-1])
    cut, fates = fitted(kind, "masked", 40, "truncate", document)
    assert np.array_equal(cut[0].tokens, pieces[0].tokens) and list(fates.rows) == ["truncated"]


def test_any_row_has_a_text_to_mask() -> None:
    chat = Example("f:1", 0, "chat", ({"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}))
    tokens = Example("f:2", 1, "tokens", tokens=(2, 9, 10, 3))
    words, given = render("wordpiece", "masked", chat, tokens)
    assert words.tokens.tolist() == tokenizer_of("wordpiece")("one\ntwo")["input_ids"]
    assert given.tokens.tolist() == [2, 9, 10, 3] and given.learned.tolist() == [False, True, True, False]


def test_what_does_not_fit() -> None:
    (pair,) = render("unigram", "seq2seq", Example("f:1", 0, "pair", prompt=LONG, text=LONG))
    (cut,), fates = fitted("unigram", "seq2seq", 20, "truncate", pair)
    read, learned = read_and_learned(cut)
    end = tokenizer_of("unigram").eos_token_id
    assert len(read) == len(learned) == 20 and read[-1] == end and end not in learned
    assert np.array_equal(read[:19], pair.tokens[:19]) and list(fates.rows) == ["truncated"]
    whole = len(read_and_learned(pair)[0])
    assert fitted("unigram", "seq2seq", whole, None, pair)[0] == [pair], "each of the two may be that long"
    assert fitted("unigram", "seq2seq", 20, None, pair)[1].rows == {"refused": [("f:1", str(whole))]}
    assert list(fitted("unigram", "seq2seq", 20, "drop", pair)[1].rows) == ["dropped"]
    labelled = Example("f:1", 0, "label", text=LONG, category="b")
    (text,) = render("wordpiece", "classify", labelled, labels=("a", "b"))
    (cut,), _ = fitted("wordpiece", "classify", 20, "truncate", text)
    assert len(cut.tokens) == 21 and cut.tokens[-1] == 1
    assert cut.tokens[19] == tokenizer_of("wordpiece").sep_token_id and cut.learned.sum() == 1


def test_a_class_and_two_texts() -> None:
    labels = ("no", "yes")
    alone = Example("f:1", 0, "label", text="One.", category="yes")
    both = Example("f:2", 1, "label", text="One.", second="Two.", category="no")
    wrong = Example("f:3", 2, "label", text="One.", category="perhaps")
    first, second, bad = render("wordpiece", "classify", alone, both, wrong, labels=labels)
    tokenizer = tokenizer_of("wordpiece")
    assert first.tokens.tolist() == [*tokenizer("One.")["input_ids"], 1]
    assert second.tokens.tolist() == [*tokenizer("One.", "Two.")["input_ids"], 0]
    assert isinstance(bad, BadRow) and '"perhaps" is none of the classes (no, yes)' in bad.problem
    shown, note = note_of(first, "classify", labels)
    assert note == "class yes" and len(shown.tokens) == len(first.tokens) - 1


def test_names_of_labels() -> None:
    assert [label_name(v) for v in (True, 3, 2.0, " a ", "", 1.5, None, [1])] == [
        "true", "3", "2", "a", None, None, None, None,
    ]  # fmt: skip
    assert ordered(["10", "9", "-1"]) == ("-1", "9", "10") and ordered(["b", "10", "a"]) == ("10", "a", "b")
    assert class_of("1", ("no", "yes")) == 1, "numbered rows mean the place of a name"
    assert class_of("0", ("1", "2")) is None, "but not where the names are numbers themselves"
    assert class_of("2", ("no", "yes")) is None and class_of("b", ("a", "b")) == 1


ROWS = {
    "text": ({"text": "Fine.", "label": 1}, "label: the rows have text, label"),
    "premise": (
        {"premise": "A.", "hypothesis": "B.", "label": "neutral"},
        "label: the rows have premise (as text), label, hypothesis (as second)",
    ),
    "review": ({"review": "Fine.", "sentiment": True}, "label: the rows have review (as text), sentiment (as label)"),
}


@pytest.mark.parametrize("name", ROWS)
def test_labels_are_found(name: str) -> None:
    row, reason = ROWS[name]
    source = Source(path="x")
    detected = detect([Raw("x:1", 0, row)], source, "data.train.0", "classify")
    assert (detected.format, detected.reason) == ("label", reason)
    example = understand(Raw("x:1", 0, row), detected, source)
    assert example.kind == "label" and example.category in ("1", "neutral", "true")
    assert example.second == row.get("hypothesis", "")


def test_labels_are_of_no_account_to_others_and_must_be_there() -> None:
    raws = [Raw("x:1", 0, {"text": "Fine.", "label": 1, "stars": "five"})]
    assert detect(raws, Source(path="x"), "data.train.0").format == "text"
    mapped = Source(path="x", fields={"label": "stars"})
    assert detect(raws, mapped, "data.train.0", "classify").columns == {"text": "text", "label": "stars"}
    with pytest.raises(UserError, match=r"fields: \{text: words, label: kind\}"):
        detect([Raw("x:1", 0, {"words": "Fine.", "kind": "a"})], Source(path="x"), "data.train.0", "classify")
    with pytest.raises(UserError, match="plain text"):
        detect([Raw("x", 0, "Fine.")], Source(path="x"), "data.train.0", "classify")
    bad = {"text": "Fine.", "label": [1]}
    detected = detect(raws, Source(path="x"), "data.train.0", "classify")
    with pytest.raises(BadRow, match="a word, a whole number or true/false"):
        understand(Raw("x:2", 1, bad), detected, Source(path="x"))


def test_classes_of_all_sources(write: Callable[..., str]) -> None:
    one = write("one.jsonl", [{"text": "a", "label": n} for n in (10, 2)])
    two = write("two.jsonl", [{"text": "a", "label": n} for n in (2, 1)])
    assert collect_labels(Data(train=[one, two])) == ("1", "2", "10")
    same = write("same.jsonl", [{"text": "a", "label": "x"}] * 3)
    with pytest.raises(UserError, match="all rows have the label x"):
        collect_labels(Data(train=same))


def test_an_evaluation_row_of_no_class(write: Callable[..., str]) -> None:
    train = write("train.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}])
    other = write("eval.jsonl", [{"text": "a", "label": "z"}, {"text": "b", "label": "x"}])
    data = Data(train=train, eval=other, sequence_length=64)
    with pytest.raises(UserError, match=r'eval.jsonl:1.*its label "z" is none of the classes'):
        prepare_data(data, tokenizer_of("wordpiece"), 0, purpose="classify", labels=("x", "y"))
    skip = data.model_copy(update={"on_bad_row": "skip"})
    prepared = prepare_data(skip, tokenizer_of("wordpiece"), 0, purpose="classify", labels=("x", "y"))
    assert prepared.eval[0].known["documents"] == 1 and prepared.eval[0].known["fates"] == {"skipped": 1}
    other_labels = prepare_data(skip, tokenizer_of("wordpiece"), 0, purpose="classify", labels=("y", "x"))
    assert other_labels.fingerprint != prepared.fingerprint and other_labels.train[0].folder != prepared.train[0].folder
