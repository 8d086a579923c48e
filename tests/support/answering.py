"""Asks an engine without a server around it, and gathers what it says."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.nn.generate import Sampling, prompt_ids
from shardwise.serve.engine import BatchingEngine, Limits
from shardwise.serve.models import Models, Served
from shardwise.serve.rows import AnswerEnded, AnswerRow, Ask, Event, Failed, TextPiece


@contextmanager
def running(*served: Served, **limits: Any) -> Iterator[BatchingEngine]:
    """An engine that is closed afterwards."""
    engine = BatchingEngine(Models(list(served)), Limits(**limits))
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


class Listener:
    """Receives the events of one answer."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.pieces: list[TextPiece] = []

    def next(self, timeout: float = 60) -> Event:
        """The next event."""
        event = self.events.get(timeout=timeout)
        if isinstance(event, TextPiece):
            self.pieces.append(event)
        return event

    def end(self) -> AnswerEnded | Failed:
        """Waits for the last event."""
        while isinstance(event := self.next(), TextPiece):
            pass
        return event

    @property
    def text(self) -> str:
        """What came so far."""
        return "".join(piece.text for piece in self.pieces)


def question(served: Served, text: str, sampling: Sampling, **more: Any) -> Ask:
    """A one-turn conversation as the engine takes it."""
    return Ask(served, prompt_ids(served.tokenizer, [{"role": "user", "content": text}]), sampling, **more)


def submit(engine: BatchingEngine, ask: Ask) -> tuple[AnswerRow, Listener]:
    """Hands one ask over; there has to be room for it."""
    listener = Listener()
    rows = engine.submit([ask], [listener.events.put])
    assert rows is not None
    return rows[0], listener


def wait_until(condition: Any, timeout: float = 60) -> None:
    """Returns once the condition holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
