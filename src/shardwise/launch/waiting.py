"""What a host says while it waits for others: who is there, who is missing, what was tried, and how long it will.

Not at once, for hosts are seldom started together, and ever more seldom: a cluster may be full for hours.
"""

from __future__ import annotations

import time

from shardwise.config.units import in_words
from shardwise.launch.link import Place
from shardwise.launch.meeting import Answer, Rules

FIRST, LONGEST = 5.0, 300.0  # seconds until the first word and, each time twice as many, between later ones
SHOWN = 8  # names


class Waiting:
    """Says when it is time to speak again: some seconds after the wait began or something changed, then less often."""

    def __init__(self) -> None:
        self._about: object = None
        self._pause = FIRST
        self._next = 0.0

    def due(self, about: object, now: float | None = None) -> bool:
        """Whether to say now what is waited for; `about` is what would be said, but for the time."""
        now = time.monotonic() if now is None else now
        if self._about is None or about != self._about:
            new = self._about is None
            self._about, self._pause = about, FIRST
            self._next = now + FIRST if new else min(self._next, now + FIRST)
            return False
        if now < self._next:
            return False
        self._pause = min(self._pause * 2, LONGEST)
        self._next = now + self._pause
        return True

    def over(self) -> None:
        """Nothing is waited for any more."""
        self._about = None


def nobody(place: Place, trouble: str, waited: float, wait: float) -> str:
    """Of a host that reaches no other."""
    if place.is_here():  # we would keep the meeting, could we have the port
        return f"no meeting of hosts at {place.host}:{place.port}, and the port is taken ({trouble})"
    return (
        f"nobody answers at {place.host}:{place.port} ({trouble}): the same command has to run on the host that has "
        f"this address, which is not this one; {waited:.0f} s so far, giving up after {in_words(wait)} (--wait)"
    )


def gave_up(place: Place, trouble: str, wait: float) -> str:
    """Of a host that has reached no other in all its time."""
    return (
        f"nobody could be reached at {place.host}:{place.port} within {in_words(wait)} (--wait): {trouble}\n"
        "  → give every host the same --meet: the name and a free port of one of them, where the same command runs"
    )


def too_few(answer: Answer, rules: Rules, wait: float) -> str:
    """Of the host where they meet, when not enough came in all its time."""
    came = f"{len(answer.there)} host{'s' * (len(answer.there) != 1)} came"
    return (
        f"{came} within {in_words(wait)}, at least {rules.least} are needed (--wait)\n"
        f"  → start the same command on the others too, or lower --hosts; there: {_listed(answer.there)}"
    )


def for_others(answer: Answer, rules: Rules, place: Place, waited: float, wait: float | None) -> str:
    """Of a host that has reached the meeting and is told to wait; `wait`: how long, where it decides that itself."""
    there, missing = len(answer.there), rules.least - len(answer.there)
    if answer.training >= rules.most:
        return f"{answer.training} hosts train, which is the most (--hosts): waiting for the place of one that is lost"
    if answer.training:
        return "waiting until the ranks of the others have saved"
    if missing <= 0:
        return f"{there} hosts are there ({_listed(answer.there)}): waiting until all of them are ready"
    until = f"giving up after {in_words(wait)} (--wait)" if wait is not None else f"as long as {place.host} does"
    said = (
        f"waiting for {missing} more host{'s' * (missing != 1)} to start the same command: {there} of {rules.least} "
        f"{'is' if there == 1 else 'are'} there ({_listed(answer.there)}); {waited:.0f} s so far, {until}"
    )
    if place.is_loopback():
        said += f"; no other host can reach {place.host}: give --meet an address that they can"
    return said


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - SHOWN
    return ", ".join(sorted(names)[:SHOWN]) + (f" and {more} more" if more > 0 else "")
