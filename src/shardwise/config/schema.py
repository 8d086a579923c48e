"""All settings of a run: frozen, complete, and strict, so that a typo is found before any process starts.

Every setting has an effect: one that had none would be worse than an error. Values of `auto` are resolved by
`resolve.py` once the machine, the model and the data are known.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from shardwise.config.combinations import check_section
from shardwise.config.diloco import OptionalDiLoCo
from shardwise.config.log import Log
from shardwise.config.methods import Full, Method, Patterns
from shardwise.config.metrics import Best, Metric, StopEarly
from shardwise.config.objectives import Objective
from shardwise.config.router import Router
from shardwise.config.schedules import ScheduleName, chunks_per_rank
from shardwise.config.section import Clash, Section
from shardwise.config.units import (
    Ahead,
    Count,
    Duration,
    Interval,
    Number,
    Positive,
    Share,
    Size,
    SomeSize,
    Span,
    Whole,
    is_quantity,
    parse_number,
    parse_share,
)
from shardwise.core.errors import UserError


class Model(Section):
    """The model to train: pretrained weights by name, or a new model from a configuration."""

    name: str | None = Field(
        default=None, description="hub id, folder, .gguf file, or the embedded smollm2-135m-instruct"
    )
    config: dict[str, Any] | None = Field(
        default=None, description="start from scratch: a transformers config, with model_type"
    )
    tokenizer: str | None = Field(
        default=None, description="tokenizer to use, by hub id or folder; default: the model's own"
    )
    revision: str | None = Field(
        default=None, description="hub revision of the model (quote it: a hash can be a number)"
    )
    trust_remote_code: bool = Field(default=False, description="run model code that the model's folder brings")

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        example = "smollm2-135m-instruct"
        if self.name is None and self.config is None:
            raise Clash("name", "neither a name nor a config is given", f"add e.g. model: {example}")
        if self.name is not None and self.config is not None:
            problem = "a name (pretrained weights) is given besides a config (start from scratch)"
            raise Clash("config", problem, "remove model.name or model.config")
        if self.config is not None and "model_type" not in self.config:
            raise Clash("config.model_type", "is needed to start from scratch", "add e.g. model_type: llama")
        if self.config is not None and self.tokenizer is None:
            raise Clash("tokenizer", "a model from scratch needs one", f"add e.g. tokenizer: {example}")
        if self.config is not None and self.revision is not None:
            raise Clash("revision", "has no meaning for a model from scratch", "remove it, or give a name")
        return self


def _model(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class Source(Section):
    """A data source."""

    path: str = Field(description="file, folder, glob, saved dataset, or hub id (hf:owner/name)", min_length=1)
    name: str | None = Field(default=None, description="of its loss curve; default: from the path")
    format: Literal[
        "auto",
        "chat",
        "sharegpt",
        "alpaca",
        "prompt",
        "text",
        "segments",
        "tokens",
        "preference",
        "kto",
        "pair",
        "label",
    ] = Field(default="auto", description="auto reads it from the rows and says why")
    fields: dict[str, str] = Field(
        default={}, description="our name: theirs, a.b for nested, e.g. {prompt: question, completion: answer.text}"
    )
    split: str | None = Field(default=None, description="of a dataset; default: train")
    subset: str | None = Field(default=None, description="of a dataset (its config name)")
    streaming: bool = Field(default=False, description="read a hub dataset as it arrives, without storing it")
    weight: Number = Field(default=1.0, gt=0, description="how often its rows come up, against those of other sources")
    epochs: Positive | None = Field(
        default=None, description="passes over it in each epoch of the run; instead of a weight"
    )


def _sources(value: Any) -> Any:
    value = [value] if isinstance(value, (str, dict, Source)) else value
    if not isinstance(value, (list, tuple)):
        raise ValueError("expected a path, or a list of paths and sources")
    if not value:
        raise ValueError("the list is empty")
    return tuple({"path": item} if isinstance(item, str) else item for item in value)


def _eval(value: Any) -> Any:
    """A fraction ("2%", 0.02) as a float, or a list of sources."""
    if isinstance(value, (int, float)) or (isinstance(value, str) and is_quantity(value)):
        share = float(parse_share(value))
        if not 0 <= share < 1:
            raise ValueError("expected a share of at least 0 and below 1, such as 2% or 0.02")
        return share
    return _sources(value)


AnySource = str | Source
Sources = Annotated[
    tuple[Source, ...],
    BeforeValidator(_sources, json_schema_input_type=AnySource | Annotated[list[AnySource], Field(min_length=1)]),
]
ShareOrSources = Annotated[
    # One or the other by type, so that a mistake in a source is not reported as a bad number besides.
    Annotated[float, Tag("share")] | Annotated[tuple[Source, ...], Tag("sources")],
    Discriminator(lambda value: "share" if isinstance(value, float) else "sources"),
    BeforeValidator(_eval, json_schema_input_type=float | AnySource | list[AnySource]),
]


class Refine(Section):
    """Row filters applied before training; every dropped row is written to a file with its reason."""

    min_tokens: Whole = Field(default=0, ge=0, description="shorter rows are left out")
    max_tokens: Count | None = Field(default=None, description="longer rows are left out")
    duplicates: Literal["keep", "exact", "near"] = Field(
        default="keep", description="leave out repeats, or near repeats too (MinHash)"
    )
    similarity: Number = Field(
        default=0.8, ge=0.5, le=1, description="Jaccard similarity of word 5-grams from which rows are near repeats"
    )
    decontaminate: Whole = Field(
        default=0, ge=0, description="leave out training rows that have this many words in a row from an eval source"
    )
    filter: str | None = Field(
        default=None, description="keep rows for which this is true, e.g. \"len(text) > 20 and lang == 'en'\""
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Refine:
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise Clash("max_tokens", f"is below min_tokens = {self.min_tokens}", "no row would be left; raise it")
        if self.similarity != 0.8 and self.duplicates != "near":
            problem = f"has no effect with duplicates: {self.duplicates}"
            raise Clash("similarity", problem, "set duplicates: near, or remove it")
        if self.filter is not None:
            from shardwise.config.row_filter import RowFilter

            try:
                RowFilter(self.filter)
            except UserError as error:
                raise Clash("filter", error.problem, error.remedy) from None
        return self


class Data(Section):
    """The training and evaluation data."""

    train: Sources = Field(description="a path, or a list of paths and sources")
    eval: ShareOrSources = Field(
        default=0.0, description="share held out per source (2%), or sources of its own; 0 = no evaluation"
    )
    sequence_length: Whole = Field(default=2048, ge=8, description="tokens per sequence")
    packing: Literal["auto"] | bool = Field(
        default="auto", description="several documents per sequence, none seeing another; auto: where the model can"
    )
    packing_window: Whole = Field(
        default=65536, ge=1, description="documents that are shuffled and packed together; a source up to this size is "
        "shuffled as a whole"
    )  # fmt: skip
    loss_on: Literal["assistant", "last", "all"] = Field(
        default="assistant", description="chat tokens that are learned: every answer, the last one, or everything"
    )
    over_length: Literal["error", "drop", "truncate", "split"] | None = Field(
        default=None, description="rows longer than sequence_length; default: error, and split for plain text"
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error", description="a row that cannot be understood; skipped ones are counted and written to a file"
    )
    temperature: Number = Field(
        default=1.0, gt=0, description="sources come up by size^(1/temperature): 1 = by size, large = equally often"
    )
    refine: Refine = Field(default_factory=lambda: Refine(), description="what to leave out")
    workers: Whole | Literal["auto"] = Field(default="auto", description="processes that tokenise; auto = cores")

    @property
    def eval_sources(self) -> tuple[Source, ...]:
        """Sources used only for evaluation; empty if a fraction is held out."""
        return () if isinstance(self.eval, float) else self.eval

    @property
    def eval_share(self) -> float:
        """Fraction of each training source that is held out; 0 if evaluation has its own sources."""
        return self.eval if isinstance(self.eval, float) else 0.0

    @model_validator(mode="after")
    def _check_decontaminate(self) -> Data:
        if self.refine.decontaminate and not self.eval_sources:
            problem = "compares with eval sources, but data.eval names none"
            raise Clash("refine.decontaminate", problem, "set data.eval to a path, or remove it")
        return self

    @model_validator(mode="after")
    def _check_eval_sources(self) -> Data:
        for index, source in enumerate(self.eval_sources):
            for name in ("weight", "epochs"):
                if getattr(source, name) != Source.model_fields[name].default:
                    problem = "has no effect: an evaluation reads every row of its sources once"
                    raise Clash(f"eval.{index}.{name}", problem, "remove it")
        return self


Beta = Annotated[float, Field(ge=0, lt=1), BeforeValidator(parse_number)]
Some = Annotated[int, Field(ge=0), BeforeValidator(parse_number)]


class Warmup(Section):
    """Warmup shared by two of DeepSpeed's schedules: from `warmup_min_lr` to `learning_rate`."""

    type: str
    warmup_min_lr: Number = Field(default=0.0, ge=0, description="rate at the start")
    warmup_num_steps: Span = Field(default=1000, description="steps (100) of the way up, or share of the run (3%)")
    warmup_type: Literal["log", "linear"] = Field(default="log", description="shape of the way up")


