"""A thread for each connection, up to a number: a crowd at the door cannot take all of a host's threads."""

from __future__ import annotations

import socketserver
import threading
from typing import Any


class BoundedThreads(socketserver.ThreadingMixIn):
    """Before one of the standard library's servers, as its ThreadingMixIn; whoever is beyond the number is let go."""

    daemon_threads = True

    def __init__(self, *args: Any, connections: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._free = threading.BoundedSemaphore(connections)

    def process_request(self, request: Any, client_address: Any) -> None:
        """As the mixin's, where a thread is to be had."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)  # type: ignore[attr-defined]

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread of a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()
