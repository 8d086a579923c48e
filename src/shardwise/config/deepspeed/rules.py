"""Rules that translate each supported key: a rule sets values on the plan and returns a description."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.config.deepspeed.plan import Auto, NoEffect, PartialTranslation, Rule, show
from shardwise.config.paths import ABSENT, find
from shardwise.config.schema import DEEPSPEED_SCHEDULES

REDUCE_BYTES = 4  # gradients are reduced in fp32


def to(target: str, read: Callable[[PartialTranslation, str, Any], Any]) -> Rule:
    """Rule for a key that we have under another name."""

    def rule(plan: PartialTranslation, key: str, value: Any) -> str:
        return plan.auto(target) if value == "auto" else plan.put(key, target, read(plan, key, value))

    return rule


def flag(plan: PartialTranslation, key: str, value: Any) -> bool:
    return plan.flag(key, value)


def number(plan: PartialTranslation, key: str, value: Any) -> float:
    return plan.number(key, value)


def count(plan: PartialTranslation, key: str, value: Any) -> int:
    return plan.integer(key, value, 1)


def axis(target: str) -> Rule:
    """Rule for the number of ranks along an axis; 0 and 1 are DeepSpeed's for none."""

    def rule(plan: PartialTranslation, key: str, value: Any) -> str:
        if value == "auto":
            return plan.auto(target)
        ranks = plan.integer(key, value or 0)
        return plan.put(key, target, ranks) if ranks > 1 else NoEffect("switched off, as it is here")

    return rule


# The step


def clip(plan: PartialTranslation, key: str, value: Any) -> str:
    """Gradient clipping; 0 disables it in DeepSpeed."""
    if value == "auto":
        return plan.auto("train.max_grad_norm")
    return plan.put(key, "train.max_grad_norm", plan.number(key, value) or None)


def steps_per_print(plan: PartialTranslation, key: str, value: Any) -> str:
    """Logging interval; null disables it in DeepSpeed, and keeps the run's setting here."""
    if value is None:
        return NoEffect("null asks for no report; the run reports as log.every says")
    if value == "auto":
        return plan.auto("log.every")
    if value == float("inf"):
        return NoEffect("infinity asks for no report; the run reports as log.every says")
    return plan.put(key, "log.every", plan.integer(key, value, 1))


def only(*fine: Any, why: str, remedy: str) -> Rule:
    """Rule for a key of which some values match what we do anyway, and all others are rejected."""

    def rule(plan: PartialTranslation, key: str, value: Any) -> str:
        if value in fine or value == "auto":
            return "as it is here always"
        raise plan.mistake(key, value, why, remedy)

    return rule


def reduced_in(plan: PartialTranslation, key: str, value: Any) -> str:
    """Dtype of the gradient reduction; null means the gradients' dtype in DeepSpeed, which is fp32 here."""
    if value is None:
        return NoEffect("null leaves it to parallel.reduce_dtype")
    if value == "auto":
        return plan.auto("parallel.reduce_dtype")
    dtype = {"fp32": "fp32", "bfp16": "bf16", "bf16": "bf16"}.get(value)
    if dtype is None:
        raise plan.mistake(key, value, "gradients travel in fp32 or bf16", "use fp32 or bfp16")
    return plan.put(key, "parallel.reduce_dtype", dtype)


# Precision


def precision(plan: PartialTranslation, key: str, value: Any) -> str:
    """Precision from fp16.enabled and bf16.enabled together."""
    fp16, bf16 = (_enabled(plan, block) for block in ("fp16", "bf16"))
    if fp16 is True and bf16 is True:
        raise plan.mistake("fp16, bf16", None, "are both enabled", "set one of the two to false")
    if fp16 is True or bf16 is True:
        return plan.put(key, "precision", "fp16" if fp16 is True else "bf16")
    if "auto" in (fp16, bf16):
        value_of_run = plan.run_value("precision")
        out = {"fp16" if fp16 is False else "", "bf16" if bf16 is False else ""} - {""}
        if value_of_run in out and not plan.forgiving:
            raise plan.mistake(key, value, f"contradicts precision = {value_of_run!r} of the run", "make the two agree")
        return plan.auto("precision")
    return plan.put(key, "precision", "fp32")


