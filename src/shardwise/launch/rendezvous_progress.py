"""What a host says while it waits for others: who is there, who is missing, what was tried, and how long it will.

Not at once, for hosts are seldom started together, and ever more seldom: a cluster may be full for hours.
"""

from __future__ import annotations

from shardwise.config.units import in_words
from shardwise.launch.rendezvous import RoundOrder, Rules
from shardwise.launch.rendezvous_link import RendezvousAddress

SHOWN = 8  # names


def nobody(place: RendezvousAddress, trouble: str, waited: float, wait: float) -> str:
    """Of a host that reaches no other."""
    if place.is_here():  # we would keep the meeting, could we have the port
        return f"no meeting of hosts at {place.host}:{place.port}, and the port is taken ({trouble})"
    return (
        f"nobody answers at {place.host}:{place.port} ({trouble}): the same command has to run on the host that has "
        f"this address, which is not this one; {waited:.0f} s so far, giving up after {in_words(wait)} (--wait)"
    )


def gave_up(place: RendezvousAddress, trouble: str, wait: float) -> str:
    """Of a host that has reached no other in all its time."""
    return (
        f"nobody could be reached at {place.host}:{place.port} within {in_words(wait)} (--wait): {trouble}\n"
        "  → give every host the same --rendezvous: name and free port of one of them, where the same command runs"
    )


def too_few(answer: RoundOrder, rules: Rules, wait: float) -> str:
    """Of the host where they meet, when not enough came in all its time."""
    came = f"{len(answer.there)} host{'s' * (len(answer.there) != 1)} came"
    return (
        f"{came} within {in_words(wait)}, at least {rules.least} are needed (--wait)\n"
        f"  → start the same command on the others too, or lower --hosts; there: {_listed(answer.there)}"
    )


def for_others(answer: RoundOrder, rules: Rules, place: RendezvousAddress, waited: float, wait: float | None) -> str:
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
        said += f"; no other host can reach {place.host}: give --rendezvous an address that they can"
    return said


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - SHOWN
    return ", ".join(sorted(names)[:SHOWN]) + (f" and {more} more" if more > 0 else "")
