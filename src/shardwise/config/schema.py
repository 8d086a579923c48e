"""RUN.yaml as types: frozen, complete, and strict, so that a typo is found before any process starts.

Only what works is here: a key that had no effect would be worse than an error. Values of `auto` are answered
by `resolve.py` once the machine, the model and the data are known.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from shardwise.config.units import Duration, Interval, Number, Share, Size, Span, Whole


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class Model(Section):
    """What to train: pretrained weights by name, or a fresh model from a configuration."""

    name: str | None = Field(None, description="hub id, folder, .gguf file, or the embedded smollm2-135m-instruct")
    config: dict[str, Any] | None = Field(None, description="start from scratch: a transformers config, with model_type")
    tokenizer: str | None = Field(None, description="tokenizer to use, by hub id or folder; default: the model's own")
    revision: str | None = Field(None, description="hub revision of the model")
    trust_remote_code: bool = Field(False, description="run model code that the model's folder brings")

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        if (self.name is None) == (self.config is None):
            raise ValueError("give either a name (pretrained weights) or a config (start from scratch)")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("a config to start from scratch needs model_type, e.g. model_type: llama")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("a model from scratch needs a tokenizer, e.g. tokenizer: smollm2-135m-instruct")
        return self


class Source(Section):
    """One set of examples."""

    path: str = Field(description="file or glob: .jsonl (chat messages or text), .txt, .md")
    format: Literal["auto", "chat", "text"] = Field("auto", description="auto reads it from the rows")


def _sources(value: Any) -> Any:
    value = [value] if isinstance(value, (str, dict)) else value
    if isinstance(value, (list, tuple)):
        return tuple({"path": item} if isinstance(item, str) else item for item in value)
    return value


def _eval(value: Any) -> Any:
    """A share ("2%", 0.02), or sources; a mapping or a path that is no number is a source."""
    if isinstance(value, str) and not value.strip().rstrip("%").replace(".", "", 1).isdigit():
        return _sources(value)
    return _sources(value) if isinstance(value, (list, tuple, dict)) else value


Sources = Annotated[tuple[Source, ...], BeforeValidator(_sources)]


class Data(Section):
    """What to learn from."""

    train: Sources = Field(description="a path, or a list of paths and sources", min_length=1)
    eval: Annotated[Annotated[Share, Field(ge=0, lt=1)] | Sources, BeforeValidator(_eval)] = Field(
        0.0, description="share held out per source (2%), or sources of its own; 0 = no evaluation"
    )
    sequence_length: Whole = Field(2048, ge=8, description="tokens per sequence")
    packing: bool = Field(True, description="several documents per sequence, none seeing another")
    loss_on: Literal["assistant", "all"] = Field("assistant", description="chat tokens that are learned")
    over_length: Literal["error", "drop", "truncate"] = Field(
        "error", description="a conversation longer than sequence_length; plain text is always split"
    )


class Train(Section):
    """How to learn."""

    steps: Annotated[Whole, Field(ge=1)] | None = Field(None, description="optimizer steps; or give epochs")
    epochs: Annotated[Number, Field(gt=0)] | None = Field(None, description="passes over the data; default 1")
    batch_size: Whole = Field(32, ge=1, description="sequences per optimizer step, over all ranks")
    micro_batch_size: Literal["auto"] | Annotated[Whole, Field(ge=1)] = Field(
        "auto", description="sequences per rank and forward pass"
    )
    optimizer: Literal["adamw"] = "adamw"
    learning_rate: Number = Field(2e-5, gt=0)
    betas: tuple[Annotated[Number, Field(ge=0, lt=1)], Annotated[Number, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: Number = Field(1e-8, gt=0)
    weight_decay: Number = Field(0.01, ge=0, description="not applied to norms and biases")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="after warm-up; wsd = warm-up, stable, then a linear decay"
    )
    warmup: Span = Field("3%", description="share of the run, or steps")
    decay: Span = Field("20%", description="length of the decay of wsd: share of the run, or steps")
    final_learning_rate: Share = Field(0.0, ge=0, le=1, description="where the schedule ends, as a share of the peak")
    clip: Annotated[Number, Field(gt=0)] | None = Field(1.0, description="largest gradient norm; null = no clipping")
    eval_every: Interval | None = Field(None, description="steps or time; default: at the end only")
    seed: Whole = Field(0, ge=0, lt=2**31)

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give steps or epochs, not both")
        return self


class Parallel(Section):
    """How the model and its states are spread over the ranks."""

    zero: Whole = Field(2, ge=0, le=3, description="ZeRO stage: 0 nothing, 1 optimizer, 2 + gradients, 3 + parameters")
    shard: Annotated[Whole, Field(ge=1)] | None = Field(
        None, description="ranks per shard group, replicated across groups (hybrid sharding); default: all"
    )


class Checkpoint(Section):
    """When the state of the run is saved and what is kept."""

    every: Interval | None = Field(100, description="steps or time; null = only at the end")
    keep: Whole = Field(2, ge=1, description="newest checkpoints kept; the best by evaluation loss is kept besides")
    background: bool = Field(True, description="write while training goes on")


class Export(Section):
    """The Hugging Face folder written at the end."""

    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field("auto", description="auto = as the original weights")
    shard_size: Size = Field("4GiB", ge=1, description="largest safetensors file")


class Log(Section):
    """What is reported while it runs."""

    every: Whole = Field(1, ge=1, description="steps between reports; the device is waited for only then")
    refresh: Duration = Field("200ms", gt=0, description="how often the live line is redrawn")


class Run(Section):
    """A run, described."""

    model: Model
    data: Data
    method: Literal["full"] = Field("full", description="full = train every parameter")
    train: Train = Train()
    parallel: Parallel = Parallel()
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="compute type; master weights are fp32. auto = bf16 on a GPU that has it, fp32 on a CPU"
    )
    recompute: Literal["none", "full"] = Field("none", description="full = keep only block inputs, compute the rest again")
    device: Literal["auto", "cuda", "cpu"] = "auto"
    ranks: Literal["auto"] | Annotated[Whole, Field(ge=1)] = Field(
        "auto", description="processes on this host; auto = one per GPU, one on a CPU; set by torchrun when it starts us"
    )
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    timeout: Duration = Field("10min", gt=0, description="longest wait for another rank")
    checkpoint: Checkpoint = Checkpoint()
    export: Export = Export()
    log: Log = Log()
    output: str = "out/run"
    resume: str = Field("auto", description="auto = go on where the output folder left off; never; or a checkpoint folder")

    @model_validator(mode="before")
    @classmethod
    def _short_model(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("model"), str):
            value = {**value, "model": {"name": value["model"]}}
        return value