def _enabled(plan: PartialTranslation, block: str) -> Any:
    for name in (block, "bfloat16") if block == "bf16" else (block,):
        value = find(plan.config, f"{name}.enabled")
        if value is not ABSENT:
            return value if value == "auto" else plan.flag(f"{name}.enabled", value)
    return None if find(plan.config, block) is ABSENT else False


def loss_scale(plan: PartialTranslation, key: str, value: Any) -> str:
    """Loss scale; 0 means dynamic in DeepSpeed."""
    if value == "auto":
        return plan.auto("loss_scale.value")
    return plan.put(key, "loss_scale.value", plan.number(key, value) or "dynamic")


def initial_scale(plan: PartialTranslation, key: str, value: Any) -> str:
    if value == "auto":
        return plan.auto("loss_scale.initial")
    return plan.put(key, "loss_scale.initial", 2.0 ** plan.integer(key, value))


# Optimizer

OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "lion": "lion", "sgd": "sgd"}
_REFUSED = {
    "onebitadam": "1-bit Adam compresses its momentum with errors fed back; there is no such collective here",
    "zerooneadam": "0/1 Adam skips communication between steps; there is no such optimizer here",
    "onebitlamb": "1-bit LAMB compresses its momentum with errors fed back; there is no such collective here",
    "lamb": "LAMB scales each layer's step by norms; there is no such optimizer here",
    "muadam": "needs the mup package's groups, which a sharded model does not have",
    "muadamw": "needs the mup package's groups, which a sharded model does not have",
    "musgd": "needs the mup package's groups, which a sharded model does not have",
    "adagrad": "there is no Adagrad here",
    "muon": "its updates are scaled otherwise than ours (which have AdamW's size): its rates would not carry over",
    "adafactor": "torch's Adafactor and ours differ in their defaults, so that the name alone would mislead",
}


def optimizer_type(plan: PartialTranslation, key: str, value: Any) -> str:
    """Optimizer; DeepSpeed's Adam is AdamW by default and decays every parameter."""
    name = str(value).lower()
    if name not in OPTIMIZERS:
        why = _REFUSED.get(name, "this optimizer is not here")
        remedy = "use AdamW, Lion or SGD, or leave `optimizer` out and set train.optimizer in the run"
        raise plan.mistake(key, value, why, remedy)
    return plan.put(key, "train.optimizer", OPTIMIZERS[name])


def learning_rate(plan: PartialTranslation, key: str, value: Any) -> str:
    """Learning rate; unused in DeepSpeed if the scheduler sets its own peak."""
    if value == "auto":
        return plan.auto("train.learning_rate")
    kind, rate = plan.get("scheduler.type"), plan.number(key, value)
    ruled = _PEAKS.get(str(kind))
    own = kind in ("WarmupDecayLR", "LRRangeTest")  # they have a peak of their own where none is given
    if ruled and (own or plan.get(f"scheduler.params.{ruled}") is not None):
        return NoEffect(f"the scheduler's {ruled} rules the rate, as in DeepSpeed")
    return plan.put(key, "train.learning_rate", rate)


def betas(plan: PartialTranslation, key: str, value: Any) -> str:
    if value == "auto":
        return plan.auto("train.betas")
    if not isinstance(value, list) or len(value) != 2:
        raise plan.mistake(key, value, "is not a pair of numbers", "write e.g. [0.9, 0.999]")
    return plan.put(key, "train.betas", [plan.number(key, part) for part in value])


def weight_decay(plan: PartialTranslation, key: str, value: Any) -> str:
    if value == "auto":
        return plan.auto("train.weight_decay")
    decay = plan.number(key, value)
    if decay and str(plan.get("optimizer.type")).lower() == "sgd" and plan.get("optimizer.params.momentum", 0):
        why = "torch's SGD adds it to the gradient, ours takes it off the weight: with momentum that is not the same"
        raise plan.mistake(key, value, why, "set it to 0, or leave `optimizer` out and use train.optimizer: sgd")
    return plan.put(key, "train.weight_decay", decay)


def adam_w_mode(plan: PartialTranslation, key: str, value: Any) -> str:
    """Decoupled weight decay; off means L2 regularisation, which is only equivalent without decay."""
    if value == "auto" or plan.flag(key, value) or str(plan.get("optimizer.type")).lower() == "adamw":
        return "decoupled decay, as it is here always"
    if plan.get("optimizer.params.weight_decay", 0):
        why = "decay through the gradient (L2) is not here; AdamW takes it off the weight"
        raise plan.mistake(key, value, why, "set it to true, or weight_decay to 0")
    return "without weight decay both modes are the same"


