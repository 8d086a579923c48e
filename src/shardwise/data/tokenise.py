"""Makes a source's chunks: reads, understands, leaves out, renders and stores them, in worker processes.

Small data are done in the process that asks. Larger ones are done by a process of their own (`python -m
shardwise.data.tokenise FOLDER`) which goes on while the run has already begun. Each chunk leaves a summary beside it:
whoever starts again after a crash goes on behind the chunks that are there, and the sums are made of the summaries.

[Note: order] Chunks are given out and taken back in the order of the rows, however many workers there are, so the first
bad row is the same one every time, and a reader that waits for the next chunk waits as little as can be.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.config.schema import Data, Source
from shardwise.data.bill import add_lengths
from shardwise.data.examples import BadRow, Document, Example, Fates, Raw
from shardwise.data.files import ChunkTask, chunk_tasks, read_chunk
from shardwise.data.formats import Detected, detect, understand
from shardwise.data.refine import Expression, length_fate
from shardwise.data.render import Renderer, check_template
from shardwise.data.store import fail, finish, write_chunk
from shardwise.errors import UserError

AHEAD = 2  # chunks per worker that are under way
DETECT_ROWS = 100


@dataclass(frozen=True)
class Spec:
    """Everything that one source's tokens follow from, but for the files and the tokenizer."""

    field: str
    index: int
    source: Source
    data: Data
    seed: int
    share: float  # held out
    vocabulary: int | None = None
    removed: str | None = None  # file of row numbers that the look for duplicates left out, with reasons

    def to_json(self) -> dict[str, Any]:
        """As JSON can carry it."""
        plain = {k: getattr(self, k) for k in ("field", "index", "seed", "share", "vocabulary", "removed")}
        return plain | {"source": self.source.model_dump(mode="json"), "data": self.data.model_dump(mode="json")}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Spec:
        """What to_json wrote."""
        parsed = {"source": Source.model_validate(values["source"]), "data": Data.model_validate(values["data"])}
        return cls(**values | parsed)


