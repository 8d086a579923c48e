"""Resolves every `auto` and makes the checks that need the machine or the model, before any process starts.

Settings that do not combine are in the table of `config/combinations`, which is checked here.

The result is a fully resolved Run, with the reason for each resolved value.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.config.axes import check_axes, check_model_axes, data_ranks, divisors_of, shard_size
from shardwise.config.combinations import axes_used, clashes, first_clash
from shardwise.config.objectives import PURPOSES, TASKS, Purpose, Task
from shardwise.config.paths import place
from shardwise.config.schema import Parallel, Run
from shardwise.config.units import human
from shardwise.core.cpu_probe import gain_of_bf16
from shardwise.core.errors import UserError

# Models whose first position is the one behind their padding id (RoBERTa's 514 are 512).
COUNTED_FROM_PADDING = frozenset(
    ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "data2vec-text", "ibert", "esm",
     "longformer", "luke", "mpnet", "xmod")
)  # fmt: skip
FULL = 4  # micro-batches for each stage of a pipeline, where the batch has them: a fifth of the time is idle at most
WORTH_BF16 = 1.4  # times the speed of fp32, from which a CPU computes in bf16: casts take some of it back
WORTH_COMPILING = 50  # steps: compiling takes the time of some dozens
NO_PRODUCTS = "this GPU does not multiply in 8 bits (NVIDIA does since Ada and Hopper, capability 8.9)"
TOKENS_PER_FORWARD = {"cuda": 8192, "cpu": 2048}


@dataclass
class Resolution:
    """A run and the reasons for resolved values, by dotted path."""

    run: Run
    reasons: dict[str, str] = field(default_factory=dict)

    def put(self, path: str, value: Any, reason: str | None) -> None:
        """Sets one value; None as reason if it needs no explanation."""
        values = self.run.model_dump()
        place(values, path, value)
        self.run = Run.model_validate(values)
        if reason is not None:
            self.reasons[path] = reason


@dataclass(frozen=True)
class Machine:
    """The machine a run is resolved for: GPUs per host, supported dtypes, and the run's total ranks, if known."""

    gpus: int
    bf16: bool = True
    fp8: bool = True
    ranks: int | None = None  # None = this machine
    compiles: bool = True