class WarmupLRSchedule(Warmup):
    """DeepSpeed's WarmupLR: from `warmup_min_lr` to `learning_rate`, then constant."""

    type: Literal["WarmupLR"] = Field(description="which of DeepSpeed's schedules")


class WarmupDecayLRSchedule(Warmup):
    """DeepSpeed's WarmupDecayLR: as WarmupLR, then linear decay to the initial rate."""

    type: Literal["WarmupDecayLR"] = Field(description="which of DeepSpeed's schedules")
    total_num_steps: Count | None = Field(default=None, description="where the decay ends; default: with the run")


class WarmupCosineLRSchedule(Section):
    """DeepSpeed's WarmupCosineLR: linear warmup and cosine decay, as fractions of `learning_rate`."""

    type: Literal["WarmupCosineLR"] = Field(description="which of DeepSpeed's schedules")
    total_num_steps: Count | None = Field(default=None, description="where the decay ends; default: with the run")
    warmup_min_ratio: Number = Field(default=0.0, ge=0, description="where the way up starts, as a share of the peak")
    warmup_num_steps: Span = Field(default=1000, description="steps (100) of the way up, or share of the run (3%)")
    cos_min_ratio: Number = Field(default=1e-4, ge=0, description="where the decay ends, as a share of the peak")
    warmup_type: Literal["log", "linear"] = Field(default="log", description="shape of the way up")