@dataclass
class Summary:
    """What became of a chunk's rows."""

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    supervised: int = 0
    held_out: int = 0
    longest: int = 0
    largest_token: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=lambda: add_lengths(None, np.empty(0, dtype=np.int64)))

    def add(self, other: Summary) -> None:
        """Takes another chunk in."""
        for name in ("rows", "documents", "tokens", "supervised", "held_out"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("longest", "largest_token"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.fates.update(other.fates)
        self.lengths = [a + b for a, b in zip(self.lengths, other.lengths, strict=True)]


class ChunkMaker:
    """Turns one chunk of rows into stored tokens; lives in each worker."""

    def __init__(self, spec: Spec, tokenizer: Any, detected: Detected, folder: Path) -> None:
        self.spec, self.tokenizer, self.detected, self.folder = spec, tokenizer, detected, folder
        data = spec.data
        self.renderer = Renderer(tokenizer, data.loss_on, spec.field)
        self.filter = Expression(data.refine.filter) if data.refine.filter else None
        self.removed = _removed_rows(spec.removed)

    def __call__(self, task: ChunkTask) -> Summary:
        """Stores the chunk and its summary; raises UserError for what ends the run."""
        summary, fates = Summary(), Fates()
        examples = list(self._examples(read_chunk(task), summary, fates))
        train: list[Document] = []
        held: list[Document] = []
        refused: list[Document] = []
        for document in self.renderer.render(examples):
            if isinstance(document, BadRow):
                self._bad(document, fates)
                continue
            for piece in self._fit(document, fates, refused):
                if not piece.learned.any():
                    fates.add("no supervised token", document.where)
                    continue
                if fate := length_fate(piece, self.spec.data.refine):
                    fates.add(fate, document.where, f"{len(piece.tokens)} tokens")
                    continue
                # A source of a single row keeps it for training.
                out = held if summary.rows > 1 and held_out(document.number, self.spec) else train
                out.append(piece)
        if refused:
            raise _too_long(refused, summary.rows, self.spec)
        self._count(train, held, summary)
        summary.fates = Counter({fate: len(rows) for fate, rows in fates.rows.items()})
        write_chunk(self.folder / "eval", task.number, held)
        write_chunk(self.folder / "train", task.number, train)
        _write_summary(self.folder, task.number, summary, fates)
        return summary

    def _examples(self, raws: Iterator[Raw | BadRow], summary: Summary, fates: Fates) -> Iterator[Example]:
        for raw in raws:
            summary.rows += 1
            try:
                if isinstance(raw, BadRow):
                    raise raw
                if raw.number in self.removed:
                    fate, reason = self.removed[raw.number]
                    fates.add(fate, raw.where, reason)
                    continue
                example = understand(raw, self.detected, self.spec.source)
                if self.filter is not None and not self.filter.matches(raw, example):
                    fates.add("filtered", raw.where, self.spec.data.refine.filter or "")
                    continue
            except BadRow as bad:
                self._bad(bad, fates)
                continue
            yield example

    def _bad(self, bad: BadRow, fates: Fates) -> None:
        if self.spec.data.on_bad_row == "error":
            remedy = f"{bad.remedy}; or set data.on_bad_row: skip"
            raise UserError(self.spec.field, bad.where, bad.problem, remedy) from None
        fates.add("skipped", bad.where, bad.problem)

    def _fit(self, document: Document, fates: Fates, refused: list[Document]) -> list[Document]:
        """The document in pieces that fit into a sequence, as data.over_length says."""
        limit, length = self.spec.data.sequence_length, len(document.tokens)
        if length <= limit:
            return [document]
        plain = self.detected.kind == "text"
        policy = self.spec.data.over_length or ("split" if plain else "error")
        if policy == "split":
            if not plain:
                fates.add("split", document.where, f"{length} tokens")
            # Neighbouring pieces share one token: the last of a piece is the first, unlearned, of the next.
            pieces = [_cut(document, start, limit) for start in range(0, length - 1, limit - 1)]
            for piece in pieces:
                piece.learned[:1] = False
            return pieces
        cut = _cut(document, 0, limit)
        if policy == "truncate" and cut.learned.any():
            fates.add("truncated", document.where, f"{length} tokens")
            return [cut]
        if policy in ("drop", "truncate"):
            nothing = ", nothing to learn in those that fit" if policy == "truncate" else ""
            fates.add("dropped", document.where, f"{length} tokens{nothing}")
        else:
            refused.append(document)
        return []

    def _count(self, train: list[Document], held: list[Document], summary: Summary) -> None:
        lengths = np.asarray([len(d.tokens) for d in train], dtype=np.int64)
        summary.documents, summary.tokens = len(train), int(lengths.sum())
        summary.supervised = sum(int(d.learned.sum()) for d in train)
        summary.held_out, summary.longest = len(held), int(lengths.max(initial=0))
        summary.largest_token = max((int(d.tokens.max()) for d in train + held), default=0)
        summary.lengths = add_lengths(None, lengths)


def held_out(row: int, spec: Spec) -> bool:
    """Whether a row is kept for evaluation: one of each 1/share consecutive rows, chosen by the seed.

    Needs no count of the rows.
    """
    if not spec.share:
        return False
    every = 1 / spec.share
    block = int((row + 0.5) / every)
    if row < 2 or block == 0:
        return row == 0  # so that the smallest source has rows on either side
    first, end = math.ceil(block * every - 0.5), math.ceil((block + 1) * every - 0.5)
    return row == first + _mixed(spec.seed * 1_000_003 + spec.index, block) % (end - first)


def _mixed(seed: int, number: int) -> int:
    """A number that looks random, from two (splitmix64)."""
    x = (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & (2**64 - 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & (2**64 - 1)
    return x ^ (x >> 31)


def _cut(document: Document, start: int, length: int) -> Document:
    place = slice(start, start + length)
    return Document(document.where, document.number, document.tokens[place], document.learned[place].copy())


def _too_long(documents: list[Document], rows: int, spec: Spec) -> UserError:
    first, lengths = documents[0], [len(d.tokens) for d in documents]
    problem = f"the row has {lengths[0]} tokens, more than data.sequence_length = {spec.data.sequence_length}"
    if len(lengths) > 1:
        problem += f" (so do {len(lengths) - 1} more of the {rows} rows about it, the longest with {max(lengths)})"
    remedy = f"raise data.sequence_length to {max(lengths)}, or set data.over_length to drop, truncate or split"
    return UserError(spec.field, first.where, problem, remedy)


def _removed_rows(file: str | None) -> dict[int, tuple[str, str]]:
    if file is None:
        return {}
    return {int(row): (fate, reason) for row, fate, reason in json.loads(Path(file).read_text())}


def _summary_file(folder: Path, number: int) -> Path:
    return folder / "summaries" / f"{number:07}.json"


def _write_summary(folder: Path, number: int, summary: Summary, fates: Fates) -> None:
    file = _summary_file(folder, number)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    rows = [(fate, *row) for fate, rows in fates.rows.items() for row in rows]
    partial.write_text(json.dumps({"summary": summary.__dict__, "fates": rows}, ensure_ascii=False))
    partial.rename(file)


def read_summary(folder: Path, number: int) -> tuple[Summary, list[list[str]]]:
    """A chunk's summary and the rows that did not go in as they are: fate, place, reason."""
    values = json.loads(_summary_file(folder, number).read_text())
    summary = Summary(**values["summary"])
    summary.fates = Counter(summary.fates)
    return summary, values["fates"]


def tokenise_source(
    spec: Spec, tokenizer: Any, folder: Path, workers: int, told: Callable[[Summary], None] = lambda _: None
) -> None:
    """Makes all chunks of a source that are not there yet, and says so in `done.json`."""
    for name in ("train", "eval", "summaries"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    tasks = chunk_tasks(spec.source, spec.field)
    first = next(tasks, None)
    if first is None:
        raise UserError(spec.field, spec.source.path, "holds no rows", "check the file, or leave it out")
    detected = _detect(first, spec)
    if detected.kind == "chat":
        check_template(tokenizer, "model.tokenizer")
    if detected.kind in ("preference", "kto"):
        problem = f"the rows are {detected.format} data, which say what to prefer, not what to write"
        remedy = "take the good answers: format: chat with fields: {messages: chosen}, or other data"
        raise UserError(spec.field, spec.source.path, problem, remedy)
    total, count = Summary(), 0
    done: Iterator[Summary] = _make_all(_chain(first, tasks), ChunkMaker(spec, tokenizer, detected, folder), workers)
    for summary in done:
        total.add(summary)
        count += 1
        told(summary)
        if spec.vocabulary is not None:
            check_largest(total.largest_token, spec.vocabulary)
    _write_fates(folder, count)
    if not total.rows:
        raise UserError(spec.field, spec.source.path, "holds no rows", "check the file, or leave it out")
    if not total.supervised and not total.held_out:
        raise _nothing_learned(spec, total)
    facts = total.__dict__ | {
        "format": detected.format, "kind": detected.kind, "reason": detected.reason,
        "seconds": round(time.monotonic() - started, 3),
    }  # fmt: skip
    finish(folder / "eval", count, {"documents": total.held_out})
    finish(folder / "train", count, facts)


def _detect(first: ChunkTask, spec: Spec) -> Detected:
    raws = []
    for raw in read_chunk(first):
        if isinstance(raw, Raw):
            raws.append(raw)
        elif spec.data.on_bad_row == "error":
            remedy = f"{raw.remedy}; or set data.on_bad_row: skip"
            raise UserError(spec.field, raw.where, raw.problem, remedy)
        if len(raws) == DETECT_ROWS:
            break
    return detect(raws, spec.source, spec.field)


def _nothing_learned(spec: Spec, total: Summary) -> UserError:
    said = ", ".join(f"{count} {fate}" for fate, count in total.fates.most_common()) or "they are empty"
    problem = f"none of its {total.rows} rows has a token to learn ({said})"
    remedy = "look at the rows with `shardwise data`; check data.loss_on, data.over_length and data.refine"
    return UserError(spec.field, spec.source.path, problem, remedy)


def _chain(first: ChunkTask, rest: Iterator[ChunkTask]) -> Iterator[ChunkTask]:
    yield first
    yield from rest


def check_largest(largest: int, vocabulary: int) -> None:
    """Every token must have an embedding; a tokenizer may know more words than the model, if the data use none."""
    if largest >= vocabulary:
        problem = f"the data have token {largest}, the model knows {vocabulary} (0 to {vocabulary - 1})"
        remedy = "use the model's own tokenizer, or for a model from scratch raise model.config.vocab_size"
        raise UserError("model.tokenizer", None, problem, remedy)


def _make_all(tasks: Iterator[ChunkTask], maker: ChunkMaker, workers: int) -> Iterator[Summary]:
    """Summaries in the order of the chunks; those of chunks that are there already are read."""
    if workers <= 1:
        for task in tasks:
            there = _summary_file(maker.folder, task.number).is_file()
            yield read_summary(maker.folder, task.number)[0] if there else maker(task)
        return
    # Forked, the workers have the tokenizer at once and share its memory.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(workers, context, initializer=_be_worker, initargs=(maker,)) as pool:
        waiting: deque[Future[Summary] | Summary] = deque()
        try:
            for task in tasks:
                there = _summary_file(maker.folder, task.number).is_file()
                waiting.append(read_summary(maker.folder, task.number)[0] if there else pool.submit(_work, task))
                while len(waiting) > AHEAD * workers:
                    yield _result(waiting.popleft())
            while waiting:
                yield _result(waiting.popleft())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _result(item: Future[Summary] | Summary) -> Summary:
    return item if isinstance(item, Summary) else item.result()


_WORKER: list[ChunkMaker] = []  # one per worker process: a pool has no other place for it


def _be_worker(maker: ChunkMaker) -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _WORKER.append(maker)


def _work(task: ChunkTask) -> Summary:
    return _WORKER[0](task)


def _write_fates(folder: Path, chunks: int) -> None:
    """One file of all rows that did not go in as they are."""
    with (folder / "fates.jsonl").open("w", encoding="utf-8") as out:
        for number in range(chunks):
            for fate, where, reason in read_summary(folder, number)[1]:
                out.write(json.dumps({"fate": fate, "where": where, "reason": reason}, ensure_ascii=False) + "\n")


def make_sources(
    specs: list[Spec],
    folders: list[Path],
    tokenizer: Any,
    workers: int,
    told: Callable[[Spec, Summary], None] = lambda *_: None,
) -> None:
    """Makes what is missing of several sources, in order."""
    for spec, folder in zip(specs, folders, strict=True):
        if (folder / "train/done.json").is_file():
            continue
        (folder / "train/failed.json").unlink(missing_ok=True)
        tokenise_source(spec, tokenizer, folder, workers, lambda summary, spec=spec: told(spec, summary))  # type: ignore[misc]


def main(plan: Path) -> None:
    """The process of its own: makes what the plan lists, and dies with the one that asked for it."""
    from filelock import FileLock
    from transformers import AutoTokenizer

    values = json.loads(plan.read_text())
    _die_with(values["parent"])
    os.nice(5)  # training comes first
    specs, folders = [Spec.from_json(v) for v in values["specs"]], [Path(f) for f in values["folders"]]
    tokenizer = AutoTokenizer.from_pretrained(values["tokenizer"])
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
