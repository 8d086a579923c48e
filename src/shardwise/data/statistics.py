"""Statistics of a run's data: what each source contributes, the fates of its rows, and packing efficiency.

Everything here is counts, so that the same statistics serve the terminal, the page and other tools, and stay small for
a source of any size. Lengths are a histogram over fixed edges: histograms of chunks add up, and percentiles are
accurate to within an eighth.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.config.objectives import Purpose
from shardwise.config.schema import Source
from shardwise.data.row_warnings import Count

VERSION = 1  # of the JSON; raised when a key changes its meaning or goes
# Every length up to 16, then 8 bins per power of two, up to 2^31.
LENGTH_EDGES = (*range(16), *((8 + part) << power for power in range(1, 28) for part in range(8)))
LOST = ("skipped", "dropped", "truncated", "refused", "no supervised token")  # fates that nobody asked for
PARTLY = ("truncated", "split")  # fates of rows that are learned all the same
REPEATS = ("duplicate", "near duplicate")
REFINED = ("filtered", "too short", "too long", *REPEATS, "contaminated")  # fates that data.refine brings
CHAT = ("chat", "sharegpt", "alpaca", "prompt", "pair", "preference", "kto")  # formats in which a part is an answer


def length_bin(length: int) -> int:
    """Index of the bin of LENGTH_EDGES that contains a length."""
    return max(0, bisect_right(LENGTH_EDGES, length) - 1)


def no_lengths() -> list[int]:
    """Returns an empty histogram of lengths."""
    return [0] * len(LENGTH_EDGES)


def add_lengths(histogram: list[int], lengths: np.ndarray | Sequence[int]) -> None:
    """Adds lengths to a histogram."""
    bins = np.searchsorted(LENGTH_EDGES, np.asarray(lengths, dtype=np.int64), side="right") - 1
    counts = np.bincount(np.maximum(bins, 0), minlength=len(LENGTH_EDGES))
    for index in np.nonzero(counts)[0]:
        histogram[index] += int(counts[index])


def bin_range(index: int) -> tuple[int, int]:
    """Smallest and largest length of a bin."""
    last = index + 1 == len(LENGTH_EDGES)
    return LENGTH_EDGES[index], (1 << 31) if last else LENGTH_EDGES[index + 1] - 1


def coarse(histogram: Sequence[int], bars: int) -> list[tuple[int, int, int]]:
    """The non-empty range of a histogram in at most `bars` bars: smallest, largest, count."""
    filled = [index for index, count in enumerate(histogram) if count]
    if not filled:
        return []
    first, last = filled[0], filled[-1]
    width = -(-(last - first + 1) // max(1, bars))
    merged = []
    for start in range(first, last + 1, width):
        end = min(start + width, last + 1)
        merged.append((bin_range(start)[0], bin_range(end - 1)[1], sum(histogram[start:end])))
    return merged


def remedy_of(fate: str, longest: int) -> str:
    """What to do if most rows of a source have this fate."""
    repeats = "its rows repeat each other or those of a source before it: leave it out, or set data.refine.duplicates"
    longer = f"raise data.sequence_length (the longest row has {longest:,} tokens)"
    remedies = {
        "dropped": f"{longer}, or set data.over_length to truncate or split",
        "truncated": longer,
        "skipped": "mend the rows, or the format and fields of the source",
        "filtered": "loosen data.refine.filter",
        "contaminated": "take rows that are not in the eval sources",
        "duplicate": repeats,
        "near duplicate": repeats,
    }
    return remedies.get(fate, "check data.refine and the rows themselves")


@dataclass(frozen=True)
class SourceStatistics:
    """Statistics of one source.

    `lengths` counts rows by their tokens before `data.over_length` is applied; `passes` is how often each row is used
    in one epoch of the run, `share` the source's fraction of the mixture's loss tokens.
    """

    name: str
    path: str
    format: str
    reason: str
    rows: int
    documents: int
    tokens: int
    supervised: int
    held_out: int = 0
    fates: dict[str, int] = field(default_factory=dict)
    remarks: dict[str, Count] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=no_lengths)
    longest: int | None = None
    weight: float = 1.0
    epochs: float | None = None
    temperature: float = 1.0
    passes: float = 1.0
    share: float = 0.0
    seconds: float = 0.0
    cached: bool = False
    fates_file: str | None = None

    @classmethod
    def from_facts(cls, source: Source, name: str, facts: dict[str, Any], **known: Any) -> SourceStatistics:
        """From the facts of a token store (done.json); `known`: held_out, passes, share, cached, fates_file."""
        names = ("rows", "documents", "tokens", "supervised", "fates", "remarks", "lengths", "longest")
        keys = ("format", "reason", "columns", *names)
        values = {key: facts[key] for key in keys if key in facts} | {"seconds": float(facts.get("seconds", 0.0))}
        return cls(name=name, path=source.path, weight=source.weight, epochs=source.epochs, **(values | known))

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of reading and tokenising; None if no time was measured."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def learned_share(self) -> float:
        return self.supervised / self.tokens if self.tokens else 0.0

    @property
    def understood(self) -> str:
        """The detected format and the reason."""
        named = self.reason.startswith(self.format) or not self.reason
        return self.reason or self.format if named else f"{self.format}: {self.reason}"

    @property
    def mixed_by(self) -> str:
        """The setting that decides how often the rows are used."""
        if self.epochs is not None:
            return f"epochs {self.epochs:g}"
        return f"weight {self.weight:g}" + (f", temperature {self.temperature:g}" if self.temperature != 1.0 else "")

    @property
    def left_out(self) -> int:
        """Number of rows that are not used at all."""
        return sum(count for fate, count in self.fates.items() if fate not in PARTLY)

    def lost(self, fates: Iterable[str]) -> int:
        """Number of rows with any of these fates."""
        return sum(self.fates.get(fate, 0) for fate in fates)

    def percentile(self, share: float) -> int:
        """Length that this share of the rows does not exceed, accurate to within an eighth."""
        total = sum(self.lengths)
        cumulative = 0
        for index, count in enumerate(self.lengths):
            cumulative += count
            if count and cumulative >= share * total - 1e-9:
                high = bin_range(index)[1]
                return high if self.longest is None else min(high, self.longest)
        return 0

    def to_json(self) -> dict[str, Any]:
        """JSON form, with lengths as [smallest, largest, rows] of the non-empty bins."""
        values = asdict(self)
        values["lengths"] = [[*bin_range(index), count] for index, count in enumerate(self.lengths) if count]
        values["remarks"] = {remark: {"rows": count, "first": at} for remark, (count, at) in self.remarks.items()}
        values["percentiles"] = {f"{share * 100:g}": self.percentile(share) for share in (0.5, 0.9, 0.99, 0.999, 1.0)}
        for key in ("learned_share", "left_out", "tokens_per_second"):
            values[key] = getattr(self, key)
        return values


@dataclass(frozen=True)
class PackingStatistics:
    """How the documents of an epoch are packed into sequences."""

    on: bool
    sequences: int
    documents: int
    tokens: int
    sequence_length: int
    window: int

    @property
    def efficiency(self) -> float:
        """Fraction of all positions that holds a token."""
        return self.tokens / max(1, self.sequences * self.sequence_length)

    @property
    def padding(self) -> int:
        return max(0, self.sequences * self.sequence_length - self.tokens)

    @property
    def documents_per_sequence(self) -> float:
        return self.documents / max(1, self.sequences)

    def to_json(self) -> dict[str, Any]:
        """JSON form of the packing statistics."""
        values = asdict(self)
        for key in ("efficiency", "padding", "documents_per_sequence"):
            values[key] = getattr(self, key)
        return values


@dataclass(frozen=True)
class StepStatistics:
    """Steps of a run over its epochs' sequences."""

    steps: int
    epochs: float
    batch_size: int
    words: str

    def to_json(self) -> dict[str, Any]:
        """JSON form of the step statistics."""
        return asdict(self)


