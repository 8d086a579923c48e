"""Threaded server with a bounded number of connections, which cannot exhaust a host's threads."""

from __future__ import annotations

import socketserver
import threading
from typing import Any


class BoundedThreads(socketserver.ThreadingMixIn):
    """Mixin for the standard library's servers, as ThreadingMixIn; connections beyond the limit are closed."""

    daemon_threads = True

    def __init__(self, *args: Any, connections: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._free = threading.BoundedSemaphore(connections)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handles a request in a new thread, if the limit allows one."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)  # type: ignore[attr-defined]

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Body of a connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()
