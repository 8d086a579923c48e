"""One answer in progress: its request, the text so far, and the events sent to its client.

The engine calls from its own thread; `emit` hands each event to whoever waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from shardwise.nn.generate import Sampling, TextPieces
from shardwise.serve.choose import Chooser, Scored
from shardwise.serve.models import Served


@dataclass(frozen=True)
class Ask:
    """A prompt for one answer; prompt and `sampling.max_tokens` fit in the context together."""

    served: Served
    prompt: list[int]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None

    @property
    def need(self) -> int:
        """Maximum length of prompt and answer in tokens."""
        return len(self.prompt) + self.sampling.max_tokens


@dataclass(frozen=True)
class TextPiece:
    """Text that can be shown, with its scored tokens if they were requested."""

    text: str
    scored: tuple[Scored, ...] = ()


@dataclass(frozen=True)
class AnswerEnded:
    """The answer is complete."""

    reason: Literal["stop", "length"]
    tokens: int


@dataclass(frozen=True)
class Failed:
    """The answer failed, before its start or on the way."""

    status: int
    message: str


Event = TextPiece | AnswerEnded | Failed


@dataclass
class StopText:
    """Cuts a text at the first stop string, and holds back what may be the beginning of one."""

    stops: tuple[str, ...]
    held: str = ""
    hit: bool = False

    def pass_on(self, text: str, final: bool = False) -> str:
        """Returns what of the text so far can be shown."""
        self.held += text
        positions = [at for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if positions:
            self.hit = True
            held_back = len(self.held) - min(positions)
        else:
            held_back = 0 if final else self._beginning()
        visible = self.held[: len(self.held) - held_back]
        self.held = "" if self.hit else self.held[len(visible) :]
        return visible

    def _beginning(self) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop string."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        sizes = range(min(longest, len(self.held)), 0, -1)
        return next((size for size in sizes if any(stop.startswith(self.held[-size:]) for stop in self.stops)), 0)


@dataclass(eq=False)
class AnswerRow:
    """State of one answer."""

    ask: Ask
    emit: Callable[[Event], None]
    deadline: float
    cancelled: bool = False
    over: bool = False
    tokens: int = 0
    _scored: list[Scored] = field(default_factory=list)

    def __post_init__(self) -> None:
        served = self.ask.served
        self.chooser = Chooser(self.ask.sampling, served.model.device)
        self.pieces = TextPieces(served.tokenizer, served.stops, self._show)
        self._cut = StopText(self.ask.stop)

    @property
    def seen(self) -> list[int]:
        """Token ids of prompt and answer so far."""
        return self.ask.prompt + self.pieces.ids

    def take(self, token: int, scored: Scored | None) -> None:
        """Appends a token, which may finish the row."""
        if scored is not None and token not in self.pieces.stops:
            self._scored.append(scored)
        self.pieces.add(token)
        self.tokens = len(self.pieces.ids)
        if self.pieces.stopped or self._cut.hit:
            self._finish("stop")
        elif self.tokens == self.ask.sampling.max_tokens:
            self._finish("length")

    def fail(self, status: int, message: str) -> None:
        """Ends the row with an error."""
        if not self.over:
            self.over = True
            self.emit(Failed(status, message))

    def late(self) -> bool:
        """Whether the row has timed out."""
        return time.monotonic() > self.deadline

    def _show(self, text: str) -> None:
        if self._cut.hit:
            return
        self._send(self._cut.pass_on(text))

    def _send(self, text: str, final: bool = False) -> None:
        if text or (final and self._scored):
            self.emit(TextPiece(text, tuple(self._scored)))
            self._scored.clear()

    def _finish(self, reason: Literal["stop", "length"]) -> None:
        self.pieces.end()
        if not self._cut.hit:
            self._send(self._cut.pass_on("", final=True), final=True)
        self.over = True
        self.emit(AnswerEnded("stop" if self._cut.hit else reason, self.tokens))