@dataclass(frozen=True)
class DataStatistics:
    """Statistics of a run's training sources, its evaluation sources if any, and their packing."""

    train: list[SourceStatistics]
    eval: list[SourceStatistics]
    packing: PackingStatistics
    tokenizer: str
    template: str | None  # fingerprint of tokenizer and chat template
    loss_on: str
    over_length: str | None
    purpose: Purpose = "causal"
    steps: StepStatistics | None = None

    @property
    def sequence_length(self) -> int:
        return self.packing.sequence_length

    @property
    def sources(self) -> list[SourceStatistics]:
        return [*self.train, *self.eval]

    def to_json(self) -> dict[str, Any]:
        """JSON form of all statistics."""
        return {
            "version": VERSION,
            "tokenizer": self.tokenizer,
            "template": self.template,
            "sequence_length": self.sequence_length,
            "loss_on": self.loss_on,
            "over_length": self.over_length,
            "purpose": self.purpose,
            "train": [source.to_json() for source in self.train],
            "eval": [source.to_json() for source in self.eval],
            "packing": self.packing.to_json(),
            "steps": self.steps and self.steps.to_json(),
        }


def read_fates(file: str | Path, limit: int, counts: dict[str, int] | None = None) -> dict[str, list[tuple[str, str]]]:
    """The first `limit` rows of each fate as (where, reason); `counts`, if known, allows to stop reading early."""
    rows: dict[str, list[tuple[str, str]]] = {}
    full: tuple[str, ...] = ()  # how lines begin that need not be parsed any more
    expected = None if counts is None else sum(min(limit, count) for count in counts.values())
    try:
        with Path(file).open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith(full):
                    continue
                try:
                    row = json.loads(line)
                    fate = str(row["fate"])
                    where = str(row["where"])
                    reason = str(row.get("reason") or "")
                except (ValueError, KeyError, TypeError, AttributeError):
                    continue  # the last line of a run that was killed
                entries = rows.setdefault(fate, [])
                if len(entries) == limit:
                    continue
                entries.append((where, reason))
                if len(entries) == limit:
                    full = (*full, f"{json.dumps({'fate': fate})[:-1]},")
                if expected is not None and sum(map(len, rows.values())) >= expected:
                    break
    except OSError:
        return rows
    return rows
