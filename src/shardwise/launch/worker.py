"""One rank: joins the others, trains, and on failure leaves a note that says rank, step, activity and reason.

Started by launch/local.py as `python -m shardwise.launch.worker JOB`, or run in place under torchrun.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardwise.core.errors import OutOfMemory, RunFailed, UserError
from shardwise.core.process import die_with_parent, leave
from shardwise.core.redact import redact
from shardwise.train.status import logs_of

if TYPE_CHECKING:
    from shardwise.resolved_run import ResolvedRun
    from shardwise.train.session import Outcome
    from shardwise.train.setup import TrainState
    from shardwise.train.status import Status


def run_rank(
    job: ResolvedRun, status: Status, say: Callable[[str], None] = lambda _: None, supervised: bool = False
) -> Outcome:
    """Trains as the rank that the environment describes; `supervised` by one that reads its last note (local.py)."""
    import torch
    import torch.distributed as dist

    from shardwise.core.host_memory import HostMemoryWatch
    from shardwise.diloco.worker import join_others
    from shardwise.distributed.mesh import init_world
    from shardwise.parallel.offload.disk import DiskFolder
    from shardwise.train.loop import fit
    from shardwise.train.setup import build_state
    from shardwise.train.watchdog.watchdog import Watchdog

    status.set("meeting the other ranks")
    world = init_world(job.run)
    logs, attempt = logs_of(job.output), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    tell = partial(_last_words, logs / f"rank-{world.rank}.error.json", world.rank, status, not supervised)
    watchdog = Watchdog(world, status, job.run.timeout, logs, partial(tell, "stall"), attempt)
    parts: TrainState | None = None
    host = HostMemoryWatch(partial(tell, "run")) if world.local_rank == 0 else nullcontext()
    with watchdog, host, DiskFolder(job.offload_folder, world.rank, world.size) as disk:
        try:
            parts = build_state(job, world, status, say if world.is_main else lambda _: None, disk)
            watchdog.follow(parts.sharded.model)
            outcome = fit(parts, join_others)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(_shortage(error, job, parts)) from error
    dist.destroy_process_group()
    return outcome


def _last_words(note: Path, rank: int, status: Status, aloud: bool, kind: str, verdict: str) -> None:
    """Of a thread that ends this rank: for the supervisor in a note, under another agent on the terminal."""
    told = {"rank": rank, "step": status.step, "doing": status.doing, "kind": kind, "reason": verdict}
    note.write_text(json.dumps(told | {"time": time.time(), "memory": False}))
    if aloud:
        print(f"error: {verdict}", file=sys.stderr, flush=True)


def _shortage(error: Exception, job: ResolvedRun, parts: TrainState | None) -> str:
    """What was there when a device ran full, beside what was foreseen."""
    import torch

    from shardwise.observe.prediction import explain_shortage
    from shardwise.parallel.zero.accounting import held_bytes

    words = f"the device has no memory left ({str(error).splitlines()[0][:120]})"
    if parts is None:
        return words
    held = held_bytes(parts.sharded, parts.optimizer)
    more = explain_shortage(job.output, held, torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)
    return f"{words}\n    {more}" if more else words


def main(job_file: Path, parent: int) -> NoReturn:
    """The process of one rank; exits 0 when done, 130/143 when stopped, else leaves a note and exits 1 or 2."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)  # until the loop takes over there is nothing to save
    die_with_parent(parent)
    faulthandler.enable()  # a crash in native code leaves its stack in the log
    from shardwise.foresight.prepare import read_resolved_run
    from shardwise.train.status import Status

    rank, logs = int(os.environ["RANK"]), logs_of(job_file.parent)
    status = Status(logs / f"rank-{rank}.status")
    code = 0
    try:
        outcome = run_rank(
            read_resolved_run(job_file), status, lambda text: print(f"  {text}", flush=True), supervised=True
        )
        code = 128 + outcome.stopped_by if outcome.stopped_by else 0
    except BaseException as error:
        print(redact(traceback.format_exc()), file=sys.stderr)
        note = failure_note(error, rank, status)
        (logs / f"rank-{rank}.error.json").write_text(json.dumps(note))
        code = 2 if isinstance(error, UserError) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    # After a failure no further collectives: a normal interpreter exit would wait for process groups and threads.
    os._exit(code)


def failure_note(error: BaseException, rank: int, status: Status) -> dict[str, object]:
    """What the supervisor needs to explain a failure."""
    known = isinstance(error, (UserError, RunFailed))
    text = str(error).strip()
    reason = text if known else f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
    kind = "user" if isinstance(error, UserError) else error.kind if isinstance(error, RunFailed) else "bug"
    rank = getattr(error, "rank", rank)  # all ranks know of a failed save, but one is to blame
    note = {"rank": rank, "step": status.step, "doing": status.doing, "kind": kind, "reason": redact(reason)}
    return note | {"time": time.time(), "memory": isinstance(error, OutOfMemory)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
