"""Ends a run that stalls, with a verdict: a thread in each rank that needs nothing of the threads that train.

When a rank has waited in a collective for longer than the run's timeout, it raises an alarm at the meeting point of the
ranks. Every watchdog that hears of it leaves there what its rank is doing; the one that raised it hears them, names
those that are late (verdict.py) and ends its rank, and so do the others. A rank that leaves nothing does not answer.
The collectives' own timeout is a little longer (LATER): the watchdog is to speak first.

Ranks that save may wait for each other as long as a slow disk takes. A watchdog whose rank has waited there for longer
than the timeout asks who is there: all is well if every rank answers and none has stood still in computing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from shardwise.core.compat.torch_private import default_store
from shardwise.distributed.mesh import World
from shardwise.train.status import STACKS, Status, read_status
from shardwise.train.watchdog.scene import Scene, look, under_way
from shardwise.train.watchdog.verdict import Silent, StallVerdict, judge

EVERY = 1.0  # seconds between two looks
ANSWER = 6.0  # seconds that a rank has to leave its scene
LAST = 3.0  # seconds that a look under way has when the run is over; the meeting point may not answer any more


class Watchdog:
    """Watches this rank; `stalled` is called once with the verdict, in the rank that judges, before all end."""

    def __init__(
        self,
        world: World,
        status: Status,
        timeout: float,
        logs: Path,
        stalled: Callable[[str], None],
        attempt: str,
    ) -> None:
        self._world, self._status, self._timeout, self._logs = world, status, timeout, logs
        self._stalled = stalled
        self._attempt = attempt
        self._model: nn.Module | None = None
        self._over = threading.Event()
        # Their members may wait for a slow disk or network while training goes on.
        self._patient = {
            group.group_name for group in (world.checkpoint, world.copies) if group is not None
        }
        self._seen, self._since = ("", 0), time.monotonic()  # what this rank does, and since when
        self._calls, self._answered, self._next_call = 0, 0, 0.0
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._world.size > 1 and dist.get_backend() != "fake":
            # A connection of its own: the one that training uses may be held by a wait.
            store: Any = default_store()
            self._store: Any = c10d.PrefixStore(f"watchdog/{self._attempt}", store.clone())
            self._store.set(f"who/{self._world.rank}", f"{os.getpid()}\t{socket.gethostname()}")
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            # Python ends daemon threads where they ask for its lock; one that is inside C++ then aborts the process.
            self._thread.join(LAST)

    def follow(self, model: nn.Module) -> None:
        """From now on modules have names."""
        self._model = model

    def _run(self) -> None:
        while not self._over.wait(EVERY):
            try:
                self._answer()
                if self._heard() or ((self._overdue() or self._forsaken()) and self._raise_alarm()):
                    return
            except (
                Exception
            ) as error:  # the meeting point is gone: so is what could be learnt from the others
                if self._over.is_set():
                    return
                if self._overdue():
                    self._alone(error)
                    return

    def _overdue(self) -> bool:
        return any(w.seconds > self._timeout and w.group not in self._patient for w in under_way())

    def _answer(self) -> None:
        """Says to those who ask that this rank is there, what it does, and for how long."""
        now = (self._status.doing, self._status.step)
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
        if not self._store.check(["calls"]):
            return
        calls = self._store.get("calls").decode().split()
        for call in calls[self._answered :]:
            still = round(time.monotonic() - self._since, 1)
            self._store.set(f"here/{call}/{self._world.rank}", f"{still}\t{self._status.doing}")
        self._answered = len(calls)

    def _forsaken(self) -> bool:
        """Whether a wait for a checkpoint, which may be long, is for a rank that is not there or stands elsewhere."""
        waits = any(w.seconds > self._timeout and w.group in self._patient for w in under_way())
        if not waits or time.monotonic() < self._next_call:
            return False
        self._calls += 1
        call = f"{self._world.rank}-{self._calls}"
        self._store.append("calls", f"{call} ")
        missing, limit = set(range(self._world.size)), time.monotonic() + 2 * ANSWER
        while missing and time.monotonic() < limit and not self._over.is_set():
            self._answer()
            for rank in [r for r in missing if self._store.check([f"here/{call}/{r}"])]:
                still, _, doing = self._store.get(f"here/{call}/{rank}").decode().partition("\t")
                if doing == "computing" and float(still) > self._timeout:
                    return True
                missing.remove(rank)
            time.sleep(0.1)
        self._next_call = time.monotonic() + self._timeout
        return bool(missing) and not self._over.is_set()

    def _look(self) -> Scene:
        return look(self._world.rank, self._status.step, self._status.doing, self._model)

    def _heard(self) -> bool:
        """Another rank's alarm: leave what this one is doing, and go when the verdict is there."""
        if not self._store.check(["alarm"]):
            return False
        self._store.set(f"scene/{self._world.rank}", self._look().to_json())
        limit = time.monotonic() + 3 * ANSWER
        while time.monotonic() < limit and not self._store.check(["verdict"]):
            time.sleep(0.2)
        self._leave()
        return True

    def _raise_alarm(self) -> bool:
        if self._store.add("alarms", 1) > 1:
            return False  # heard at the next look
        self._store.set("alarm", "")
        verdict, scenes = self._judge()
        self._tell(verdict.text, scenes)
        self._store.set("verdict", verdict.text)
        self._leave()
        return True

    def _judge(self) -> tuple[StallVerdict, dict[int, Scene]]:
        rank, size = self._world.rank, self._world.size
        scenes, limit = {rank: self._look()}, time.monotonic() + ANSWER
        while len(scenes) < size and time.monotonic() < limit:
            for other in set(range(size)) - set(scenes):
                if self._store.check([f"scene/{other}"]):
                    scenes[other] = Scene.from_json(self._store.get(f"scene/{other}"))
            time.sleep(0.1)
        silent = {other: self._silent(other) for other in range(size) if other not in scenes}
        return judge(scenes, silent, self._timeout), scenes

    def _silent(self, rank: int) -> Silent:
        """What is known of a rank that does not answer; its process is looked at where it is on this host."""
        process, host, state = 0, "", ""
        if self._store.check([f"who/{rank}"]):
            number, _, host = self._store.get(f"who/{rank}").decode().partition("\t")
            process = int(number)
            if host == socket.gethostname():
                try:
                    state = {"zombie": "gone"}.get(found := psutil.Process(process).status(), found)
                    state = state if state in ("stopped", "gone") else ""
                except psutil.NoSuchProcess:
                    state = "gone"
        step, doing = read_status(self._logs / f"rank-{rank}.status")
        return Silent(rank, host, process, step, doing, state)

    def _alone(self, error: Exception) -> None:
        """No word with the others any more."""
        scene = self._look()
        held = max(scene.waiting, key=lambda one: one.seconds)
        self._tell(
            f"rank {scene.rank} waited {self._timeout:g} s (timeout) in {held.kind} number {held.number} of group "
            f"{held.group} at step {scene.step}, and the ranks' meeting point does not answer ({error})\n"
            "  1. this host is cut off from the others\n  2. the host of the meeting point is down",
            {scene.rank: scene},
        )
        self._leave()

    def _tell(self, text: str, scenes: dict[int, Scene]) -> None:
        file = self._logs / STACKS
        with contextlib.suppress(OSError):
            parts = [
                f"rank {rank}, step {s.step}, {s.doing}\n{s.stack}"
                for rank, s in sorted(scenes.items())
            ]
            file.write_text("\n\n".join(parts))
            text += f"\n  stacks of all ranks that answered: {file}"
        self._stalled(text)

    def _leave(self) -> None:
        if self._over.is_set():
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
