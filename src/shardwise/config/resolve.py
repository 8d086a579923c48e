"""Answers every `auto` and makes the checks that need more than one field, before any process starts.

The result is a Run without open questions, and for each answer the reason that is printed.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.config.axes import axes_used, check_axes, check_model_axes, check_objective_axes, data_ranks, divisors_of
from shardwise.config.methods import Qlora
from shardwise.config.metrics import check_metrics
from shardwise.config.objectives import PURPOSES, TASKS, Purpose, Task
from shardwise.config.schema import Offload, Parallel, Run
from shardwise.errors import UserError
from shardwise.parallel.mesh import shard_size

# Models whose first position is the one behind their padding id (RoBERTa's 514 are 512).
COUNTED_FROM_PADDING = frozenset(
    ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "data2vec-text", "ibert", "esm",
     "longformer", "luke", "mpnet", "xmod")
)  # fmt: skip
FULL = 4  # micro-batches for each stage of a pipeline, where the batch has them: a fifth of the time is idle at most
TOKENS_PER_FORWARD = {"cuda": 8192, "cpu": 2048}


@dataclass
class Resolution:
    """A run and the reasons for what was filled in, by dotted path."""

    run: Run
    reasons: dict[str, str] = field(default_factory=dict)

    def put(self, path: str, value: Any, reason: str) -> None:
        """Sets one value."""
        values = self.run.model_dump()
        *parents, leaf = path.split(".")
        place = values
        for part in parents:
            place = place[part]
        place[leaf] = value
        self.run = Run.model_validate(values)
        self.reasons[path] = reason


def resolve_machine(run: Run) -> Resolution:
    """Device, ranks, back end, precision and micro-batch: what depends on this machine and not on model or data."""
    import torch

    result = Resolution(run)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
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
    ranks = _resolve_ranks(result, gpus)
    _resolve_backend(result, gpus, ranks)
    _resolve_precision(result)
    _check_parallel(result.run, ranks)
    _check_activations(result.run)
    _check_offload(result.run)
    _check_in_backward(result.run)
    _check_optimizer(result.run)
    _check_method(result.run)
    check_metrics(result.run)
    _resolve_micro_batch(result, ranks)
    if run.objective != "auto":
        check_objective_axes(run)
    return result


def world_size(run: Run) -> int:
    """Ranks of the whole run: torchrun's count where it started us, else this host's."""
    return _launched("WORLD_SIZE") if "WORLD_SIZE" in os.environ else int(run.ranks)


def _launched(name: str) -> int:
    """A count that torchrun (or another launcher) left in the environment."""
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
        crowded = run.device == "cuda" and int(run.ranks) > gpus
        if crowded:
            raise UserError(
                "ranks",
                run.ranks,
                f"but this host has {gpus} GPUs",
                f"use ranks: {gpus}, or backend: gloo to share GPUs (slow)",
            )
        result.put("backend", "nccl" if run.device == "cuda" else "gloo", f"device is {run.device}")
    elif run.backend == "nccl" and run.device == "cpu":
        raise UserError("backend", "nccl", "works on CUDA devices only", "use backend: gloo or leave it out")
    elif run.backend == "nccl" and int(run.ranks) > gpus:
        raise UserError(
            "ranks", run.ranks, f"but this host has {gpus} GPUs and NCCL takes one rank per GPU", f"use ranks: {gpus}"
        )


def _resolve_precision(result: Resolution) -> None:
    import torch

    run = result.run
    if run.precision != "auto":
        return
    if run.device == "cpu":
        result.put("precision", "fp32", "on a CPU fp32 is the fastest that is always there")
    elif torch.cuda.is_bf16_supported(including_emulation=False):
        result.put("precision", "bf16", "the GPU computes in bf16")
    else:
        result.put("precision", "fp16", "the GPU has no bf16")


def _check_parallel(run: Run, ranks: int) -> None:
    check_axes(run, ranks)
    zero, shard, axes = run.parallel.zero, run.parallel.shard, axes_used(run.parallel)
    if shard is not None and zero == 0:
        raise UserError(
            "parallel.shard", shard, "stage 0 shards nothing", "set parallel.zero to 1, 2 or 3, or leave shard out"
        )
    spread = ranks // (run.parallel.pipeline * run.parallel.tensor)  # ranks along context hold the same weights
    if spread % shard_size(zero, shard, spread):
        what = f"{spread} ranks" + (" of a stage and tensor group" if spread < ranks else "")
        raise UserError("parallel.shard", shard, f"does not divide the {what}", f"use one of {divisors_of(spread)}")
    check_plusplus(run.parallel, ranks)
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


ELEMENTWISE = ("adamw", "adamw8bit", "adamw4bit", "lion", "sgd")  # optimizers whose states can be anywhere


def _check_offload(run: Run) -> None:
    offload, train = run.offload, run.train
    if offload.optimizer != "none" and train.optimizer not in ELEMENTWISE:
        problem = f"{train.optimizer} looks at whole matrices; states leave the device in pieces"
        raise UserError(
            "offload.optimizer", offload.optimizer, problem, f"use optimizer: {', '.join(ELEMENTWISE)}, or offload none"
        )
    check_places(offload, run.parallel.zero, run.precision)


def check_places(offload: Offload, zero: int, precision: str) -> None:
    """What may be where; for runs and for loops of one's own."""
    if offload.parameters != "none" and zero != 3:
        problem = f"stage {zero} holds all parameters on the device"
        raise UserError("offload.parameters", offload.parameters, problem, "set parallel.zero: 3")
    if offload.parameters != "none" and offload.optimizer == "none":
        problem = "the optimizer's states would be larger than what leaves the device"
        raise UserError("offload.parameters", offload.parameters, problem, "set offload.optimizer: cpu or disk too")
    if offload.parameters != "none" and precision == "fp16":
        problem = "gradients off the device cannot be checked for fp16's overflow"
        raise UserError("offload.parameters", offload.parameters, problem, "use precision: bf16 or fp32")
    if offload.disk is not None and "disk" not in (offload.optimizer, offload.parameters):
        problem = "nothing is offloaded to disk"
        raise UserError("offload.disk", offload.disk, problem, "set offload.optimizer: disk, or leave it out")
    if offload.ratio != 1.0 and offload.optimizer == "none":
        problem = "no optimizer state leaves the device"
        raise UserError("offload.ratio", offload.ratio, problem, "set offload.optimizer: cpu, or leave it out")


