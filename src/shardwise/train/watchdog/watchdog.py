"""Ends a run that stalls, with a verdict: a thread in each rank, independent of training threads.

When a rank has waited in a collective for longer than the run's timeout, it raises an alarm in the
ranks' store. Every watchdog that sees the alarm writes there what its rank is doing. The one that
raised it collects these scenes and names the ranks that are late (verdict.py); then all processes
end. A rank that writes no scene does not answer. The collectives' own timeout is a little longer
(LATER), so that the watchdog reports first.

Ranks that save may wait for each other as long as a slow disk takes. A watchdog whose rank has
waited there for longer than the timeout calls the others: it raises no alarm if every rank answers
and none has been computing the same step for that long.

A rank that hangs in native code that holds Python's lock, or the driver's, cannot run this thread
either: then the file of its status stays as old as it is, which the launcher notices.
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

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from shardwise.core.compat.torch_private import default_store
from shardwise.core.process import process_state
from shardwise.distributed.mesh import World
from shardwise.train.status import STACKS, Status, read_status
from shardwise.train.watchdog.scene import Scene, longest_wait, look
from shardwise.train.watchdog.verdict import Silent, StallVerdict, judge

EVERY = 1.0  # seconds between two looks
RARELY = 5.0  # at most, between two looks at the collectives, where the timeout is long
ANSWER = 6.0  # seconds that a rank has to write its scene
LAST = 3.0  # seconds to wait for the thread when the run is over, as the store may not answer


class Watchdog:
    """Watches this rank; calls `stalled` with the verdict, on one rank, before all ranks end."""

    def __init__(
        self,
        world: World,
        status: Status,
        timeout: float,
        logs: Path,
        stalled: Callable[[str], None],
        attempt: str,
    ) -> None:
        self._world = world
        self._status = status
        self._timeout = timeout
        self._logs = logs
        self._stalled = stalled
        self._attempt = attempt
        self._model: nn.Module | None = None
        self._over = threading.Event()
        # Groups whose members may wait for a slow disk or network while training continues.
        groups = (world.checkpoint, world.copies)
        self._patient = {group.group_name for group in groups if group is not None}
        self._waited_patiently = 0.0  # seconds in a patient group, when it was last looked
        self._activity = ("", 0)
        self._since = time.monotonic()  # begin of the activity
        self._calls = 0  # calls of this rank
        self._answered = 0  # number of calls answered
        self._next_call = 0.0
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
            # Python ends daemon threads when they ask for the GIL; one inside C++ would abort.
            self._thread.join(LAST)

    def follow(self, model: nn.Module) -> None:
        """Sets the model, so that scenes name its modules."""
        self._model = model

    def _run(self) -> None:
        next_look = 0.0
        while not self._over.wait(EVERY):
            self._status.beat()
            try:
                self._answer()
                if self._heard():
                    return
                if time.monotonic() >= next_look:
                    if (self._overdue() or self._forsaken()) and self._raise_alarm():
                        return
                    next_look = time.monotonic() + min(RARELY, self._timeout / 20)
            except Exception as error:  # the store is gone
                if self._over.is_set():
                    return
                if self._overdue():
                    self._alone(error)
                    return

    def _overdue(self) -> bool:
        waited, self._waited_patiently = longest_wait(self._patient)
        return waited > self._timeout

    def _answer(self) -> None:
        """Answers calls with this rank's activity and its duration."""
        activity = (self._status.doing, self._status.step)
        if activity != self._activity:
            self._activity = activity
            self._since = time.monotonic()
        if not self._store.check(["calls"]):
            return
        calls = self._store.get("calls").decode().split()
        for call in calls[self._answered :]:
            seconds = round(time.monotonic() - self._since, 1)
            self._store.set(f"here/{call}/{self._world.rank}", f"{seconds}\t{self._status.doing}")
        self._answered = len(calls)

    def _forsaken(self) -> bool:
        """Whether a long wait for a checkpoint is for a rank that does not answer or is stuck."""
        waits = self._waited_patiently > self._timeout
        if not waits or time.monotonic() < self._next_call:
            return False
        self._calls += 1
        call = f"{self._world.rank}-{self._calls}"
        self._store.append("calls", f"{call} ")
        missing = set(range(self._world.size))
        limit = time.monotonic() + 2 * ANSWER
        while missing and time.monotonic() < limit and not self._over.is_set():
            self._answer()
            for rank in [r for r in missing if self._store.check([f"here/{call}/{r}"])]:
                seconds, _, doing = self._store.get(f"here/{call}/{rank}").decode().partition("\t")
                if doing == "computing" and float(seconds) > self._timeout:
                    return True
                missing.remove(rank)
            time.sleep(0.1)
        self._next_call = time.monotonic() + self._timeout
        return bool(missing) and not self._over.is_set()

    def _look(self) -> Scene:
        return look(self._world.rank, self._status.step, self._status.doing, self._model)

    def _heard(self) -> bool:
        """On another rank's alarm: writes the scene, and ends this process after the verdict."""
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
            return False  # another rank's alarm came first
        self._store.set("alarm", "")
        verdict, scenes = self._judge()
        self._report(verdict.text, scenes)
        self._store.set("verdict", verdict.text)
        self._leave()
        return True

    def _judge(self) -> tuple[StallVerdict, dict[int, Scene]]:
        size = self._world.size
        scenes = {self._world.rank: self._look()}
        limit = time.monotonic() + ANSWER
        while len(scenes) < size and time.monotonic() < limit:
            for other in set(range(size)) - set(scenes):
                if self._store.check([f"scene/{other}"]):
                    scenes[other] = Scene.from_json(self._store.get(f"scene/{other}"))
            time.sleep(0.1)
        silent = {other: self._silent(other) for other in range(size) if other not in scenes}
        return judge(scenes, silent, self._timeout), scenes

    def _silent(self, rank: int) -> Silent:
        """The last status of a rank that does not answer; its process's state if on this host."""
        process = 0
        host = ""
        state = ""
        if self._store.check([f"who/{rank}"]):
            number, _, host = self._store.get(f"who/{rank}").decode().partition("\t")
            process = int(number)
            if host == socket.gethostname():
                state = process_state(process)
        step, doing = read_status(self._logs / f"rank-{rank}.status")
        return Silent(rank, host, process, step, doing, state)

    def _alone(self, error: Exception) -> None:
        """Reports this rank's stall, and ends it, if the store does not answer."""
        scene = self._look()
        pending = max(scene.waiting, key=lambda pending: pending.seconds)
        collective = f"{pending.kind} number {pending.number} of group {pending.group}"
        self._report(
            f"rank {scene.rank} waited {self._timeout:g} s (timeout) in {collective} at step "
            f"{scene.step}, and the ranks' meeting point does not answer ({error})\n"
            "  1. this host is cut off from the others\n  2. the host of the meeting point is down",
            {scene.rank: scene},
        )
        self._leave()

    def _report(self, text: str, scenes: dict[int, Scene]) -> None:
        file = self._logs / STACKS
        with contextlib.suppress(OSError):
            stacks = []
            for rank, scene in sorted(scenes.items()):
                stacks.append(f"rank {rank}, step {scene.step}, {scene.doing}\n{scene.stack}")
            file.write_text("\n\n".join(stacks))
            text += f"\n  stacks of all ranks that answered: {file}"
        self._stalled(text)

    def _leave(self) -> None:
        if self._over.is_set():
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
