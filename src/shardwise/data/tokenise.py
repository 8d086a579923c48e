"""Tokenises a source in chunks: reads, parses, filters, renders and stores them, in worker processes.

Small data are tokenised in the calling process. Larger data are tokenised by a separate process (`python -m
shardwise.data.tokenise FOLDER`) which continues after training has begun. Each chunk has a summary beside it: a restart
after a crash resumes behind the existing chunks, and totals are computed from the summaries.

[Note: order] Chunks are submitted and collected in row order, for any number of workers, so the first bad row is
always the same one, and a reader that waits for the next chunk waits as little as possible.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from shardwise.config.objectives import Purpose
from shardwise.config.schema import Data, Source
from shardwise.core.errors import UserError
from shardwise.data.examples import BadRow, Document, Example, Raw, RowOutcomes
from shardwise.data.files import ChunkTask, chunk_tasks, read_chunk, source_files, source_notes
from shardwise.data.formats import SAMPLE, TURNS, Detected, detect, understand
from shardwise.data.preference import JUDGED, check_format, truncated
from shardwise.data.refine import (
    DuplicateFinder,
    EvalNgrams,
    Removal,
    Removals,
    RowKeys,
    RowRules,
    length_fate,
    row_keys,
)
from shardwise.data.render import Renderer, check_template
from shardwise.data.row_renderers import fit_row
from shardwise.data.row_warnings import EMPTY_PIECE, Count, add_remarks
from shardwise.data.statistics import add_lengths, no_lengths, read_fates, remedy_of
from shardwise.data.store import fail, finish, has_chunk, write_chunk, write_json

AHEAD = 2  # chunks per worker that are under way
LOOK_CHUNKS = 16  # in which there must be a row that can be read
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Spec:
    """Everything the tokens of one source depend on, except its files and the tokenizer."""

    field: str
    index: int
    source: Source
    data: Data
    seed: int
    share: float  # held out
    vocabulary: int | None = None
    purpose: Purpose = "causal"
    labels: tuple[str, ...] = ()  # classes, of purpose classify
    stops: tuple[str, ...] = ()  # tokens that the model's generation config stops at

    @property
    def trains(self) -> bool:
        """Whether the source is trained on, rather than evaluated."""
        return self.field.startswith("data.train")

    def to_json(self) -> dict[str, Any]:
        """Converts it to JSON values."""
        names = ("field", "index", "seed", "share", "vocabulary", "purpose", "labels", "stops")
        plain = {name: getattr(self, name) for name in names}
        return plain | {"source": self.source.model_dump(mode="json"), "data": self.data.model_dump(mode="json")}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Spec:
        """Restores a Spec from `to_json`."""
        parsed: dict[str, Any] = {name: tuple(values[name]) for name in ("labels", "stops")}
        parsed["source"] = Source.model_validate(values["source"])
        parsed["data"] = Data.model_validate(values["data"])
        return cls(**values | parsed)


@dataclass
class Summary:
    """Counts over the rows of one or more chunks."""

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    supervised: int = 0
    held_out: int = 0
    longest: int = 0
    largest_token: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    remarks: dict[str, Count] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=no_lengths)

    def add(self, other: Summary) -> None:
        """Adds the counts of another summary."""
        for name in ("rows", "documents", "tokens", "supervised", "held_out"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("longest", "largest_token"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.fates.update(other.fates)
        add_remarks(self.remarks, other.remarks.items())
        self.lengths = [a + b for a, b in zip(self.lengths, other.lengths, strict=True)]


class RowReader:
    """Reads and parses the rows of a chunk; one per worker."""

    def __init__(self, spec: Spec, detected: Detected, passages: EvalNgrams | None) -> None:
        self.spec, self.detected = spec, detected
        self.rules = RowRules(spec.data.refine, passages)

    def examples(self, task: ChunkTask, removed: dict[int, Removal], fates: RowOutcomes) -> tuple[list[Example], int]:
        """Returns the accepted examples and the number of rows read."""
        understood: list[tuple[Raw, Example]] = []
        rows = 0
        for raw in read_chunk(task):
            rows += 1
            try:
                if isinstance(raw, BadRow):
                    raise raw
                if raw.number in removed:
                    fates.add(removed[raw.number].fate, raw.where, removed[raw.number].reason)
                    continue
                understood.append((raw, understand(raw, self.detected, self.spec.source)))
            except BadRow as bad:
                self.bad(bad, fates)
        accepted = []
        for (raw, example), verdict in zip(understood, self.rules.judge(understood), strict=True):
            if verdict is None:
                accepted.append(example)
            elif isinstance(verdict, BadRow):
                self.bad(verdict, fates)
            else:
                fates.add(verdict.fate, raw.where, verdict.reason)
        return accepted, rows

    def bad(self, bad: BadRow, fates: RowOutcomes) -> None:
        """Records a bad row, or raises UserError if `data.on_bad_row` is error."""
        if self.spec.data.on_bad_row == "error":
            raise refusal(bad, self.spec) from None
        fates.add("skipped", bad.where, bad.problem)

    def keys(self, task: ChunkTask) -> RowKeys:
        """Keys of a chunk's rows, for finding duplicates."""
        return row_keys(self.examples(task, {}, RowOutcomes())[0], self.spec.data.refine)


