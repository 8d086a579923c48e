"""Settings of evaluation metrics: which one to follow, and whether lower or higher is better."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from shardwise.config.section import Clash, Section
from shardwise.config.units import Number, Whole

LESS, MORE = ("loss", "perplexity", "error", "entropy"), ("accuracy", "margin", "reward", "f1", "match", "win")


class Metric(Section):
    """A metric of each evaluation."""

    metric: str = Field(
        default="eval_loss",
        min_length=1,
        description="eval_loss, or another figure of the evaluation's record, e.g. accuracy or losses.NAME of a source",
    )
    mode: Literal["auto", "min", "max"] = Field(
        default="auto", description="whether less (min) or more (max) of it is better; auto = by its name"
    )

    @model_validator(mode="after")
    def _check_direction(self) -> Metric:
        if self.mode == "auto" and _direction(self.metric) is None:
            problem = f"its name does not say whether less or more {self.metric} is better"
            raise Clash("mode", problem, "add mode: min or mode: max")
        return self

    @property
    def more_is_better(self) -> bool:
        """Whether higher is better."""
        return (_direction(self.metric) if self.mode == "auto" else self.mode) == "max"


class StopEarly(Metric):
    """Early stopping, when evaluations no longer improve."""

    patience: Whole = Field(default=3, ge=1, description="evaluations in a row without improvement that end the run")
    min_delta: Number = Field(default=0.0, ge=0, description="least change that counts as an improvement, e.g. 0.001")


def _direction(name: str) -> str | None:
    if name.startswith("losses.") or any(word in name for word in LESS):
        return "min"
    return "max" if any(word in name for word in MORE) else None


def _named(value: Any) -> Any:
    return {"metric": value} if isinstance(value, str) else value


Best = Annotated[Metric, BeforeValidator(_named, json_schema_input_type=str | Metric)]
