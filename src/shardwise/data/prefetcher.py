"""Collates the next step's batch while the device computes the current one, so that the device does not wait for data.

One thread, one step ahead: batches are a pure function of the position, so prefetching changes nothing but the timing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from shardwise.data.loader import Loader, StepBatch
from shardwise.data.mixing import LoaderClosed


class Prefetcher:
    """Serves the steps of a loader, preparing the next one in the background until position `end`."""

    def __init__(self, loader: Loader, batch_size: int, micro: int, rank: int, ranks: int, end: int) -> None:
        self._loader, self._end = loader, end
        self._step: Callable[[int], StepBatch] = lambda at: loader.step(at, batch_size, micro, rank, ranks)
        self._thread: threading.Thread | None = None
        self._position = -1
        self._batch: StepBatch | BaseException | None = None

    def step(self, position: int) -> StepBatch:
        """Returns this rank's share of the batch at a position, and starts preparing the following one."""
        prefetched = self._take()
        batch = prefetched if self._position == position and prefetched is not None else self._step(position)
        if isinstance(batch, BaseException):
            raise batch
        following = position + batch.sequences
        if following < self._end:
            self._position = following
            # A daemon: a process that must leave at once does not wait for it.
            self._thread = threading.Thread(target=self._make, args=(following,), name="next batch", daemon=True)
            self._thread.start()
        return batch

    def _take(self) -> StepBatch | BaseException | None:
        if self._thread is not None:
            self._thread.join()
        batch = self._batch
        self._thread = None
        self._batch = None
        return batch

    def _make(self, position: int) -> None:
        try:
            self._batch = self._step(position)
        except LoaderClosed:
            pass
        except BaseException as error:  # raised where the batch is asked for
            self._batch = error

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *error: Any) -> None:
        self._loader.close()
        self._take()
