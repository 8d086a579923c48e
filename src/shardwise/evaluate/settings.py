"""Tasks of `shardwise eval`, as `--tasks eval.yaml` writes them; the command's options make the same settings.

tasks:
  - {type: loss, data: heldout.jsonl}
  - {type: choice, path: mmlu.csv, shots: 5, examples: dev.csv, score: letter}
  - {type: generate, path: sums.jsonl, scorer: numeric}
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from shardwise.config.explain import wanted
from shardwise.config.load import _Loader
from shardwise.config.schema import Sources
from shardwise.config.section import Clash, Section
from shardwise.config.units import Count, Duration, Whole
from shardwise.core.errors import UserError


class _Task(Section):
    """Fields of every task."""

    name: str | None = Field(default=None, description="in tables and files; default: from the path")
    limit: Count | None = Field(default=None, description="measure the first so many rows only")

    @property
    def label(self) -> str:
        """Name in tables and files."""
        return self.name or Path(str(getattr(self, "path", ""))).name or str(getattr(self, "type", ""))


class LossTask(Section):
    """Loss and perplexity per source, as training evaluates them."""

    type: Literal["loss"] = "loss"
    name: str | None = Field(default=None, description="in tables and files")
    data: Sources | None = Field(default=None, description="sources as in data.train; default: what the run held out")
    sequence_length: Annotated[int, Field(ge=8)] | None = Field(
        default=None, description="tokens per sequence; default: the run's, or 2048"
    )

    @property
    def label(self) -> str:
        """Name in tables and files."""
        return self.name or "loss"


class ChoiceTask(_Task):
    """Multiple choice by the likelihood of each choice."""

    type: Literal["choice"] = "choice"
    path: str = Field(min_length=1, description="JSON lines, CSV or Parquet: question, choices (or A, B, …), answer")
    fields: dict[str, str] = Field(default={}, description="our name: theirs, e.g. {question: stem, answer: key}")
    score: Literal["byte", "raw", "token", "letter"] = Field(
        default="byte",
        description="log p of a choice per byte, as it is, or per token; letter = the choices are shown and their "
        "letters compared",
    )
    shots: Whole = Field(default=0, ge=0, description="worked examples before each question")
    examples: str | None = Field(default=None, description="the file they are from; by subject where it has subjects")
    template: str | None = Field(
        default=None, description="with {question} and {choices}; default: Question: … Answer:"
    )
    chat: bool = Field(default=False, description="ask through the chat template")

    @model_validator(mode="after")
    def _has_examples(self) -> ChoiceTask:
        if self.shots and self.examples is None:
            raise Clash("shots", "needs a file of examples", "add examples: FILE")
        if self.examples is not None and not self.shots:
            raise Clash("examples", "has no effect without shots", "add shots, e.g. 5")
        if self.template is not None and "{question}" not in self.template:
            raise Clash("template", "does not say where the question goes", "put {question} in it")
        return self


class GenerateTask(_Task):
    """Greedy answers through the chat template, scored by a rule."""

    type: Literal["generate"] = "generate"
    path: str = Field(min_length=1, description="rows of prompt (or messages) and answer")
    fields: dict[str, str] = Field(default={}, description="our name: theirs, e.g. {prompt: question, answer: target}")
    scorer: Literal["exact", "contains", "regex", "json", "numeric"] = Field(
        default="exact", description="exact and contains ignore case, blanks and closing punctuation"
    )
    pattern: str | None = Field(default=None, description="regex: what must be found; default: each row's answer")
    extract: str | None = Field(
        default=None, description="a pattern whose last match (group 1 if it has one) is scored instead of it all"
    )
    keys: tuple[str, ...] = Field(default=(), description="json: keys that the object must have")
    system: str | None = Field(default=None, description="system prompt")
    max_tokens: Count = Field(default=256, description="longest answer")

    @model_validator(mode="after")
    def _fits_the_scorer(self) -> GenerateTask:
        if self.pattern is not None and self.scorer != "regex":
            raise Clash("pattern", f"has no effect with scorer: {self.scorer}", "use extract, or scorer: regex")
        if self.keys and self.scorer != "json":
            raise Clash("keys", f"has no effect with scorer: {self.scorer}", "use scorer: json")
        return self


class HarnessTask(_Task):
    """Tasks of EleutherAI's lm-eval."""

    type: Literal["lm-eval"] = "lm-eval"
    tasks: Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)] = Field(
        min_length=1, description="names of its tasks"
    )
    folder: str | None = Field(default=None, description="folder of task files of your own")
    shots: Annotated[int, Field(ge=0)] | None = Field(default=None, description="default: as each task says")

    @property
    def label(self) -> str:
        """Name in tables and files."""
        return self.name or ",".join(self.tasks)


