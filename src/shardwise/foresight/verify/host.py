"""The process that ranks are forked from: it imports once, so every claim starts quickly.

Started as `python -m shardwise.foresight.verify.host PARENT MODEL DEVICE`. Each line of JSON on standard input is work
for some ranks; each on standard output holds their results. It computes nothing itself: a process with threads or a
CUDA context cannot be forked. For ranks on a GPU it imports nothing either: some libraries initialise CUDA on import.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from shardwise.core.errors import RunFailed, UserError
from shardwise.core.lost_peer import is_echo

POLL = 0.02
LAST_WORDS = 3.0  # seconds given to the other ranks, after one failed, to say what they saw


def main(parent: int, model: str, device: str) -> None:
    """Serves work until standard input ends; `model` is the folder whose code the ranks run, on `device`."""
    from shardwise.core.process import die_with_parent as _die_with_parent

    _die_with_parent(parent)
    if device == "cpu":
        _import_for(model)
    for line in sys.stdin:
        work = json.loads(line)
        folder = Path(work["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        results = run_ranks(lambda rank, w=work: _work(w), int(work["ranks"]), folder)  # type: ignore[misc]
        print(json.dumps(results), flush=True)


def _work(work: dict[str, Any]) -> dict[str, Any]:
    if work["kind"] == "bench":  # a claim's ranks have no use for its imports
        from shardwise.foresight.bench.train import bench_rank

        return bench_rank(work)
    from shardwise.foresight.verify import measure, plain

    kinds: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"plain": plain.answer, "claim": measure.measure}
    return kinds[work["kind"]](work)


def _import_for(model: str) -> None:
    """Imports what every rank needs, which takes longer than most claims."""
    import accelerate  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import shardwise.foresight.verify.measure
    import shardwise.foresight.verify.plain  # noqa: F401

    with contextlib.suppress(Exception):  # a model that brings its own code is imported by the ranks
        kind = type(AutoConfig.from_pretrained(model, trust_remote_code=False))
        importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))


def run_ranks(task: Callable[[int], dict[str, Any]], ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Runs the task on forked ranks and returns their results; if one fails, all are ended."""
    children = {_fork(rank, task, ranks, folder): rank for rank in range(ranks)}
    results: list[dict[str, Any]] = [{"failed": "it did not answer", "kind": "bug"} for _ in range(ranks)]
    deadline: float | None = None
    while children and (deadline is None or time.monotonic() < deadline):
        for pid, rank in list(children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del children[pid]
                results[rank] = _read(folder / f"{rank}.json", status)
                if "failed" in results[rank] and deadline is None:
                    deadline = time.monotonic() + LAST_WORDS
        time.sleep(POLL)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return results


def _read(file: Path, status: int) -> dict[str, Any]:
    if file.is_file():
        result: dict[str, Any] = json.loads(file.read_text())
        return result
    code = os.waitstatus_to_exitcode(status)
    reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
    hint = " (often for lack of memory)" if code == -signal.SIGKILL else ""
    return {"failed": reason + hint, "kind": "bug"}


def _fork(rank: int, task: Callable[[int], dict[str, Any]], ranks: int, folder: Path) -> int:
    host = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    _run_rank(rank, task, ranks, folder, host)


def _run_rank(rank: int, task: Callable[[int], dict[str, Any]], ranks: int, folder: Path, host: int) -> NoReturn:
    code = 1
    try:
        from shardwise.core.process import die_with_parent as _die_with_parent

        _die_with_parent(host)
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        answer = _answer(rank, task, ranks, folder)
        partial = folder / f"{rank}.part"
        partial.write_text(json.dumps(answer))
        partial.rename(folder / f"{rank}.json")
        code = 0
    finally:
        # No further collectives, and no waiting for threads of process groups.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _answer(rank: int, task: Callable[[int], dict[str, Any]], ranks: int, folder: Path) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from shardwise.core.cpu_probe import usable_cores

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // ranks))
    try:
        if ranks > 1:
            _init_process_group(rank, ranks, folder)
        result = task(rank)
        if dist.is_initialized() and ranks > 1:
            dist.barrier()  # a rank that leaves early would look lost to the others
        return result
    except BaseException as error:
        traceback.print_exc()
        text = str(error).strip()
        expected = isinstance(error, (UserError, RunFailed))
        message = text if expected else f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
        lost_peer = is_echo(message)
        kind = "lost" if lost_peer else "bug"
        return {"failed": message, "kind": "user" if expected else kind}


def _init_process_group(rank: int, ranks: int, folder: Path) -> None:
    """Initialises the ranks' process group; they rendezvous through a file, so there is no race for a port."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    settings = json.loads((folder / "meet.json").read_text())
    if settings["device"] == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        settings["backend"], f"file://{folder}/meet", timedelta(seconds=settings["timeout"]), ranks, rank
    )  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