def momentum(plan: PartialTranslation, key: str, value: Any) -> str:
    """SGD's momentum, which is the first of our betas."""
    if value == "auto":
        return plan.auto("train.betas")
    return plan.put(key, "train.betas", [plan.number(key, value), list(plan.now("train.betas"))[1]])


def optimizer_defaults(plan: PartialTranslation) -> None:
    """Sets DeepSpeed's defaults of the optimizer parameters that are not given."""
    kind = str(plan.get("optimizer.type", "")).lower()
    if kind not in OPTIMIZERS:
        return
    params = plan.get("optimizer.params", {})

    def default(name: str, target: str, value: Any) -> None:
        if name not in params:
            plan.put_default(f"optimizer.params.{name}", target, value)

    plan.put_default("optimizer.params", "train.decay_norms", True)  # it decays every parameter it is given
    if "train.learning_rate" not in plan.sources:
        default("lr", "train.learning_rate", 1e-3)
    if kind in ("adam", "adamw", "lion"):
        default("betas", "train.betas", [0.9, 0.999])
    else:
        default("momentum", "train.betas", [0.0, 0.95])
    decayed = kind in ("adam", "adamw") and bool(params.get("torch_adam"))
    default("weight_decay", "train.weight_decay", 0.01 if decayed else 0.0)


# Scheduler

_PEAKS = {
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "OneCycle": "cycle_max_lr",
    "LRRangeTest": "lr_range_test_min_lr",
}


def scheduler_type(plan: PartialTranslation, key: str, value: Any) -> str:
    """Learning-rate schedule of the same name; see [Note: DeepSpeed's schedules]."""
    if value not in DEEPSPEED_SCHEDULES:
        known = ", ".join(DEEPSPEED_SCHEDULES)
        raise plan.mistake(key, value, "is not one of DeepSpeed's schedules", f"use one of {known}")
    return plan.put(key, "train.schedule", {"type": value})


def schedule_parameter(plan: PartialTranslation, key: str, value: Any) -> str:
    """A parameter of the schedule, under the same name."""
    kind = str(plan.get("scheduler.type"))
    name = key.rpartition(".")[2]
    schedule = find(plan.values, "train.schedule")
    if find(plan.config, "scheduler.type") is not ABSENT and not isinstance(schedule, dict):
        return NoEffect("the schedule is not known")  # which has been said
    if kind not in DEEPSPEED_SCHEDULES or not isinstance(schedule, dict):
        raise plan.mistake("scheduler.type", None, "is not given", f"add one of {', '.join(DEEPSPEED_SCHEDULES)}")
    if name not in DEEPSPEED_SCHEDULES[kind].model_fields:
        known = ", ".join(list(DEEPSPEED_SCHEDULES[kind].model_fields)[1:])
        raise plan.mistake(key, value, f"{kind} has no such parameter", f"it has {known}")
    if value == "auto":
        return _schedule_auto(plan, schedule, name)
    if isinstance(value, list):
        raise plan.mistake(key, value, "one value per parameter group is not here", "give one number")
    if value is None:
        return "null, as if not given"
    return plan.put(key, f"train.schedule.{name}", value)


def _schedule_auto(plan: PartialTranslation, schedule: dict[str, Any], name: str) -> str:
    if name == "warmup_num_steps":
        schedule[name] = plan.now("train.warmup")
        return f"auto → train.schedule.warmup_num_steps: {show(schedule[name])} (train.warmup)"
    if name == "total_num_steps":
        return Auto("auto → the steps of the run", "train.steps")
    default = DEEPSPEED_SCHEDULES[schedule["type"]].model_fields[name].default
    return f"auto → train.schedule.{name}: {show(default)} (DeepSpeed's default)"


