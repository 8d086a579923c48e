"""Messages of a host that waits at the rendezvous: who is present, who is missing, what was tried, and the timeout.

Not printed at once, as hosts seldom start together, and at growing intervals: a cluster may be full for hours.
"""

from __future__ import annotations

from shardwise.config.units import in_words
from shardwise.launch.rendezvous import RoundOrder, Rules
from shardwise.launch.rendezvous_link import RendezvousAddress

SHOWN = 8  # names


def nobody(place: RendezvousAddress, trouble: str, waited: float, wait: float) -> str:
    """Message of a host that reaches no other."""
    if place.is_here():  # we would keep the meeting, could we have the port
        return f"no meeting of hosts at {place.host}:{place.port}, and the port is taken ({trouble})"
    return (
        f"nobody answers at {place.host}:{place.port} ({trouble}): the same command has to run on the host that has "
        f"this address, which is not this one; {waited:.0f} s so far, giving up after {in_words(wait)} (--wait)"
    )


def gave_up(place: RendezvousAddress, trouble: str, wait: float) -> str:
    """Message of a host that reached no other before its timeout."""
    return (
        f"nobody could be reached at {place.host}:{place.port} within {in_words(wait)} (--wait): {trouble}\n"
        "  → give every host the same --rendezvous: name and free port of one of them, where the same command runs"
    )


def too_few(answer: RoundOrder, rules: Rules, wait: float) -> str:
    """Message of the keeper's host when too few hosts arrived before the timeout."""
    arrived = f"{len(answer.there)} host{'s' * (len(answer.there) != 1)} came"
    return (
        f"{arrived} within {in_words(wait)}, at least {rules.least} are needed (--wait)\n"
        f"  → start the same command on the others too, or lower --hosts; there: {_listed(answer.there)}"
    )


def for_others(answer: RoundOrder, rules: Rules, place: RendezvousAddress, waited: float, wait: float | None) -> str:
    """Message of a host that waits for others; `wait`: its timeout, if it has one of its own."""
    count = len(answer.there)
    missing = rules.least - len(answer.there)
    if answer.training >= rules.most:
        return f"{answer.training} hosts train, which is the most (--hosts): waiting for the place of one that is lost"
    if answer.training:
        return "waiting until the ranks of the others have saved"
    if missing <= 0:
        return f"{count} hosts are there ({_listed(answer.there)}): waiting until all of them are ready"
    until = f"giving up after {in_words(wait)} (--wait)" if wait is not None else f"as long as {place.host} does"
    text = (
        f"waiting for {missing} more host{'s' * (missing != 1)} to start the same command: {count} of {rules.least} "
        f"{'is' if count == 1 else 'are'} there ({_listed(answer.there)}); {waited:.0f} s so far, {until}"
    )
    if place.is_loopback():
        text += f"; no other host can reach {place.host}: give --rendezvous an address that they can"
    return text


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - SHOWN
    return ", ".join(sorted(names)[:SHOWN]) + (f" and {more} more" if more > 0 else "")
