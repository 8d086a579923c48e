"""Stores of made-up documents whose tokens tell where they are from, and loaders over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.data.examples import Document
from shardwise.data.layout import CausalLayout
from shardwise.data.loader import Loader, MicroBatch
from shardwise.data.mixing import SourceStream
from shardwise.data.store import TokenStore, finish, write_chunk

LENGTH, PAD = 64, 0


def documents(count: int, seed: int = 0, source: int = 0, most: int = LENGTH) -> list[Document]:
    """Documents of 2 to `most` tokens; a token tells source, document and place, 0 is padding alone."""
    rng = np.random.default_rng(seed)
    made = []
    for number, size in enumerate(rng.integers(2, most + 1, count)):
        tokens = 1 + np.arange(size) + 100 * (number + 10_000 * source)
        learned = rng.random(size) < 0.6
        learned[0], learned[-1] = False, True
        made.append(Document(f"made:{number}", number, tokens, learned))
    return made


def write_store(folder: Path, made: list[Document], chunk: int = 16, done: bool = True) -> TokenStore:
    """A store of these documents, `chunk` of them at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(made), chunk)
    for index, start in enumerate(starts):
        write_chunk(folder, index, made[start : start + chunk])
    if done:
        finish(folder, len(starts), {"documents": len(made)})
    return TokenStore(folder)


def stream(folder: Path, count: int, source: int = 0, chunk: int = 16, **settings: Any) -> SourceStream:
    """A source of `count` documents (written once per folder and source)."""
    place = folder / f"{source}-{count}-{chunk}"
    store = TokenStore(place) if place.exists() else write_store(place, documents(count, source, source), chunk)
    return SourceStream(f"s{source}", store, **({"rows": count} | settings))


def loader(
    sources: Iterable[SourceStream], packing: bool = True, window: int = 1000, seed: int = 3, **settings: Any
) -> Loader:
    """A loader over them, with sequences of `LENGTH` tokens."""
    return Loader(list(sources), LENGTH, packing, window, seed, CausalLayout(PAD), **settings)


def places(sequences: Iterable[np.ndarray]) -> Counter[tuple[int, int, int]]:
    """How often each document comes up: source, chunk and place in the chunk."""
    return Counter(tuple(d) for s in sequences for d in s[["source", "chunk", "index"]].tolist())


def ids_of(micro: MicroBatch) -> torch.Tensor:
    """The tokens of a micro-batch, PAD behind those of a row."""
    assert micro.filled is not None
    return micro.input_ids.where(torch.arange(micro.input_ids.shape[1]) < micro.filled[:, None], PAD)


def seen(micro: MicroBatch) -> Counter[int]:
    """How often each document comes up in a micro-batch, by the number in its tokens."""
    ids = ids_of(micro).numpy().ravel()
    return Counter((ids[(ids != PAD) & (ids % 100 == 1)] // 100).tolist())
