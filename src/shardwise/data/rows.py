"""Layouts with one document per row: source and target, masked text, text with its class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from shardwise.core.labels import IGNORE
from shardwise.data.layout import BatchLayout, Reader
from shardwise.data.masking import Masker
from shardwise.data.store import LEARNED

_MASKS = 4  # what this stream of random numbers is for, beside those of mixing.py


@dataclass(frozen=True)
class RowBatch:
    """Inputs of one forward with one document per row: ids padded to the longest, and labels.

    `labels` are target tokens, the tokens under masks, or a class per row; `sources` is the source index of each row,
    out of `source_count`, None if there is only one; `units` counts labels by source, where only the batch knows;
    `counts` as in MicroBatch.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor
    sources: torch.Tensor | None = None
    source_count: int = 1
    token_type_ids: torch.Tensor | None = None
    units: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None  # where a rank has but a part of each row
    counts: bool = True

    def to(self, device: torch.device) -> RowBatch:
        """Copy with all tensors on `device`."""
        moved: dict[str, Any] = {
            f.name: part.to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(part := getattr(self, f.name), torch.Tensor)
        }
        return replace(self, **moved)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Keyword arguments of the model's forward, without labels."""
        optional = {"token_type_ids": self.token_type_ids, "position_ids": self.position_ids}
        required = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        return required | {name: part for name, part in optional.items() if part is not None}

    def sources_like(self, labels: torch.Tensor) -> torch.Tensor | None:
        """Source index of each label; None if there is only one source."""
        if self.sources is None or labels.ndim == 1:
            return self.sources
        return self.sources[:, None].expand_as(labels)


def padded(rows: Sequence[np.ndarray], value: int) -> torch.Tensor:
    """Stacks rows into a matrix, padded with `value` to the longest."""
    matrix = np.full((len(rows), max(map(len, rows))), value, dtype=np.int64)
    for line, row in zip(matrix, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(matrix)


class _RowLayout:
    """Base class of layouts with one document per row."""

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id

    def units(self, documents: np.ndarray) -> np.ndarray:
        """Number of loss tokens of each document."""
        learned: np.ndarray = documents["supervised"]
        return learned

    def _read(self, reader: Reader, sequences: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokens and loss mask of each row."""
        rows = []
        for (place,) in sequences:
            marked = reader.marked(int(place["source"]), int(place["chunk"]), int(place["index"]))
            rows.append(((marked & ~LEARNED).astype(np.int64), marked >= LEARNED))
        return rows

    def _batch(
        self, reader: Reader, sequences: Sequence[np.ndarray], ids: Sequence[np.ndarray], labels: torch.Tensor
    ) -> RowBatch:
        sources = None
        if reader.source_count > 1:
            sources = torch.tensor([int(s["source"][0]) for s in sequences])
        real = padded([np.ones(len(row), dtype=np.int64) for row in ids], 0)
        return RowBatch(padded(ids, self.pad_id), real, labels, sources, reader.source_count)


def row_layout(objective: Any, tokenizer: Any, pad_id: int, seed: int, vocabulary: int) -> BatchLayout:
    """Returns the layout of an objective whose rows are read one at a time."""
    match objective.type:
        case "seq2seq":
            return Seq2seqLayout(pad_id)
        case "masked":
            return MaskedLayout(
                pad_id, Masker.of(tokenizer, objective.mlm_probability, objective.whole_words, vocabulary), seed
            )
    assert objective.type == "classify"
    return ClassifyLayout(pad_id, type_separator(tokenizer))


class Seq2seqLayout(_RowLayout):
    """A source per row with its target as labels; the objective shifts them as the model does."""

    counted = True

    def collate(self, reader: Reader, sequences: Sequence[np.ndarray], epoch: int) -> RowBatch:
        """Collates sources and targets, each padded to the longest."""
        rows = self._read(reader, sequences)
        labels = padded([tokens[learned] for tokens, learned in rows], IGNORE)
        return self._batch(reader, sequences, [tokens[~learned] for tokens, learned in rows], labels)


class MaskedLayout(_RowLayout):
    """A text per row with masked tokens: different ones in each epoch, the same on any number of ranks."""

    counted = False

    def __init__(self, pad_id: int, masker: Masker, seed: int) -> None:
        super().__init__(pad_id)
        self._masker, self._seed = masker, seed

    def collate(self, reader: Reader, sequences: Sequence[np.ndarray], epoch: int) -> RowBatch:
        """Collates masked texts; labels are the tokens under the masks."""
        inputs, labels = [], []
        units = np.zeros(reader.source_count, dtype=np.int64)
        for (place,), (tokens, maskable) in zip(sequences, self._read(reader, sequences), strict=True):
            where = [int(place[name]) for name in ("source", "chunk", "index")]
            rng = np.random.default_rng([self._seed, _MASKS, epoch, *where])
            row, chosen = self._masker(tokens, maskable, rng)
            inputs.append(row)
            labels.append(np.where(chosen, tokens, IGNORE))
            units[where[0]] += int(chosen.sum())
        batch = self._batch(reader, sequences, inputs, padded(labels, IGNORE))
        return replace(batch, units=torch.from_numpy(units))


class ClassifyLayout(_RowLayout):
    """A text per row with its class.

    `separator`: the token after which the second of two texts begins, for models with token types (BERT).
    """

    counted = True

    def __init__(self, pad_id: int, separator: int | None) -> None:
        super().__init__(pad_id)
        self._separator = separator

    def collate(self, reader: Reader, sequences: Sequence[np.ndarray], epoch: int) -> RowBatch:
        """Collates texts and their classes."""
        rows = [tokens for tokens, _ in self._read(reader, sequences)]
        texts = [row[:-1] for row in rows]
        batch = self._batch(reader, sequences, texts, torch.tensor([int(row[-1]) for row in rows]))
        if self._separator is None:
            return batch
        return replace(batch, token_type_ids=padded([second_text(t, self._separator) for t in texts], 0))


def second_text(tokens: np.ndarray, separator: int) -> np.ndarray:
    """Token types: 1 for tokens of a second text, 0 for the others."""
    ends = tokens == separator
    before: np.ndarray = np.cumsum(ends) - ends
    return (before > 0).astype(np.int64)


def type_separator(tokenizer: Any) -> int | None:
    """The token after which a tokenizer's token types change from 0 to 1 in a pair; None if they do not."""
    pair = tokenizer("a", "a")
    types = pair.get("token_type_ids")
    separator = tokenizer.sep_token_id
    if types is None or separator is None or "token_type_ids" not in tokenizer.model_input_names:
        return None
    same = second_text(np.array(pair["input_ids"]), separator).tolist() == list(types)
    return int(separator) if same and any(types) else None