class OneCycleSchedule(Section):
    """DeepSpeed's OneCycle: up to `learning_rate` and back, then decay; the momentum moves inversely."""

    type: Literal["OneCycle"] = Field(description="which of DeepSpeed's schedules")
    cycle_min_lr: Number = Field(gt=0, description="rate at both ends of the cycle, e.g. 1e-5")
    cycle_first_step_size: Count = Field(default=2000, description="steps of the way up")
    cycle_second_step_size: Some | None = Field(default=None, description="steps of the way down; default: as many")
    cycle_first_stair_count: Whole = Field(default=0, ge=0, description="stairs of the way up; 0 = a smooth line")
    cycle_second_stair_count: Some | None = Field(default=None, description="stairs of the way down; default: as many")
    decay_step_size: Whole = Field(default=0, ge=0, description="steps per unit of decay after the cycle; 0 = none")
    decay_lr_rate: Number = Field(default=0.0, ge=0, description="decay of the rate after the cycle")
    cycle_momentum: bool = Field(default=True, description="cycle the first of the betas contrary to the rate")
    cycle_min_mom: Beta = Field(default=0.8, description="first beta at the top of the cycle")
    cycle_max_mom: Beta = Field(default=0.9, description="first beta at the ends of the cycle")
    decay_mom_rate: Number = Field(default=0.0, ge=0, description="growth of the first beta after the cycle")


class LRRangeTestSchedule(Section):
    """DeepSpeed's LRRangeTest: increases from `learning_rate` without end, to find the stability limit."""

    type: Literal["LRRangeTest"] = Field(description="which of DeepSpeed's schedules")
    lr_range_test_step_size: Count = Field(default=2000, description="steps per unit of growth")
    lr_range_test_step_rate: Number = Field(default=1.0, ge=0, description="growth per unit, as a share of the start")
    lr_range_test_staircase: bool = Field(default=False, description="grow in stairs")


DEEPSPEED_SCHEDULES: dict[str, type[Section]] = {
    "WarmupLR": WarmupLRSchedule,
    "WarmupDecayLR": WarmupDecayLRSchedule,
    "WarmupCosineLR": WarmupCosineLRSchedule,
    "OneCycle": OneCycleSchedule,
    "LRRangeTest": LRRangeTestSchedule,
}


