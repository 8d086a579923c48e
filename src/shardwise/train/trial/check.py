"""Before a run with axes beyond data: a tiny model of the same class, divided in the same way, against one process.

It takes seconds and is remembered by architecture, settings and versions. A model that would train wrongly is refused,
by the axis and the module that is off. The trial runs in processes of its own on this machine, whatever the run will
run on: two ranks along each axis show what more would.
"""

from __future__ import annotations

import datetime
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
from shardwise.distributed.mesh import MeshLayout, layout_of
from shardwise.nn.models.source import ModelSource

LIMIT = 300.0  # seconds
FORMAT = "3"  # of what is remembered
TILE = 4  # tokens at a time, where a run has tiles

if TYPE_CHECKING:
    from shardwise.nn.tiny.case import TinyCase


def small_run(run: Run) -> tuple[Run, int]:
    """The run's settings with two ranks along each axis, and how many ranks that takes.

    Kept is what the assembly depends on and a tiny model in fp32 can show: axes, ZeRO, adapters, recomputation, tiles,
    routers. A base in few bits, fp8, compiling and offload are not: they round, or need the device.
    """
    parallel = run.parallel
    small: dict[str, Any] = {name: 2 for name in axes_used(parallel)}
    inner = 2 ** len([name for name in small if name != "expert"])
    expert_alone = "expert" in small and not {"tensor", "context"} & small.keys()
    if "pipeline" in small:
        small |= {
            "pipeline_schedule": parallel.pipeline_schedule,
            "virtual_stages": parallel.virtual_stages and 2,
        }
    if "context" in small:
        small |= {"context_kind": parallel.context_kind}
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
    return run.model_copy(update=changes), inner * (2 if expert_alone else 1)


def _small_method(run: Run) -> Any:
    """The method as a tiny model can have it: QLoRA is LoRA, an adapter that is trained further is a fresh one."""
    method = run.method
    if isinstance(method, Qlora):
        method = Lora(**method.model_dump(include=set(Lora.model_fields) - {"type"}))
    return (
        method
        if isinstance(method, Full)
        else method.model_copy(update={"adapter": None, "dropout": 0.0})
    )


def check_axes(source: ModelSource, run: Run, say: Callable[[str], None] = lambda _: None) -> None:
    """Refuses axes that would not compute what one process computes, by a trial on a tiny model of the class."""
    small, ranks = small_run(run)
    axes, case = axes_used(run.parallel), _case_of(source, small)
    small = _with_fitting_method(case, small)
    remembered = cache_root() / "axes" / f"{_key(case, small)}.json"
    if remembered.is_file():
        found = json.loads(remembered.read_text())
    else:
        say(
            f"checking {', '.join(axes)} on a tiny {source.config.model_type} model against one process"
        )
        began = time.monotonic()
        found = _try(case, small, ranks)
        remembered.parent.mkdir(parents=True, exist_ok=True)
        if found["outcome"] != "silent":  # a machine under load may be to blame
            part = remembered.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(found))
            part.rename(remembered)
        if found["outcome"] == "pass":
            apart = f"loss {found['loss']:.0e} and gradients {found['gradient']:.0e} apart"
            say(
                f"{', '.join(axes)}: the same as in one process ({apart}, {time.monotonic() - began:.1f} s)"
            )
    if found["outcome"] == "pass":
        return
    axis = found.get("axis") or axes[0]
    kind = source.config.model_type
    problem = {
        "refused": f"{kind} cannot be divided so: {found['why']}",
        "wrong": f"{kind} would train wrongly, {found['why']} is off",
        "silent": f"a tiny {kind} model divided so gave no answer ({found['why']})",
    }[found["outcome"]]
    raise UserError(
        f"parallel.{axis}",
        getattr(run.parallel, axis),
        problem,
        "leave this axis out, or use another one",
    )


