"""Files and an endpoint for tests of evaluation."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def no_bar(_: int) -> Callable[[int], None]:
    """In the place of a progress bar."""
    return lambda _: None


def write_lines(file: Path, rows: list[dict[str, Any]]) -> str:
    """JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


QUESTIONS: list[dict[str, Any]] = [
    {"question": "What does stage 3 shard?", "choices": ["nothing", "parameters too", "only states", "a"], "answer": 1},
    {"question": "Which is a number?", "choices": ["seven", "blue and green"], "answer": "A", "subject": "words"},
    {"question": "Where is the optimizer?", "choices": ["on the rank", "nowhere", "x y z"], "answer": "x y z"},
    {"question": "A", "choices": ["gather", "reduce"], "answer": 0, "subject": "words"},
]


@dataclass
class Mock:
    """An OpenAI-compatible endpoint: `answer` makes a reply of a request's body, or gives a status to fail with."""

    answer: Callable[[dict[str, Any]], str | int]
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    url: str = ""


@contextmanager
def endpoint(answer: Callable[[dict[str, Any]], str | int]) -> Iterator[Mock]:
    """A server in a thread of its own."""
    mock, lock = Mock(answer), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                mock.requests.append(body)
                mock.headers.append(dict(self.headers))
                mock.at_once += 1
                mock.most_at_once = max(mock.most_at_once, mock.at_once)
            said = mock.answer(body)
            status = said if isinstance(said, int) else 200
            reply: Any = {"error": {"message": f"status {status}"}}
            if isinstance(said, str):
                reply = {"choices": [{"message": {"role": "assistant", "content": said}}]}
            data = json.dumps(reply).encode()
            with lock:
                mock.at_once -= 1
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if status == 429:
                self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    mock.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield mock
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
