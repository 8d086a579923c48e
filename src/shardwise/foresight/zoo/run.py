"""Tests every architecture of the installed transformers along every axis against one process: the table in the docs.

Each trial runs in processes of its own, forked from one that has imported everything: a model whose code hangs or
crashes costs its time limit and no other trial.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.config.objectives import Task
from shardwise.config.schema import Run
from shardwise.distributed.mesh import MeshLayout, layout_of
from shardwise.nn.models.build import find_blocks
from shardwise.nn.tiny.case import TinyCase, case_of
from shardwise.nn.tiny.shrink import shrink
from shardwise.parallel.tiny_reference import alone
from shardwise.train.trial.check import small_run
from shardwise.train.trial.ranks import failure_of, line_of, run_ranks
from shardwise.train.trial.step import try_on_rank

AXES = ("tensor", "pipeline", "context", "expert")
LIMIT = 120.0  # seconds of one trial
TIMEOUT = 40.0  # seconds that a rank waits for the other


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
    plain: float | None = None  # along tensor, the share of blocks that run on plain tensors


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
    torch.set_num_threads(1)
    for model_type in names or architectures(task):
        yield one_trial(model_type, task, axis, limit)


def one_trial(model_type: str, task: Task, axis: str, limit: float = LIMIT) -> ZooResult:
    """Forks the ranks of a trial, waits for them, and returns the result."""
    run, ranks = small_run(run_along(axis))
    layout = layout_of(run.parallel, ranks)
    started = time.monotonic()
    results = run_ranks(lambda rank, folder: _on_rank(rank, folder, model_type, task, run, layout), ranks, limit)
    seconds = round(time.monotonic() - started, 2)
    outcome = failure_of(results) or results[0] or {}
    if outcome["outcome"] == "silent":
        outcome = {"outcome": "refused", "why": f"no answer within {limit:.0f} s, or a crash"}
    return ZooResult(**outcome | {"model_type": model_type, "task": task, "axis": axis, "seconds": seconds})


def run_along(axis: str, **parallel: Any) -> Run:
    """Returns the default settings with two ranks along an axis and no losses of routers."""
    router = {"aux_loss": 0, "z_loss": 0, "bias_update": 0}
    settings = {"model": "tiny", "data": {"train": "none"}, "parallel": {axis: 2} | parallel, "router": router}
    return Run.model_validate(settings)


def _on_rank(rank: int, folder: Path, model_type: str, task: Task, run: Run, layout: MeshLayout) -> dict[str, Any]:
    try:
        case = tiny_case(model_type, task)
        expected = alone(case)
    except BaseException as error:
        return {"outcome": "unbuilt", "why": line_of(error)}
    plain: dict[str, float] = {}

    def see(model: Any, context: Any) -> None:
        if context.tensor is not None and (blocks := find_blocks(model)):
            plain["plain"] = len(context.tensor.local) / len(blocks)

    return try_on_rank(rank, folder, case, run, layout, lambda: expected, TIMEOUT, see) | plain


def as_json(results: Sequence[ZooResult]) -> str:
    """Returns the results as JSON."""
    return json.dumps([asdict(result) for result in results], indent=1)
