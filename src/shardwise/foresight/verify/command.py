"""`shardwise verify`: shrinks the run, computes the reference, tries claim after claim, and returns a certificate."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.config.axes import check_model_axes
from shardwise.config.combinations import first_clash
from shardwise.config.load import load_run
from shardwise.config.methods import Full, Lora
from shardwise.config.resolve import Resolution, resolve_machine, resolve_objective, task_wanted
from shardwise.config.schema import Run
from shardwise.core.cpu_probe import free_memory
from shardwise.core.errors import UserError
from shardwise.foresight.verify.certificate import Certificate, ClaimRow
from shardwise.foresight.verify.claims import ClaimPlan, plan_claims
from shardwise.foresight.verify.prove import Prover, Say, as_run
from shardwise.foresight.verify.ranks import ranks, stopped_by_sigterm, unlaunched
from shardwise.foresight.verify.shrunk_model import LAYERS, ResourceBudget, ShrunkModel, drops_out, make_model
from shardwise.nn.models.adapt import adapt_model, settle_attention
from shardwise.nn.models.source import ModelSource, find_model

TOKENS = {"cpu": 1 << 14, "cuda": 1 << 18}  # of a proof's batch; longer sequences are cut
SHARE = 0.6  # of the free memory
EAGER = 4 * 6  # bytes of eager attention per score and layer: fp32 scores, weights, masks and their gradients
TIMEOUT = 300.0  # seconds that ranks wait for each other


@dataclass(frozen=True)
class VerifyOptions:
    """Options of the command line besides the run."""

    full: bool = False
    layers: int | None = None
    own_precision: bool = False
    keep: Path | None = None  # where the ranks' logs stay


def verify(
    run_file: str | Path | dict[str, Any],
    overrides: list[str] | tuple[str, ...] = (),
    options: VerifyOptions | None = None,
    say: Say = lambda _: None,
    on_result: Callable[[ClaimRow], None] = lambda _: None,
) -> Certificate:
    """Tries every claim of a run and returns the certificate. Raises UserError if the run itself is invalid."""
    options = options or VerifyOptions()
    _check(options)
    loaded = load_run(run_file, overrides)
    loaded.print_notes()
    name = "the given run" if isinstance(run_file, dict) else Path(run_file).name
    with stopped_by_sigterm():
        folder = Path(tempfile.mkdtemp(prefix="shardwise-verify-"))
        try:
            return _verify(loaded.run, name, options, folder, say, on_result)
        finally:
            if options.keep is not None and (folder / "claims").is_dir():
                shutil.copytree(folder / "claims", options.keep, dirs_exist_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def _check(options: VerifyOptions) -> None:
    if options.full and options.layers is not None:
        raise UserError("--layers", options.layers, "the whole model has all of its layers", "leave --full out")
    if options.keep is not None and options.keep.exists() and not options.keep.is_dir():
        raise UserError("--keep", str(options.keep), "is not a folder", "give the name of a folder, e.g. logs")


def _verify(
    run: Run, name: str, options: VerifyOptions, folder: Path, say: Say, on_result: Callable[[ClaimRow], None]
) -> Certificate:
    total = _check_run(run)
    say("finding the model")
    result = Resolution(run)
    source = find_model(run.model, say, task_wanted(run))
    resolve_objective(result, source.task)
    source = adapt_model(result, source, source.load_tokenizer())
    source = settle_attention(result, source, say)
    run = result.run
    first_clash(run, objective_only=True)
    check_model_axes(run, source.config, total)
    device = _device(run)
    precision = _precision(run, device) if options.own_precision else "fp32"
    plan = plan_claims(run, bool(run.data.packing), precision)
    notes = list(plan.notes)
    memory = int(SHARE * _memory(device))
    length = min(run.data.sequence_length, max(64, min(TOKENS[device] // plan.rows, _eager_length(source, memory))))
    room = ResourceBudget(device, memory, plan.ranks, plan.rows * length * 2 * (len(plan.claims) + 2))
    stages = 2 * run.parallel.chunks_per_rank
    say("making the model of the proof")
    layers_needed = stages if run.parallel.pipeline > 1 else 1
    sized = make_model(source, folder / "model", room, options.layers, options.full, layers_needed)
    if drops_out(source.config):
        notes.append("dropout is off: it draws other numbers in other shapes")
    base = _base(run, sized, source, plan, precision, device, length, notes)
    *others, last = plan.claims
    if any(as_run(base, last) == as_run(base, claim) for claim in others):
        plan.claims = others  # all of it is what one of the others shows
    prover = Prover(base, source, plan, sized, folder, say)
    prover.prepare()
    certificate = Certificate(
        name,
        sized.description,
        sized.parameters,
        prover.batch_description,
        prover.reference_description,
        precision,
        device,
        notes,
    )
    with ranks(precision, device, folder) as started:
        prover.compute_reference(started)
        notes += prover.notes
        for claim in plan.claims:
            row = prover.show(claim, started, certificate.rows)
            certificate.rows.append(row)
            on_result(row)
    return certificate


def _check_run(run: Run) -> int:
    """Rejects what `shardwise train` would reject, whatever this machine has; returns the number of ranks."""
    parallel = run.parallel
    shard_ranks = parallel.tensor * math.lcm(parallel.context, parallel.dp_shard_size or 1, parallel.hpz_size or 1)
    total = parallel.pipeline * math.lcm(shard_ranks, parallel.expert) if run.ranks == "auto" else int(run.ranks)
    with unlaunched():
        resolve_machine(run.model_copy(update={"ranks": total, "device": "cpu", "backend": "gloo"}))
    return total


def _device(run: Run) -> str:
    gpu = torch.cuda.is_available()
    if run.device == "cuda" and not gpu:
        raise UserError("device", "cuda", "no CUDA device is visible here", "add device=cpu to prove it on the CPU")
    return "cuda" if gpu and run.device != "cpu" else "cpu"


def _precision(run: Run, device: str) -> str:
    if run.precision != "auto":
        return run.precision
    if device == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def _eager_length(source: ModelSource, memory: int) -> int:
    """The longest document whose eager attention scores fit in half of the memory."""
    heads = getattr(source.config.get_text_config(), "num_attention_heads", None)
    per_score = EAGER * LAYERS * (heads if isinstance(heads, int) else 32)
    return math.isqrt(memory // 2 // per_score)


def _memory(device: str) -> int:
    if device == "cpu":
        return free_memory()
    return int(torch.cuda.mem_get_info()[0])


def _base(
    run: Run, sized: ShrunkModel, source: ModelSource, plan: ClaimPlan, precision: str, device: str, length: int,
    notes: list[str],
) -> dict[str, Any]:  # fmt: skip
    """The plain settings that claims change: the user's run on one rank, without anything that is to be verified."""
    values = run.model_dump(mode="json")
    values["model"] = {
        "name": str(sized.folder), "tokenizer": source.tokenizer, "trust_remote_code": source.trust_remote_code,
    }  # fmt: skip
    for section in ("parallel", "offload", "checkpoint", "export", "log"):
        values.pop(section)
    values |= {
        "precision": precision, "device": device, "recompute": "none", "recompute_blocks": None, "recompute_group": 1,
        "recompute_attention": True, "compile": False, "resume": "never",
        "timeout": min(run.timeout, TIMEOUT), "backend": "auto", "checkpoint": {"every": None},
        "offload": {"disk": None}, "parallel": {}, "fp8": {"recipe": "none"},
    }  # fmt: skip
    if run.fp8.recipe != "none":
        notes.append("fp8 is left out: its rounding depends on what is computed together")
    values["train"] |= {
        "steps": 2, "epochs": None, "batch_size": plan.rows, "schedule": "constant", "warmup": 0, "eval_every": None,
        "early_stopping": None, "optimizer_in_backward": False,
    }  # fmt: skip
    if run.router.balance != "document":
        values["router"] |= {"balance": "document"}
        notes.append("routers are balanced by document: by micro-batch depends on how the batch is split")
    if isinstance(run.method, Lora):
        values["method"] |= {"dropout": 0.0}
    if not isinstance(run.method, Full):
        values["method"] |= {"adapter": None}  # one of the whole model does not fit fewer layers
    if length < run.data.sequence_length:
        values["data"] |= {"sequence_length": length, "over_length": "truncate"}
        notes.append(f"sequences of {run.data.sequence_length} tokens are cut to {length}")
    return values
