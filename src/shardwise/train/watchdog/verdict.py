"""Who held the others up, from what every rank was doing: told in words, with the usual causes, the likeliest first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.train.watchdog.scene import PendingCollective, Scene


@dataclass(frozen=True)
class Silent:
    """A rank that did not answer, with what is known of it from before."""

    rank: int
    host: str = ""
    process: int = 0
    step: int = 0
    doing: str = ""
    state: str = ""  # of the process, where it could be seen: stopped, gone, …


@dataclass(frozen=True)
class StallVerdict:
    """The ranks that are late, and everything in words."""

    late: tuple[int, ...]
    text: str


def judge(scenes: dict[int, Scene], silent: dict[int, Silent], timeout: float) -> StallVerdict:
    """Follows who waits for whom to those who wait for nobody."""
    awaited = {rank: _awaited(scene, scenes, silent, timeout) for rank, scene in scenes.items()}
    wanted = {rank for ranks in awaited.values() for rank in ranks}
    late = sorted(rank for rank in wanted if not awaited.get(rank))
    apart = not late and bool(wanted)  # they wait for each other, in a circle
    late = late or sorted(wanted)
    waiting = sorted(rank for rank in scenes if awaited[rank])
    if not late:
        return StallVerdict((), _nobody(scenes, timeout))
    step = max((s.step for s in scenes.values()), default=0)
    who = f"rank {late[0]}" if len(late) == 1 else _ranks(late)
    head = f"{who} kept the others waiting for {timeout:g} s (timeout) at step {step}"
    if apart:
        head = f"{_ranks(late)} wait for each other since {timeout:g} s (timeout) at step {step}"
    lines = [head]
    for rank in late:
        lines.append(f"  {_late(rank, scenes, silent)}")
        if apart and (held := _longest(scenes[rank])):
            lines[-1] += f"; waits in {_collective(held)}"
    for collective, ranks in _by_collective(scenes, [r for r in waiting if not apart]).items():
        named = f"rank {ranks[0]} waits" if len(ranks) == 1 else f"{_ranks(ranks)} wait"
        place = scenes[ranks[0]].module
        lines.append(f"  {named} in {collective}" + (f", at {place}" if place else ""))
    lines += [
        f"  {number}. {cause}"
        for number, cause in enumerate(_causes(late, scenes, silent, apart), 1)
    ]
    return StallVerdict(tuple(late), "\n".join(lines))


def _awaited(
    scene: Scene, scenes: dict[int, Scene], silent: dict[int, Silent], timeout: float
) -> set[int]:
    """The ranks that have not come to what this one waits in."""
    found: set[int] = set()
    for held in scene.waiting:
        if held.seconds < min(timeout, 1.0) / 2:
            continue  # under way, not stuck
        for rank in scene.members.get(held.group, ()):
            other = scenes.get(rank)
            if rank in silent or (
                other is not None and other.begun.get(held.group, 0) < held.number
            ):
                found.add(rank)
    return found - {scene.rank}


def _longest(scene: Scene) -> PendingCollective | None:
    return max(scene.waiting, key=lambda one: one.seconds, default=None)


def _collective(held: PendingCollective) -> str:
    return f"{held.kind} number {held.number} of group {held.group}" + (
        f" ({held.shape})" if held.shape else ""
    )


def _by_collective(scenes: dict[int, Scene], ranks: Iterable[int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank in ranks:
        if held := _longest(scenes[rank]):
            found.setdefault(_collective(held), []).append(rank)
    return found


def _late(rank: int, scenes: dict[int, Scene], silent: dict[int, Silent]) -> str:
    if rank in silent:
        gone = silent[rank]
        where = f" (process {gone.process} on {gone.host})" if gone.process else ""
        state = f": {gone.state}" if gone.state else ""
        last = f"; it was last seen at step {gone.step} while {gone.doing}" if gone.doing else ""
        return f"rank {rank}{where} does not answer{state}{last}"
    scene = scenes[rank]
    module = f" in {scene.module}" if scene.module else ""
    line = f", in {scene.line}" if scene.line else ""
    return f"rank {rank} (process {scene.process} on {scene.host}) is {scene.doing}, step {scene.step}{module}{line}"


def _causes(
    late: list[int], scenes: dict[int, Scene], silent: dict[int, Silent], apart: bool
) -> list[str]:
    """The usual ones for what was seen, the likeliest first."""
    if apart:
        return ["ranks took different ways through the code: a branch on something that differs between them",
                "a collective of your own that not every rank of its group calls"]  # fmt: skip
    if late[0] in silent:
        gone = silent[late[0]]
        if gone.state == "stopped":
            return [
                f"the process was stopped (SIGSTOP, a debugger): kill -CONT {gone.process} lets it go on"
            ]
        if gone.state == "gone":
            return ["the process was killed, often for lack of memory (see dmesg)"]
        return ["its host is cut off from the network, or down", "its host has run out of memory and swaps",
                "a call into native code that never returns"]  # fmt: skip
    doing = scenes[late[0]].doing
    if doing == "saving":
        return [
            "its disk or network storage is slow or full",
            "timeout is too short for a checkpoint of this size",
        ]
    causes = [
        "it is slower than the others: another job on its device or cores, or a hot and throttled one"
    ]
    if scenes[late[0]].step <= 1:
        causes.insert(0, "the first step is slow (compiling, reading weights): raise timeout")
    if "data" in scenes[late[0]].line:
        causes.insert(0, "its data come slowly: storage, or rows that take long to read")
    return [
        *causes,
        "it is stuck in code of yours or a library's: see its stack",
        "timeout is too short: raise it",
    ]


def _nobody(scenes: dict[int, Scene], timeout: float) -> str:
    step = max((scene.step for scene in scenes.values()), default=0)
    lines = [
        f"all ranks came to the same collective at step {step}, which did not end within {timeout:g} s (timeout)"
    ]
    for collective, ranks in _by_collective(scenes, sorted(scenes)).items():
        lines.append(f"  {_ranks(ranks)} wait in {collective}")
    causes = ["the network between them drops or delays: links, firewalls, the wrong interface (GLOO_SOCKET_IFNAME, "
              "NCCL_SOCKET_IFNAME)", "timeout is too short for what is sent: raise it"]  # fmt: skip
    return "\n".join(lines + [f"  {number}. {cause}" for number, cause in enumerate(causes, 1)])


def _ranks(ranks: list[int]) -> str:
    """For reading: some by number, many by count."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