def this_machine() -> Machine:
    """Detects the machine this process runs on."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    bf16 = bool(gpus) and torch.cuda.is_bf16_supported(including_emulation=False)
    return Machine(gpus, bf16, compiles=bool(gpus) and _can_compile())


def _can_compile() -> bool:
    """Whether compiled blocks are possible: Triton, a GPU for it, and a C compiler for its launchers."""
    from shardwise.core.compat.torch_private import has_triton

    compilers = (os.environ.get("CC"), "gcc", "clang", "cc")
    return bool(has_triton()) and any(name is not None and shutil.which(name) for name in compilers)


def resolve_machine(run: Run, machine: Machine | None = None) -> Resolution:
    """Resolves device, ranks, backend, precision and micro-batch, which depend on the machine alone."""
    machine = machine or this_machine()
    result = Resolution(run)
    gpus = machine.gpus
    if run.device == "cuda" and not gpus:
        raise UserError(
            "device", "cuda", "no CUDA device is visible here", "use device: cpu, or run `shardwise doctor`"
        )
    if run.device == "auto":
        result.put(
            "device",
            "cuda" if gpus else "cpu",
            f"{gpus} CUDA devices are visible" if gpus else "no CUDA device is visible",
        )
    if machine.ranks is None:
        ranks = _resolve_ranks(result, gpus)
        _resolve_backend(result, gpus, ranks)
    else:
        ranks = machine.ranks
        backend = "nccl" if result.run.device == "cuda" else "gloo"
        result.put("ranks", ranks, "of the machine that is planned for")
        result.put("backend", backend, f"device is {result.run.device}")
    _resolve_precision(result, machine)
    if result.run.compile == "auto":
        result.put("compile", *compile_here(result.run, machine))
    check_axes(result.run, ranks)
    first_clash(result.run)
    check_parallel(result.run, ranks)
    _resolve_masters(result, ranks)
    _resolve_micro_batch(result, ranks)
    return result


def world_size(run: Run) -> int:
    """Total ranks of the run: torchrun's count if it started us, else this host's."""
    return _launched("WORLD_SIZE") if "WORLD_SIZE" in os.environ else int(run.ranks)


def _launched(name: str) -> int:
    """A count from the environment of torchrun or another launcher."""
    text = os.environ[name]
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            name, text, "this environment variable is no count of processes", f"unset {name}, or use torchrun"
        )
    return int(text)


def _resolve_ranks(result: Resolution, gpus: int) -> int:
    run = result.run
    if "WORLD_SIZE" in os.environ:
        local = _launched("LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "WORLD_SIZE")
        if run.ranks not in ("auto", local):
            raise UserError(
                "ranks",
                run.ranks,
                f"but the launcher started {local} processes on this host",
                "leave ranks out, or make both equal",
            )
        result.put("ranks", local, f"the launcher started {os.environ['WORLD_SIZE']} in all")
        return _launched("WORLD_SIZE")
    if run.ranks == "auto":
        on_gpu = run.device == "cuda"
        result.put(
            "ranks", gpus if on_gpu else 1, "one per GPU" if on_gpu else "one process on a CPU; set ranks for more"
        )
    return int(result.run.ranks)


def _resolve_backend(result: Resolution, gpus: int, ranks: int) -> None:
    run = result.run
    if run.backend == "auto":
        if run.device == "cuda" and int(run.ranks) > gpus:
            raise UserError(
                "ranks",
                run.ranks,
                f"but this host has {gpus} GPUs",
                f"use ranks: {gpus}, or advanced.backend: gloo to share GPUs (slow)",
            )
        result.put("backend", "nccl" if run.device == "cuda" else "gloo", f"device is {run.device}")
    elif run.backend == "nccl" and run.device == "cuda" and int(run.ranks) > gpus:
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":  # NCCL 2.30: for tests of correctness
            return
        problem = f"but this host has {gpus} GPUs and NCCL takes one rank per GPU"
        raise UserError("ranks", run.ranks, problem, f"use ranks: {gpus}")


def _resolve_precision(result: Resolution, machine: Machine) -> None:
    run = result.run
    if run.fp8.recipe != "none" and run.device == "cuda" and not _has_fp8(machine):
        raise UserError("fp8.recipe", run.fp8.recipe, NO_PRODUCTS, "set precision: bf16 and fp8: none")
    if getattr(run.method, "multiply", "") == "fp8" and run.device == "cuda" and not _has_fp8(machine):
        raise UserError("method.multiply", "fp8", NO_PRODUCTS, "leave it out")
    if run.precision != "auto":
        return
    if run.fp8.recipe != "none":
        result.put("precision", "bf16", "fp8 layers compute beside bf16")
    elif run.device == "cpu":
        gain = gain_of_bf16() if machine.ranks is None else 0.0
        if gain >= WORTH_BF16:
            result.put("precision", "bf16", f"this CPU multiplies {gain:.1f} times as fast in bf16 as in fp32")
        else:
            result.put("precision", "fp32", "on a CPU fp32 is the fastest that is always there")
    elif machine.bf16:
        result.put("precision", "bf16", "the GPU computes in bf16")
    else:
        result.put("precision", "fp16", "the GPU has no bf16")


def compile_here(run: Run, machine: Machine) -> tuple[bool, str | None]:
    """Whether to compile the run's blocks if that is not set, and why."""
    if run.device != "cuda":
        return False, None
    if not machine.compiles:
        return False, "Triton or a C compiler is missing here"
    if run.train.steps is not None and run.train.steps < WORTH_COMPILING:
        return False, f"it would not pay within {run.train.steps} steps"
    if run.parallel.tensor > 1 or run.parallel.pipeline > 1:
        return False, "its gain beside tensor and pipeline parallelism has not been measured"
    conflicts = clashes(run.model_copy(update={"compile": True}))
    if clash := next((conflict for conflict in conflicts if conflict.field == "compile"), None):
        return False, f"it {clash.problem}"
    return True, "norms and activations are fused; the first step takes longer"