def refusal(bad: BadRow, spec: Spec) -> UserError:
    """Converts a bad row to a UserError."""
    also = "" if "on_bad_row" in bad.remedy else "; or set data.on_bad_row: skip"
    return UserError(spec.field, bad.where, bad.problem, bad.remedy + also)


class ChunkMaker:
    """Tokenises and stores one chunk of rows; one per worker."""

    def __init__(self, reader: RowReader, tokenizer: Any, folder: Path) -> None:
        self.reader = reader
        self.tokenizer = tokenizer
        self.folder = folder
        self.spec = reader.spec
        spec = self.spec
        self.renderer = Renderer(tokenizer, spec.data.loss_on, spec.field, spec.purpose, spec.labels, spec.stops)
        self._template_checked = self.renderer.rows is not None  # such rows are not rendered by one

    def __call__(self, work: tuple[ChunkTask, dict[int, Removal]]) -> Summary:
        """Stores the chunk and its summary, unless they exist; raises UserError for errors that end the run."""
        task, removed = work
        if has_chunk(self.folder / "train", task.index):
            return read_summary(self.folder, task.index)[0]
        summary = Summary()
        fates = RowOutcomes()
        examples, summary.rows = self.reader.examples(task, removed, fates)
        if not self._template_checked and any(example.kind in TURNS for example in examples):
            check_template(self.tokenizer, "model.tokenizer", self.spec.stops)
            self._template_checked = True
        plain = {example.number for example in examples if example.kind == "text"}
        train: list[Document] = []
        evaluation: list[Document] = []
        refused: list[Document] = []
        lengths: list[int] = []
        for document in self.renderer.render(examples):
            if isinstance(document, BadRow):
                self.reader.bad(document, fates)
                continue
            if removal := length_fate(document, self.spec.data.refine):
                fates.add(removal.fate, document.where, removal.reason)
                continue
            # A source of a single row keeps it for training.
            out = evaluation if summary.rows > 1 and held_out(document.number, self.spec) else train
            if out is train:
                lengths.append(len(document.tokens))
            if not document.learned.any():
                fates.add("no supervised token", document.where)
                continue
            pieces = fit(document, document.number in plain, self.spec, fates, refused, self.renderer)
            trained = [piece for piece in pieces if piece.learned.any()]
            out += trained
            noted = [(remark, (1, document.where)) for remark in document.remarks]
            if empty := len(pieces) - len(trained):
                noted.append((EMPTY_PIECE, (empty, document.where)))
            add_remarks(summary.remarks, noted)
        if refused:
            raise _too_long(refused, summary.rows, self.spec)
        self._count(train, evaluation, lengths, summary)
        summary.fates = Counter({fate: len(rows) for fate, rows in fates.rows.items()})
        write_chunk(self.folder / "eval", task.index, evaluation)
        _write_summary(self.folder, task.index, summary, fates)
        write_chunk(self.folder / "train", task.index, train)  # last: whoever sees it finds the rest
        return summary

    def _count(self, train: list[Document], evaluation: list[Document], lengths: list[int], summary: Summary) -> None:
        summary.documents = len(train)
        summary.tokens = sum(len(d.tokens) for d in train)
        summary.supervised = sum(int(d.learned.sum()) for d in train)
        summary.held_out = len(evaluation)
        summary.longest = max(lengths, default=0)
        summary.largest_token = max((int(d.tokens.max()) for d in train + evaluation), default=0)
        add_lengths(summary.lengths, lengths)