def _schedule_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return str(kind) if kind in DEEPSPEED_SCHEDULES else "named"


Schedule = Annotated[
    Annotated[Literal["cosine", "linear", "constant", "wsd"], Tag("named")]
    | Annotated[WarmupLRSchedule, Tag("WarmupLR")]
    | Annotated[WarmupDecayLRSchedule, Tag("WarmupDecayLR")]
    | Annotated[WarmupCosineLRSchedule, Tag("WarmupCosineLR")]
    | Annotated[OneCycleSchedule, Tag("OneCycle")]
    | Annotated[LRRangeTestSchedule, Tag("LRRangeTest")],
    Discriminator(_schedule_kind),
]


class Train(Section):
    """Optimizer, schedule and length of the training."""

    steps: Count | None = Field(
        default=None, description="optimizer steps, each of a full batch; beside epochs: at most so many"
    )
    epochs: Positive | None = Field(
        default=None,
        description="passes over the data; the last step of each takes what is left of it. Default 1, unless steps "
        "are given",
    )
    batch_size: Whole = Field(default=32, ge=1, description="sequences per optimizer step, over all ranks")
    micro_batch_size: Literal["auto"] | Count = Field(
        default="auto", description="sequences per rank and forward pass: a number, or auto"
    )
    optimizer: Literal["adamw", "adamw8bit", "adamw4bit", "adam-mini", "adafactor", "lion", "muon", "sgd"] = Field(
        default="adamw",
        description="adamw holds 8 bytes per parameter, adamw8bit 2.1, adamw4bit 1.1, adam-mini and muon about 4, "
        "lion and sgd 4, adafactor next to none; all but lion (a third to a tenth) and sgd (more) take adamw's rates",
    )
    optimizer_state: Literal["fp32", "bf16"] = Field(
        default="fp32", description="type of adamw's, lion's and sgd's states; bf16 rounds stochastically"
    )
    master_weights: Literal["auto", "fp32", "split"] = Field(
        default="auto",
        description="the weights that are updated: fp32 = beside bf16 copies; split = bf16 weights, and the rest of "
        "their 32 bits among the optimizer's states (the same numbers, no copies); auto = split if these are offloaded "
        "or there is one GPU",
    )
    optimizer_in_backward: bool = Field(
        default=False,
        description="update each parameter during backward and free its gradient; needs max_grad_norm: null",
    )
    learning_rate: Number = Field(default=2e-5, gt=0, description="peak rate, e.g. 2e-5")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.95), description="Adam's two decay rates, e.g. [0.9, 0.95]; lion's; sgd's momentum is the first"
    )
    eps: Number = Field(default=1e-8, gt=0, description="Adam's guard against division by zero, e.g. 1e-8")
    weight_decay: Number = Field(default=0.01, ge=0, description="not applied to norms and biases")
    decay_norms: bool = Field(default=False, description="apply weight_decay to norms and biases too")
    schedule: Schedule = Field(
        default="cosine",
        description="after warm-up; wsd = warm-up, stable, then a linear decay. DeepSpeed's own schedules are set by "
        "its config (parallel.deepspeed); warmup, decay and min_lr_ratio then do nothing",
    )
    warmup: Span = Field(default="3%", description="share of the run (3%), or steps (100)")
    decay: Span = Field(default="20%", description="length of the decay of wsd: share of the run (20%), or steps (100)")
    min_lr_ratio: Share = Field(default=0.0, ge=0, le=1, description="where the schedule ends, as a share of the peak")
    max_grad_norm: Positive | None = Field(
        default=1.0, description="gradients are clipped to this norm; null = no clipping"
    )
    eval_every: Interval | None = Field(
        default=None, description="steps (50) or time (10min); default: at the end only"
    )
    early_stopping: StopEarly | None = Field(
        default=None, description="end the run when evaluations no longer improve, e.g. {patience: 3}; needs data.eval"
    )
    seed: Whole = Field(
        default=0, ge=0, lt=2**31, description="decides order, held-out rows, fresh weights and dropout"
    )


LEAST_BUCKET = 1 << 10


