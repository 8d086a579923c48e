"""`shardwise serve` in a process of its own, on a free port."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Server:
    """A running server: where it is, and what it said."""

    def __init__(self, *words: str, **env: str) -> None:
        line = [sys.executable, "-m", "shardwise", "serve", *words, "--port", "0"]
        self.process = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ) | env
        )
        self.said: list[str] = []
        self.logged: list[str] = []
        first: queue.Queue[str] = queue.Queue()
        for pipe, lines in ((self.process.stdout, self.said), (self.process.stderr, self.logged)):
            threading.Thread(target=self._read, args=(pipe, lines, first), daemon=True).start()
        while (match := re.search(r"http://[^ ]*/v1", first.get(timeout=200))) is None:
            assert self.process.poll() is None, self.logged
        self.url = match[0]

    def _read(self, pipe: Any, lines: list[str], first: queue.Queue[str]) -> None:
        for line in pipe:
            lines.append(line)
            first.put(line)
        first.put("")

    def client(self, **options: Any) -> Any:
        """The official client."""
        import openai

        return openai.OpenAI(base_url=self.url, **{"api_key": "none", "max_retries": 0, "timeout": 200} | options)

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        return self.process.wait(60)


@contextmanager
def serving(*words: str, **env: str) -> Iterator[Server]:
    """A server that is gone afterwards."""
    server = Server(*words, **env)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait(30)
