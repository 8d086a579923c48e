"""Reads the data of a run for the bill and the preview, without readying anything else of the run.

This is the seam between what is shown (bill, preview, page) and how data are prepared: `survey` prepares, `bill_of`
counts, `samples_of` and `sample_at` fetch real examples.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.cache import cache_root
from shardwise.config.schema import Data, Run, Source
from shardwise.data.bill import Bill, PackingBill, SourceBill, add_lengths, no_lengths
from shardwise.data.packing import pack
from shardwise.data.prepare import Bill as Counts
from shardwise.data.prepare import Prepared, _fit, _key, check_vocabulary, prepare_data
from shardwise.data.preview import Sample
from shardwise.data.render import render_rows
from shardwise.data.rows import Row, read_rows
from shardwise.errors import UserError


class Problems(Exception):
    """Everything that keeps the data from being prepared."""

    def __init__(self, errors: list[UserError]) -> None:
        super().__init__(*errors)
        self.errors = errors


@dataclass(frozen=True)
class Survey:
    """The prepared data of a run, and what is needed to read more of them."""

    run: Run
    tokenizer: Any
    label: str
    prepared: Prepared
    seconds: float
    cached: bool


def survey(run: Run, say: Callable[[str], None] = lambda _: None) -> Survey:
    """Finds the tokenizer and prepares the data; raises Problems with everything that is wrong with them."""
    from shardwise.models.build import build_on_meta
    from shardwise.models.source import find_model

    source = find_model(run.model)
    tokenizer, data, seed = source.load_tokenizer(), run.data, run.train.seed
    started = time.monotonic()
    try:
        cached = (cache_root() / "data" / _key(data, tokenizer, seed)).is_dir()
        prepared = prepare_data(data, tokenizer, seed, say)
        seconds = time.monotonic() - started
        check_vocabulary(prepared, build_on_meta(source).get_input_embeddings().num_embeddings, source.tokenizer)
    except UserError as error:
        raise Problems(_every_problem(data, tokenizer, seed) or [error]) from None
    return Survey(run, tokenizer, source.tokenizer, prepared, seconds, cached)


def _every_problem(data: Data, tokenizer: Any, seed: int) -> list[UserError]:
    """Each source on its own, since the first mistake ends the preparation of all."""
    found: list[UserError] = []
    for kind, sources in _by_kind(data):
        for index, source in enumerate(sources):
            alone = data.model_copy(update={"train": (source,), "eval": 0.0})
            try:
                prepare_data(alone, tokenizer, seed)
            except UserError as error:
                field = re.sub(r"^data\.train(\.0)?", f"data.{kind}.{index}", error.field)
                same = UserError(field, error.value, error.problem, error.remedy)
                if str(same) not in map(str, found):
                    found.append(same)
    return found


def _by_kind(data: Data) -> list[tuple[str, tuple[Source, ...]]]:
    return [("train", data.train), ("eval", data.eval if isinstance(data.eval, tuple) else ())]


def source_names(sources: tuple[Source, ...]) -> list[str]:
    """The name of each source: its own, or the end of its path; told apart where two are the same."""
    names: list[str] = []
    for source in sources:
        name = base = source.name or Path(source.path).name or source.path
        count = 1
        while name in names:
            count += 1
            name = f"{base} ({count})"
        names.append(name)
    return names


def bill_of(found: Survey) -> Bill:
    """Counts what was prepared."""
    data, prepared = found.run.data, found.prepared
    total = max(1, sum(b.tokens for b in prepared.bills))
    lists: dict[str, list[SourceBill]] = {"train": [], "eval": []}
    for kind, sources in _by_kind(data):
        corpus = prepared.train if kind == "train" else prepared.eval
        counts = prepared.bills if kind == "train" else prepared.eval_bills
        for index, (name, source, one) in enumerate(zip(source_names(sources), sources, counts, strict=True)):
            mine = np.empty(0, dtype=np.int64)
            if corpus is not None:
                mine = np.asarray(corpus.lengths[np.asarray(corpus.source) == index])
            lists[kind].append(_source_bill(found, name, source, one, mine, total if kind == "train" else 0))
    lengths = np.asarray(prepared.train.lengths)
    sequences = len(pack(lengths, data.sequence_length, found.run.train.seed, 0, data.packing))
    packing = PackingBill(
        data.packing, sequences, len(lengths), int(lengths.sum()), data.sequence_length, data.packing_window
    )
    return Bill(lists["train"], lists["eval"], packing, found.label, None, data.loss_on, data.over_length)


def _source_bill(found: Survey, name: str, source: Source, one: Counts, mine: np.ndarray, total: int) -> SourceBill:
    lengths = no_lengths()
    add_lengths(lengths, mine)
    first = next(read_rows(source, "data"), None)
    chat = first is not None and first.messages is not None
    return SourceBill(
        name=name,
        path=source.path,
        format="chat" if chat else "text",
        reason="" if source.format != "auto" else f"the first row has {'messages' if chat else 'text'}",
        rows=one.rows,
        documents=one.documents,
        tokens=one.tokens,
        supervised=one.supervised,
        held_out=one.held_out,
        fates={fate: count for fate in ("dropped", "truncated") if (count := getattr(one, fate))},
        lengths=lengths,
        longest=int(mine.max()) if len(mine) else None,
        weight=source.weight,
        epochs=source.epochs,
        share=one.tokens / total if total else 0.0,
        seconds=0.0 if found.cached else found.seconds * one.tokens / max(1, total),
        cached=found.cached,
    )


def spread(rows: int, wanted: int) -> list[int]:
    """Row numbers from the first on, evenly over all of them."""
    wanted = min(rows, wanted)
    return [index * rows // wanted for index in range(wanted)]


def _named(data: Data) -> Iterator[tuple[str, str, Source]]:
    """Field, name and settings of every source."""
    for kind, sources in _by_kind(data):
        for index, (name, source) in enumerate(zip(source_names(sources), sources, strict=True)):
            yield f"data.{kind}.{index}", name, source


def samples_of(found: Survey, wanted: int) -> list[Sample]:
    """`wanted` rows of each source, evenly spread, the same ones every time."""
    samples: list[Sample] = []
    for field, name, source in _named(found.run.data):
        numbers = set(spread(sum(1 for _ in read_rows(source, field)), wanted))
        rows = [row for number, row in enumerate(read_rows(source, field)) if number in numbers]
        samples += _rendered(found, name, rows, field)
    return samples


def sample_at(found: Survey, place: str) -> Sample:
    """One particular row: FILE:LINE, FILE (of a text file), SOURCE:NUMBER, or NUMBER (of the first source)."""
    before, _, last = place.rpartition(":")
    number = int(last) if last.isascii() and last.isdigit() else None
    for field, name, source in _named(found.run.data):
        for count, row in enumerate(read_rows(source, field), 1):
            named = number == count and before in ("", name)
            if row.where == place or row.where.endswith(f"/{place}") or named:
                return next(_rendered(found, name, [row], field))
        if number is not None and not before:
            break  # a bare number is of the first source
    remedy = "write FILE:LINE as the bill shows it, SOURCE:NUMBER, or the number of a row of the first source"
    raise UserError("--row", place, "no source of this run has such a row", remedy)


def _rendered(found: Survey, name: str, rows: list[Row], field: str) -> Iterator[Sample]:
    data = found.run.data
    for row, document in zip(rows, render_rows(rows, found.tokenizer, data.loss_on, field), strict=True):
        pieces, fate = _fit(document, row, data)
        note, shown = "", document
        if len(pieces) > 1:
            note = f"split over {len(pieces)} sequences"
        elif not pieces:
            note = f"{fate}: longer than data.sequence_length"
        elif fate:
            note, shown = f"{fate} from {len(document.tokens):,} tokens", pieces[0]
        yield Sample(name, row.where, shown.tokens, shown.learned, note)
