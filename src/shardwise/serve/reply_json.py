"""Responses in OpenAI's JSON: complete, and as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardwise.serve.choose import Scored
from shardwise.serve.rows import TextPiece


@dataclass
class Usage:
    """Token counts of a request: each prompt counts once, however many answers it gets."""

    prompt: int
    completion: int = 0

    def json(self) -> dict[str, int]:
        """Returns the counts in OpenAI's form."""
        total = self.prompt + self.completion
        return {"prompt_tokens": self.prompt, "completion_tokens": self.completion, "total_tokens": total}


@dataclass
class ReplyForm:
    """What all chunks of one response share."""

    model: str
    tokenizer: Any
    kind: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        """Returns the response object around choices."""
        head = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        return head | {"choices": choices} | extra

    def word(self, token: int) -> str:
        """Decodes one token; an incomplete character shows as U+FFFD."""
        return str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))


class ReplyShape(Protocol):
    """The parts in which chats and completions differ."""

    def whole(self, form: ReplyForm, index: int, pieces: list[TextPiece], reason: str, scored: bool) -> dict[str, Any]:
        """Returns a choice of a complete response."""

    def opening(self, form: ReplyForm, index: int) -> dict[str, Any] | None:
        """Returns the choice of a stream's first chunk, if there is one before the text."""

    def part(self, form: ReplyForm, index: int, piece: TextPiece, scored: bool) -> dict[str, Any]:
        """Returns a choice of a chunk with text."""

    def closing(self, form: ReplyForm, index: int, reason: str) -> dict[str, Any]:
        """Returns a choice of a stream's last chunk."""


class Chat:
    """JSON shapes of `/v1/chat/completions`."""

    def whole(self, form: ReplyForm, index: int, pieces: list[TextPiece], reason: str, scored: bool) -> dict[str, Any]:
        """See ReplyShape."""
        message = {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None}
        tokens = [token for piece in pieces for token in piece.scored]
        logprobs = self._logprobs(form, tokens) if scored else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, form: ReplyForm, index: int) -> dict[str, Any] | None:
        """See ReplyShape."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, form: ReplyForm, index: int, piece: TextPiece, scored: bool) -> dict[str, Any]:
        """See ReplyShape."""
        logprobs = self._logprobs(form, piece.scored) if scored else None
        return {"index": index, "delta": {"content": piece.text}, "logprobs": logprobs, "finish_reason": None}

    def closing(self, form: ReplyForm, index: int, reason: str) -> dict[str, Any]:
        """See ReplyShape."""
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, form: ReplyForm, tokens: Iterable[Scored]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            word = form.word(token)
            incomplete = "\ufffd" in word  # the bytes of half a character are not to be had from every tokenizer
            return {"token": word, "logprob": logprob, "bytes": None if incomplete else list(word.encode())}

        rows = []
        for scored in tokens:
            top = [entry(*pair) for pair in scored.top]
            rows.append(entry(scored.token, scored.logprob) | {"top_logprobs": top})
        return {"content": rows, "refusal": None}


class Text:
    """JSON shapes of `/v1/completions`."""

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}

    def whole(self, form: ReplyForm, index: int, pieces: list[TextPiece], reason: str, scored: bool) -> dict[str, Any]:
        """See ReplyShape."""
        merged = TextPiece("".join(p.text for p in pieces), tuple(token for p in pieces for token in p.scored))
        return self.part(form, index, merged, scored) | {"finish_reason": reason}

    def opening(self, form: ReplyForm, index: int) -> dict[str, Any] | None:
        """See ReplyShape."""
        return None

    def part(self, form: ReplyForm, index: int, piece: TextPiece, scored: bool) -> dict[str, Any]:
        """See ReplyShape."""
        logprobs = self._logprobs(form, index, piece.scored) if scored else None
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": None}

    def closing(self, form: ReplyForm, index: int, reason: str) -> dict[str, Any]:
        """See ReplyShape."""
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}

    def _logprobs(self, form: ReplyForm, index: int, tokens: Iterable[Scored]) -> dict[str, Any]:
        tokens = list(tokens)
        words = [form.word(scored.token) for scored in tokens]
        offsets = []
        for word in words:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(word)
        return {
            "tokens": words,
            "token_logprobs": [scored.logprob for scored in tokens],
            "top_logprobs": [{form.word(token): value for token, value in scored.top} for scored in tokens],
            "text_offset": offsets,
        }