class JudgeTask(_Task):
    """Answers to questions of one or more turns, judged by another model."""

    type: Literal["judge"] = "judge"
    path: str = Field(min_length=1, description="rows of turns (a list of questions), category and reference")
    mode: Literal["single", "pairwise"] = Field(
        default="single", description="a grade from 1 to 10, or a comparison with the first model"
    )
    url: str = Field(min_length=1, description="of an OpenAI-compatible endpoint, e.g. http://127.0.0.1:8000/v1")
    model: str = Field(min_length=1, description="the judge's name there")
    key: str = Field(default="OPENAI_API_KEY", description="environment variable that holds the key, if one is needed")
    max_tokens: Count = Field(default=512, description="longest answer of the models that are judged")
    judge_tokens: Count = Field(default=1024, description="longest judgement")
    concurrency: Count = Field(default=4, description="judgements asked for at the same time")
    retries: Whole = Field(default=5, ge=0, description="further attempts when the endpoint fails, with growing pauses")
    timeout: Duration = Field(default=120.0, gt=0, description="longest wait for one judgement")


Task = Annotated[LossTask | ChoiceTask | GenerateTask | HarnessTask | JudgeTask, Field(discriminator="type")]
KINDS: dict[str, Any] = {
    "loss": LossTask, "choice": ChoiceTask, "generate": GenerateTask, "lm-eval": HarnessTask, "judge": JudgeTask,
}  # fmt: skip
_ADAPTER: TypeAdapter[Any] = TypeAdapter(Task)


def make_task(values: dict[str, Any], where: str) -> Any:
    """Returns one task from its settings; a UserError names the setting that is wrong."""
    try:
        return _ADAPTER.validate_python(values)
    except ValidationError as error:
        raise _explained(error, values, where) from None


def read_tasks(file: Path) -> list[Any]:
    """Returns the tasks of an eval.yaml."""
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        raise UserError("--tasks", str(file), problem, "give a YAML file with tasks") from None
    except yaml.YAMLError as error:
        raise UserError("--tasks", str(file), f"is not valid YAML ({error})", "mend the file") from None
    tasks = values.get("tasks") if isinstance(values, dict) else values
    if not isinstance(tasks, list) or not tasks or not all(isinstance(task, dict) for task in tasks):
        remedy = "write tasks: and under it e.g. - {type: choice, path: questions.jsonl}"
        raise UserError("--tasks", str(file), "holds no list of tasks", remedy)
    return [make_task(task, f"{file.name} tasks.{n}") for n, task in enumerate(tasks)]


def _explained(error: ValidationError, values: dict[str, Any], where: str) -> UserError:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if str(part) not in KINDS]
    field = ".".join([where, *path])
    value = first["input"]
    if "discriminator" in first["ctx"] if first.get("ctx") else False:
        return UserError(f"{where}.type", values.get("type"), "is no kind of task", f"use one of {', '.join(KINDS)}")
    if isinstance(clash := first.get("ctx", {}).get("error"), Clash):
        return UserError(f"{where}.{clash.key}", values.get(clash.key), clash.problem, clash.remedy)
    known_keys = list(KINDS[values["type"]].model_fields)
    if first["type"] == "extra_forbidden":
        close_matches = difflib.get_close_matches(path[-1], known_keys, n=1)
        return UserError(
            field,
            value,
            "unknown key",
            f"did you mean {close_matches[0]}?" if close_matches else f"known: {', '.join(known_keys)}",
        )
    if first["type"] == "missing":
        return UserError(field, None, "is required", f"add {path[-1]}: …")
    described = KINDS[values["type"]].model_fields.get(path[0])
    return UserError(
        field, value, wanted(first), f"{path[0]}: {described.description}" if described else "see the docs"
    )
