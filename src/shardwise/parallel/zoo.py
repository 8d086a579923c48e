"""Every architecture of the installed transformers along every axis, against one process: the table in the docs.

Each trial runs in processes of its own, forked from one that has imported everything: a model whose code hangs or
crashes costs its time limit and no other trial.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.config.objectives import Task
from shardwise.models.shrink import shrink
from shardwise.parallel.trial import Answer, Case, Refused, Verdict, alone, case_of, judge

RANKS = 2
LIMIT = 120.0  # seconds of one trial

Trial = Callable[[Case, DeviceMesh], Answer]
# Where each axis computes a case on a mesh of one dimension; imported when asked for.
AXES = {
    "tensor": "shardwise.parallel.tensor_trial:try_tensor",
    "pipeline": "shardwise.parallel.pipeline_trial:try_pipeline",
    "context": "shardwise.parallel.context_trial:try_context",
    "expert": "shardwise.parallel.expert_trial:try_expert",
}


@dataclass(frozen=True)
class Result:
    """Of one architecture along one axis: `pass`, `wrong`, `refused`, or `unbuilt` where no tiny model runs here."""

    model_type: str
    task: str
    axis: str
    outcome: str
    loss: float | None = None
    gradient: float | None = None
    why: str = ""
    seconds: float = 0.0


def architectures(task: Task) -> list[str]:
    """Model types for a task, as transformers lists them."""
    from transformers.models.auto import modeling_auto as auto

    listed: dict[str, Any] = {
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    return sorted(listed[task])


def tiny_case(model_type: str, task: Task) -> Case:
    """A case of an architecture as its authors configure it, but small."""
    from transformers import CONFIG_MAPPING

    return case_of(shrink(CONFIG_MAPPING[model_type]()), task)


def trials(axis: str, task: Task, names: Sequence[str] = (), limit: float = LIMIT) -> Iterator[Result]:
    """The results of an axis, one architecture after the other."""
    _ready(axis)
    for model_type in names or architectures(task):
        yield one_trial(model_type, task, axis, limit)


def one_trial(model_type: str, task: Task, axis: str, limit: float = LIMIT) -> Result:
    """Forks the ranks of a trial, waits for them, and reads what they found."""
    began = time.monotonic()
    found = run_ranks(lambda rank, folder: _on_rank(rank, model_type, task, axis, folder), RANKS, limit)
    seconds = round(time.monotonic() - began, 2)
    silent = {"outcome": "refused", "why": f"no answer within {limit:.0f} s, or a crash"}
    known = [one for one in found if one is not None]
    # The rank that failed by itself tells more than those that waited for it in vain.
    bad = [one for one in known if one["outcome"] != "pass"]
    told = min(bad, key=lambda one: "process group" in one["why"] or "gloo" in one["why"], default=None)
    if told is None:
        told = known[0] if len(known) == RANKS else silent
    return Result(model_type, task, axis, seconds=seconds, **told)


def _ready(axis: str) -> Trial:
    torch.set_num_threads(1)
    module, _, name = AXES[axis].partition(":")
    found: Trial = getattr(importlib.import_module(module), name)
    return found


def run_ranks(work: Callable[[int, Path], Any], ranks: int, limit: float) -> list[dict[str, Any] | None]:
    """What forked ranks answer, None for those that do not within the limit."""
    deadline = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder:
        _wait([_fork(rank, work, Path(folder)) for rank in range(ranks)], deadline)
        return [_read(Path(folder) / f"{rank}.json") for rank in range(ranks)]


def _fork(rank: int, work: Callable[[int, Path], Any], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        if "SHARDWISE_ZOO_TRACE" not in os.environ:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
        answer = work(rank, folder)
        (folder / f"{rank}.part").write_text(json.dumps(answer))
        (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    finally:
        os._exit(0)


def _on_rank(rank: int, model_type: str, task: Task, axis: str, folder: Path) -> dict[str, Any]:
    try:
        case = tiny_case(model_type, task)
        wanted = alone(case)
    except BaseException as error:
        return {"outcome": "unbuilt", "why": _line(error)}

    def divided() -> Verdict:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS,
            timeout=datetime.timedelta(seconds=40),
        )  # fmt: skip
        return judge(_ready(axis)(case, init_device_mesh("cpu", (RANKS,), mesh_dim_names=(axis,))), wanted)

    return outcome_of(divided)


def outcome_of(trial: Callable[[], Verdict]) -> dict[str, Any]:
    """What a trial came to: `pass`, `wrong` with what is off, or `refused` with the reason."""
    try:
        verdict = trial()
    except Refused as refusal:
        return {"outcome": "refused", "why": str(refusal)}
    except BaseException as error:
        traceback.print_exc()
        return {"outcome": "refused", "why": _line(error)}
    found = {"loss": verdict.loss, "gradient": verdict.gradient}
    if verdict.right:
        return found | {"outcome": "pass"}
    return found | {"outcome": "wrong", "why": f"the gradient of {verdict.module}" if verdict.module else "the loss"}


def _line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:200]


def _wait(children: list[int], deadline: float) -> None:
    waiting = list(children)
    while waiting and time.monotonic() < deadline:
        waiting = [pid for pid in waiting if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        time.sleep(0.02)
    for pid in waiting:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None


def as_json(results: Sequence[Result]) -> str:
    """For programs."""
    return json.dumps([asdict(one) for one in results], indent=1)
