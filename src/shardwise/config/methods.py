"""Settings of `method`: which parameters are trained, and how the frozen ones are stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from shardwise.config.section import Clash, Section
from shardwise.config.units import Count, Positive, Share


def _patterns(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Patterns = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(_patterns, json_schema_input_type=str | list[str]),
]
AllLinear = Literal["linear"]


def _targets(value: Any) -> Any:
    return value if value == "linear" else _patterns(value)


class Full(Section):
    """Full fine-tuning: all parameters are trained."""

    type: Literal["full"] = Field(default="full", description="train every parameter")


class Lora(Section):
    """LoRA: a trained low-rank update beside each target."""

    type: Literal["lora"] = Field(default="lora", description="train low-rank updates")
    rank: Count = Field(default=16, description="of the updates")
    alpha: Positive | None = Field(default=None, description="the update is scaled by alpha / rank; default: 2 × rank")
    dropout: Share = Field(default=0.0, ge=0, lt=1, description="of the update's input, e.g. 0.05")
    rslora: bool = Field(default=False, description="scale by alpha / √rank: steadier at high ranks")
    dora: bool = Field(default=False, description="train each output's magnitude apart from its direction")
    target_modules: Annotated[
        AllLinear | tuple[Annotated[str, Field(min_length=1)], ...],
        BeforeValidator(_targets, json_schema_input_type=str | list[str]),
    ] = Field(default="linear", description="linear = all but the head; or names of modules, * for any part")
    rank_pattern: dict[str, Count] = Field(default={}, description="other ranks by name pattern, e.g. {'*.mlp.*': 8}")
    modules_to_save: Patterns = Field(default=(), description="modules that are trained whole besides, e.g. lm_head")
    adapter: str | None = Field(default=None, min_length=1, description="folder of an adapter to go on from (PEFT's)")

    @property
    def scaled(self) -> float:
        """alpha, or its default."""
        return self.alpha if self.alpha is not None else 2.0 * self.rank


class Qlora(Lora):
    """QLoRA: LoRA on a quantized base model."""

    type: Literal["qlora"] = Field(default="qlora", description="train low-rank updates on a quantised base")  # type: ignore[assignment]
    bits: Literal["nf4", "int8", "fp8"] = Field(
        default="nf4",
        description="how the base's linear layers are stored; fp8 is also multiplied in 8 bits while it trains: the "
        "fastest on GPUs that have it",
    )
    multiply: Literal["auto", "plain", "fp8"] = Field(
        default="auto",
        description="how the base is multiplied while adapters train: plain = unpacked, in the run's precision; fp8 = "
        "in 8 bits, nf4 too, which is rounded once more for it; auto = fp8 where it is stored so",
    )
    double_quant: bool = Field(default=True, description="nf4: quantise the scales as well (4.13 bits instead of 4.5)")

    @model_validator(mode="after")
    def _check_multiply(self) -> Qlora:
        if self.multiply == "fp8":
            without = {"bits: int8": self.bits == "int8", "dropout": self.dropout > 0, "dora": self.dora}
            if conflicting := [name for name, enabled in without.items() if enabled]:
                raise Clash("multiply", f"does not go with {' and '.join(conflicting)}", "leave multiply out, or that")
        return self


class Ia3(Section):
    """IA³: a trained scale for each key, value and feed-forward channel."""

    type: Literal["ia3"] = Field(default="ia3", description="train factors of keys, values and feed-forward channels")
    target_modules: Patterns | None = Field(
        default=None, description="modules whose outputs are scaled; default: keys and values"
    )
    feedforward_modules: Patterns | None = Field(
        default=None, description="modules whose inputs are scaled; default: the last of each feed-forward part"
    )
    modules_to_save: Patterns = Field(default=(), description="modules that are trained whole besides, e.g. lm_head")
    adapter: str | None = Field(default=None, min_length=1, description="folder of an adapter to go on from (PEFT's)")


METHODS = {"full": Full, "lora": Lora, "ia3": Ia3, "qlora": Qlora}


def _method(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


def _kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in METHODS else None


AnyMethod = Annotated[
    Annotated[Full, Tag("full")]
    | Annotated[Lora, Tag("lora")]
    | Annotated[Ia3, Tag("ia3")]
    | Annotated[Qlora, Tag("qlora")],
    Discriminator(
        _kind,
        custom_error_type="method",
        custom_error_message="expected full, lora, ia3 or qlora, or a mapping with such a type",
    ),
]
Method = Annotated[
    AnyMethod,
    BeforeValidator(_method, json_schema_input_type=Literal["full", "lora", "ia3", "qlora"] | AnyMethod),
]