class Parallel(Section):
    """How the model and its states are distributed over the ranks."""

    zero: Whole = Field(
        default=2, ge=0, le=3, description="ZeRO stage: 0 nothing, 1 optimizer, 2 + gradients, 3 + parameters"
    )
    deepspeed: str | None = Field(
        default=None, description="path of a DeepSpeed config (JSON), read with the run; see docs/deepspeed.md"
    )
    dp_shard_size: Count | None = Field(
        default=None,
        description="ranks per shard group, replicated across groups (hybrid sharding, HSDP); default: all",
    )
    hpz_size: Count | None = Field(
        default=None,
        description="hpZ of ZeRO++ (zero_hpz_partition_size): keep a second copy of the parameters, sharded over this "
        "many ranks of a node, so that later gathers of a step stay within them; 1 keeps all parameters on every rank "
        "(leave it out to switch hpZ off)",
    )
    quantize_weights: bool = Field(
        default=False, description="qwZ of ZeRO++ (zero_quantized_weights): gather the weights as int8"
    )
    quantize_gradients: bool = Field(
        default=False,
        description="qgZ of ZeRO++ (zero_quantized_gradients): reduce the gradients in 4 bits; in a group of several "
        "nodes with several ranks each, in 8 bits within a node and 4 between nodes",
    )
    error_feedback: bool | None = Field(
        default=None,
        description="true or false: whether qgZ adds what rounding lost to the next gradient, which takes 2 bytes per "
        "parameter (in a group of several nodes, over the ranks of a node); default: true with quantize_gradients",
    )
    bucket: Literal["auto"] | SomeSize | None = Field(
        default="auto",
        description="largest buffer of a gather or a reduction (4 bytes per element), e.g. 200MB, at least 1KiB: "
        "blocks are divided or joined to suit; null: one block at a time; auto: so many blocks that latency is little "
        "of a gather, as measured at the start",
    )
    prefetch: Literal["auto"] | Ahead = Field(
        default="auto",
        description="units that are gathered ahead of those that compute, 0 to 8; auto: as many as hide a gather, as "
        "measured at the start",
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="the type that gradients travel and are added up in; bf16 is half the bytes"
    )
    tensor: Count = Field(
        default=1, description="ranks that divide each weight, and each sequence between the blocks' parts (Megatron)"
    )
    context: Count = Field(default=1, description="ranks that divide each sequence, attention included")
    context_kind: Literal["ring", "ulysses"] = Field(
        default="ring",
        description="ring: keys and values go round; ulysses: heads are exchanged for parts of the sequence, so the "
        "ranks must divide the heads",
    )
    pipeline: Count = Field(default=1, description="ranks that divide the blocks: stages one after the other")
    pipeline_schedule: ScheduleName = Field(
        default="1f1b",
        description="the order in which stages take the micro-batches; naive: one at a time, for comparison",
    )
    virtual_stages: Count | None = Field(
        default=None, description="with pipeline_schedule: interleaved, the stages of each rank; default: 2"
    )
    expert: Count = Field(default=1, description="ranks that divide the experts of each layer, tokens going to them")
    auto: bool = Field(default=False, description="let the planner choose all of it (short: parallel: auto)")

    @property
    def chunks_per_rank(self) -> int:
        """Chunks of the model on each rank of a pipeline, by the schedule."""
        return chunks_per_rank(self.pipeline_schedule, self.virtual_stages)

    @property
    def uses_model_parallelism(self) -> bool:
        """Whether the model is partitioned by more than ZeRO."""
        return max(self.tensor, self.context, self.pipeline, self.expert) > 1

    @model_validator(mode="after")
    def _check_parallel(self) -> Parallel:
        check_section("parallel", self)
        plain = Parallel.model_construct().model_dump() if self.auto else {}
        if self.auto and (name := next((n for n, v in plain.items() if n != "auto" and getattr(self, n) != v), None)):
            raise Clash("auto", f"the planner chooses all of it, but {name} is given too", f"remove {name}, or auto")
        if self.virtual_stages == 1:
            problem = "one stage per rank is not interleaved"
            remedy = "use 2 or more, or pipeline_schedule: 1f1b"
            raise Clash("virtual_stages", problem, remedy)
        if isinstance(self.bucket, int) and self.bucket < LEAST_BUCKET:
            problem = f"is {self.bucket} bytes, less than a row of any weight; a bare number is bytes"
            raise Clash("bucket", problem, "use e.g. 200MB (at least 1KiB), or leave it out")
        return self