def fit(
    document: Document, plain: bool, spec: Spec, fates: RowOutcomes, refused: list[Document], renderer: Renderer
) -> list[Document]:
    """Splits, truncates or drops a document that exceeds the sequence length, as data.over_length says."""
    if renderer.rows is not None:
        return fit_row(document, spec, renderer.rows.special, fates, refused)
    limit = spec.data.sequence_length
    length = len(document.tokens)
    if length <= limit:
        return [document]
    policy = spec.data.over_length or ("split" if plain else "error")
    if policy == "split":
        if not plain:
            fates.add("split", document.where, f"{length} tokens")
        # Neighbouring pieces share one token: the last of a piece is the first, unlearned, of the next.
        pieces = [_slice_of(document, start, limit) for start in range(0, length - 1, limit - 1)]
        for piece in pieces:
            piece.learned[:1] = False
        return pieces
    cut = truncated(document, limit) if spec.purpose == "preference" else _slice_of(document, 0, limit)
    if policy == "truncate" and cut is not None and cut.learned.any():
        fates.add("truncated", document.where, f"{length} tokens")
        return [cut]
    if policy in ("drop", "truncate"):
        nothing = ", nothing to learn in those that fit" if policy == "truncate" else ""
        fates.add("dropped", document.where, f"{length} tokens{nothing}")
    else:
        refused.append(document)
    return []


def held_out(row: int, spec: Spec) -> bool:
    """Whether a row is held out for evaluation: one of each 1/share consecutive rows, chosen by the seed.

    Does not need the number of rows.
    """
    if not spec.share:
        return False
    every = 1 / spec.share
    block = int((row + 0.5) / every)
    if row < 2 or block == 0:
        return row == 0  # so that the smallest source has rows on either side
    first, end = math.ceil(block * every - 0.5), math.ceil((block + 1) * every - 0.5)
    return row == first + _splitmix(spec.seed * 1_000_003 + spec.index, block) % (end - first)


