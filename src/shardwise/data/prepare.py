"""Prepares token stores from the settings, reusing the cache.

A source's cache folder is keyed by the contents of its files and everything that affects its tokens, so a second run
starts at once and a changed file is noticed. Small data are tokenised in this process, larger data in a separate one: a
run with a fixed number of steps starts after the first window of each source, one that counts epochs waits for all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from shardwise.config.objectives import Purpose
from shardwise.config.schema import Data, Refine
from shardwise.core.cache import cache_root
from shardwise.core.cpu_probe import usable_cores
from shardwise.core.errors import UserError
from shardwise.data.files import content_digest, count_rows, source_files
from shardwise.data.fingerprint import template_fingerprint
from shardwise.data.mixing import ORDER, SourceStream, source_names
from shardwise.data.store import POLL, TokenStore
from shardwise.data.tokenise import Spec, Summary, check_largest, make_sources, read_summary, source_bytes

FORMAT = 7  # raised when the same rows give other tokens or masks
INLINE = 8 << 20  # bytes of source files that are tokenised on the spot
BEAT = 1.0  # seconds without a finished chunk after which the progress is told again
LITTER = 60.0  # seconds after which a folder of work whose owner holds no lock is litter


@dataclass(frozen=True)
class PreparedSource:
    """Token stores of one source, possibly still being written."""

    spec: Spec
    folder: Path
    store: TokenStore
    held_out: TokenStore
    rows: int | None = None  # where mixing needs to know beforehand
    cached: bool = False

    @property
    def facts(self) -> dict[str, Any] | None:
        """Counts of the tokenised source; None while it is being tokenised."""
        return self.store.facts

    @property
    def known(self) -> dict[str, Any]:
        """Counts of the tokenised source; waits until they are available."""
        return self.store.wait()


@dataclass(frozen=True)
class Prepared:
    """Training and evaluation sources, and the data fingerprint stored in checkpoints."""

    train: list[PreparedSource]
    eval: list[PreparedSource]
    fingerprint: str
    share: float
    digests: tuple[str, ...] = ()  # of the sources' contents, those for training first

    @property
    def counts(self) -> list[int | None]:
        """Rows of each source, where mixing needs them."""
        return [source.rows for source in self.train + self.eval]

    @property
    def complete(self) -> bool:
        """Whether all sources are tokenised."""
        return all(s.facts is not None for s in self.train + self.eval)

    def wait(self) -> None:
        """Waits until all sources are tokenised."""
        for source in self.train + self.eval:
            source.store.wait()

    def streams(self) -> list[SourceStream]:
        """The training sources as inputs of the mixture."""
        names = source_names([prepared.spec.source for prepared in self.train])
        return [
            SourceStream(name, prepared.store, prepared.rows, prepared.spec.source.weight, prepared.spec.source.epochs)
            for name, prepared in zip(names, self.train, strict=True)
        ]

    def total(self, name: str) -> int:
        """Sum of a count over the training sources completed so far."""
        return sum(int(s.facts[name]) for s in self.train if s.facts is not None)


@dataclass(frozen=True)
class Contents:
    """What reading the sources gave: digests of their contents, and counts of rows where mixing needs them."""

    digests: list[str]
    rows: list[int | None]


ProgressReport = Callable[
    [int, int, int | None, int], None
]  # source, its rows so far, all its rows if known, tokens so far


def prepare_data(
    data: Data,
    tokenizer: Any,
    seed: int,
    say: Callable[[str], None] = lambda _: None,
    vocabulary: int | None = None,
    early: bool = False,
    progress: ProgressReport | None = None,
    purpose: Purpose = "causal",
    labels: tuple[str, ...] = (),
    stops: tuple[str, ...] = (),
    read: Contents | None = None,
) -> Prepared:
    """Loads or builds the token stores of all sources; `early` returns as soon as training can start.

    `read`: what another process found when it read the sources, which are not read again then.
    """
    share = data.eval_share
    specs = [
        Spec(f"data.train.{i}", i, s, data, seed, share, vocabulary, purpose, labels, stops)
        for i, s in enumerate(data.train)
    ]
    unrefined = data.model_copy(update={"refine": Refine()})  # what is measured by is not refined
    specs += [
        Spec(f"data.eval.{i}", i, s, unrefined, seed, 0.0, vocabulary, purpose, labels, stops)
        for i, s in enumerate(data.eval_sources)
    ]
    digests = [content_digest(spec.source, spec.field) for spec in specs] if read is None else read.digests
    everything = hashlib.sha256("".join(digests).encode()).hexdigest()
    shape = " ".join([template_fingerprint(tokenizer), *stops])
    folders = [
        cache_root() / "data" / _key(spec, digest, shape, everything)
        for spec, digest in zip(specs, digests, strict=True)
    ]
    missing = [i for i, f in enumerate(folders) if not (f / "train/done.json").is_file()]
    alive: Callable[[], bool] = lambda: False  # noqa: E731
    if missing:
        alive = _build_stores(specs, folders, tokenizer, say, early, progress)
    rows = _row_counts(specs, _counts_needed(data)) if read is None else read.rows
    sources = [
        PreparedSource(
            spec, folder, TokenStore(folder / "train", alive), TokenStore(folder / "eval", alive), rows[i],
            i not in missing,
        )
        for i, (spec, folder) in enumerate(zip(specs, folders, strict=True))
    ]  # fmt: skip
    train, evaluation = sources[: len(data.train)], sources[len(data.train) :]
    fingerprint = _fingerprint(digests[: len(train)], shape, data, seed, share, purpose, labels)
    prepared = Prepared(train, evaluation, fingerprint, share, tuple(digests))
    if not early:
        prepared.wait()
    _check(prepared, vocabulary)
    return prepared


def _check(prepared: Prepared, vocabulary: int | None) -> None:
    """Checks that need complete sources; incomplete ones are checked by the process that tokenises them."""
    if vocabulary is not None:
        for source in prepared.train + prepared.eval:
            check_largest(int((source.facts or {"largest_token": 0})["largest_token"]), vocabulary)
    if not prepared.complete:
        return
    if not prepared.total("documents"):
        paths = [s.spec.source.path for s in prepared.train]
        raise UserError("data.train", paths, "holds no example to train on", "check the files and data.over_length")
    if prepared.share and not prepared.total("held_out"):
        problem = "nothing could be held out: every source has a single row"
        remedy = "give data.eval files of its own, or write the data as several rows"
        raise UserError("data.eval", prepared.share, problem, remedy)


def _row_counts(specs: list[Spec], needed: bool) -> list[int | None]:
    return [count_rows(spec.source, spec.field) if needed and spec.trains else None for spec in specs]


def _counts_needed(data: Data) -> bool:
    """Whether row counts are needed; not if every source is mixed in proportion to its size."""
    weighted = [s for s in data.train if s.epochs is None]
    return len(weighted) > 1 and (data.temperature != 1 or len({s.weight for s in weighted}) > 1)


def _build_stores(
    specs: list[Spec],
    folders: list[Path],
    tokenizer: Any,
    say: Callable[[str], None],
    early: bool,
    progress: ProgressReport | None,
) -> Callable[[], bool]:
    """Builds missing stores, here or in a separate process; returns a function that says whether that still runs."""
    lock = cache_root() / "data" / f"{folders[0].name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    _sweep(lock.parent)
    say("reading and tokenising the data")
    if sum(source_bytes(spec) for spec in specs) <= INLINE:
        with FileLock(lock):
            make_sources(specs, folders, tokenizer, 1)
        return lambda: False
    data = specs[0].data
    workers = usable_cores() if data.workers == "auto" else int(data.workers)
    child = None if _is_locked(lock) else _start(specs, folders, tokenizer, workers, lock)

    def alive() -> bool:
        if child is not None:
            child.poll()  # lets go of one that has ended
        return _is_locked(lock)

    try:
        _follow(specs, folders, alive, early, progress)
    except KeyboardInterrupt:
        if child is not None:
            _stop(child, lock)
        raise
    return alive


def _stop(child: subprocess.Popen[bytes], lock: Path) -> None:
    """Ends our tokenising process; its workers notice by themselves and hold the lock until then."""
    child.terminate()
    child.wait()
    for work in lock.parent.glob(f"*-{lock.stem}-*"):
        shutil.rmtree(work, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Removes the temporary files of dead processes; completed chunks stay and are resumed from.

    Work folders are named by the lock that their owner holds while working (the age check is for one about to take it).
    """
    for litter in folder.glob("*-*-*"):
        kind, key, _ = litter.name.split("-", 2)
        with contextlib.suppress(OSError):  # somebody else sweeps too
            old = time.time() - litter.stat().st_mtime >= LITTER
            if kind in ("tokenise", "refine") and litter.is_dir() and old and not _is_locked(folder / f"{key}.lock"):
                shutil.rmtree(litter, ignore_errors=True)