def _check_in_backward(run: Run) -> None:
    train = run.train
    if not train.in_backward:
        return
    if train.clip is not None:
        problem = "clipping needs the norm of all gradients, which are gone one by one"
        raise UserError("train.in_backward", True, problem, "set train.clip: null")
    if run.precision == "fp16":
        problem = "fp16's loss scale must see all gradients before the first is used"
        raise UserError("train.in_backward", True, problem, "use precision: bf16 or fp32")
    if train.optimizer not in (*ELEMENTWISE, "adam-mini"):
        problem = f"{train.optimizer} works over all ranks at once"
        raise UserError("train.in_backward", True, problem, f"use optimizer: {', '.join(ELEMENTWISE)}")


def _check_activations(run: Run) -> None:
    if run.offload.activations != "none" and run.recompute != "full":
        problem = f"moves what recomputation keeps, but recompute is {run.recompute}"
        raise UserError("offload.activations", run.offload.activations, problem, "add recompute: full")


def _check_optimizer(run: Run) -> None:
    train, default = run.train, type(run.train)()
    coded = ("adamw", "lion", "sgd")
    if train.optimizer_state != "fp32" and train.optimizer not in coded:
        problem = f"{train.optimizer} has its own way to store its states"
        raise UserError(
            "train.optimizer_state", train.optimizer_state, problem, f"leave it out, or use one of {', '.join(coded)}"
        )
    if train.optimizer_state != "fp32" and train.optimizer == "sgd" and train.betas[0] == 0:
        problem = "sgd without momentum (betas[0] = 0) has no state"
        raise UserError("train.optimizer_state", train.optimizer_state, problem, "leave it out")
    if train.optimizer == "adafactor" and train.betas != default.betas:
        problem = "adafactor has no first moment, and a decay of its own for the second"
        raise UserError("train.betas", list(train.betas), problem, "leave it out, or use another optimizer")