class LossScale(Section):
    """Loss scaling for fp16, which keeps small gradients from underflowing; the scale adapts to overflows."""

    value: Literal["dynamic"] | Positive = Field(default="dynamic", description="dynamic, or a number that stays")
    initial: Positive = Field(default=65536.0, description="the dynamic scale at the start")
    growth_interval: Count = Field(default=2000, description="steps without overflow until the scale is doubled")
    hysteresis: Count = Field(default=1, description="overflows it takes to halve the scale")
    consecutive_hysteresis: bool = Field(
        default=False, description="count overflows anew after each step without, not after growth"
    )
    minimum: Positive = Field(default=1.0, description="least scale; an overflow at it ends the run")

    @model_validator(mode="after")
    def _ordered(self) -> LossScale:
        if self.initial < self.minimum:
            raise Clash("initial", f"is below minimum = {self.minimum:g}", "raise initial or lower minimum")
        return self


class Offload(Section):
    """What is offloaded from the device to cheaper memory."""

    optimizer: Literal["none", "cpu", "disk"] = Field(
        default="none", description="where the optimizer's states (and half of the master weights) live"
    )
    parameters: Literal["none", "cpu", "disk"] = Field(
        default="none", description="where the shards of the parameters live; stage 3 only"
    )
    activations: Literal["none", "cpu"] = Field(
        default="none", description="where the inputs of recomputed blocks wait for backward; needs recompute: full"
    )
    activation_blocks: Count | None = Field(
        default=None,
        description="of how many blocks the inputs go there, the first ones, which wait longest; default: of all",
    )
    ratio: Literal["auto"] | Annotated[Share, Field(ge=0, le=1)] = Field(
        default=1.0,
        description="share of the optimizer's states that leaves the device, 0 to 1 or e.g. 50%; auto = what does not "
        "fit",
    )
    disk: str | None = Field(
        default=None, min_length=1, description="folder for `disk`; default: offload/ in the output folder"
    )


class Checkpoint(Section):
    """When checkpoints are saved, and which are retained."""

    every: Interval | None = Field(default=100, description="steps (100) or time (10min); null = only at the end")
    keep: Whole = Field(default=2, ge=1, description="newest checkpoints kept; the best by evaluation is kept besides")
    best: Best = Field(
        default=Metric(), description="figure of the evaluations that decides which checkpoint is the best"
    )
    async_save: bool = Field(default=True, description="write checkpoints while training continues")
    memory: Interval | None = Field(
        default=None,
        description="besides, copies of the state in the memory of its host and of another one, to go on from when a "
        "rank or a host dies: every so many steps (5) or so often (30s); null = none",
    )

    @model_validator(mode="after")
    def _check_intervals(self) -> Checkpoint:
        memory = self.memory
        disk = self.every
        if memory is not None and disk is not None:
            pairs = ((memory.steps, disk.steps), (memory.seconds, disk.seconds))
            if any(often is not None and seldom is not None and often >= seldom for often, seldom in pairs):
                problem = f"every {memory} is no more often than checkpoints on disk (every {disk})"
                raise Clash("memory", problem, "copy to memory more often, or leave it out")
        return self


class Export(Section):
    """The Hugging Face folder exported at the end."""

    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(default="auto", description="auto = as the original weights")
    shard_size: Size = Field(default=4 << 30, ge=1, description="largest safetensors file, e.g. 4GiB")
    merged: bool = Field(default=False, description="after training an adapter, also write base and adapter as one")
    checkpoint: Literal["last", "best"] = Field(
        default="last", description="which checkpoint is exported: the last, or the best by checkpoint.best"
    )
    check: Literal["auto"] | bool = Field(
        default="auto",
        description="compare the folder with the trained model before it appears; auto = up to 2B parameters that fit "
        "in memory",
    )


class Guard(Section):
    """Handling of NaN, loss spikes, and silent data corruption."""

    nan: Literal["stop", "skip", "back"] = Field(
        default="stop",
        description="when the loss or the gradient is NaN or infinite: stop = end the run; skip = train on without "
        "that step's update; back = restart from the last checkpoint on disk and leave out the data from there to the "
        "bad step",
    )
    spike: float | None = Field(
        default=None,
        gt=0,
        description="a loss that lies more than so many standard deviations above the mean of the recent steps is a "
        "spike, e.g. 8; none = spikes are not looked for",
    )
    on_spike: Literal["stop", "skip", "back"] = Field(
        default="back", description="what to do about a spike: stop, skip or back, as for nan; without spike no effect"
    )
    window: Count = Field(default=100, description="how many recent steps the mean and the deviation are taken over")
    max_recoveries: Whole = Field(
        default=10, ge=0, description="end the run after so many skips and restarts by nan and spike"
    )
    checksum: Count | None = Field(
        default=None,
        description="every so many steps, e.g. 500, compare the weights and states that several ranks hold copies of, "
        "bit for bit; a difference (faulty memory or device) ends the run and names the rank",
    )

    @property
    def skips(self) -> bool:
        """Whether updates may be skipped, so that each must be checked first."""
        return self.nan == "skip" or (self.spike is not None and self.on_spike == "skip")