def _is_locked(lock: Path) -> bool:
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True


def _start(specs: list[Spec], folders: list[Path], tokenizer: Any, workers: int, lock: Path) -> subprocess.Popen[bytes]:
    """Starts the tokenising process; returns once it, or another that was faster, holds the lock."""
    work = Path(tempfile.mkdtemp(prefix=f"tokenise-{lock.stem}-", dir=lock.parent))
    tokenizer.save_pretrained(work / "tokenizer")
    plan = work / "plan.json"
    plan.write_text(json.dumps({
        "parent": os.getpid(), "specs": [s.to_json() for s in specs], "folders": [str(f) for f in folders],
        "tokenizer": str(work / "tokenizer"), "lock": str(lock), "workers": workers,
    }))  # fmt: skip
    log = (work / "log").open("wb")
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    child = subprocess.Popen(
        [sys.executable, "-m", "shardwise.data.tokenise", str(plan)], stdout=log, stderr=log, env=env
    )
    try:
        while not _is_locked(lock) and child.poll() is None:
            time.sleep(0.05)
    except KeyboardInterrupt:
        _stop(child, lock)
        raise
    if child.poll():
        problem = f"the process that tokenises ended at once ({(work / 'log').read_text()[-300:].strip()})"
        raise UserError("data", None, problem, f"see {work / 'log'}")
    return child


