"""A DiLoCo worker: joins the others, syncs with them every N steps, and continues from the global parameters.

[Note: coming back] A checkpoint records its round. A worker that returns during the same round resumes with its own
parameters, as if it had never been away. If the others have moved on, it takes the global parameters and the others'
position in the run: at round k that is step k × every, since the schedule belongs to the model, not to the worker. Its
data resume where it stopped, and its inner optimizer keeps its states; what it had trained since its last sync is lost.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.config.diloco import DiLoCo, split_address
from shardwise.core.errors import UserError
from shardwise.diloco.client import Client, RoundEnded
from shardwise.diloco.codec import Cutter, Dtype, Joiner, decode, encode
from shardwise.diloco.outer_step import OuterRule
from shardwise.diloco.vector import TrainedVector, base_of
from shardwise.train.outer_sync import NoSync
from shardwise.train.setup import TrainState

SILENCE = 10.0  # seconds in a meeting after which the terminal is told what is waited for
BEAT = 0.5  # seconds between signs of life to the other ranks while the main one is on the network


def join_others(state: TrainState) -> NoSync | OuterSync:
    """Joins the sync server if the run uses DiLoCo; the parameters and the position may have moved on."""
    total = state.job.run.train.steps or 0
    if state.job.run.diloco is None or state.position.step >= total:
        return NoSync()
    state.status.set("joining the other workers")
    return OuterSync(state, state.job.run.diloco, total)


class OuterSync(NoSync):
    """Syncs of one worker; every rank has one, and the main rank talks to the network."""

    def __init__(self, parts: TrainState, settings: DiLoCo, total: int) -> None:
        self._parts = parts
        self._settings = settings
        self._total = total
        self._world = parts.world
        self._position = parts.position
        self._folder = parts.job.output / "apart"
        self._client: Client | None = None
        if self._world.is_main:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            host, port = split_address(settings.server)
            name = name_of(settings, parts.job.output)
            token = token_of(settings)
            self._client = Client(
                host, port, name, token, settings.connect_timeout, lambda text: print(text, flush=True)
            )
        self._trained = TrainedVector(parts)
        self._lost: list[torch.Tensor] = []  # by part, on the main rank: what rounding lost and is still to be sent
        self._finished = False
        self._anchor: dict[str, torch.Tensor] = {}  # this rank's shards of the global parameters, on the host
        self._join()

    def due(self, step: int, last: bool) -> bool:
        """Whether this step ends with a sync."""
        return last or step % self._settings.sync_every == 0

    def __exit__(self, kind: object, *error: object) -> None:
        if self._client is not None:
            if self._finished or kind is not None:  # who fails may be back at once: others find out by waiting
                self._client.close()
            else:
                self._client.leave()
            shutil.rmtree(self._folder, ignore_errors=True)

    # Joining

    def _join(self) -> None:
        base = base_of(self._parts)
        digest = self._stage("fp32", lambda name, local: local)
        plan = self._trained.plan
        client = self._client

        def come() -> dict[str, Any]:
            assert client is not None
            answer = client.join(plan, base, digest)
            while answer["state"] == "give":
                client.give(plan, base, self._folder / "out")
                answer = client.join(plan, base, digest)
            known = self._position.apart.get("round")
            if not answer["same"]:
                answer["round"] = client.fetch_global(plan, self._folder / "in")
            return answer | {"own": known == answer["round"]}

        answer = self._run_on_main(come)
        self._rule = OuterRule(**answer["rule"])
        self._round = int(answer["round"])
        position = self._position
        before = self._position.step
        resumed = answer["same"] or answer["own"]
        if (
            not answer["same"]
            and "round" not in position.apart
            and self._round * self._settings.sync_every >= self._total
        ):
            # It has never met anyone, and would end at once with a model that it had no part in.
            problem = f"is at round {self._round}, where a run of {self._total} steps has ended: others trained there"
            remedy = "for a new run give the sync server a new folder (shardwise diloco-server --state FOLDER)"
            if client is not None:
                client.leave()  # nobody is to wait for it
            raise UserError("diloco.server", self._settings.server, problem, remedy)
        if answer["same"]:
            self._anchor = dict(self._trained.local())
        else:
            self._apply("global", write=not resumed)
        if not resumed:
            self._advance_step()
        if not resumed or "supervised" not in position.apart:
            position.apart = {"supervised": position.supervised}
        position.apart["round"] = self._round
        self.notes = (self._join_message(answer["same"], resumed, before),)

    def _join_message(self, same: bool, resumed: bool, before: int) -> str:
        text = f"diloco: joined at round {self._round}, synchronising every {self._settings.sync_every} steps"
        if not resumed:
            moved = f", at step {self._position.step}" if self._position.step > before else ""
            text += f"; took the parameters of the others{moved}"
        elif not same:
            text += "; going on within the round"
        return text

    # Meeting

    def meet(self, last: bool, stopping: Callable[[], bool], log: Callable[[str], None]) -> dict[str, Any]:
        """Sends this worker's difference, waits for the others and applies the result; returns its record.

        `stopping`: whether the run was asked to stop. Then it does not wait, unless it was the last step. `log`:
        receives the explanation of a long wait.
        """
        position = self._position
        rule = self._rule
        client = self._client
        self._stage(rule.dtype, lambda name, local: self._anchor[name] - local)
        word = {"round": self._round, "step": position.step, "last": last}
        word["tokens"] = position.supervised - position.apart["supervised"]
        sent, received = (client.bytes_sent, client.bytes_received) if client is not None else (0, 0)

        def exchange() -> dict[str, Any]:
            assert client is not None
            ended = client.exchange(
                self._trained.plan, self._folder / "out", word, self._folder / "in", rule.dtype != "fp32",
                lambda: not last and stopping(),
            )  # fmt: skip
            traffic = {"bytes_sent": client.bytes_sent - sent, "bytes_received": client.bytes_received - received}
            return {"ended": ended and vars(ended), "traffic": traffic}

        waits = f"step {position.step}: waiting for the other workers to end round {self._round}"
        answer = self._run_on_main(exchange, lambda: log(waits))
        record = {"kind": "meet", "step": position.step, "tokens": word["tokens"], **answer["traffic"]}
        if answer["ended"] is None:
            return record | {"left": True}
        ended = RoundEnded(**answer["ended"])
        self._apply(ended.kind, write=True)
        self._round = ended.round
        self._finished = last
        position.apart = {"round": self._round, "supervised": position.supervised}
        self._advance_step()
        figures = ended.figures
        return record | {
            "round": self._round, "workers": figures.get("workers"), "seconds_waited": round(ended.seconds, 3),
            "mean_norm": figures.get("mean_norm"), "own_norm": figures.get("norms"),
            "distance": figures.get("distances"), "late": ended.late, "lost": ended.lost,
        }  # fmt: skip

    def _advance_step(self) -> None:
        """Moves a worker that is behind to the others' step, so that all end with the same sync."""
        position = self._position
        position.step = max(position.step, min(self._round * self._settings.sync_every, self._total))

    # Files and ranks

    @torch.no_grad()
    def _stage(self, dtype: Dtype, of: Callable[[str, torch.Tensor], torch.Tensor]) -> str:
        """Writes `of` every tensor as parts to be sent; returns the digest of the values on the main rank."""
        out = self._folder / "out"
        cutter = Cutter()
        digest = hashlib.sha256()
        count = 0

        def put(parts: Iterator[torch.Tensor]) -> None:
            nonlocal count
            for part in parts:
                digest.update(part.numpy().tobytes())
                (out / f"{count:05d}").write_bytes(encode(part, dtype, self._rounding_error(count, part, dtype)))
                count += 1

        if self._world.is_main:
            out.mkdir(exist_ok=True)
        for name, local in self._trained.local():
            full = self._trained.gather(name, of(name, local))
            if full is not None:
                put(cutter.put(full))
        if self._world.is_main:
            put(cutter.rest())
        return digest.hexdigest()

    def _rounding_error(self, index: int, part: torch.Tensor, dtype: Dtype) -> torch.Tensor | None:
        if dtype == "fp32":
            return None
        if index == len(self._lost):
            self._lost.append(torch.zeros_like(part))
        return self._lost[index]

    @torch.no_grad()
    def _apply(self, kind: str, write: bool) -> None:
        """Uses the fetched parts as the new anchor and, if `write`, as the parameters."""
        dtype: Dtype = "fp32" if kind == "global" else self._rule.dtype
        plan = self._trained.plan
        source = self._folder / "in"
        files = ((source / f"{i:05d}").read_bytes() for i in range(plan.parts))
        joiner = Joiner(decode(body, dtype, plan.size(i)) for i, body in enumerate(files))
        for name, shape in plan.tensors:
            full = joiner.take(shape) if self._world.is_main else None
            received = self._trained.scatter(name, full)
            self._anchor[name] = received.clone() if kind == "global" else self._anchor[name] + received
            if write:
                self._trained.write(name, self._anchor[name])
        self._trained.written()

    def _run_on_main(
        self, work: Callable[[], dict[str, Any]], on_delay: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Runs the main rank's network work in a thread, and broadcasts its result.

        Meanwhile the main rank sends heartbeats: workers may wait longer than the ranks' collective timeout. `on_delay`
        is called once if it takes long.
        """
        quiet_until = time.monotonic() + SILENCE
        result: list[Any] = [None]
        failed: list[BaseException] = []

        def run() -> None:
            try:
                result[0] = work()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, name="meeting", daemon=True)
        if self._world.is_main:
            thread.start()
        group = self._world.control
        beating = self._world.size > 1
        ended = torch.zeros(1, dtype=torch.int32)
        while not ended:
            if self._world.is_main:
                thread.join(BEAT)
                ended.fill_(not thread.is_alive())
                if on_delay is not None and not ended and time.monotonic() > quiet_until:
                    on_delay()
                    on_delay = None
            if beating:
                dist.broadcast(ended, 0, group=group)
        if failed:
            raise failed[0]  # the other ranks are ended by the one that watches over them
        if beating:
            dist.broadcast_object_list(result, 0, group=group)
        return dict(result[0])


def name_of(settings: DiLoCo, output: Path) -> str:
    """A worker's name: given, or stable for this run on this host."""
    return settings.name or f"{socket.gethostname()}:{output.absolute()}"[-200:]


def token_of(settings: DiLoCo) -> str | None:
    """The token from the environment: files are copied, and command lines are public."""
    if settings.token_env is None:
        return None
    if not (token := os.environ.get(settings.token_env, "").strip()):
        remedy = f"export {settings.token_env}=… before you start the run"
        raise UserError("diloco.token_env", settings.token_env, "holds no token", remedy)
    return token
