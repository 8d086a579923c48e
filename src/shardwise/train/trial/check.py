"""Tries the axes of a run on a tiny model of the same class, against one process, before it starts.

The trial takes seconds; its outcome is cached by architecture, settings and versions. A model that
would train wrongly is refused, with the axis and the module that is off. The trial runs in its own
processes on this machine, whatever the run will use: two ranks an axis show what more would.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config.combinations import axes_used
from shardwise.config.methods import Full, Lora, Qlora
from shardwise.config.schema import Fp8, Offload, Parallel, Run
from shardwise.core.cache import cache_root
from shardwise.core.errors import UserError
from shardwise.distributed.mesh import layout_of
from shardwise.nn.models.source import ModelSource

LIMIT = 300.0  # seconds
FORMAT = "4"  # of the cached outcomes
TILE = 4  # tokens at a time, where a run has tiles

if TYPE_CHECKING:
    from shardwise.nn.tiny.case import TinyCase
    from shardwise.resolved_run import ResolvedRun


def small_run(run: Run) -> tuple[Run, int]:
    """Returns the run's settings with two ranks along each axis, and the number of ranks.

    The assembly depends on axes, ZeRO, adapters, recomputation, tiles and routers, which a tiny
    model in fp32 can show. Quantised bases, fp8, compilation and offload round or need the device,
    and are left out.
    """
    parallel = run.parallel
    small: dict[str, Any] = dict.fromkeys(axes_used(parallel), 2)
    ranks = 2 ** len(small.keys() - {"expert"})
    if "expert" in small and not {"tensor", "context"} & small.keys():
        ranks *= 2
    if "pipeline" in small:
        small["pipeline_schedule"] = parallel.pipeline_schedule
        small["virtual_stages"] = parallel.virtual_stages and 2
    if "context" in small:
        small["context_kind"] = parallel.context_kind
    changes: dict[str, Any] = {
        "parallel": Parallel(zero=parallel.zero, **small),
        "precision": "fp32",
        "method": _small_method(run),
        "freeze": (),
        "train": run.train.model_copy(
            update={"master_weights": "fp32", "optimizer_in_backward": False}
        ),
        "recompute": "full" if run.recompute == "full" else "none",
        "recompute_blocks": None,
        "recompute_group": 1,
        "recompute_attention": True,
        "compile": False,
        "tiled_mlp": None if run.tiled_mlp is None else TILE,
        "router": run.router.model_copy(update={"balance": "document"}),
        "fp8": Fp8(),
        "offload": Offload(),
        "log": run.log.model_copy(update={"breakdown": False}),
        "device": "cpu",
    }
    return run.model_copy(update=changes), ranks


def _small_method(run: Run) -> Any:
    """The method for a tiny model: LoRA for QLoRA, and a fresh adapter for one from a folder."""
    method = run.method
    if isinstance(method, Full):
        return method
    if isinstance(method, Qlora):
        method = Lora(**method.model_dump(include=set(Lora.model_fields) - {"type"}))
    return method.model_copy(update={"adapter": None, "dropout": 0.0})


def check_run_axes(job: ResolvedRun, say: Callable[[str], None] = lambda _: None) -> None:
    """Raises a UserError if the run's axes do not go with its model, or the teacher beside it."""
    check_axes(job.source, job.run, say)
    teacher = job.teacher
    if teacher is None or teacher.answers is not None:
        return
    from shardwise.parallel.frozen_model import frozen_run

    run = frozen_run(job.run, teacher.source.config)
    if not run.parallel.uses_model_parallelism:
        return
    try:
        check_axes(teacher.source, run, say)
    except UserError as error:
        problem = f"the teacher's {error.problem}"
        remedy = f"{error.remedy}, or ask the teacher once (objective.cache: true and top_k)"
        raise UserError(error.field, error.value, problem, remedy) from None