def _check_method(run: Run) -> None:
    kind = run.method.type
    if kind != "full" and run.model.name is None:
        problem = "an adapter of a model that starts from scratch would be of no use without it"
        raise UserError("method", kind, problem, "use method: full, or give a model.name")
    if kind == "full" and run.export.merged:
        raise UserError("export.merged", True, "there is no adapter to merge", "leave it out, or set method: lora")


def check_plusplus(parallel: Parallel, ranks: int) -> None:
    """ZeRO++ where there is nothing to gather, to reduce in shards, or to keep a second copy of."""
    zero, secondary = parallel.zero, parallel.secondary_shard
    remedy = "set parallel.zero to 1, 2 or 3, or leave it out"
    if parallel.quantize_weights and zero == 0:
        raise UserError("parallel.quantize_weights", True, "stage 0 gathers no weights", remedy)
    if parallel.quantize_gradients and zero == 0:
        problem = "stage 0 all-reduces its gradients; 4 bits are for those that are reduced into shards"
        raise UserError("parallel.quantize_gradients", True, problem, remedy)
    if parallel.gradient_feedback is not None and not parallel.quantize_gradients:
        problem = "no gradient is quantised, so nothing is lost that could be added"
        remedy = "set parallel.quantize_gradients: true, or leave it out"
        raise UserError("parallel.gradient_feedback", parallel.gradient_feedback, problem, remedy)
    if secondary is None:
        return
    if zero != 3:
        problem = f"stage {zero} gathers its parameters once a step anyway"
        raise UserError("parallel.secondary_shard", secondary, problem, "set parallel.zero: 3, or leave it out")
    group = shard_size(zero, parallel.shard, ranks)
    divisors = divisors_of(group)
    if secondary not in divisors:
        whole = f"group of {group} ranks that the parameters are divided over"
        problem = f"is larger than the {whole}" if secondary > group else f"does not divide the {whole}"
        useful = divisors[1:-1]  # 1 would keep all of it on every rank, and the whole group saves nothing
        remedy = f"use one of {useful}, or leave it out" if useful else "leave it out: there are no parts to keep it in"
        remedy += "; on several hosts, start it under torchrun on all of them" * (secondary > group)
        raise UserError("parallel.secondary_shard", secondary, problem, remedy)