def schedule_peak(plan: PartialTranslation, key: str, value: Any) -> str:
    """Peak learning rate of the schedule: train.learning_rate."""
    kind = str(plan.get("scheduler.type"))
    name = key.rpartition(".")[2]
    if kind not in DEEPSPEED_SCHEDULES and find(plan.config, "scheduler.type") is not ABSENT:
        return NoEffect("the schedule is not known")  # which has been said
    if _PEAKS.get(kind) != name:
        raise plan.mistake(key, value, f"{kind} has no such parameter", f"remove {name}")
    if value is None or value == "auto":
        rate = plan.get("optimizer.params.lr")
        lead = "auto → " if value == "auto" else "null → "
        if rate is None:
            return Auto(lead + plan.auto("train.learning_rate").removeprefix("auto → "), "train.learning_rate")
        return lead + plan.put(key, "train.learning_rate", plan.number("optimizer.params.lr", rate))
    if isinstance(value, list):
        raise plan.mistake(key, value, "one value per parameter group is not here", "give one number")
    return plan.put(key, "train.learning_rate", plan.number(key, value))


def schedule_defaults(plan: PartialTranslation) -> None:
    """Defaults: a constant rate without a scheduler; WarmupDecayLR and LRRangeTest have their own peak."""
    kind = plan.get("scheduler.type")
    if kind is None:
        silent = all(plan.run_value(f"train.{name}") is ABSENT for name in ("schedule", "warmup"))
        if silent:
            plan.put_default("scheduler", "train.schedule", "constant")
            plan.put_default("scheduler", "train.warmup", 0)
        return
    params = find(plan.config, "scheduler.params")
    name = _PEAKS.get(str(kind))
    if kind in ("WarmupDecayLR", "LRRangeTest") and name not in (params if isinstance(params, dict) else {}):
        plan.put_default(f"scheduler.params.{name}", "train.learning_rate", 1e-3)
    if kind == "OneCycle":
        for needed in ("cycle_min_lr", "cycle_max_lr"):
            if find(plan.config, f"scheduler.params.{needed}") is ABSENT:
                raise plan.mistake(f"scheduler.params.{needed}", None, "OneCycle needs it", "add e.g. 1e-4")


# ZeRO


def zero_as_flag(plan: PartialTranslation, key: str, value: Any) -> str:
    """ZeRO as a boolean, as in early versions: true is stage 1."""
    return plan.put(key, "parallel.zero", int(plan.flag(key, value)))


def stage(plan: PartialTranslation, key: str, value: Any) -> str:
    if value == "auto":
        return plan.auto("parallel.zero")
    number = plan.integer(key, value)
    if number > 3:
        raise plan.mistake(key, value, "there are stages 0 to 3", "use 0, 1, 2 or 3")
    return plan.put(key, "parallel.zero", number)


DEVICES = {"none": "none", "cpu": "cpu", "nvme": "disk"}


def offload_device(part: str, least_stage: int) -> Rule:
    """Rule for where optimizer states or parameters are offloaded; nvme is our disk."""

    def rule(plan: PartialTranslation, key: str, value: Any) -> str:
        target = f"offload.{part}"
        if value == "auto":
            return plan.auto(target)
        value = "none" if value is None else value
        device = DEVICES[plan.choice(key, value, tuple(DEVICES))]
        at = int(plan.now("parallel.zero"))
        if device != "none" and at < least_stage:
            return NoEffect(f"needs stage {least_stage}, and this is stage {at}; DeepSpeed leaves it out too")
        done = plan.put(key, target, device)
        has_path = plan.get(f"{key.rpartition('.')[0]}.nvme_path") is not None
        return done if device != "disk" or has_path else f"{done}, in {_own_folder(plan)}"

    return rule


def _own_folder(plan: PartialTranslation) -> str:
    """Offload folder if no path is given."""
    return str(plan.now("offload.disk") or Path(str(plan.now("output"))) / "offload")


def cpu_offload(part: str) -> Rule:
    """Rule for the boolean offload flags of early versions."""

    def rule(plan: PartialTranslation, key: str, value: Any) -> str:
        return plan.put(key, f"offload.{part}", "cpu" if plan.flag(key, value) else "none")

    return rule


def nvme_path(plan: PartialTranslation, key: str, value: Any) -> str:
    """Offload folder; one serves both optimizer and parameters, and it only matters if one of them is on disk."""
    part = "optimizer" if "offload_optimizer" in key else "parameters"
    if plan.now(f"offload.{part}") != "disk":
        return NoEffect("nothing of this goes to nvme")
    if value in (None, "auto"):
        return NoEffect(f"not given: {_own_folder(plan)} is used")
    return plan.put(key, "offload.disk", str(value))


