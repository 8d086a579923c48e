"""Tokenises the sources once into arrays that every rank maps into memory.

The result lies in the cache under a key made of the files' contents and everything that shapes the tokens, so a second
run starts at once and a changed file is noticed. Documents that are too long are counted and named, never cut in
silence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.cache import cache_root, make_once
from shardwise.config.schema import Data, Source
from shardwise.data.examples import Document
from shardwise.data.render import check_template, render_rows
from shardwise.data.rows import Row, read_rows, source_files, unreadable
from shardwise.errors import UserError

FORMAT = 3  # raised when the same rows give other tokens or masks


@dataclass(frozen=True)
class Corpus:
    """Documents as one flat array: tokens, what is learned, where each begins, which source it came from."""

    tokens: np.ndarray
    learned: np.ndarray
    starts: np.ndarray
    source: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    @property
    def supervised(self) -> np.ndarray:
        """Learned tokens per document."""
        sums = np.concatenate([[0], np.cumsum(self.learned, dtype=np.int64)])
        return np.asarray(sums[self.starts[1:]] - sums[self.starts[:-1]])


@dataclass(frozen=True)
class Bill:
    """What became of one source."""

    path: str
    rows: int
    documents: int
    tokens: int
    supervised: int
    dropped: int = 0
    truncated: int = 0
    held_out: int = 0


@dataclass(frozen=True)
class Prepared:
    """Training and evaluation documents, the bill per source, and a fingerprint that checkpoints carry."""

    train: Corpus
    eval: Corpus | None
    bills: list[Bill]
    eval_bills: list[Bill]
    fingerprint: str
    largest_token: int


def prepare_data(data: Data, tokenizer: Any, seed: int, say: Callable[[str], None] = lambda _: None) -> Prepared:
    """Reads, renders and stores everything the run will learn from, or finds it in the cache."""
    key = _key(data, tokenizer, seed)
    folder = cache_root() / "data" / key
    if not folder.is_dir():
        say("reading and tokenising the data")
    make_once(folder, lambda partial: _write(data, tokenizer, seed, partial))
    meta = json.loads((folder / "bill.json").read_text())
    return Prepared(
        train=_open(folder / "train"),
        eval=_open(folder / "eval") if (folder / "eval").is_dir() else None,
        bills=[Bill(**b) for b in meta["train"]],
        eval_bills=[Bill(**b) for b in meta["eval"]],
        fingerprint=_fingerprint(meta["train_digest"], data, seed),
        largest_token=meta["largest_token"],
    )


def check_vocabulary(prepared: Prepared, vocabulary: int, tokenizer: str) -> None:
    """Every token must have an embedding; a tokenizer may know more words than the model, if the data use none."""
    if prepared.largest_token >= vocabulary:
        problem = f"the data have token {prepared.largest_token}, the model knows {vocabulary} (0 to {vocabulary - 1})"
        remedy = "use the model's own tokenizer, or for a model from scratch raise model.config.vocab_size"
        raise UserError("model.tokenizer", tokenizer, problem, remedy)


def _write(data: Data, tokenizer: Any, seed: int, folder: Path) -> None:
    train, evaluation = _Writer(), _Writer()
    share = data.eval if isinstance(data.eval, float) else 0.0
    bills = [
        _add_source(source, index, f"data.train.{index}", data, tokenizer, seed, share, train, evaluation)
        for index, source in enumerate(data.train)
    ]
    eval_bills = []
    if not isinstance(data.eval, float):
        eval_bills = [
            _add_source(source, index, f"data.eval.{index}", data, tokenizer, seed, 0.0, evaluation, evaluation)
            for index, source in enumerate(data.eval)
        ]
    if not train.documents:
        paths = [s.path for s in data.train]
        raise UserError("data.train", paths, "holds no example to train on", "check the files and data.over_length")
    if share and not evaluation.documents:
        problem = "nothing could be held out: every source has a single row"
        raise UserError(
            "data.eval", share, problem, "give data.eval files of its own, or write the data as several rows"
        )
    train.save(folder / "train")
    if evaluation.documents:
        evaluation.save(folder / "eval")
    largest = max(int(d.tokens.max()) for d in train.documents + evaluation.documents)
    bill: dict[str, Any] = {"train": [asdict(b) for b in bills], "eval": [asdict(b) for b in eval_bills]}
    bill |= {"largest_token": largest, "train_digest": _digest_of(folder / "train")}
    (folder / "bill.json").write_text(json.dumps(bill, indent=1))


def _add_source(
    source: Source,
    index: int,
    field: str,
    data: Data,
    tokenizer: Any,
    seed: int,
    share: float,
    train: _Writer,
    held: _Writer,
) -> Bill:
    rows = list(read_rows(source, field))
    if not rows:
        raise UserError(field, source.path, "holds no rows", "check the file, or leave it out")
    if any(row.messages is not None for row in rows):
        check_template(tokenizer, "model.tokenizer")
    held_out = _held_out(len(rows), share, seed, index)
    totals = dict.fromkeys(("documents", "tokens", "supervised", "dropped", "truncated"), 0)
    refused: list[Document] = []
    for number, document in enumerate(render_rows(rows, tokenizer, data.loss_on, field)):
        pieces, fate = _fit(document, rows[number], data)
        if fate == "refused":
            refused.append(document)
        elif fate:
            totals[fate] += 1
        for piece in pieces:
            if not piece.learned.any():
                continue
            writer = held if number in held_out else train
            writer.add(piece, index)
            if writer is train:
                totals["documents"] += 1
                totals["tokens"] += len(piece.tokens)
                totals["supervised"] += int(piece.learned.sum())
    if refused:
        raise _too_long(refused, data.sequence_length, field)
    return Bill(path=source.path, rows=len(rows), held_out=len(held_out), **totals)


def _too_long(documents: list[Document], limit: int, field: str) -> UserError:
    first, lengths = documents[0], [len(d.tokens) for d in documents]
    problem = f"the conversation has {lengths[0]} tokens, more than data.sequence_length = {limit}"
    if len(lengths) > 1:
        problem += f" (so do {len(lengths) - 1} more, the longest with {max(lengths)})"
    remedy = f"raise data.sequence_length to {max(lengths)}, or set data.over_length to drop or truncate"
    return UserError(field, first.where, problem, remedy)


def _fit(document: Document, row: Row, data: Data) -> tuple[list[Document], str | None]:
    """Splits long text so that each token is predicted once; treats a long conversation as the config says."""
    limit, length = data.sequence_length, len(document.tokens)
    if length <= limit:
        return [document], None
    if row.messages is None:
        # Neighbouring pieces share one token: the last of a piece is the first, unlearned, of the next.
        pieces = [_cut(document, start, limit) for start in range(0, length - 1, limit - 1)]
        for piece in pieces:
            piece.learned[:1] = False
        return pieces, None
    if data.over_length == "truncate" and document.learned[:limit].any():
        return [_cut(document, 0, limit)], "truncated"
    return [], "refused" if data.over_length == "error" else "dropped"  # truncated to nothing learned = dropped


def _cut(document: Document, start: int, length: int) -> Document:
    place = slice(start, start + length)
    return replace(document, tokens=document.tokens[place], learned=document.learned[place].copy())


def _held_out(rows: int, share: float, seed: int, index: int) -> set[int]:
    if not share or rows < 2:
        return set()
    count = min(rows - 1, max(1, round(rows * share)))
    chosen = np.random.default_rng([seed, index, 7]).permutation(rows)[:count]
    return {int(i) for i in chosen}


class _Writer:
    def __init__(self) -> None:
        self.documents: list[Document] = []
        self.source: list[int] = []

    def add(self, document: Document, source: int) -> None:
        self.documents.append(document)
        self.source.append(source)

    def save(self, folder: Path) -> None:
        folder.mkdir()
        starts = np.concatenate([[0], np.cumsum([len(d.tokens) for d in self.documents])]).astype(np.int64)
        np.save(folder / "tokens.npy", np.concatenate([d.tokens for d in self.documents]))
        np.save(folder / "learned.npy", np.concatenate([d.learned for d in self.documents]))
        np.save(folder / "starts.npy", starts)
        np.save(folder / "source.npy", np.asarray(self.source, dtype=np.int32))


def _open(folder: Path) -> Corpus:
    return Corpus(*(np.load(folder / f"{n}.npy", mmap_mode="r") for n in ("tokens", "learned", "starts", "source")))


def _fingerprint(train_digest: str, data: Data, seed: int) -> str:
    """What decides the order of the training sequences: a place in them means nothing if this differs."""
    order = [train_digest, data.sequence_length, data.packing, seed]
    return hashlib.sha256(json.dumps(order).encode()).hexdigest()[:24]


def _digest_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.npy")):
        with file.open("rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()


def _key(data: Data, tokenizer: Any, seed: int) -> str:
    """Everything that decides the tokens: the files' bytes, the settings, the tokenizer and its template."""
    digest = hashlib.sha256()
    settings = data.model_dump(exclude={"packing"})
    words = [tokenizer.chat_template, tokenizer.special_tokens_map]
    digest.update(json.dumps([FORMAT, settings, seed, words], sort_keys=True, default=str).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    sources = [(f"data.train.{i}", s) for i, s in enumerate(data.train)]
    if not isinstance(data.eval, float):
        sources += [(f"data.eval.{i}", s) for i, s in enumerate(data.eval)]
    for field, source in sources:
        for file in source_files(source, field):
            try:
                with file.open("rb") as f:
                    digest.update(hashlib.file_digest(f, "sha256").digest())
            except OSError as error:
                raise unreadable(error, file, field) from None
    return digest.hexdigest()[:24]
