"""Tests every architecture of the installed transformers along every axis against one process: the table in the docs.

Each trial runs in processes of its own, forked from one that has imported everything: a model whose code hangs or
crashes costs its time limit and no other trial.
"""

from __future__ import annotations

import datetime
import importlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.config.objectives import Task
from shardwise.nn.tiny.case import Deviation, LossAndGradients, TinyCase, case_of, judge
from shardwise.nn.tiny.shrink import shrink
from shardwise.parallel.tiny_reference import alone
from shardwise.train.trial.ranks import _line, outcome_of, run_ranks

RANKS = 2
LIMIT = 120.0  # seconds of one trial

Trial = Callable[[TinyCase, DeviceMesh], LossAndGradients]
# Where each axis computes a case on a mesh of one dimension; imported when asked for.
AXES = {
    "tensor": "shardwise.train.trial.tensor:try_tensor",
    "pipeline": "shardwise.train.trial.pipeline:try_pipeline",
    "context": "shardwise.train.trial.context:try_context",
    "expert": "shardwise.train.trial.expert:try_expert",
}


@dataclass(frozen=True)
class ZooResult:
    """Result of one architecture along one axis: `pass`, `wrong`, `refused`, or `unbuilt` if no tiny model runs."""

    model_type: str
    task: str
    axis: str
    outcome: str
    loss: float | None = None
    gradient: float | None = None
    why: str = ""
    seconds: float = 0.0


def architectures(task: Task) -> list[str]:
    """Returns the model types for a task, as transformers lists them."""
    from transformers.models.auto import modeling_auto as auto

    mappings: dict[str, Any] = {
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    return sorted(mappings[task])


def tiny_case(model_type: str, task: Task) -> TinyCase:
    """Returns a test case with the architecture's default config, shrunk."""
    from transformers import CONFIG_MAPPING

    return case_of(shrink(CONFIG_MAPPING[model_type]()), task)


def trials(axis: str, task: Task, names: Sequence[str] = (), limit: float = LIMIT) -> Iterator[ZooResult]:
    """Yields the results of an axis, one architecture after the other."""
    _ready(axis)
    for model_type in names or architectures(task):
        yield one_trial(model_type, task, axis, limit)


def one_trial(model_type: str, task: Task, axis: str, limit: float = LIMIT) -> ZooResult:
    """Forks the ranks of a trial, waits for them, and returns the result."""
    started = time.monotonic()
    results = run_ranks(lambda rank, folder: _on_rank(rank, model_type, task, axis, folder), RANKS, limit)
    seconds = round(time.monotonic() - started, 2)
    silent = {"outcome": "refused", "why": f"no answer within {limit:.0f} s, or a crash"}
    answered = [result for result in results if result is not None]
    # The rank that failed by itself tells more than those that waited for it in vain.
    failures = [result for result in answered if result["outcome"] != "pass"]
    outcome = min(
        failures, key=lambda result: "process group" in result["why"] or "gloo" in result["why"], default=None
    )
    if outcome is None:
        outcome = answered[0] if len(answered) == RANKS else silent
    return ZooResult(model_type, task, axis, seconds=seconds, **outcome)


def _ready(axis: str) -> Trial:
    torch.set_num_threads(1)
    module, _, name = AXES[axis].partition(":")
    trial: Trial = getattr(importlib.import_module(module), name)
    return trial


def _on_rank(rank: int, model_type: str, task: Task, axis: str, folder: Path) -> dict[str, Any]:
    try:
        case = tiny_case(model_type, task)
        expected = alone(case)
    except BaseException as error:
        return {"outcome": "unbuilt", "why": _line(error)}

    def run_sharded() -> Deviation:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS,
            timeout=datetime.timedelta(seconds=40),
        )  # fmt: skip
        return judge(_ready(axis)(case, init_device_mesh("cpu", (RANKS,), mesh_dim_names=(axis,))), expected)

    return outcome_of(run_sharded)


def as_json(results: Sequence[ZooResult]) -> str:
    """Returns the results as JSON."""
    return json.dumps([asdict(result) for result in results], indent=1)
