"""One rank: joins the process group, trains, and on failure writes a note with rank, step, activity and reason.

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
from shardwise.launch.heartbeat import stack_file
from shardwise.train.status import logs_of

if TYPE_CHECKING:
    from shardwise.resolved_run import ResolvedRun
    from shardwise.train.session import Outcome
    from shardwise.train.setup import TrainState
    from shardwise.train.status import Status


def run_rank(
    resolved: ResolvedRun, status: Status, say: Callable[[str], None] = lambda _: None, supervised: bool = False
) -> Outcome:
    """Trains as the rank described by the environment; `supervised` if local.py reads its failure note."""
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
    world = init_world(resolved.run)
    logs = logs_of(resolved.output)
    dump_stacks_on_signal(stack_file(logs, world.rank))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    report_failure = partial(
        _report_failure, logs / f"rank-{world.rank}.error.json", world.rank, status, not supervised
    )
    watchdog = Watchdog(world, status, resolved.run.timeout, logs, partial(report_failure, "stall"), attempt)
    state: TrainState | None = None
    host = HostMemoryWatch(partial(report_failure, "run")) if world.local_rank == 0 else nullcontext()
    with watchdog, host, DiskFolder(resolved.offload_folder, world.rank, world.size) as disk:
        try:
            state = build_state(resolved, world, status, say if world.is_main else lambda _: None, disk)
            watchdog.follow(state.sharded.model)
            outcome = fit(state, join_others)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(_out_of_memory_message(error, resolved, state)) from error
    dist.destroy_process_group()
    return outcome


def dump_stacks_on_signal(file: Path) -> None:
    """From now on SIGUSR2 writes all stacks to a file, even where native code holds Python's lock."""
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR2, file=file.open("w"), all_threads=True)


def _report_failure(note: Path, rank: int, status: Status, aloud: bool, kind: str, verdict: str) -> None:
    """Reports the failure of a rank that a thread ends: in a note, and on the terminal if not supervised."""
    note_values = {"rank": rank, "step": status.step, "doing": status.doing, "kind": kind, "reason": verdict}
    note.write_text(json.dumps(note_values | {"time": time.time(), "memory": False}))
    if aloud:
        print(f"error: {verdict}", file=sys.stderr, flush=True)


def _out_of_memory_message(error: Exception, resolved: ResolvedRun, state: TrainState | None) -> str:
    """Message for an out-of-memory error: measured memory beside the prediction."""
    import torch

    from shardwise.observe.prediction import explain_shortage
    from shardwise.parallel.zero.accounting import held_bytes

    words = f"the device has no memory left ({str(error).splitlines()[0][:120]})"
    if state is None:
        return words
    state_bytes = held_bytes(state.sharded, state.optimizer)
    more = explain_shortage(
        resolved.output, state_bytes, torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    )
    return f"{words}\n    {more}" if more else words


def main(job_file: Path, parent: int) -> NoReturn:
    """Entry point of a rank process; exits 0 when done, 130/143 when stopped, else writes a note and exits 1 or 2."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)  # until the loop takes over there is nothing to save
    die_with_parent(parent)
    faulthandler.enable()  # a crash in native code leaves its stack in the log
    from shardwise.foresight.prepare import read_resolved_run
    from shardwise.train.status import Status

    rank = int(os.environ["RANK"])
    logs = logs_of(job_file.parent)
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
    kind = "bug"
    if isinstance(error, UserError):
        kind = "user"
    elif isinstance(error, RunFailed):
        kind = error.kind
    rank = getattr(error, "rank", rank)  # all ranks know of a failed save, but one is to blame
    note = {"rank": rank, "step": status.step, "doing": status.doing, "kind": kind, "reason": redact(reason)}
    return note | {"time": time.time(), "memory": isinstance(error, OutOfMemory)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
