"""A connection that does not come out with its request is closed: else a few that trickle would keep all others out."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0  # for the request line and headers, from the first byte or the connection on


class Impatient(H11Protocol):
    """uvicorn's HTTP protocol, which waits for a request's head without end, with an end."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """As uvicorn's; the clock runs."""
        super().connection_made(transport)
        self._mind()

    def data_received(self, data: bytes) -> None:
        """As uvicorn's; the clock stops once the head is there."""
        super().data_received(data)
        self._mind()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's."""
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _mind(self) -> None:
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self._give_up)
        elif not waits and self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self.transport.close()