def _follow(
    specs: list[Spec], folders: list[Path], alive: Callable[[], bool], early: bool, progress: ProgressReport | None
) -> None:
    """Reports progress until everything is tokenised or, if `early`, until training can start."""
    window = specs[0].data.packing_window
    for source, (spec, folder) in enumerate(zip(specs, folders, strict=True)):
        # Counting reads the source through: only for those who want to know how much is left.
        total = count_rows(spec.source, spec.field) if progress else None
        done = Summary()
        number = 0
        store = TokenStore(folder / "train", alive)
        while not (early and done.documents >= window and spec.trains):
            reported = time.monotonic()
            while (ready := store.ready(number)) is None:
                time.sleep(POLL)
                if progress and time.monotonic() - reported >= BEAT:  # one row may take long
                    progress(source, done.rows, total, done.tokens)
                    reported = time.monotonic()
            if not ready:
                break
            done.add(read_summary(folder, number)[0])
            if progress:
                progress(source, done.rows, total, done.tokens)
            number += 1


def _key(spec: Spec, digest: str, shape: str, everything: str) -> str:
    """Cache key of a source: file contents and names, settings that affect tokens, and the tokenizer."""
    data = spec.data
    source = spec.source
    refine = spec.data.refine
    settings: list[Any] = [FORMAT, digest, shape, spec.share, data.sequence_length, data.loss_on, data.over_length]
    settings += [data.on_bad_row, source.format, source.fields, source.split, source.subset, refine.model_dump()]
    settings += [spec.seed, spec.index] if spec.share else []
    settings += [spec.purpose, spec.labels] if spec.purpose != "causal" else []
    settings += [source.path, [str(file) for file in source_files(source, spec.field)]]
    if refine.duplicates != "keep" or refine.decontaminate:
        settings += [everything, spec.field]
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _fingerprint(
    digests: list[str], shape: str, data: Data, seed: int, share: float, purpose: str, labels: tuple[str, ...]
) -> str:
    """Fingerprint of the order of training sequences: a position is valid only under the same one."""
    sources = [
        [digest, s.format, s.fields, s.split, s.subset, s.weight, s.epochs]
        for digest, s in zip(digests, data.train, strict=True)
    ]
    order: list[Any] = [FORMAT, ORDER, sources, shape, data.sequence_length, data.packing, data.packing_window]
    order += [data.loss_on, data.over_length, data.on_bad_row, data.temperature, data.refine.model_dump(), seed, share]
    order += [purpose, labels] if purpose != "causal" else []
    return hashlib.sha256(json.dumps(order, sort_keys=True).encode()).hexdigest()[:24]