def offload_ratio(plan: PartialTranslation, key: str, value: Any) -> str:
    if plan.now("offload.optimizer") == "none":
        return NoEffect("nothing is offloaded")
    if value == "auto":
        return plan.auto("offload.ratio")
    share = plan.number(key, value)
    if share > 1:
        raise plan.mistake(key, value, "is a share", "write a number from 0 to 1")
    return plan.put(key, "offload.ratio", share)


def bucket(plan: PartialTranslation, key: str, value: Any) -> str:
    """Bucket size, in elements there and bytes here: the smaller of the two buckets sets ours."""
    if value == "auto":
        return plan.auto("parallel.bucket")
    name = key.rpartition(".")[2]
    elements = plan.integer(key, value)
    if name == "allgather_bucket_size" and int(plan.now("parallel.zero")) == 3:
        return NoEffect("stage 3 gathers unit by unit; DeepSpeed reads it at stages 1 and 2 alone")
    if not elements:
        raise plan.mistake(key, value, "a bucket of nothing moves nothing", "use e.g. 500000000")
    earlier = find(plan.values, "parallel.bucket")
    size = elements * REDUCE_BYTES
    if earlier is not ABSENT and earlier <= size:
        return NoEffect(f"the other bucket is smaller: advanced.bucket: {earlier}")
    if earlier is not ABSENT:
        plan.values["parallel"].pop("bucket")
    return f"{plan.put(key, 'parallel.bucket', size)} ({elements:,} elements of {REDUCE_BYTES} bytes)"


def hpz_size(plan: PartialTranslation, key: str, value: Any) -> str:
    if value == "auto":
        return plan.auto("parallel.hpz_size")
    size = plan.integer(key, value)
    if size > 1 and int(plan.now("parallel.zero")) != 3:
        return NoEffect("hpZ is of stage 3; DeepSpeed leaves it out at other stages too")
    return plan.put(key, "parallel.hpz_size", size if size > 1 else None)


def quantize(target: str) -> Rule:
    """Rule for qwZ and qgZ, which require stage 3 in DeepSpeed."""

    def rule(plan: PartialTranslation, key: str, value: Any) -> str:
        if value == "auto":
            return plan.auto(target)
        on = plan.flag(key, value)
        if on and int(plan.now("parallel.zero")) != 3:
            return NoEffect("is of stage 3; DeepSpeed leaves it out at other stages too")
        return plan.put(key, target, on)

    return rule


def loco(plan: PartialTranslation, key: str, value: Any) -> str:
    """LoCo error feedback; ours has no parameters."""
    if value in (None, "auto") or value == {}:
        return NoEffect("not given; qgZ adds what rounding lost all the same, unless advanced.error_feedback: false")
    if not isinstance(value, dict) or (unknown := sorted(set(value) - {"err_beta", "reset_T"})):
        problem = f"has no {unknown[0]}" if isinstance(value, dict) else "is not a block"
        raise plan.mistake(key, value, problem, 'write e.g. {"err_beta": 0.8, "reset_T": 1024}')
    if not plan.now("parallel.quantize_gradients"):
        return NoEffect("goes with zero_quantized_gradients, which are off")
    idle = "what is lost is added whole, and dropped at each checkpoint"
    return f"{plan.put(key, 'parallel.error_feedback', True)}; {' and '.join(value)} without effect: {idle}"


def mics(plan: PartialTranslation, key: str, value: Any) -> str:
    """MiCS, which is hybrid sharding; values below 1 disable it."""
    size = int(plan.number(key, value, -1))
    return plan.put(key, "parallel.dp_shard_size", size) if size > 0 else NoEffect("off")


# Activations and reports


def cpu_checkpointing(plan: PartialTranslation, key: str, value: Any) -> str:
    """Offload of activation checkpoints to the host; requires recomputation."""
    if value == "auto" or not plan.flag(key, value):
        return NoEffect("off")
    plan.put(key, "recompute", "full")
    return f"{plan.put(key, 'offload.activations', 'cpu')}, recompute: full"


def csv_folder(plan: PartialTranslation, key: str, value: Any) -> str:
    """Folder from output_path and job_name, as DeepSpeed joins them."""
    if not plan.get("csv_monitor.enabled", False):
        return NoEffect("csv_monitor is off")
    path = plan.get("csv_monitor.output_path", "")
    name = plan.get("csv_monitor.job_name", "DeepSpeedJobName")
    return plan.put(key, "log.csv", f"{path}/{name}" if path else str(name))
