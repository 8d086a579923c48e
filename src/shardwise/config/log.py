"""Settings of logging: how often, to which trackers, and samples generated during training."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from shardwise.config.section import Section
from shardwise.config.units import Count, Whole

Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]
TRACKERS: tuple[str, ...] = get_args(Tracker)


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class Samples(Section):
    """Samples generated during training."""

    prompts: Annotated[tuple[str, ...], BeforeValidator(_several, json_schema_input_type=str | tuple[str, ...])] = (
        Field(min_length=1, description="what it is asked, or goes on with; one or several")
    )
    every: Count = Field(default=100, description="steps between samples; the last step has some in any case")
    max_new_tokens: Count = Field(default=64, description="longest answer")
    chat: bool = Field(
        default=True, description="ask as a user does, where there is a chat template; false = go on with the text"
    )


class Log(Section):
    """What is logged during training."""

    every: Whole = Field(default=1, ge=1, description="steps between reports; the device is waited for only then")
    breakdown: bool = Field(
        default=False, description="time in forward, backward, gather, reduce, offload and step; waits for the device"
    )
    comms: bool = Field(default=False, description="bytes, time and bandwidth of each collective")
    csv: str | None = Field(default=None, description="folder for one CSV file per figure, beside metrics.jsonl")
    trackers: Annotated[
        tuple[Tracker, ...], BeforeValidator(_several, json_schema_input_type=Tracker | tuple[Tracker, ...])
    ] = Field(default=(), description="where the figures go besides: tensorboard, wandb, trackio, mlflow")
    samples: Samples | None = Field(
        default=None, description="what the model writes during training, e.g. samples: {prompts: [Hello]}"
    )
    profile: tuple[Count, ...] = Field(
        default=(),
        description="steps that are taken under torch's profiler, e.g. [10, 500]: traces, a snapshot of a GPU's "
        "memory, and what to change, in words",
    )
