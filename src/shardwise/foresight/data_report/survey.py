"""Reads the data of a run for the bill and the preview, without readying anything else of the run.

This is the seam between what is shown (bill, preview, page) and how data are prepared: `survey` prepares, `bill_of`
counts, `samples_of` and `sample_at` fetch real examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.config.resolve import Resolution, purpose_of, resolve_model, resolve_objective, task_wanted
from shardwise.config.schema import Data, Run, Train
from shardwise.core.errors import UserError
from shardwise.data.epochs import Epochs, stream_in_words
from shardwise.data.examples import BadRow, RowOutcomes
from shardwise.data.fingerprint import template_fingerprint
from shardwise.data.layout import CausalLayout
from shardwise.data.loader import Loader, make_loader
from shardwise.data.mixing import all_names, passes_per_epoch
from shardwise.data.preference import describe_head
from shardwise.data.preference_layout import LAYOUTS
from shardwise.data.prepare import Prepared, PreparedSource, ProgressReport, prepare_data
from shardwise.data.render import Renderer
from shardwise.data.row_renderers import note_of
from shardwise.data.statistics import DataStatistics, PackingStatistics, SourceStatistics, StepStatistics
from shardwise.data.tokenise import RowReader, Spec, fit, look
from shardwise.foresight.data_report.preview import Sample
from shardwise.nn.models.adapt import adapt_model, labels_of, settle_attention
from shardwise.nn.models.build import vocabulary_size


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


def survey(run: Run, say: Callable[[str], None] = lambda _: None, tell: ProgressReport | None = None) -> Survey:
    """Finds the tokenizer and prepares the data; raises Problems with everything that is wrong with them."""
    from shardwise.nn.models.build import build_on_meta
    from shardwise.nn.models.source import find_model

    source = find_model(run.model, say, task_wanted(run))
    result = Resolution(run)
    resolve_objective(result, source.task)
    tokenizer = source.load_tokenizer()
    stops = source.stop_tokens(tokenizer)
    try:
        source = adapt_model(result, source, tokenizer)
        resolve_model(result, source.config)
        source = settle_attention(result, source, say)
    except UserError as error:
        raise Problems([error]) from None
    run = result.run
    known: dict[str, Any] = {"purpose": purpose_of(run), "labels": labels_of(run), "stops": stops}
    data, seed = run.data, run.train.seed
    vocabulary = vocabulary_size(build_on_meta(source))
    try:
        prepared = prepare_data(data, tokenizer, seed, say, vocabulary, progress=tell, **known)
    except UserError as error:
        raise Problems(_every_problem(data, tokenizer, seed, known) or [error]) from None
    return Survey(run, tokenizer, source.tokenizer, prepared)


def _every_problem(data: Data, tokenizer: Any, seed: int, known: dict[str, Any]) -> list[UserError]:
    """Each source on its own, since the first mistake ends the preparation of all."""
    found: list[UserError] = []
    for kind, sources in (("train", data.train), ("eval", data.eval_sources)):
        for index, source in enumerate(sources):
            alone = data.model_copy(update={"train": (source,), "eval": 0.0})
            try:
                prepare_data(alone, tokenizer, seed, **known)
            except UserError as error:
                field = re.sub(r"^data\.train(\.0)?", f"data.{kind}.{index}", error.field)
                same = UserError(field, error.value, error.problem, error.remedy)
                if str(same) not in map(str, found):
                    found.append(same)
    return found


def _named(found: Survey) -> Iterator[tuple[str, PreparedSource]]:
    yield from zip(all_names(found.run.data), found.prepared.train + found.prepared.eval, strict=True)


def bill_of(found: Survey) -> DataStatistics:
    """Counts what was prepared."""
    data, prepared = found.run.data, found.prepared
    streams = prepared.streams()
    passes = [float(p) for p in passes_per_epoch(streams, data.temperature)]
    seen = [p * one.known["tokens"] for p, one in zip(passes, prepared.train, strict=True)]
    bills: dict[bool, list[SourceStatistics]] = {True: [], False: []}
    for name, one in _named(found):
        known: dict[str, Any] = {"cached": one.cached, "fates_file": str(one.folder / "fates.jsonl")}
        if one.spec.trains:
            share = seen[one.spec.index] / max(1.0, sum(seen))
            known |= {"held_out": one.known["held_out"], "passes": passes[one.spec.index], "share": share}
            known |= {"temperature": data.temperature}
        bills[one.spec.trains].append(SourceStatistics.from_facts(one.spec.source, name, one.known, **known))
    layout = LAYOUTS.get(purpose_of(found.run), CausalLayout)(0)
    loader = make_loader(streams, data, found.run.train.seed, layout, data.temperature)
    sequences, efficiency = loader.epoch_sequences(), loader.efficiency()
    documents = round(sum(p * one.known["documents"] for p, one in zip(passes, prepared.train, strict=True)))
    tokens = round(efficiency * sequences * data.sequence_length)
    packing = PackingStatistics(
        bool(data.packing), sequences, documents, tokens, data.sequence_length, data.packing_window
    )
    template = template_fingerprint(found.tokenizer)
    purpose = purpose_of(found.run)
    return DataStatistics(
        bills[True], bills[False], packing, found.label, template, data.loss_on, data.over_length, purpose,
        _steps(found.run.train, loader),
    )  # fmt: skip


def _steps(train: Train, loader: Loader) -> StepStatistics:
    steps, batch, first = train.steps, train.batch_size, loader.epoch_sequences()
    if steps is not None and train.epochs is None:
        return StepStatistics(steps, steps * batch / first, batch, stream_in_words(steps, batch, first))
    count = train.epochs or 1.0
    epochs = Epochs.of(count, loader.epoch_sequences)
    whole = epochs.steps(batch)
    return StepStatistics(min(steps or whole, whole), count, batch, epochs.in_words(count, batch, steps))


def spread(rows: int, wanted: int) -> list[int]:
    """Row numbers from the first on, evenly over all of them."""
    wanted = min(rows, wanted)
    return [index * rows // wanted for index in range(wanted)]


def samples_of(found: Survey, wanted: int) -> list[Sample]:
    """`wanted` rows of each source, evenly spread, the same ones every time."""
    samples: list[Sample] = []
    for name, one in _named(found):
        numbers = set(spread(one.known["rows"], wanted))
        samples += _rendered(found, name, one.spec, partial(_among, numbers))
    return samples


def _among(numbers: set[int], number: int, where: str) -> bool:
    return number in numbers


def sample_at(found: Survey, place: str) -> Sample:
    """One particular row: FILE:LINE, FILE (of a text file), SOURCE:NUMBER, or NUMBER (of the first source)."""
    before, _, last = place.rpartition(":")
    number = int(last) - 1 if last.isascii() and last.isdigit() else None
    # As places are written: a line, a row of a table or of one long line, a file that is one row.
    written = {place, *([f"{before} row {number + 1}"] if number is not None and before else [])}
    written |= {before} if number == 0 and before else set()
    ends = tuple(f"/{one}" for one in written if one)
    whole = {str(Path(one).expanduser().absolute()) for one in written if one}
    for name, one in _named(found):
        here = number if before in ("", name) else None

        def chosen(row: int, where: str, here: int | None = here) -> bool:
            return row == here or where in written or where.endswith(ends) or str(Path(where).absolute()) in whole

        for sample in _rendered(found, name, one.spec, chosen):
            return sample
        if number is not None and not before:
            break  # a bare number is of the first source
    remedy = "write FILE:LINE as the bill shows it, SOURCE:NUMBER, or the number of a row of the first source"
    raise UserError("--row", place, "no source of this run has such a row", remedy)


def _rendered(found: Survey, name: str, spec: Spec, chosen: Callable[[int, str], bool]) -> Iterator[Sample]:
    """The chosen rows as the model will see them, whatever became of them."""
    detected, tasks = look(spec)
    skip = spec.data.model_copy(update={"on_bad_row": "skip"})
    reader = RowReader(replace(spec, data=skip), detected, None)
    renderer = Renderer(found.tokenizer, spec.data.loss_on, spec.field, spec.purpose, spec.labels, spec.stops)
    for task in tasks:
        examples = [e for e in reader.examples(task, {}, RowOutcomes())[0] if chosen(e.number, e.where)]
        texts = {e.number for e in examples if e.kind == "text"}
        for document in renderer.render(examples):
            if isinstance(document, BadRow):
                continue
            fates = RowOutcomes()
            pieces = fit(document, document.number in texts, spec, fates, [], renderer)
            note, shown = "", document
            if len(pieces) > 1:
                note = f"split over {len(pieces)} sequences"
            elif not pieces:
                note = f"{next(iter(fates.rows), 'refused')}: longer than data.sequence_length"
            elif len(pieces[0].tokens) < len(document.tokens):
                note, shown = f"truncated from {len(document.tokens):,} tokens", pieces[0]
            shown, said = note_of(shown, spec.purpose, spec.labels)
            note = "; ".join(filter(None, (said, describe_head(shown, spec.purpose), note)))
            yield Sample(name, document.where, shown.tokens, shown.learned, note)