def check_axes(source: ModelSource, run: Run, say: Callable[[str], None] = lambda _: None) -> None:
    """Raises a UserError for axes along which a tiny model differs from one process."""
    small, ranks = small_run(run)
    axes = axes_used(run.parallel)
    case = _case_of(source, small)
    small = _with_fitting_method(case, small)
    kind = source.config.model_type
    cached = cache_root() / "axes" / f"{_key(case, small)}.json"
    if cached.is_file():
        outcome = json.loads(cached.read_text())
    else:
        names = ", ".join(axes)
        say(f"checking {names} on a tiny {kind} model against one process")
        began = time.monotonic()
        outcome = _try(case, small, ranks)
        seconds = time.monotonic() - began
        cached.parent.mkdir(parents=True, exist_ok=True)
        if outcome["outcome"] != "silent":  # a machine under load may be to blame
            part = cached.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(outcome))
            part.rename(cached)
        if outcome["outcome"] == "pass":
            apart = f"loss {outcome['loss']:.0e} and gradients {outcome['gradient']:.0e} apart"
            say(f"{names}: the same as in one process ({apart}, {seconds:.1f} s)")
    if outcome["outcome"] == "pass":
        return
    axis = outcome.get("axis") or axes[0]
    problem = {
        "refused": f"{kind} cannot be divided so: {outcome['why']}",
        "wrong": f"{kind} would train wrongly, {outcome['why']} is off",
        "silent": f"a tiny {kind} model divided so gave no answer ({outcome['why']})",
    }[outcome["outcome"]]
    remedy = "leave this axis out, or use another one"
    raise UserError(f"parallel.{axis}", getattr(run.parallel, axis), problem, remedy)


def _case_of(source: ModelSource, run: Run) -> TinyCase:
    """With adapters in single precision, for frozen bases are stored in the compute type."""
    import torch

    from shardwise.nn.tiny.case import tiny_case

    router: Any = run.router
    aux = 0.0 if router.aux_loss == "auto" else float(router.aux_loss)
    z = 0.0 if router.z_loss == "auto" else float(router.z_loss)
    case = replace(tiny_case(source), router=(aux, z))
    return case if isinstance(run.method, Full) else replace(case, dtype=torch.float32)


def _with_fitting_method(case: TinyCase, run: Run) -> Run:
    """Without adapters where a tiny model has none of their modules (say, layers by number)."""
    from shardwise.nn.adapters.apply import apply_method

    if isinstance(run.method, Full):
        return run
    try:
        apply_method(case.model(), run)
        return run
    except UserError:
        return run.model_copy(update={"method": Full()})


def _key(case: TinyCase, small: Run) -> str:
    """What the outcome depends on: the model's code and switches, the settings, and versions."""
    import torch
    import transformers

    import shardwise

    config = case.config
    names = {"parallel", "method", "recompute", "tiled_mlp", "router", "experts", "attention"}
    parts = [
        FORMAT,
        type(config).__module__,
        config.to_json_string(),
        case.task,
        small.model_dump_json(include=names),
        str(case.router),
        torch.__version__,
        transformers.__version__,
        shardwise.__version__,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _try(case: TinyCase, small: Run, ranks: int) -> dict[str, Any]:
    """The outcome of the trial, from a process that imports once and forks the ranks."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "case"
        job.write_bytes(pickle.dumps((case, small, ranks)))
        command = [sys.executable, "-m", "shardwise.train.trial.check", str(job)]
        try:
            done = subprocess.run(
                command, env=environment, timeout=LIMIT, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            return {"outcome": "silent", "why": f"nothing within {LIMIT:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        errors = done.stderr.strip().splitlines() or ["no words"]
        return {"outcome": "silent", "why": errors[-1][:200]}
    outcome: dict[str, Any] = json.loads(lines[-1])
    return outcome


def main(file: Path) -> None:
    """Forks the ranks of a trial and prints the outcome as one line."""
    import torch

    from shardwise.train.trial.ranks import failure_of, run_ranks
    from shardwise.train.trial.step import reference_of, try_on_rank

    torch.set_num_threads(1)
    case, run, ranks = pickle.loads(file.read_bytes())
    layout = layout_of(run.parallel, ranks)

    def work(rank: int, folder: Path) -> dict[str, Any]:
        return try_on_rank(rank, folder, case, run, layout, lambda: reference_of(case, run), LIMIT)

    answers = run_ranks(work, ranks, LIMIT)
    print(json.dumps(failure_of(answers) or answers[0]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
