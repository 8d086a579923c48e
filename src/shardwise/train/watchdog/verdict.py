"""Finds the ranks that stalled the others, and lists the usual causes, the likeliest first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.train.watchdog.scene import PendingCollective, Scene


@dataclass(frozen=True)
class Silent:
    """A rank that did not answer, with its last known status."""

    rank: int
    host: str = ""
    process: int = 0
    step: int = 0
    doing: str = ""
    state: str = ""  # of a process on this host: "stopped" or "gone", if so


@dataclass(frozen=True)
class StallVerdict:
    """The ranks that are late, and the report."""

    late: tuple[int, ...]
    text: str


def judge(scenes: dict[int, Scene], silent: dict[int, Silent], timeout: float) -> StallVerdict:
    """Follows who waits for whom, to the ranks that wait for nobody."""
    awaited = {rank: _awaited(scene, scenes, silent, timeout) for rank, scene in scenes.items()}
    wanted = {rank for ranks in awaited.values() for rank in ranks}
    late = sorted(rank for rank in wanted if not awaited.get(rank))
    if not late and wanted:
        return _circular(sorted(wanted), scenes, silent, timeout)
    if not late:
        return StallVerdict((), _nobody(scenes, timeout))
    since = f"{timeout:g} s (timeout) at step {_last_step(scenes)}"
    lines = [f"{_ranks(late)} kept the others waiting for {since}"]
    lines += [f"  {_status(rank, scenes, silent)}" for rank in late]
    waiting = sorted(rank for rank in scenes if awaited[rank])
    for collective, ranks in _by_collective(scenes, waiting).items():
        verb = "waits" if len(ranks) == 1 else "wait"
        line = f"  {_ranks(ranks)} {verb} in {collective}"
        if module := scenes[ranks[0]].module:
            line += f", at {module}"
        lines.append(line)
    lines += _numbered(_causes(late[0], scenes, silent))
    return StallVerdict(tuple(late), "\n".join(lines))


def judge_hung(hung: list[Silent], lines: list[str], seconds: float) -> str:
    """The report on ranks that cannot say what they do; `lines`: where each of them is, or ""."""
    have = "has" if len(hung) == 1 else "have"
    report = [f"{_ranks([s.rank for s in hung])} {have} not responded for {seconds:g} s (timeout)"]
    for silent, line in zip(hung, lines, strict=True):
        status = f"  {_last_status(silent)}"
        report.append(f"{status}, in {line}" if line else status)
    stopped = [silent for silent in hung if silent.state == "stopped"]
    return "\n".join(report + _numbered(_stopped(stopped[0]) if stopped else NATIVE))


def _circular(
    ranks: list[int], scenes: dict[int, Scene], silent: dict[int, Silent], timeout: float
) -> StallVerdict:
    """The verdict on ranks that wait for each other, in a circle."""
    since = f"{timeout:g} s (timeout) at step {_last_step(scenes)}"
    lines = [f"{_ranks(ranks)} wait for each other since {since}"]
    for rank in ranks:
        line = f"  {_status(rank, scenes, silent)}"
        if pending := _longest(scenes[rank]):
            line += f"; waits in {_collective(pending)}"
        lines.append(line)
    lines += _numbered(DIVERGED)
    return StallVerdict(tuple(ranks), "\n".join(lines))


def _awaited(
    scene: Scene, scenes: dict[int, Scene], silent: dict[int, Silent], timeout: float
) -> set[int]:
    """The ranks that have not begun a collective that this one waits in."""
    ranks: set[int] = set()
    for pending in scene.waiting:
        if pending.seconds < min(timeout, 1.0) / 2:
            continue  # under way, not stuck
        for rank in pending.peers or scene.members.get(pending.group, ()):
            if rank in silent or (rank in scenes and _is_behind(scenes[rank], scene.rank, pending)):
                ranks.add(rank)
    return ranks - {scene.rank}


def _is_behind(other: Scene, rank: int, pending: PendingCollective) -> bool:
    """Whether a rank has not begun what `rank` waits in."""
    if not pending.peers:
        return other.begun.get(pending.group, 0) < pending.number
    return not any(rank in w.peers and w.group == pending.group for w in other.waiting)


def _last_step(scenes: dict[int, Scene]) -> int:
    return max((scene.step for scene in scenes.values()), default=0)


def _longest(scene: Scene) -> PendingCollective | None:
    return max(scene.waiting, key=lambda pending: pending.seconds, default=None)


def _collective(pending: PendingCollective) -> str:
    text = f"{pending.kind} number {pending.number} of group {pending.group}"
    return f"{text} ({pending.shape})" if pending.shape else text


def _by_collective(scenes: dict[int, Scene], ranks: Iterable[int]) -> dict[str, list[int]]:
    """Ranks by the collective that they have waited in the longest."""
    ranks_by_collective: dict[str, list[int]] = {}
    for rank in ranks:
        if pending := _longest(scenes[rank]):
            ranks_by_collective.setdefault(_collective(pending), []).append(rank)
    return ranks_by_collective


def _status(rank: int, scenes: dict[int, Scene], silent: dict[int, Silent]) -> str:
    """What a rank is doing, or was doing when last seen."""
    if rank in silent:
        return _last_status(silent[rank])
    scene = scenes[rank]
    text = f"rank {rank} (process {scene.process} on {scene.host}) is {scene.doing}"
    text += f", step {scene.step}"
    if scene.module:
        text += f" in {scene.module}"
    if scene.line:
        text += f", in {scene.line}"
    return text


def _last_status(silent: Silent) -> str:
    text = f"rank {silent.rank}"
    if silent.process:
        text += f" (process {silent.process} on {silent.host})"
    text += " does not answer"
    if silent.state:
        text += f": {silent.state}"
    if silent.doing:
        text += f"; it was last seen at step {silent.step} while {silent.doing}"
    return text


DIVERGED = [
    "ranks took different ways through the code: a branch on something that differs between them",
    "a collective of your own that not every rank of its group calls",
]
UNREACHABLE = [
    "its host is cut off from the network, or down",
    "its host has run out of memory and swaps",
    "a call into native code that never returns",
]
NATIVE = [
    "a deadlock between devices: each waits for a message of another that waits in the same way",
    "a fault of a device or its driver: see nvidia-smi, and Xid in dmesg",
    "a call into native code that never returns: see the stacks",
]
SAVING = [
    "its disk or network storage is slow or full",
    "timeout is too short for a checkpoint of this size",
]
COMPUTING = [
    "it is slower than the others: another job on its device or cores, or a hot and throttled one",
    "it is stuck in code of yours or a library's: see its stack",
    "timeout is too short: raise it",
]
COMMUNICATING = [
    "the network between them drops or delays: links, firewalls, the wrong interface "
    "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)",
    "timeout is too short for what is sent: raise it",
]


def _causes(rank: int, scenes: dict[int, Scene], silent: dict[int, Silent]) -> list[str]:
    """The usual causes for what a late rank was doing, the likeliest first."""
    if rank in silent:
        state = silent[rank].state
        if state == "stopped":
            return _stopped(silent[rank])
        if state == "gone":
            return ["the process was killed, often for lack of memory (see dmesg)"]
        return UNREACHABLE
    scene = scenes[rank]
    if scene.doing == "saving":
        return SAVING
    causes = []
    if "data" in scene.line:
        causes.append("its data come slowly: storage, or rows that take long to read")
    if scene.step <= 1:
        causes.append("the first step is slow (compiling, reading weights): raise timeout")
    return causes + COMPUTING


def _stopped(silent: Silent) -> list[str]:
    remedy = f"kill -CONT {silent.process} lets it go on"
    return [f"the process was stopped (SIGSTOP, a debugger): {remedy}"]


def _nobody(scenes: dict[int, Scene], timeout: float) -> str:
    """The report when every rank has begun the same collective."""
    lines = [
        f"all ranks came to the same collective at step {_last_step(scenes)}, "
        f"which did not end within {timeout:g} s (timeout)"
    ]
    for collective, ranks in _by_collective(scenes, sorted(scenes)).items():
        lines.append(f"  {_ranks(ranks)} wait in {collective}")
    return "\n".join(lines + _numbered(COMMUNICATING))


def _numbered(causes: list[str]) -> list[str]:
    return [f"  {number}. {cause}" for number, cause in enumerate(causes, 1)]


def _ranks(ranks: list[int]) -> str:
    """The first eight ranks by number, and the count of the others."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    text = "ranks " + ", ".join(map(str, ranks[:8]))
    return f"{text} and {len(ranks) - 8} more" if len(ranks) > 8 else text
