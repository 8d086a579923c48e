"""Client of a judge: /chat/completions of an OpenAI-compatible endpoint, with retries.

The key is read from the environment at each call and goes into the request's header, nowhere else.
"""

from __future__ import annotations

import json
import os
import random
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardwise.core.errors import RunFailed, UserError

PATH = "/chat/completions"
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # what may pass
LONGEST_PAUSE = 60.0


@dataclass(frozen=True)
class Endpoint:
    """An endpoint with its model, limits and retries."""

    url: str
    model: str
    key: str = "OPENAI_API_KEY"
    max_tokens: int = 1024
    retries: int = 5
    timeout: float = 120.0
    pause: float = 1.0
    stop: threading.Event = field(default_factory=threading.Event)  # set: no further attempts
    sleep: Callable[[float], object] | None = None  # in the place of real pauses

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError("--judge-url", self.url, "is no address", "write e.g. http://127.0.0.1:8000/v1")
        if parts.username or parts.password:
            problem = "holds a name or password, which would be stored with the results"
            raise UserError(
                "--judge-url", f"{parts.scheme}://…@{parts.hostname}", problem, f"put the key in ${self.key}"
            )

    def ask(self, messages: list[dict[str, str]]) -> str:
        """Returns the answer to a conversation at temperature 0; raises RunFailed after the last attempt."""
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": self.max_tokens}
        for attempt in range(self.retries + 1):
            if self.stop.is_set():
                raise RunFailed("the judge is asked no more")
            try:
                return _content(self._post(body))
            except _TransientError as failure:
                if attempt == self.retries:
                    attempts = f"{attempt + 1} attempt{'s' * (attempt > 0)}"
                    summary = f"the judge at {self.url} gave no answer in {attempts} ({failure})"
                    raise RunFailed(f"{summary}; what was judged is kept, the same command goes on") from None
                pause = min(LONGEST_PAUSE, self.pause * 2**attempt) * random.uniform(0.5, 1.0)
                (self.sleep or self.stop.wait)(pause if failure.wait is None else min(LONGEST_PAUSE, failure.wait))
        raise AssertionError("not reached")

    def _post(self, body: dict[str, Any]) -> Any:
        base = self.url.rstrip("/")
        address = base if base.endswith(PATH) else base + PATH
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.key):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            message = _error_message(error)
            if error.code in AGAIN:
                raise _TransientError(f"{error.code} {message}", _seconds(error.headers.get("Retry-After"))) from None
            remedy = (
                f"put the key in ${self.key}" if error.code in (401, 403) else "check --judge-url and --judge-model"
            )
            raise UserError(
                "--judge-url", self.url, f"the endpoint refuses ({error.code}: {message})", remedy
            ) from None
        except (OSError, ValueError) as error:  # no connection, a time-out, or no JSON
            raise _TransientError(str(getattr(error, "reason", error))) from None


class _TransientError(Exception):
    """A failure that may pass, and how long the endpoint asks to wait."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


def _content(answer: Any) -> str:
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise _TransientError("its answer has no choices[0].message.content") from None
    if not isinstance(content, str):
        raise _TransientError("its answer is no text")
    return content


def _error_message(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(2000).decode(errors="replace")
    except OSError:
        return str(error.reason)
    try:
        error_value = json.loads(text)["error"]
        text = str(error_value["message"] if isinstance(error_value, dict) else error_value)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(text.split())[:200] or str(error.reason)


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text is not None else None
    except ValueError:
        return None
