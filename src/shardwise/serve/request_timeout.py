"""Closes connections that do not complete their request in time: a few slow ones would keep all others out."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0  # for the request line and headers, from the first byte or the connection on


class HeadTimeoutProtocol(H11Protocol):
    """uvicorn's HTTP protocol with a time limit for a request's head, which uvicorn itself does not have."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Starts the timer."""
        super().connection_made(transport)
        self._update_timer()

    def data_received(self, data: bytes) -> None:
        """Stops the timer once the request's head is complete."""
        super().data_received(data)
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the timer."""
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _update_timer(self) -> None:
        awaiting_head = self.cycle is None or self.cycle.response_complete
        if awaiting_head and self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self._close_late)
        elif not awaiting_head and self._late is not None:
            self._late.cancel()
            self._late = None

    def _close_late(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self.transport.close()
