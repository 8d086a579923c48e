"""Reads the data of a run for the report and the preview, without preparing anything else of the run.

This is the seam between what is shown (report, preview, page) and how data are prepared: `survey` prepares, `bill_of`
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
    """The prepared data of a run, and what is needed to read more of it."""

    run: Run
    tokenizer: Any
    label: str
    prepared: Prepared


def survey(run: Run, say: Callable[[str], None] = lambda _: None, progress: ProgressReport | None = None) -> Survey:
    """Finds the tokenizer and prepares the data. Raises Problems with everything that is wrong with them."""
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
    options: dict[str, Any] = {"purpose": purpose_of(run), "labels": labels_of(run), "stops": stops}
    data = run.data
    seed = run.train.seed
    vocabulary = vocabulary_size(build_on_meta(source))
    try:
        prepared = prepare_data(data, tokenizer, seed, say, vocabulary, progress=progress, **options)
    except UserError as error:
        raise Problems(_every_problem(data, tokenizer, seed, options) or [error]) from None
    return Survey(run, tokenizer, source.tokenizer, prepared)


def _every_problem(data: Data, tokenizer: Any, seed: int, options: dict[str, Any]) -> list[UserError]:
    """Prepares each source on its own, since the first mistake ends the preparation of all."""
    errors: list[UserError] = []
    for kind, sources in (("train", data.train), ("eval", data.eval_sources)):
        for index, source in enumerate(sources):
            single = data.model_copy(update={"train": (source,), "eval": 0.0})
            try:
                prepare_data(single, tokenizer, seed, **options)
            except UserError as error:
                field = re.sub(r"^data\.train(\.0)?", f"data.{kind}.{index}", error.field)
                same = UserError(field, error.value, error.problem, error.remedy)
                if str(same) not in map(str, errors):
                    errors.append(same)
    return errors


def _named(surveyed: Survey) -> Iterator[tuple[str, PreparedSource]]:
    yield from zip(all_names(surveyed.run.data), surveyed.prepared.train + surveyed.prepared.eval, strict=True)


def bill_of(surveyed: Survey) -> DataStatistics:
    """Returns the statistics of the prepared data."""
    data = surveyed.run.data
    prepared = surveyed.prepared
    streams = prepared.streams()
    passes = [float(p) for p in passes_per_epoch(streams, data.temperature)]
    tokens_per_epoch = [p * source.known["tokens"] for p, source in zip(passes, prepared.train, strict=True)]
    statistics: dict[bool, list[SourceStatistics]] = {True: [], False: []}
    for name, source in _named(surveyed):
        extra: dict[str, Any] = {"cached": source.cached, "fates_file": str(source.folder / "fates.jsonl")}
        if source.spec.trains:
            share = tokens_per_epoch[source.spec.index] / max(1.0, sum(tokens_per_epoch))
            extra |= {"held_out": source.known["held_out"], "passes": passes[source.spec.index], "share": share}
            extra |= {"temperature": data.temperature}
        statistics[source.spec.trains].append(
            SourceStatistics.from_facts(source.spec.source, name, source.known, **extra)
        )
    layout = LAYOUTS.get(purpose_of(surveyed.run), CausalLayout)(0)
    loader = make_loader(streams, data, surveyed.run.train.seed, layout, data.temperature)
    sequences = loader.epoch_sequences()
    efficiency = loader.efficiency()
    documents = round(sum(p * source.known["documents"] for p, source in zip(passes, prepared.train, strict=True)))
    tokens = round(efficiency * sequences * data.sequence_length)
    packing = PackingStatistics(
        bool(data.packing), sequences, documents, tokens, data.sequence_length, data.packing_window
    )
    template = template_fingerprint(surveyed.tokenizer)
    purpose = purpose_of(surveyed.run)
    return DataStatistics(
        statistics[True], statistics[False], packing, surveyed.label, template, data.loss_on, data.over_length, purpose,
        _steps(surveyed.run.train, loader),
    )  # fmt: skip


def _steps(train: Train, loader: Loader) -> StepStatistics:
    steps = train.steps
    batch = train.batch_size
    sequences = loader.epoch_sequences()
    if steps is not None and train.epochs is None:
        return StepStatistics(steps, steps * batch / sequences, batch, stream_in_words(steps, batch, sequences))
    count = train.epochs or 1.0
    epochs = Epochs.of(count, loader.epoch_sequences)
    total = epochs.steps(batch)
    return StepStatistics(min(steps or total, total), count, batch, epochs.in_words(count, batch, steps))


def spread(rows: int, count: int) -> list[int]:
    """Returns row numbers from the first on, evenly spread over all rows."""
    count = min(rows, count)
    return [index * rows // count for index in range(count)]


def samples_of(surveyed: Survey, count: int) -> list[Sample]:
    """Returns `wanted` rows of each source, evenly spread, the same ones every time."""
    samples: list[Sample] = []
    for name, source in _named(surveyed):
        numbers = set(spread(source.known["rows"], count))
        samples += _rendered(surveyed, name, source.spec, partial(_among, numbers))
    return samples


def _among(numbers: set[int], number: int, where: str) -> bool:
    return number in numbers


def sample_at(surveyed: Survey, place: str) -> Sample:
    """Returns one row: FILE:LINE, FILE (of a text file), SOURCE:NUMBER, or NUMBER (of the first source)."""
    before, _, last = place.rpartition(":")
    number = int(last) - 1 if last.isascii() and last.isdigit() else None
    # As places are written: a line, a row of a table or of one long line, a file that is one row.
    spellings = {place, *([f"{before} row {number + 1}"] if number is not None and before else [])}
    spellings |= {before} if number == 0 and before else set()
    ends = tuple(f"/{spelling}" for spelling in spellings if spelling)
    absolute = {str(Path(spelling).expanduser().absolute()) for spelling in spellings if spelling}
    for name, source in _named(surveyed):
        row_number = number if before in ("", name) else None

        def chosen(row: int, where: str, row_number: int | None = row_number) -> bool:
            return (
                row == row_number
                or where in spellings
                or where.endswith(ends)
                or str(Path(where).absolute()) in absolute
            )

        for sample in _rendered(surveyed, name, source.spec, chosen):
            return sample
        if number is not None and not before:
            break  # a bare number is of the first source
    remedy = "write FILE:LINE as the bill shows it, SOURCE:NUMBER, or the number of a row of the first source"
    raise UserError("--row", place, "no source of this run has such a row", remedy)


def _rendered(surveyed: Survey, name: str, spec: Spec, chosen: Callable[[int, str], bool]) -> Iterator[Sample]:
    """The chosen rows as the model sees them, including those that are dropped or truncated."""
    detected, tasks = look(spec)
    skip = spec.data.model_copy(update={"on_bad_row": "skip"})
    reader = RowReader(replace(spec, data=skip), detected, None)
    renderer = Renderer(surveyed.tokenizer, spec.data.loss_on, spec.field, spec.purpose, spec.labels, spec.stops)
    for task in tasks:
        examples = [e for e in reader.examples(task, {}, RowOutcomes())[0] if chosen(e.number, e.where)]
        texts = {e.number for e in examples if e.kind == "text"}
        for document in renderer.render(examples):
            if isinstance(document, BadRow):
                continue
            fates = RowOutcomes()
            pieces = fit(document, document.number in texts, spec, fates, [], renderer)
            note = ""
            kept_document = document
            if len(pieces) > 1:
                note = f"split over {len(pieces)} sequences"
            elif not pieces:
                note = f"{next(iter(fates.rows), 'refused')}: longer than data.sequence_length"
            elif len(pieces[0].tokens) < len(document.tokens):
                note = f"truncated from {len(document.tokens):,} tokens"
                kept_document = pieces[0]
            kept_document, purpose_note = note_of(kept_document, spec.purpose, spec.labels)
            note = "; ".join(filter(None, (purpose_note, describe_head(kept_document, spec.purpose), note)))
            yield Sample(name, document.where, kept_document.tokens, kept_document.learned, note)