def _parallel(value: Any) -> Any:
    return {"auto": True} if value == "auto" else value


def _fp8(value: Any) -> Any:
    return {"recipe": value} if isinstance(value, str) else value


class Fp8(Section):
    """Which matrix products run in fp8, and how; the rest runs in bf16."""

    recipe: Literal["none", "tensorwise", "rowwise"] = Field(
        default="none",
        description="tensorwise = one scale per tensor, the fastest; rowwise = one per row, closer to bf16",
    )
    modules_to_not_convert: Patterns = Field(
        default=(), description="linear layers that stay in bf16, by name, * for any part"
    )
    min_features: Count = Field(
        default=512, description="layers with fewer inputs or outputs stay in bf16: rounding costs more than it saves"
    )
    use_fast_accum: bool = Field(
        default=False,
        description="on a GPU, add up backward's products with fewer bits, as forward's are: faster by some percent, "
        "gradients less exact",
    )
    gather: Literal["auto", "bf16", "fp8"] = Field(
        default="auto",
        description="how ZeRO gathers these layers' weights; fp8 = as they are multiplied: half the bytes, the same "
        "numbers (tensorwise only); auto = fp8 wherever that can be",
    )


class Run(Section):
    """The settings of a training run."""

    model: Annotated[Model, BeforeValidator(_model, json_schema_input_type=str | Model)] = Field(
        description="a name (hub id, folder, .gguf file), or settings of its own"
    )
    data: Data = Field(description="what to learn from, e.g. data: {train: chat.jsonl}")
    method: Method = Field(
        default=Full(), description="what is trained: full, lora, qlora or ia3, or a mapping with its settings"
    )
    objective: Objective = Field(
        default="auto",
        description="what it is trained to do: causal, seq2seq, masked, classify, dpo, orpo, kto or distill, or a "
        "mapping with its settings; auto = as the model's class says",
    )
    freeze: Patterns = Field(default=(), description="parameters that stay as they are, by name, * for any part")
    train: Train = Field(default=Train(), description="how to learn")
    parallel: Annotated[Parallel, BeforeValidator(_parallel, json_schema_input_type=Literal["auto"] | Parallel)] = (
        Field(default=Parallel(), description="how the model is spread over the ranks: settings, or auto = as planned")
    )
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp8"] = Field(  # fp8 never stays: see _short
        default="auto",
        description="compute type; master weights are fp32. auto = bf16 where the device is fast in it, else fp32 "
        "(fp16 on old GPUs); fp8 is short for bf16 with fp8: tensorwise",
    )
    fp8: Annotated[Fp8, BeforeValidator(_fp8, json_schema_input_type=str | Fp8)] = Field(
        default=Fp8(), description="linear layers in 8 bits beside bf16: tensorwise or rowwise, or settings of its own"
    )
    loss_scale: LossScale = Field(default=LossScale(), description="loss scaling; for precision: fp16 alone")
    recompute: Literal["auto", "none", "light", "full"] = Field(
        default="none",
        description="light = compute again what costs next to nothing (needs compile); full = keep only block inputs, "
        "compute the rest again; auto = as little as memory asks for: none, light, or full of some blocks",
    )
    recompute_blocks: Count | None = Field(
        default=None, description="of how many blocks the rest is computed again, the first ones; default: of all"
    )
    recompute_group: Count = Field(
        default=1,
        description="keep the input of one recomputed block in so many, and compute the others' again from it: less "
        "memory for up to a forward more (one GPU)",
    )
    recompute_attention: bool = Field(
        default=True,
        description="false = of recomputed blocks keep what attention made as well, where one document fills a row: as "
        "much again as block inputs take, for a fifth less time at 100K tokens and more",
    )
    tiled_mlp: Count | None = Field(
        default=None,
        description="compute feed-forward parts (and norms) so many tokens at a time and again in backward: for long "
        "sequences, e.g. 8192",
    )
    attention: Literal["auto", "plain"] = Field(
        default="auto",
        description="of packed rows: auto = document by document, without a mask; plain = as transformers does it, by "
        "a mask of the whole row",
    )
    experts: Literal["auto", "plain"] = Field(
        default="auto",
        description="of routed experts: auto = sorted rows, neither kept nor scattered; plain = as "
        "transformers does it",
    )
    router: Router = Field(default=Router(), description="how the routers of a mixture of experts are balanced")
    loss: Literal["auto", "plain"] = Field(
        default="auto",
        description="of next tokens: auto = by pieces, without ever making all logits; plain = from the whole of them",
    )
    compile: Literal["auto"] | bool = Field(
        default="auto",
        description="compile each block: the first step takes longer, all others less. auto = on GPUs, in runs of "
        "50 steps and more, not with tensor or pipeline parallelism",
    )
    offload: Offload = Field(default=Offload(), description="what is kept off the device")
    device: Literal["auto", "cuda", "cpu"] = Field(default="auto", description="auto = CUDA where there is a GPU")
    ranks: Literal["auto"] | Count = Field(
        default="auto",
        description="processes on this host: a number, or auto = one per GPU, one on a CPU; torchrun sets it",
    )
    backend: Literal["auto", "nccl", "gloo"] = Field(default="auto", description="auto = nccl on GPUs, gloo on CPUs")
    timeout: Duration = Field(
        default=600.0,
        gt=0,
        description="longest wait for another rank, e.g. 10min; then the run ends and says who is late",
    )
    restarts: int = Field(
        default=3,
        ge=0,
        description="how often a run that lost a rank (killed, stalled, cut off) is started again by itself from its "
        "last checkpoint, counted anew with each one",
    )
    guard: Guard = Field(default=Guard(), description="what to do about NaN, loss spikes and flipped bits")
    diloco: OptionalDiLoCo = Field(
        default=None,
        description="DiLoCo or FedAvg: train locally and synchronise with other workers every N steps; HOST:PORT of "
        "the sync server (`shardwise diloco-server`), or settings; see docs/diloco.md",
    )
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="when the state is saved and what is kept")
    export: Export = Field(default=Export(), description="the Hugging Face folder written at the end")
    log: Log = Field(default=Log(), description="what is reported while it runs")
    output: str = Field(default="out/run", min_length=1, description="folder for checkpoints, logs and the model")
    resume: str = Field(
        default="auto",
        min_length=1,
        description="auto = go on where the output folder left off; never; or a checkpoint folder",
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, values: Any) -> Any:
        """Expands the short form `precision: fp8`."""
        if isinstance(values, dict) and values.get("precision") == "fp8":
            fp8 = _fp8(values.get("fp8") or {})
            if not isinstance(fp8, dict):
                return values | {"precision": "bf16"}
            if fp8.get("recipe") == "none":
                raise ValueError("precision: fp8 contradicts fp8.recipe: none; leave one of them out")
            return values | {"precision": "bf16", "fp8": {"recipe": "tensorwise"} | fp8}
        return values

    @model_validator(mode="after")
    def _check_guard_has_checkpoints(self) -> Run:
        guard = self.guard
        spikes = guard.spike is not None and guard.on_spike == "back"
        if self.checkpoint.every is None and (guard.nan == "back" or spikes):
            key = "guard.nan" if guard.nan == "back" else "guard.on_spike"
            raise Clash(key, "goes back to a checkpoint, and none is written on the way (checkpoint.every: null)",
                        "set checkpoint.every, e.g. 10min")  # fmt: skip
        return self

    @property
    def computes_in(self) -> str:
        """The precision in words, and whether blocks are compiled."""
        fp8 = "" if self.fp8.recipe == "none" else f" with fp8 ({self.fp8.recipe})"
        return f"{self.precision}{fp8}{', compiled' * self.compiled}"

    @property
    def compiled(self) -> bool:
        """Whether blocks are compiled; False while that is not resolved."""
        return self.compile is True

    @property
    def left_open(self) -> bool:
        """Whether something is left to the planner (foresight/plan/auto.py)."""
        return self.parallel.auto or self.recompute == "auto"
