"""Continuous batching: requests join the running rows between two steps, and leave as soon as they are answered.

One thread does all the computing. Each turn it drops requests that were cancelled or timed out, prefills the prompts of
some that wait, and decodes one token for every batch. `transformers` has a scheduler of this kind, which runs on CPUs
too; it draws for all requests from one random stream and owns the model for as long as it lives, so that neither a
request's seed nor several adapters on one base are possible with it. Hence this one.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from shardwise.core.errors import UserError
from shardwise.nn.generate import Sampling
from shardwise.serve.batch import DecodeBatch
from shardwise.serve.kv import can_join
from shardwise.serve.models import Models, Served
from shardwise.serve.rows import AnswerRow, Ask, Event

log = logging.getLogger("shardwise.serve")

BUSY = "the server has as many requests as it takes; try again in a moment"
FAILED = "the server met an error of its own; its log has more"
STOPPING = "the server is shutting down"


@dataclass(frozen=True)
class Limits:
    """Limits of the engine's load."""

    concurrent: int = 64
    queue: int = 256
    seconds: float = 600.0
    # Prompt tokens read at once: while they are read, the answers under way stand still.
    prefill: int = 512
    memory: float = 0.5  # share of the free memory that keys and values may take


class BatchingEngine:
    """Answers requests for all models of a server, on a thread of its own."""

    def __init__(self, models: Models, limits: Limits) -> None:
        self.limits = limits
        self._joins = {served: _checked(served) for served in models}
        self._waiting: deque[AnswerRow] = deque()
        self._starting: list[AnswerRow] = []
        self._batches: list[DecodeBatch] = []
        self._per_token = {served: _bytes_per_token(served) for served in models}
        self._memory = limits.memory * min(_free_memory(served) for served in models)
        self._wake = threading.Condition()
        self._stopping: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the engine's thread."""
        self._thread.start()

    def submit(self, asks: list[Ask], emits: list[Callable[[Event], None]]) -> list[AnswerRow] | None:
        """Accepts all of these requests, or returns None if there is no room for them."""
        deadline = time.monotonic() + self.limits.seconds
        with self._wake:
            if self._stopping is not None or len(self._waiting) + len(asks) > self.limits.queue:
                return None
            rows = [AnswerRow(ask, emit, deadline) for ask, emit in zip(asks, emits, strict=True)]
            self._waiting.extend(rows)
            self._wake.notify()
        return rows

    def drain(self, grace: float) -> None:
        """Accepts no more requests, and ends running ones after `grace` seconds at the latest."""
        with self._wake:
            self._stopping = time.monotonic() + grace
            self._wake.notify()

    def close(self, wait: float = 10.0) -> None:
        """Stops now."""
        self.drain(0)
        self._thread.join(wait)

    @property
    def stopping(self) -> bool:
        """Whether it accepts no more requests."""
        return self._stopping is not None

    def load(self) -> tuple[int, int]:
        """Returns the number of running and of waiting requests."""
        return len(self._running_rows()), len(self._waiting)

    def _running_rows(self) -> list[AnswerRow]:
        # Once each: a row is in both places for a moment, and others ask from threads of their own.
        return list(dict.fromkeys([*self._starting, *(row for batch in self._batches for row in batch.rows)]))

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            try:
                if not self._turn():
                    return
            except Exception:  # a bug of ours, which is to cost the requests at hand and not the server
                log.exception("a turn failed")
                for row in [*self._waiting, *self._running_rows()]:
                    row.fail(500, FAILED)
                self._waiting = deque()
                self._starting = []
                self._batches = []

    def _turn(self) -> bool:
        """One step for every batch; returns False when the engine is stopped and idle."""
        with self._wake:
            while not (self._waiting or self._batches or self.stopping):
                self._wake.wait()
            self._sweep()
            self._starting = self._admitted()
            if self.stopping and not self._running_rows():
                return False
        rows = self._starting
        new_batches = [DecodeBatch(rows[0].ask.served, rows)] if rows else []
        for batch in [*new_batches, *self._batches]:
            self._guarded([batch], batch.step)
        self._starting = []
        for batch in new_batches:
            self._place(batch)
        self._batches = [batch for batch in self._batches if batch.rows]
        return True

    def _sweep(self) -> None:
        """Ends requests whose client has disconnected, that timed out, or that the shutdown cuts short."""
        grace_over = self._stopping is not None and time.monotonic() > self._stopping
        for row in [*self._waiting, *self._running_rows()]:
            if row.cancelled:
                row.over = True
            elif grace_over or (self.stopping and row in self._waiting):
                row.fail(503, STOPPING)
            elif row.late():
                row.fail(504, f"no answer within {self.limits.seconds:g} seconds")
        self._waiting = deque(row for row in self._waiting if not row.over)
        for batch in self._batches:
            batch.drop()
        self._batches = [batch for batch in self._batches if batch.rows]

    def _admitted(self) -> list[AnswerRow]:
        """The rows to start now, all of one model, as far as rows, prompt tokens and memory allow."""
        if not self._waiting:
            return []
        served = self._waiting[0].ask.served
        free_rows = self.limits.concurrent - sum(len(batch.rows) for batch in self._batches)
        admitted: list[AnswerRow] = []
        for row in self._waiting:
            if row.ask.served is not served:
                continue
            prompts = [len(candidate.ask.prompt) for candidate in (*admitted, row)]
            idle = not (admitted or self._batches)  # what does not fit beside others is tried alone
            if len(admitted) == free_rows or not (idle or self._fits(served, [*admitted, row])):
                break
            if admitted and (not self._joins[served] or max(prompts) * len(prompts) > self.limits.prefill):
                break
            admitted.append(row)
        self._waiting = deque(row for row in self._waiting if row not in admitted)
        return admitted

    def _fits(self, served: Served, rows: list[AnswerRow]) -> bool:
        """Whether the memory would hold these rows too, if all answers reach their maximum length."""
        size = 0.0
        for batch in list(self._batches):
            batch_rows = list(batch.rows)
            if batch.served is served and self._joins[served]:
                rows = [*rows, *batch_rows]
            else:
                longest = max(row.ask.need for row in batch_rows)
                size += longest * len(batch_rows) * self._per_token[batch.served]
        size += max(row.ask.need for row in rows) * len(rows) * self._per_token[served]
        return size <= self._memory

    def _place(self, new_batch: DecodeBatch) -> None:
        """Merges prefilled rows into the running batch of their model."""
        if not new_batch.rows:
            return
        others = [batch for batch in self._batches if batch.served is new_batch.served and batch.rows]
        if others and self._joins[new_batch.served]:
            self._guarded([others[0], new_batch], lambda: others[0].join(new_batch))
        else:
            self._batches.append(new_batch)

    def _guarded(self, batches: list[DecodeBatch], work: Callable[[], None]) -> None:
        """Runs work on batches; a failure ends their requests and nothing else."""
        try:
            work()
        except Exception as error:
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            if not out_of_memory:
                log.exception("a step failed")
            for batch in batches:
                for row in batch.rows:
                    row.fail(*((503, "the memory is full; ask for less") if out_of_memory else (500, FAILED)))
                batch.rows = []


def _checked(served: Served) -> bool:
    """Whether requests for this model can share a batch; raises UserError if it cannot be served at all."""
    if "past_key_values" not in inspect.signature(served.model.forward).parameters:
        problem = f"{type(served.model).__name__} keeps its state in a way this server does not handle"
        raise UserError("model", served.name, problem, "use shardwise chat, or an engine made for it")
    return can_join(served.model)


@torch.inference_mode()
def _bytes_per_token(served: Served) -> float:
    """Measured on one token, which also shows that the model runs."""
    row = AnswerRow(Ask(served, [min(served.stops, default=0)] * 2, Sampling(max_tokens=2)), lambda _: None, math.inf)
    batch = DecodeBatch(served, [row])
    batch.rows[0].pieces.stops = set()  # whatever it says, the row stays
    batch.step()
    return batch.bytes_per_token()


def _free_memory(served: Served) -> float:
    device = served.model.device
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available)