def _resolve_micro_batch(result: Resolution, ranks: int) -> None:
    run = result.run
    if run.train.micro_batch_size != "auto":
        return
    per_rank, budget = run.train.batch_size // data_ranks(run.parallel, ranks), TOKENS_PER_FORWARD[run.device]
    fits = [d for d in divisors_of(per_rank) if d * run.data.sequence_length <= budget] or [1]
    reason, wanted = f"at most {budget} tokens per forward on {run.device}", FULL * run.parallel.pipeline
    if run.parallel.pipeline > 1 and per_rank // max(fits) < wanted:  # stages wait for one another
        fits = [d for d in fits if per_rank // d >= wanted] or [1]
        reason = f"{per_rank // max(fits)} micro-batches for {run.parallel.pipeline} stages to work on"
    result.put("train.micro_batch_size", max(fits), reason)


def task_wanted(run: Run) -> Task | None:
    """The class of model that the objective asks for; None where the model's own class decides."""
    return None if run.objective == "auto" else TASKS.get(run.objective.type, "causal")


def purpose_of(run: Run) -> Purpose:
    """What the rows of a run with a resolved objective become."""
    assert run.objective != "auto"
    return PURPOSES[run.objective.type]


def resolve_objective(result: Resolution, task: Task) -> None:
    """What the model's class is for, where the run does not say; rows that cannot be packed are not."""
    if result.run.objective == "auto":
        result.put("objective", {"type": task}, "what the model's class is for")
    purpose, data = purpose_of(result.run), result.run.data
    if data.packing and purpose in ("seq2seq", "masked", "classify"):
        result.put("data.packing", False, f"{purpose} rows are read one at a time")
    if data.over_length == "split" and purpose in ("seq2seq", "classify"):
        what = "a target belongs to its whole source" if purpose == "seq2seq" else "a class belongs to a whole text"
        raise UserError("data.over_length", "split", f"{what}, so rows cannot be split", "use truncate or drop")
    check_judged(result.run)
    check_objective_axes(result.run)


def check_judged(run: Run) -> None:
    """What has no meaning where answers are judged as a whole."""
    data = run.data
    if purpose_of(run) not in ("preference", "kto"):
        return
    if data.over_length == "split":
        problem = "an answer that is judged as a whole cannot be split"
        raise UserError("data.over_length", "split", problem, "use error, drop or truncate")
    if data.loss_on != type(data).model_fields["loss_on"].default:
        problem = "what is learned are the answers that are judged, no more and no less"
        raise UserError("data.loss_on", data.loss_on, problem, "leave it out")
    _check_reference(run)


def _check_reference(run: Run) -> None:
    """An adapter's base is the reference where training starts from the base, and leaves it as it is."""
    method = run.method
    if run.objective.type not in ("dpo", "kto") or method.type == "full":  # type: ignore[union-attr]
        return
    if method.adapter is not None:
        problem = "the reference would be the base without this adapter, not the model that training starts from"
        remedy = "merge the adapter into the base first and train a new one, or use objective: orpo"
        raise UserError("method.adapter", method.adapter, problem, remedy)
    if isinstance(method, Qlora) and method.also:
        problem = "the reference is the quantised base, which would be changed by training modules whole"
        raise UserError("method.also", list(method.also), problem, "leave it out, or use method: lora")


def resolve_model(result: Resolution, config: Any) -> None:
    """Checks the sequence length against what the model was made for."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit and config.model_type in COUNTED_FROM_PADDING:
        limit -= config.pad_token_id + 1
    length = result.run.data.sequence_length
    if limit and length > limit:
        raise UserError("data.sequence_length", length, f"the model has {limit} positions", f"use {limit} or less")
    if result.run.parallel.beyond_data:
        check_model_axes(result.run, config, world_size(result.run))


def resolve_steps(result: Resolution, sequences_per_epoch: int) -> None:
    """Turns epochs into steps once the data are packed."""
    train = result.run.train
    if train.steps is None:
        epochs = train.epochs or 1.0
        steps = max(1, math.ceil(epochs * sequences_per_epoch / train.batch_size))
        values = result.run.model_dump()
        values["train"] |= {"steps": steps, "epochs": None}
        result.run = Run.model_validate(values)
        result.reasons["train.steps"] = (
            f"{epochs:g} epoch{'s' * (epochs != 1)} of {sequences_per_epoch} sequences, {train.batch_size} a step"
        )


def check_room(run: Run, trained: int, frozen: int = 0) -> None:
    """One checkpoint (fp32 master and two moments) and the exported model must fit on the disk of the output."""
    existing = Path(run.output).expanduser().absolute()
    while not existing.exists():
        existing = existing.parent
    whole = run.method.type == "full" or run.export.merged  # frozen parameters are exported too
    needed = 16 * trained + (4 * frozen if whole else 0)
    free = shutil.disk_usage(existing).free
    if free < needed:
        problem = f"has {free / 2**30:.2f} GiB free; a checkpoint and the model take {needed / 2**30:.2f} GiB"
        raise UserError("output", run.output, problem, "free some space or choose a folder on another disk")


def check_output(run: Run) -> None:
    """The output folder must be writable, found by writing (permissions alone do not tell); resume must be there."""
    from shardwise.checkpoint.store import choose_checkpoint

    target = Path(run.output).expanduser()
    _check_writable("output", run.output)
    if run.log.csv is not None:
        _check_writable("log.csv", run.log.csv)
    choose_checkpoint(run.resume, target / "checkpoints")


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
