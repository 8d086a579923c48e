"""Settings of `objective`: the training objective, which decides the model class and the rows it takes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from shardwise.config.section import Clash, Section
from shardwise.config.units import Count, Number, Positive, Share

Purpose = Literal["causal", "seq2seq", "masked", "classify", "preference", "kto"]
Task = Literal["causal", "seq2seq", "masked", "classify"]


class Causal(Section):
    """Next-token prediction."""

    type: Literal["causal"] = Field(default="causal", description="predict the next token")


class Seq2seq(Section):
    """Sequence-to-sequence training of an encoder–decoder (T5, BART)."""

    type: Literal["seq2seq"] = Field(default="seq2seq", description="write a target from a source")


class Masked(Section):
    """Masked language modelling (BERT)."""

    type: Literal["masked"] = Field(default="masked", description="fill in masked tokens")
    mlm_probability: Share = Field(default=0.15, gt=0, lt=1, description="share of the tokens that are masked")
    whole_words: bool = Field(default=True, description="mask all pieces of a word together")


class Classify(Section):
    """Text classification."""

    type: Literal["classify"] = Field(default="classify", description="tell the class of a text")
    labels: tuple[str, ...] | None = Field(default=None, description="the classes in order; default: as found, sorted")


class Dpo(Section):
    """DPO: preference pairs against a reference (the model before training)."""

    type: Literal["dpo"] = Field(default="dpo", description="prefer chosen to rejected answers")
    beta: Positive = Field(default=0.1, description="how closely the reference is kept to")
    label_smoothing: Share = Field(default=0.0, ge=0, lt=0.5, description="share of labels taken to be wrong")
    sft: Number = Field(default=0.0, ge=0, description="weight of the plain loss on chosen answers, added")


class Orpo(Section):
    """ORPO: cross-entropy on chosen answers plus an odds-ratio penalty on rejected ones; no reference."""

    type: Literal["orpo"] = Field(default="orpo", description="learn chosen answers, against rejected ones")
    beta: Positive = Field(default=0.1, description="weight of the odds ratio")


class Kto(Section):
    """KTO: single answers labelled desirable or not, against a reference."""

    type: Literal["kto"] = Field(default="kto", description="learn from answers that are wanted or not")
    beta: Positive = Field(default=0.1, description="how closely the reference is kept to")
    desirable_weight: Positive = Field(default=1.0, description="weight of wanted answers")
    undesirable_weight: Positive = Field(default=1.0, description="weight of unwanted ones")


class Distill(Section):
    """Distillation: match a teacher's predictions."""

    type: Literal["distill"] = Field(default="distill", description="match a teacher's predictions")
    teacher: str = Field(min_length=1, description="hub id or folder of a model with the same tokenizer")
    temperature: Positive = Field(default=1.0, description="softens both predictions")
    weight: Share = Field(default=0.5, gt=0, le=1, description="share of the teacher's loss; the rest is the plain one")
    top_k: Count | None = Field(default=None, description="match the teacher's k likeliest tokens; default: all")
    cache: bool = Field(default=False, description="ask the teacher once and store its top_k; needs top_k")

    @model_validator(mode="after")
    def _check_store(self) -> Distill:
        if self.cache and self.top_k is None:
            problem = "stores the teacher's likeliest tokens, but top_k does not say how many"
            raise Clash("cache", problem, "set top_k, for example 64, or leave cache out")
        return self


OBJECTIVES = {
    "causal": Causal, "seq2seq": Seq2seq, "masked": Masked, "classify": Classify, "dpo": Dpo, "orpo": Orpo, "kto": Kto,
    "distill": Distill,
}  # fmt: skip
Named = Literal["auto", "causal", "seq2seq", "masked", "classify", "dpo", "orpo", "kto", "distill"]


def _objective(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) and value != "auto" else value


def _kind(value: Any) -> str | None:
    if value == "auto":
        return "auto"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in OBJECTIVES else None


AnyObjective = Annotated[
    Annotated[Literal["auto"], Tag("auto")]
    | Annotated[Causal, Tag("causal")]
    | Annotated[Seq2seq, Tag("seq2seq")]
    | Annotated[Masked, Tag("masked")]
    | Annotated[Classify, Tag("classify")]
    | Annotated[Dpo, Tag("dpo")]
    | Annotated[Orpo, Tag("orpo")]
    | Annotated[Kto, Tag("kto")]
    | Annotated[Distill, Tag("distill")],
    Discriminator(
        _kind,
        custom_error_type="objective",
        custom_error_message=f"expected auto, {', '.join(OBJECTIVES)}, or a mapping with such a type",
    ),
]
Objective = Annotated[AnyObjective, BeforeValidator(_objective, json_schema_input_type=Named | AnyObjective)]
# What the rows become, and what class of model reads them where it is not a causal one.
PURPOSES: dict[str, Purpose] = {
    "causal": "causal", "distill": "causal", "seq2seq": "seq2seq", "masked": "masked", "classify": "classify",
    "dpo": "preference", "orpo": "preference", "kto": "kto",
}  # fmt: skip
TASKS: dict[str, Task] = {"seq2seq": "seq2seq", "masked": "masked", "classify": "classify"}
