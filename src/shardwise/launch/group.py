"""The ranks of one host in one round: starts, polls, stops (with a save) or kills them; each has its own log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from shardwise.launch.heartbeat import Heartbeats
from shardwise.launch.rendezvous import Seat

POLL = 0.05
LAST_WORDS = 3.0  # seconds given to the other ranks, after one died, to write down what they saw
TAIL = 4000  # bytes at the end of a log in which the reason of a failure is looked for
ASKED = (0, 128 + signal.SIGTERM, -signal.SIGTERM)  # ends of ranks that were asked to save and stop


@dataclass(frozen=True)
class RankCommand:
    """The command of every rank of this host, in any round."""

    arguments: tuple[str, ...]  # of `shardwise`
    logs: Path
    threads: int
    grace: float  # seconds that ranks have to save
    env: dict[str, str]
    timeout: float  # seconds that a rank waits for another


@dataclass(frozen=True)
class RanksEnded:
    """How a host's ranks ended: exit codes, and the rank and message of the one at fault."""

    codes: tuple[int, ...]
    words: str = ""

    @property
    def stopped(self) -> bool:
        """Whether they ended on request (or as other hosts' ranks did)."""
        return all(code in ASKED for code in self.codes) and any(self.codes)


class RankGroup:
    """Running ranks of one host."""

    def __init__(
        self, plan: RankCommand, round_: int, seats: tuple[Seat, ...], place: int, interface: str | None
    ) -> None:
        self._plan = plan
        self.round = round_
        self.killed = False
        self._deadline: float | None = None
        first = sum(seat.ranks for seat in seats[:place])
        world = sum(seat.ranks for seat in seats)
        local = seats[place].ranks
        plan.logs.mkdir(parents=True, exist_ok=True)
        shared = {
            "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local), "MASTER_ADDR": seats[0].address,
            "MASTER_PORT": str(seats[0].port), "GROUP_RANK": str(place), "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        self.logs = [plan.logs / f"rank-{first + index}.log" for index in range(local)]
        self._children: list[subprocess.Popen[bytes]] = []
        for index, log in enumerate(self.logs):
            env = os.environ | plan.env | shared | {"RANK": str(first + index), "LOCAL_RANK": str(index)}
            env.setdefault("OMP_NUM_THREADS", str(plan.threads))
            if interface is not None:
                env.setdefault("GLOO_SOCKET_IFNAME", interface)
            with log.open("ab") as stream:
                stream.write(f"--- round {round_}: rank {first + index} of {world} on {seats[place].name}\n".encode())
                stream.flush()
                # A session of its own keeps the terminal's Ctrl-C away: the agent passes it on, once.
                speaks = first + index == 0
                child = subprocess.Popen(
                    [sys.executable, "-m", "shardwise.cli.rank_process", str(os.getpid()), *plan.arguments],
                    env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if speaks else stream, stderr=stream,
                    start_new_session=True,
                )  # fmt: skip
            self._children.append(child)
            if speaks:
                threading.Thread(target=_pass_on, args=(child, log), daemon=True).start()
        processes = {first + index: child.pid for index, child in enumerate(self._children)}
        self._heartbeats = Heartbeats(plan.logs, processes if world > 1 else {}, plan.timeout)

    def stop(self) -> bool:
        """Asks the ranks to save and exit, and kills them after the grace period. True on the first call."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._plan.grace
            for child in self._children:
                if child.poll() is None:
                    child.terminate()
            return True
        if time.monotonic() > self._deadline and not self.killed:
            self.kill()
        return False

    @property
    def asked(self) -> bool:
        """Whether they were asked to stop."""
        return self._deadline is not None

    def kill(self) -> None:
        """Kills the ranks at once."""
        self.killed = True
        for child in self._children:
            if child.poll() is None:
                child.kill()
        for child in self._children:
            child.wait()

    def poll(self) -> RanksEnded | None:
        """How the ranks ended, None while they run; when one fails the others may report, then are killed."""
        codes = [child.poll() for child in self._children]
        if None not in codes:
            return self._ended()
        if any(code not in (None, *ASKED) for code in codes):
            await_other_ranks(self._children)
            blamed = self._ended()
            self.kill()
            return blamed
        if verdict := self._heartbeats.verdict():
            self.kill()
            self.killed = False  # a failure, not an order
            return RanksEnded(tuple(1 for _ in codes), verdict)
        return None

    def _ended(self) -> RanksEnded:
        codes = [child.poll() for child in self._children]
        bad = [index for index, code in enumerate(codes) if code not in (None, *ASKED)]
        words = ""
        if bad:
            # A mistake before a crash, a killed rank before those that lost it.
            index = min(bad, key=lambda i: (codes[i] != 2, (codes[i] or 0) >= 0))
            words = _reason(self.logs[index], codes[index] or 0)
        return RanksEnded(tuple(1 if code is None else code for code in codes), words)


def await_other_ranks(children: list[subprocess.Popen[bytes]]) -> None:
    """Waits until the other ranks have ended too, at most as long as they need to report why."""
    deadline = time.monotonic() + LAST_WORDS
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        time.sleep(POLL)


def _pass_on(child: subprocess.Popen[bytes], log: Path) -> None:
    """Copies the first rank's output to its log and to ours; a closed reader must not disturb the rank."""
    assert child.stdout is not None
    with log.open("ab") as stream:
        for line in child.stdout:
            stream.write(line)
            stream.flush()
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.buffer.write(line)
                sys.stdout.flush()


def _reason(log: Path, code: int) -> str:
    """The failure message of a rank, or the end of its log."""
    if code < 0:
        return f"{log.stem} was killed by {signal.Signals(-code).name} (log: {log})"
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - TAIL))
            text = stream.read().decode(errors="replace")
    except OSError:
        text = ""
    lines = text.rpartition("--- round ")[2].splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if starts:
        return "\n".join([lines[starts[-1]].removeprefix("error: "), *lines[starts[-1] + 1 :]])
    last = next((line for line in reversed(lines) if line and not line.startswith(" ")), f"exit code {code}")
    return f"{log.stem}: {last} (log: {log})"