def _splitmix(seed: int, number: int) -> int:
    """Pseudo-random number from a seed and a counter (splitmix64)."""
    x = (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & (2**64 - 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & (2**64 - 1)
    return x ^ (x >> 31)


def _slice_of(document: Document, start: int, length: int) -> Document:
    place = slice(start, start + length)
    return replace(document, tokens=document.tokens[place], learned=document.learned[place].copy())


def _too_long(documents: list[Document], rows: int, spec: Spec) -> UserError:
    first = documents[0]
    lengths = [len(d.tokens) for d in documents]
    problem = f"the row has {lengths[0]} tokens, more than data.sequence_length = {spec.data.sequence_length}"
    if len(lengths) > 1:
        problem += (
            f"; {len(lengths) - 1} more of the {rows} rows read with it are too long, up to {max(lengths)} tokens"
        )
    indivisible = (*JUDGED, "seq2seq", "classify")
    policies = "drop or truncate" if spec.purpose in indivisible else "drop, truncate or split"
    remedy = f"raise data.sequence_length to {max(lengths)}, or set data.over_length to {policies}"
    return UserError(spec.field, first.where, problem, remedy)


def _summary_file(folder: Path, number: int) -> Path:
    return folder / "summaries" / f"{number:07}.json"


def _write_summary(folder: Path, number: int, summary: Summary, fates: RowOutcomes) -> None:
    rows = [(fate, *row) for fate, rows in fates.rows.items() for row in rows]
    write_json(_summary_file(folder, number), {"summary": summary.__dict__, "fates": rows})


def read_summary(folder: Path, number: int) -> tuple[Summary, list[list[str]]]:
    """A chunk's summary and the rows that were dropped or changed: fate, location, reason."""
    values = json.loads(_summary_file(folder, number).read_text())
    summary = Summary(**values["summary"])
    summary.fates = Counter(summary.fates)
    return summary, values["fates"]


def tokenise_source(
    spec: Spec,
    tokenizer: Any,
    folder: Path,
    workers: int,
    passages: EvalNgrams | None = None,
    removals: Removals | None = None,
) -> None:
    """Tokenises all chunks of a source that do not exist yet, and writes `done.json`."""
    for name in ("train", "eval", "summaries"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    detected, tasks = look(spec)
    check_format(detected, spec.purpose, spec.field, spec.source.path)
    maker = ChunkMaker(RowReader(spec, detected, passages), tokenizer, folder)
    work = ((task, _removed(removals, spec, task)) for task in tasks)
    total = Summary()
    count = 0
    for summary in in_order(maker, work, workers):
        total.add(summary)
        count += 1
        if spec.vocabulary is not None:
            check_largest(total.largest_token, spec.vocabulary)
    _write_fates(folder, count)
    notes = source_notes(spec.source, spec.field)
    if not total.supervised and not total.held_out:
        raise _no_loss_tokens(spec, total, folder)
    facts = total.__dict__ | {
        "format": detected.format, "reason": ". ".join([detected.reason, *notes]), "columns": detected.columns,
        "seconds": round(time.monotonic() - started, 3),
    }  # fmt: skip
    finish(folder / "eval", count, {"documents": total.held_out})
    finish(folder / "train", count, facts)


def _removed(removals: Removals | None, spec: Spec, task: ChunkTask) -> dict[int, Removal]:
    if removals is None or not spec.trains:
        return {}
    return removals.of(spec.index, task.first_row, task.first_row + task.rows)


def look(spec: Spec) -> tuple[Detected, Iterator[ChunkTask]]:
    """Detects the format of a source from its first readable rows; returns it with all chunks."""
    tasks = chunk_tasks(spec.source, spec.field)
    inspected: list[ChunkTask] = []
    raws: list[Raw] = []
    for task in islice(tasks, LOOK_CHUNKS):
        inspected.append(task)
        for raw in read_chunk(task):
            if isinstance(raw, Raw):
                raws.append(raw)
            elif spec.data.on_bad_row == "error":
                raise refusal(raw, spec)
            if len(raws) == SAMPLE:
                break
        if raws:
            break
    if not raws:
        problem = "none of its first rows can be read" if any(task.rows for task in inspected) else "holds no rows"
        raise UserError(spec.field, spec.source.path, problem, "check the file, or leave it out")
    detected = detect(raws, spec.source, spec.field, spec.purpose)
    if rules := RowRules(spec.data.refine).filter:
        missing = rules.check_columns((raw.value for raw in raws), spec.source.path)
        if missing:
            reason = f"{detected.reason}; it has no {', '.join(missing)}, which data.refine.filter takes for None"
            detected = replace(detected, reason=reason)
    return detected, chain(inspected, tasks)


def _no_loss_tokens(spec: Spec, total: Summary, folder: Path) -> UserError:
    """UserError for a source without loss tokens, with the first row of the most common fate."""
    listed = ", ".join(f"{count} {fate}" for fate, count in total.fates.most_common()) or "they are empty"
    few = "its only row has no" if total.rows == 1 else f"none of its {total.rows} rows has a"
    problem = f"{few} token to learn ({listed})"
    if not total.fates:
        return UserError(spec.field, spec.source.path, problem, "check the file, or leave the source out")
    fate = total.fates.most_common(1)[0][0]
    rows = read_fates(folder / "fates.jsonl", 1, total.fates)
    for where, reason in rows.get(fate, [])[:1]:
        problem += f"; the first, {where}: {reason or fate}"
    return UserError(spec.field, spec.source.path, problem, remedy_of(fate, total.longest))


def check_largest(largest: int, vocabulary: int) -> None:
    """Raises UserError if a token has no embedding; unused tokens beyond the model's vocabulary are fine."""
    if largest >= vocabulary:
        problem = f"the data have token {largest}, the model knows {vocabulary} (0 to {vocabulary - 1})"
        remedy = "use the model's own tokenizer, or for a model from scratch raise model.config.vocab_size"
        raise UserError("model.tokenizer", None, problem, remedy)


def in_order(function: Callable[[A], B], items: Iterator[A], workers: int) -> Iterator[B]:
    """Yields the function's results in the order of the items, computed by worker processes."""
    if workers <= 1:
        yield from map(function, items)
        return
    # Forked, the workers have the tokenizer at once and share its memory.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(workers, context, initializer=_init_worker, initargs=(function,)) as pool:
        waiting: deque[Future[B]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(_call_function, item))
                if len(waiting) > AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_FUNCTION: list[Callable[[Any], Any]] = []  # of this worker process: a pool has no other place for it


def _init_worker(function: Callable[[Any], Any]) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the workers
    _die_with(os.getppid())  # a killed parent ends nobody
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _FUNCTION.append(function)


def _call_function(item: Any) -> Any:
    return _FUNCTION[0](item)


def _write_fates(folder: Path, chunks: int) -> None:
    """Writes one file of all rows that were dropped or changed."""
    with (folder / "fates.jsonl").open("w", encoding="utf-8") as out:
        for number in range(chunks):
            for fate, where, reason in read_summary(folder, number)[1]:
                out.write(json.dumps({"fate": fate, "where": where, "reason": reason}, ensure_ascii=False) + "\n")


def source_bytes(spec: Spec) -> float:
    """Size of a source's files in bytes; a dataset of the hub counts as infinite."""
    files = source_files(spec.source, spec.field)
    return sum(file.stat().st_size for file in files) if files else math.inf


def make_sources(specs: list[Spec], folders: list[Path], tokenizer: Any, workers: int) -> None:
    """Tokenises what is missing of several sources, in order."""
    missing = [(s, f) for s, f in zip(specs, folders, strict=True) if not (f / "train/done.json").is_file()]
    # The small ones first: a run that need not wait for all waits for the first windows of each.
    missing.sort(key=lambda item: source_bytes(item[0]))
    for _, folder in missing:
        (folder / "train/failed.json").unlink(missing_ok=True)
    name = f"refine-{folders[0].name}-"  # see _sweep of prepare.py
    with tempfile.TemporaryDirectory(prefix=name, dir=_make_folder(folders[0].parent)) as work:
        passages = removals = None
        if any(spec.trains for spec, _ in missing):
            passages = _eval_ngrams(specs, Path(work))
            removals = _find_duplicates(specs, passages, workers, Path(work))
        for spec, folder in missing:
            tokenise_source(spec, tokenizer, folder, workers, passages if spec.trains else None, removals)


def _make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _eval_ngrams(specs: list[Spec], work: Path) -> EvalNgrams | None:
    """N-grams of the evaluation sources, which training rows must not contain."""
    words = specs[0].data.refine.decontaminate
    if not words:
        return None

    def examples() -> Iterator[Example]:
        for spec in specs:
            if not spec.trains:
                detected, tasks = look(spec)
                reader = RowReader(spec, detected, None)
                for task in tasks:
                    yield from reader.examples(task, {}, RowOutcomes())[0]

    return EvalNgrams.from_examples(examples(), words, work / "passages")


def _find_duplicates(specs: list[Spec], passages: EvalNgrams | None, workers: int, work: Path) -> Removals | None:
    """Duplicate rows of the training sources."""
    if specs[0].data.refine.duplicates == "keep":
        return None
    finder = DuplicateFinder(specs[0].data.refine, _make_folder(work / "repeats"))
    for spec in specs:
        if spec.trains:
            detected, tasks = look(spec)
            for keys in in_order(RowReader(spec, detected, passages).keys, tasks, workers):
                finder.add(spec.index, keys)
    return finder.removed()


def main(plan: Path) -> None:
    """Entry point of the tokenising process: builds what the plan lists, and exits with its parent."""
    from filelock import FileLock
    from transformers import AutoTokenizer

    values = json.loads(plan.read_text())
    _die_with(values["parent"])
    os.nice(5)  # training comes first
    specs = [Spec.from_json(v) for v in values["specs"]]
    folders = [Path(f) for f in values["folders"]]
    tokenizer = AutoTokenizer.from_pretrained(values["tokenizer"], trust_remote_code=False)
    with FileLock(values["lock"]):
        try:
            make_sources(specs, folders, tokenizer, values["workers"])
        except UserError as error:
            for folder in folders:
                if not (folder / "train/done.json").is_file():
                    (folder / "train").mkdir(parents=True, exist_ok=True)
                    fail(folder / "train", error)
    shutil.rmtree(plan.parent, ignore_errors=True)


def _die_with(parent: int) -> None:
    import threading

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
