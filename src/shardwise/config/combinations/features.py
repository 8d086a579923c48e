"""The features of a run: each with the setting that decides it, and a value that enables it.

A feature is looked up in any object with the settings' attribute names: a Run, the config of a custom training loop, or
a section being validated. A missing setting is neither on nor off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as of_dataclass
from functools import reduce
from typing import Any, Literal

from shardwise.config import schedules

ABSENT: Any = object()


def look_up(settings: Any, path: str) -> Any:
    """The value at a dotted path, or ABSENT."""
    return reduce(lambda value, name: getattr(value, name, ABSENT), path.split("."), settings)


@dataclass(frozen=True, eq=False)
class Feature:
    """A choice made by a setting."""

    name: str
    field: str  # the setting that decides it
    value: Any  # of that setting: turns it on
    test: Callable[[Any], bool] | None = None  # of that setting's value; default: it is `value`
    also: Callable[[Any], bool] | None = None  # a further condition, on all settings
    company: Mapping[str, Any] = of_dataclass(default_factory=dict)  # what it cannot do without, by dotted path
    group: str = ""  # a run has one of each group; default: the field
    numbers: Literal["same", "rounded", "other"] = "same"  # what it makes of a run's losses: see tests/config
    shown: bool = True  # among the combinations; a default or a detail is not

    @property
    def of(self) -> str:
        """The group of alternatives it belongs to."""
        return self.group or self.field

    @property
    def settings(self) -> dict[str, Any]:
        """Settings by dotted path that enable it, including its requirements."""
        return {**self.company, self.field: self.value}

    def on(self, settings: Any) -> bool:
        """Whether the settings enable this feature."""
        value = look_up(settings, self.field)
        if value is ABSENT or not (value == self.value if self.test is None else self.test(value)):
            return False
        return self.also is None or self.also(settings)


def _above_one(value: Any) -> bool:
    return int(value) > 1


def _above_zero(value: Any) -> bool:
    return value != "auto" and float(value) > 0


def _given(value: Any) -> bool:
    return value is not None


def _chosen(value: Any) -> bool:
    return value not in (None, "auto")


def _stages(settings: Any) -> bool:
    return look_up(settings, "parallel.pipeline") is not ABSENT and settings.parallel.pipeline > 1


def _parts(settings: Any) -> bool:
    return look_up(settings, "parallel.context") is not ABSENT and settings.parallel.context > 1


def _choice(field: str, *values: Any, **more: Any) -> tuple[Feature, ...]:
    """The features for the values of one setting."""
    return tuple(Feature(f"{field.rpartition('.')[2]}: {value}", field, value, **more) for value in values)


ZERO = tuple(Feature(f"zero: {stage}", "parallel.zero", stage) for stage in range(4))
SHARD = Feature("dp_shard_size", "parallel.dp_shard_size", 2, _given)
SECONDARY = Feature("hpz_size", "parallel.hpz_size", 2, _given, company={"parallel.zero": 3})
QUANTIZE_WEIGHTS = Feature("quantize_weights", "parallel.quantize_weights", True, numbers="rounded")
QUANTIZE_GRADIENTS = Feature("quantize_gradients", "parallel.quantize_gradients", True, numbers="rounded")
BUCKET = Feature("bucket", "parallel.bucket", 20_000, _chosen)
PREFETCH = Feature("prefetch", "parallel.prefetch", 2, _chosen, company={"parallel.zero": 3})
REDUCE = Feature("reduce_dtype: bf16", "parallel.reduce_dtype", "bf16", numbers="rounded")

STATES = tuple(Feature(f"offload.optimizer: {p}", "offload.optimizer", p) for p in ("cpu", "disk"))
PARAMETERS = tuple(
    Feature(f"offload.parameters: {p}", "offload.parameters", p,
            company={"parallel.zero": 3, "offload.optimizer": "cpu"})
    for p in ("cpu", "disk")
)  # fmt: skip
ACTIVATIONS = Feature("offload.activations", "offload.activations", "cpu", company={"recompute": "full"})
RECOMPUTE = Feature("recompute: full", "recompute", "full")
LIGHT = Feature("recompute: light", "recompute", "light", company={"compile": True})
COMPILE = Feature("compile", "compile", True)

PRECISIONS = _choice("precision", "fp32", "bf16", "fp16", numbers="other")
FP16 = PRECISIONS[2]
FP8 = tuple(
    Feature(
        f"fp8: {recipe}", "fp8.recipe", recipe, numbers="other", company={"precision": "bf16", "fp8.min_features": 16}
    )
    for recipe in ("tensorwise", "rowwise")
)
OPTIMIZERS = _choice(
    "train.optimizer", "adamw", "adamw8bit", "adamw4bit", "lion", "sgd", "adam-mini", "adafactor", "muon",
    numbers="other",
)  # fmt: skip
ADAMW, EIGHT_BITS, FOUR_BITS, LION, SGD, ADAM_MINI, ADAFACTOR, MUON = OPTIMIZERS
ELEMENTWISE = (ADAMW, EIGHT_BITS, FOUR_BITS, LION, SGD)  # their states can be anywhere, in pieces
BF16_STATES = Feature("optimizer_state: bf16", "train.optimizer_state", "bf16", numbers="other")
SPLIT_MASTERS = Feature("master_weights: split", "train.master_weights", "split", company={"precision": "bf16"})
IN_BACKWARD = Feature(
    "optimizer_in_backward", "train.optimizer_in_backward", True, company={"train.max_grad_norm": None}
)

_BASE = {"model.name": "./model"}  # adapters are of a model that exists
FULL = Feature("method: full", "method.type", "full", group="method", numbers="other")
LORA = Feature(
    "method: lora", "method.type", "lora", also=lambda s: not s.method.dora, company=_BASE, group="method",
    numbers="other",
)  # fmt: skip
DORA = Feature(
    "method: dora", "method.dora", True, also=lambda s: s.method.type == "lora",
    company={**_BASE, "method.type": "lora"}, group="method", numbers="other",
)  # fmt: skip
QLORA = Feature("method: qlora", "method.type", "qlora", company=_BASE, group="method", numbers="other")
IA3 = Feature("method: ia3", "method.type", "ia3", company=_BASE, group="method", numbers="other")
ADAPTERS = (LORA, DORA, QLORA, IA3)

OBJECTIVES = tuple(
    Feature(f"objective: {kind}", "objective.type", kind, group="objective", numbers="other",
            company={"objective.teacher": "./teacher"} if kind == "distill" else {})
    for kind in ("causal", "seq2seq", "masked", "classify", "dpo", "orpo", "kto", "distill")
)  # fmt: skip
CAUSAL, SEQ2SEQ, MASKED, CLASSIFY, DPO, ORPO, KTO, DISTILL = OBJECTIVES
ROUTER = Feature("router.aux_loss", "router.aux_loss", 0.5, _above_zero, numbers="other")
PACKING = Feature("packing", "data.packing", True, numbers="other")

TENSOR = Feature("tensor", "parallel.tensor", 2, _above_one)
CONTEXTS = tuple(
    Feature(f"context: {kind}", "parallel.context_kind", kind, also=_parts, group="context",
            company={"parallel.context": 2})
    for kind in ("ring", "ulysses")
)  # fmt: skip
SCHEDULES = tuple(
    Feature(f"pipeline: {name}", "parallel.pipeline_schedule", name, also=_stages, group="pipeline",
            company={"parallel.pipeline": 2})
    for name in schedules.SCHEDULES
)  # fmt: skip
(ZBV,) = (feature for feature in SCHEDULES if feature.value == "zbv")
EXPERT = Feature("expert", "parallel.expert", 2, _above_one)
AXES = (TENSOR, *CONTEXTS, *SCHEDULES, EXPERT)
CPU, CUDA = _choice("device", "cpu", "cuda", numbers="other")

FEATURES = (
    *ZERO, SHARD, SECONDARY, QUANTIZE_WEIGHTS, QUANTIZE_GRADIENTS, BUCKET, PREFETCH, REDUCE, *STATES, *PARAMETERS,
    ACTIVATIONS, RECOMPUTE, LIGHT, COMPILE, *PRECISIONS, *FP8, *OPTIMIZERS, BF16_STATES, SPLIT_MASTERS, IN_BACKWARD,
    FULL, *ADAPTERS, *OBJECTIVES, ROUTER, PACKING, *AXES, CPU, CUDA,
)  # fmt: skip


# What rules speak of besides: defaults that something needs to be otherwise, and settings of little weight.
def _hidden(name: str, field: str, value: Any, test: Callable[[Any], bool] | None = None, **more: Any) -> Feature:
    return Feature(name, field, value, test, shown=False, **more)


BIAS_UPDATE = _hidden("router.bias_update", "router.bias_update", 0.001, _above_zero)
DILOCO = _hidden("diloco", "diloco", {"server": "127.0.0.1:29400"}, _given)
MULTIPLY = _hidden("method.multiply: fp8", "method.multiply", "fp8", company=_BASE | {"method.type": "qlora"})
TILE = _hidden("tiled_mlp", "tiled_mlp", 64, _given)
SOME_BLOCKS = _hidden("offload.activation_blocks", "offload.activation_blocks", 1, _given,
                      company={"offload.activations": "cpu", "recompute": "full"})  # fmt: skip
SOME_RECOMPUTED = _hidden("recompute_blocks", "recompute_blocks", 1, _given, company={"recompute": "full"})
GROUPS = _hidden("recompute_group", "recompute_group", 2, lambda size: size > 1, company={"recompute": "full"})
KEPT_ATTENTION = _hidden("recompute_attention: false", "recompute_attention", False, company={"recompute": "full"})
PLAIN_ATTENTION = _hidden("attention: plain", "attention", "plain")
UNPACKED = _hidden("packing: false", "data.packing", False)
NO_ACTIVATIONS = _hidden("offload.activations: none", "offload.activations", "none")
NO_FP8 = _hidden("fp8: none", "fp8.recipe", "none")
KEPT_16 = _hidden("fp8.modules_to_not_convert", "fp8.modules_to_not_convert", ("down_proj",), bool)
FP8_FAST = _hidden(
    "fp8.use_fast_accum", "fp8.use_fast_accum", True, company={"precision": "bf16", "fp8.recipe": "tensorwise"}
)
FP8_GATHER = _hidden("fp8.gather: fp8", "fp8.gather", "fp8", company={"precision": "bf16", "fp8.recipe": "tensorwise"})
EAGER = _hidden("compile: false", "compile", False)
STATES_STAY = _hidden("offload.optimizer: none", "offload.optimizer", "none")
NO_DISK = _hidden(
    "nothing on disk", "offload.disk", "scratch", _given,
    also=lambda s: "disk" not in (s.offload.optimizer, s.offload.parameters),
)  # fmt: skip
RATIO = _hidden("offload.ratio", "offload.ratio", 0.5, lambda value: value != 1.0)
OPEN_RECOMPUTE = _hidden("recompute: auto", "recompute", "auto")
NO_RECOMPUTE = _hidden("recompute: none", "recompute", "none")
FEEDBACK = _hidden("error_feedback", "parallel.error_feedback", True, _given)
WHOLE_GRADIENTS = _hidden("quantize_gradients: false", "parallel.quantize_gradients", False)
CLIP = _hidden("max_grad_norm", "train.max_grad_norm", 1.0, _given)
NO_MOMENTUM = _hidden("betas[0] = 0", "train.betas", (0.0, 0.95), lambda betas: betas[0] == 0)
OTHER_BETAS = _hidden("betas", "train.betas", (0.8, 0.9), lambda betas: tuple(betas) != (0.9, 0.95))
SCRATCH = _hidden(
    "a model from scratch", "model.config", {"model_type": "llama"}, _given,
    company={"model.name": None, "model.tokenizer": "./tokenizer"},
)  # fmt: skip
MERGED = _hidden("export.merged", "export.merged", True)
STOP_EARLY = _hidden("early_stopping", "train.early_stopping", {"patience": 3}, _given)
COPIES = _hidden("checkpoint.memory", "checkpoint.memory", "5", _given)
OTHER_BEST = _hidden("checkpoint.best", "checkpoint.best", "accuracy", lambda best: best != type(best)())
EXPORT_BEST = _hidden("export.checkpoint: best", "export.checkpoint", "best")
NO_EVALUATION = _hidden("no data.eval", "data.eval", 0.0, lambda share: share == 0.0)
EVALUATION = _hidden("data.eval", "data.eval", 0.02, lambda share: share != 0.0)
AT_THE_END = _hidden("no eval_every", "train.eval_every", None)
SPLIT = _hidden("over_length: split", "data.over_length", "split")
OTHER_LOSS = _hidden("loss_on", "data.loss_on", "all", lambda value: value != "assistant")
GOES_ON = _hidden("method.adapter", "method.adapter", "./adapter", _given)
TRAINED_WHOLE = _hidden("method.modules_to_save", "method.modules_to_save", ["lm_head"], bool)
SKIPS = _hidden("guard that skips", "guard.nan", "skip", lambda nan: nan == "skip")
SKIPS_LEAPS = _hidden("guard.on_spike: skip", "guard.on_spike", "skip", company={"guard.spike": 8.0})
NCCL = _hidden("backend: nccl", "backend", "nccl")
CHUNKS = _hidden("virtual_stages", "parallel.virtual_stages", 2, _given)
ONE_CHUNK = _hidden(
    "a schedule of one stage per rank",
    "parallel.pipeline_schedule",
    "1f1b",
    lambda schedule: not schedules.SCHEDULES[schedule].any_chunks,
)
OTHER_SCHEDULE = _hidden(
    "pipeline_schedule", "parallel.pipeline_schedule", "gpipe", lambda schedule: schedule != "1f1b"
)
NO_PIPELINE = _hidden("pipeline: 1", "parallel.pipeline", 1)
OTHER_KIND = _hidden("context_kind", "parallel.context_kind", "ulysses", lambda kind: kind != "ring")
NO_CONTEXT = _hidden("context: 1", "parallel.context", 1)


def feature(name: str) -> Feature:
    """Looks up a feature by its name, as `shardwise config --combinations` prints it."""
    return next(item for item in FEATURES if item.name == name)