def _resolve_masters(result: Resolution, ranks: int) -> None:
    run = result.run
    parallel = result.run.parallel
    if run.train.master_weights != "auto":
        return
    split = run.model_copy(update={"train": run.train.model_copy(update={"master_weights": "split"})})
    plus = parallel.quantize_weights or parallel.quantize_gradients or parallel.hpz_size is not None
    alone = ranks == 1 and parallel.zero < 3 and not plus and parallel.bucket in (None, "auto")
    if run.precision == "bf16" and run.offload.optimizer != "none":
        result.put("train.master_weights", "split", "states that leave the device take half of the fp32 weights along")
    elif run.device == "cuda" and alone and not clashes(split):
        result.put("train.master_weights", "split", "on one GPU the same numbers in less memory and time")
    else:
        result.put("train.master_weights", "fp32", None)


def _has_fp8(machine: Machine) -> bool:
    if machine.ranks is not None:
        return machine.fp8
    import torch

    from shardwise.core.effective_device import has_fp8_matmul as multiplies

    return multiplies(torch.device("cuda"))


def check_parallel(run: Run, ranks: int) -> None:
    zero = run.parallel.zero
    shard = run.parallel.dp_shard_size
    axes = axes_used(run.parallel)
    spread = ranks // (run.parallel.pipeline * run.parallel.tensor)  # ranks along context hold the same weights
    if spread % shard_size(zero, shard, spread):
        group = f"{spread} ranks" + (" of a stage and tensor group" if spread < ranks else "")
        raise UserError(
            "parallel.dp_shard_size", shard, f"does not divide the {group}", f"use one of {divisors_of(spread)}"
        )
    if run.recompute_group > 1 and ranks > 1:
        raise UserError(
            "advanced.memory.recompute_group",
            run.recompute_group,
            f"is for one GPU yet, not for {ranks} ranks",
            "leave it out",
        )
    check_secondary(run.parallel, spread)
    if run.parallel.reduce_dtype == "bf16" and spread == 1:
        raise UserError("parallel.reduce_dtype", "bf16", "gradients are added up over no ranks", "leave it out")
    if run.fp8.gather == "fp8" and shard_size(zero, shard, spread) == 1:
        raise UserError(
            "advanced.fp8.gather", "fp8", "every rank has the weights whole: there is nothing to gather", "leave it out"
        )
    batch, micro = run.train.batch_size, run.train.micro_batch_size
    ranks = data_ranks(run.parallel, ranks)
    among = f"{ranks} ranks" + (f" that see different data ({', '.join(axes)} apart)" if axes else "")
    if batch % ranks:
        near = sorted({max(1, batch // ranks) * ranks, math.ceil(batch / ranks) * ranks})
        raise UserError(
            "train.batch_size", batch, f"cannot be divided among {among}", f"use {' or '.join(map(str, near))}"
        )
    if micro != "auto" and batch % (int(micro) * ranks):
        per_rank = batch // ranks
        fits = divisors_of(per_rank)
        problem = f"batch_size {batch} on {among} is {per_rank} sequences per rank, not a multiple of it"
        raise UserError("train.micro_batch_size", micro, problem, f"use one of {fits[:12]}")


def check_secondary(parallel: Parallel, ranks: int) -> None:
    """Checks that hpZ's secondary shards divide the primary ones evenly."""
    secondary = parallel.hpz_size
    if secondary is None:
        return
    group = shard_size(parallel.zero, parallel.dp_shard_size, ranks)
    divisors = divisors_of(group)
    if secondary not in divisors:
        group_name = f"group of {group} ranks that the parameters are divided over"
        problem = f"is larger than the {group_name}" if secondary > group else f"does not divide the {group_name}"
        useful = divisors[1:-1]  # 1 would keep all of it on every rank, and the whole group saves nothing
        remedy = f"use one of {useful}, or leave it out" if useful else "leave it out: there are no parts to keep it in"
        remedy += "; on several hosts, start it under torchrun on all of them" * (secondary > group)
        raise UserError("parallel.hpz_size", secondary, problem, remedy)


def _resolve_micro_batch(result: Resolution, ranks: int) -> None:
    run = result.run
    if run.train.micro_batch_size != "auto":
        return
    per_rank = run.train.batch_size // data_ranks(run.parallel, ranks)
    budget = TOKENS_PER_FORWARD[run.device]
    fits = [d for d in divisors_of(per_rank) if d * run.data.sequence_length <= budget] or [1]
    reason = f"at most {budget} tokens per forward on {run.device}"
    needed = FULL * run.parallel.pipeline
    if run.parallel.pipeline > 1 and per_rank // max(fits) < needed:  # stages wait for one another
        fits = [d for d in fits if per_rank // d >= needed] or [1]
        reason = f"{per_rank // max(fits)} micro-batches for {run.parallel.pipeline} stages to work on"
    result.put("train.micro_batch_size", max(fits), reason)


def task_wanted(run: Run) -> Task | None:
    """The model class that the objective requires; None if the model's own class decides."""
    return None if run.objective == "auto" else TASKS.get(run.objective.type, "causal")


def purpose_of(run: Run) -> Purpose:
    """What the rows of a run with a resolved objective are used for."""
    assert run.objective != "auto"
    return PURPOSES[run.objective.type]


def resolve_objective(result: Resolution, task: Task) -> None:
    """Sets the objective from the model's class if the run has none; disables packing where impossible."""
    if result.run.objective == "auto":
        result.put("objective", {"type": task}, "what the model's class is for")
    purpose = purpose_of(result.run)
    data = result.run.data
    if data.packing and purpose in ("seq2seq", "masked", "classify"):
        result.put("data.packing", False, f"{purpose} rows are read one at a time")
    first_clash(result.run, objective_only=True)
    check_samples(result.run, purpose)


def check_samples(run: Run, purpose: str) -> None:
    """Checks that samples can be generated: a causal model, replicated or sharded by ZeRO."""
    if run.log.samples is None:
        return
    if purpose in ("seq2seq", "masked", "classify"):
        problem = f"a model that is trained for {purpose} does not go on with a text"
        raise UserError("log.samples", None, problem, "leave log.samples out")
    for axis in ("tensor", "context", "pipeline", "expert"):
        if getattr(run.parallel, axis) != 1:
            problem = f"samples are not written by a model that is divided along {axis}"
            raise UserError("log.samples", None, problem, f"leave log.samples out, or parallel.{axis}")


def resolve_model(result: Resolution, config: Any) -> None:
    """Checks the sequence length against the model's maximum."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit and config.model_type in COUNTED_FROM_PADDING:
        limit -= config.pad_token_id + 1
    length = result.run.data.sequence_length
    if limit and 0 < limit < length:  # XLNet says -1: as long as you like
        raise UserError("data.sequence_length", length, f"the model has {limit} positions", f"use {limit} or less")
    if result.run.parallel.uses_model_parallelism:
        check_model_axes(result.run, config, world_size(result.run))


def resolve_steps(result: Resolution, epochs: float, steps: int, reason: str) -> None:
    """Sets the number of steps of the epochs, once the data are packed; a lower train.steps is kept."""
    limit = result.run.train.steps
    if limit is None or limit > steps:
        sooner = "" if limit is None else f"; they end before step {limit}, which train.steps allows"
        result.put("train.steps", steps, f"{reason}{sooner}")
    if result.run.train.epochs is None:
        result.put("train.epochs", epochs, None)


def check_room(run: Run, trained: int, frozen: int = 0) -> None:
    """Checks that one checkpoint (fp32 master and two moments) and the exported model fit on the output's disk."""
    existing = Path(run.output).expanduser().absolute()
    while not existing.exists():
        existing = existing.parent
    all_parameters = run.method.type == "full" or run.export.merged  # frozen parameters are exported too
    needed = 16 * trained + (4 * frozen if all_parameters else 0)
    free = shutil.disk_usage(existing).free
    if free < needed:
        problem = f"has {human(free)} free; a checkpoint and the model take {human(needed)}"
        raise UserError("output", run.output, problem, "free some space or choose a folder on another disk")


def check_output(run: Run) -> None:
    """Checks that the output folder is writable, by writing: permissions alone do not show it."""
    _check_writable("output", run.output)
    if run.log.csv is not None:
        _check_writable("log.csv", run.log.csv)
    check_trackers(run.log.trackers)


def check_trackers(names: Sequence[str]) -> None:
    """Checks that the trackers' packages are installed, without importing them."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError("log.trackers", name, "its package is not installed", f'pip install "shardwise[{name}]"')


def _check_writable(field_name: str, path: str) -> None:
    target = Path(path).expanduser()
    try:
        existing = target
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is a file")
        with tempfile.NamedTemporaryFile(dir=existing):
            pass
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise UserError(field_name, path, problem, "choose a folder you may write to") from None