def _case_of(source: ModelSource, run: Run) -> TinyCase:
    """With adapters in single precision, for their frozen bases are stored in the compute type."""
    import torch

    from shardwise.nn.tiny.case import tiny_case

    router: Any = run.router
    aux, z = (
        0.0 if value == "auto" else float(value) for value in (router.aux_loss, router.z_loss)
    )
    case = replace(tiny_case(source), router=(aux, z))
    return case if isinstance(run.method, Full) else replace(case, dtype=torch.float32)


def _with_fitting_method(case: TinyCase, run: Run) -> Run:
    """Without adapters where a tiny model has none of the modules that they are for (layers by their number, say)."""
    from shardwise.nn.adapters.apply import apply_method

    if isinstance(run.method, Full):
        return run
    try:
        apply_method(case.model(), run)
        return run
    except UserError:
        return run.model_copy(update={"method": Full()})


def _key(case: TinyCase, small: Run) -> str:
    """What the outcome depends on: the model's code and switches, the settings, and the versions of who computes."""
    import torch
    import transformers

    import shardwise

    config = case.config
    told = [FORMAT, type(config).__module__, config.to_json_string(), case.task]
    names = {"parallel", "method", "recompute", "tiled_mlp", "router", "experts", "attention"}
    told += [small.model_dump_json(include=names)]
    told += [str(case.router), torch.__version__, transformers.__version__, shardwise.__version__]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:24]


def _try(case: TinyCase, small: Run, ranks: int) -> dict[str, Any]:
    """The outcome of the trial, from a process that imports once and forks the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "case"
        job.write_bytes(pickle.dumps((case, small, ranks)))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        command = [sys.executable, "-m", "shardwise.train.trial.check", str(job)]
        try:
            done = subprocess.run(
                command, env=environment, timeout=LIMIT, capture_output=True, text=True, check=False
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"outcome": "silent", "why": f"nothing within {LIMIT:.0f} s"}
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            return {
                "outcome": "silent",
                "why": (done.stderr.strip().splitlines() or ["no words"])[-1][:200],
            }
        found: dict[str, Any] = json.loads(lines[-1])
        return found


def main(file: Path) -> None:
    """Forks the ranks of a trial and prints the outcome as one line."""
    import torch

    import shardwise.train.trial.combined  # noqa: F401  (imported once, before the ranks part)
    from shardwise.train.trial.ranks import run_ranks

    torch.set_num_threads(1)
    case, run, ranks = pickle.loads(file.read_bytes())
    layout = layout_of(run.parallel, ranks)
    outcomes = run_ranks(
        lambda rank, folder: _on_rank(rank, folder, case, run, layout), ranks, LIMIT
    )
    told = next((one for one in outcomes if one and one["outcome"] in ("refused", "wrong")), None)
    known = [one for one in outcomes if one]
    print(
        json.dumps(
            told
            or (known[0] if len(known) == ranks else {"outcome": "silent", "why": "a rank crashed"})
        )
    )


def _on_rank(
    rank: int, folder: Path, case: TinyCase, run: Run, layout: MeshLayout
) -> dict[str, Any]:
    import torch.distributed as dist

    from shardwise.distributed.mesh import join_world
    from shardwise.nn.tiny.case import Deviation, judge
    from shardwise.parallel.parallelize import AxisRefused
    from shardwise.train.trial.combined import reference_of, try_run
    from shardwise.train.trial.ranks import outcome_of

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(layout.ranks), "LOCAL_RANK": str(rank)}
    refused: dict[str, str] = {}

    def divided() -> Deviation:
        wanted, limit = reference_of(case, run), datetime.timedelta(seconds=LIMIT)
        dist.init_process_group("gloo", f"file://{folder}/meet", limit, layout.ranks, rank)
        try:
            return judge(try_run(case, run, join_world("cpu", "gloo", LIMIT, layout)), wanted)
        except AxisRefused as refusal:
            refused["axis"] = refusal.axis
            raise

    return outcome_of(divided) | refused


if __name__ == "__main__":
    main(Path(sys.argv[1]))
