"""The data loader that `initialize(training_data=…)` returns: this rank's share of the samples, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


class DeepSpeedDataLoader:
    """Iterates over this rank's micro-batches; as in DeepSpeed, every epoch has the same order by default.

    Call `loader.data_sampler.set_epoch(n)` for another order.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        rank: int,
        ranks: int,
        collate_fn: Callable[..., Any] | None,
        drop_last: bool,
        workers: int = 0,
        sampler: Any = None,
    ) -> None:
        stream = isinstance(dataset, IterableDataset)
        if not stream and sampler is None:
            sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank)
        self.dataset = dataset
        self.batch_size = batch_size
        self.data_sampler = sampler
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
        )
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> DeepSpeedDataLoader:
        self._batches = iter(self._loader)
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._loader)
        return next(self._batches)


class RepeatingLoader:
    """Restarts a loader whenever it ends."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)
