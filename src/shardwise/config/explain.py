"""Converts pydantic's validation errors into one UserError: field, value, location, remedy."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from shardwise.config.advanced import DEEPSPEED_ONLY, INSIDE, SECTIONS, written
from shardwise.config.methods import METHODS
from shardwise.config.objectives import OBJECTIVES
from shardwise.config.renamed import RENAMED
from shardwise.config.schema import DEEPSPEED_SCHEDULES, Run
from shardwise.config.section import Clash
from shardwise.core.errors import UserError, together

_EXAMPLES = {
    "model": "add e.g. model: smollm2-135m-instruct",
    "data": "add e.g. data: {train: chat.jsonl}",
    "data.train": "add e.g. data: {train: chat.jsonl}",
}
_SECTION_EXPECTED = {"model_type", "model_attributes_type"}
# What other trainers call our keys, where the names themselves are not alike.
_ELSEWHERE = {
    "lr": "train.learning_rate",
    "max_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.batch_size",
    "gradient_clipping": "train.max_grad_norm",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "train.eval_every",
    "logging_steps": "log.every",
    "report_to": "log.trackers",
    "resume_from_checkpoint": "resume",
    "nproc_per_node": "ranks",
    "early_stopping_patience": "train.early_stopping.patience",
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing", "activation_checkpoint"), "recompute"),
    "bf16": "precision",
    "fp16": "precision",
    "stage": "parallel.zero",
    "dataset": "data.train",
    "output_dir": "output",
    "max_seq_length": "data.sequence_length",
    "base_model": "model",
    "model_name_or_path": "model",
    "val_set_size": "data.eval",
    "num_epochs": "train.epochs",
    "warmup_ratio": "train.warmup",
    "lr_scheduler_type": "train.schedule",
    "beta": "objective.beta",
    "load_in_4bit": "method: qlora",
    "load_in_8bit": "method: {type: qlora, bits: int8}",
    "adapter": "method",
    "rank": "method.rank",
    "r": "method.rank",
    "lora_r": "method.rank",
    "lora_alpha": "method.alpha",
    "lora_dropout": "method.dropout",
    "use_rslora": "method.rslora",
    "use_dora": "method.dora",
    "target_modules": "method.target_modules",
    "lora_target_modules": "method.target_modules",
    "lora_target_linear": "method.target_modules",
    "modules_to_save": "method.modules_to_save",
    "lora_modules_to_save": "method.modules_to_save",
    "train_on_inputs": "data.loss_on",
    "assistant_only_loss": "data.loss_on",
    "excess_length_strategy": "data.over_length",
    "zero_hpz_partition_size": "parallel.hpz_size",
    "zero_quantized_weights": "parallel.quantize_weights",
    "zero_quantized_gradients": "parallel.quantize_gradients",
    **dict.fromkeys(("data_parallel_shard_degree", "dp_shard", "mics_shard_size"), "parallel.dp_shard_size"),
    **dict.fromkeys(("tp", "tp_size", "tensor_parallel", "tensor_model_parallel_size", "sp"), "parallel.tensor"),
    **dict.fromkeys(("cp", "context_parallel", "context_parallel_size", "sequence_parallel"), "parallel.context"),
    **dict.fromkeys(("pp", "pipeline_parallel", "pipeline_model_parallel_size", "pp_degree"), "parallel.pipeline"),
    **dict.fromkeys(("ep", "expert_parallel", "expert_model_parallel_size", "ep_size"), "parallel.expert"),
}
# What others call the values of ours.
_SYNONYMS = {
    "nvme": "disk", "ssd": "disk", "host": "cpu", "ram": "cpu", "gpu": "cuda", "off": "none", "adam": "adamw",
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
}  # fmt: skip
# What pydantic adds to a location for unions, tags and validators; none of these is a key of ours.
_MARKERS = {"int", "float", "str", "bool", "literal", "constrained-int", "constrained-float", "share", "sources"}
# Sections that are one of several, by their type, which pydantic adds to the location.
_KINDS: dict[str, dict[str, Any]] = {"method": METHODS, "objective": OBJECTIVES}
_ALTERNATIVES: dict[str, Any] = METHODS | OBJECTIVES | DEEPSPEED_SCHEDULES
_MARKERS |= {"named", *_ALTERNATIVES}


def explain(error: ValidationError, origin: dict[str, str], base: str) -> UserError:
    """One error for the first mistake: the field as written, its location, and the closest valid alternative.

    For data sources, which are usually written alike, all mistakes are reported.
    """
    details = error.errors()
    first = min(details, key=_priority)
    if not _of_source(first):
        return _explain_one(first, details, origin, base)
    others = [d for d in details if not _of_source(d)]
    firsts: dict[str, Any] = {}
    for detail in sorted(filter(_of_source, details), key=_priority):
        firsts.setdefault(_field_path(detail["loc"]), detail)
    errors: list[UserError] = []
    for path in sorted(firsts):
        same = [d for d in details if _field_path(d["loc"]) == path]
        errors.append(_explain_one(firsts[path], [*same, *([] if errors else others)], origin, base))
    return together(errors)


def _of_source(detail: Any) -> bool:
    """Whether an error is about a setting of a data source."""
    return re.match(r"data\.(train|eval)\.\d+(\.|$)", _field_path(detail["loc"])) is not None


def _explain_one(first: Any, details: list[Any], origin: dict[str, str], base: str) -> UserError:
    path = _field_path(first["loc"])
    others = {_field_path(d["loc"]) for d in details} - {path}
    more = f" (and {len(others)} more mistake{'s' * (len(others) > 1)})" if others else ""
    where = _where(path, origin, base)
    value, kind = first["input"], first["type"]
    if kind == "extra_forbidden":
        return UserError(written(path), value, f"unknown key {where}{more}", _nearest(first["loc"]))
    if kind == "missing" and isinstance(first["loc"][-1], int):  # a tuple that is too short
        path = path.rpartition(".")[0]
        return UserError(written(path), value, f"has too few values {where}{more}", _remedy(path, []))
    if kind == "missing":
        remedy = _EXAMPLES.get(path, f"add {path}: …")
        return UserError(path, None, f"is required, but {base} does not set it{more}", remedy)
    if isinstance(clash := first.get("ctx", {}).get("error"), Clash):
        return _clash(clash, path, value, origin, base, more)
    if kind in _KINDS:
        return _unknown_kind(path, kind, value, f"{where}{more}")
    same = [d for d in details if _field_path(d["loc"]) == path]
    displayed = list(value) if isinstance(value, tuple) else value
    if isinstance(value, (dict, BaseModel)):
        displayed = None
    return UserError(written(path) or base, displayed, f"{_problem(same)} {where}{more}", _remedy(path, same))


def unknown_advanced(path: str, value: Any, origin: dict[str, str], base: str) -> UserError:
    """The mistake of something below `advanced` that is no setting there."""
    where = _where(path, origin, base)
    section = path if path in SECTIONS else path.rpartition(".")[0]
    below = [place.removeprefix(f"{section}.") for place in [*SECTIONS, *INSIDE] if place.startswith(f"{section}.")]
    known = list(dict.fromkeys(name.partition(".")[0] for name in below))
    if path in SECTIONS:
        problem = f"expected a section with settings of its own {where}"
        return UserError(path, value, problem, f"{path} takes {', '.join(known)}")
    key = path.rpartition(".")[2]
    places = _leaves() | {place.rpartition(".")[2]: place for place in INSIDE}
    near = difflib.get_close_matches(key, list(places), n=1, cutoff=0.6)
    remedy = f"did you mean {places[near[0]]}?" if near else f"known here: {', '.join(known)}"
    return UserError(path, value, f"unknown key {where}", remedy)


def _unknown_kind(path: str, section: str, value: Any, where: str) -> UserError:
    """Error for a section whose `type` is unknown or missing."""
    known = list(_KINDS[section])
    if not isinstance(value, dict):
        return UserError(path, value, f"expected a name or a mapping {where}", f"use one of {', '.join(known)}")
    if "type" not in value:
        has = [kind for kind, fields in _KINDS[section].items() if set(value) <= set(fields.model_fields)]
        return UserError(path, None, f"has settings, but no type {where}", f"add type: {' or '.join(has or known)}")
    suggestion = _meant(value["type"], known)
    remedy = f"did you mean {suggestion}?" if suggestion else f"use one of {', '.join(known)}"
    return UserError(path, value["type"], f"is not known {where}", remedy)


def near_file(path: Path, pattern: str) -> Path | None:
    """The file in the same folder with the most similar name, ignoring the suffix they share."""
    files = {p.stem: p for p in path.parent.glob(pattern)} if path.parent.is_dir() else {}
    near = difflib.get_close_matches(path.stem, list(files), n=1)
    return files[near[0]] if near else None


def section_names() -> list[str]:
    """Names of the run's sections."""
    return [name for name, info in Run.model_fields.items() if _section_in(info.annotation) is not None]


def _clash(clash: Clash, path: str, settings: Any, origin: dict[str, str], base: str, more: str) -> UserError:
    field = f"{path}.{clash.key}".lstrip(".")
    value = settings
    for part in clash.key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    displayed = None if isinstance(value, dict) else value
    return UserError(written(field), displayed, f"{clash.problem} {_where(field, origin, base)}{more}", clash.remedy)


def _priority(detail: Any) -> tuple[int, int]:
    order = {"extra_forbidden": 0, "too_short": 2, "missing": 3}
    return order.get(detail["type"], 1), len(detail["loc"])


def _where(path: str, origin: dict[str, str], base: str) -> str:
    location = next((origin[p] for p in _ancestors(path) if p in origin), base)
    return {"command line": "(on the command line)", "given": "(in the given dict)"}.get(location, f"(at {location})")


def _problem(details: list[Any]) -> str:
    """The problem; the alternatives of a union are joined by `or`."""
    if any(d["type"] in _SECTION_EXPECTED for d in details):
        return "expected a section with settings of its own"
    texts = [wanted(detail) for detail in details]
    head = "expected "
    if len(texts) > 1 and all(text.startswith(head) for text in texts):
        return head + " or ".join(dict.fromkeys(text.removeprefix(head) for text in texts))
    return texts[0]


_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "keys with values",
}
_BOUNDS = {
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "below {lt:g}",
}


def wanted(detail: Any) -> str:
    """A pydantic error in plain words."""
    kind = detail["type"]
    context = detail.get("ctx", {})
    if kind in _BOUNDS:
        return "expected a number that is " + _BOUNDS[kind].format(**context)
    if kind == "literal_error":
        return f"expected {context['expected']}"
    if kind == "finite_number":
        return "expected a finite number"
    if kind == "string_too_short":
        return "is empty" if context["min_length"] == 1 else f"expected {context['min_length']} characters"
    if kind.endswith(("_parsing", "_type", "_from_float")) and kind.partition("_")[0] in _WANTED:
        return f"expected {_WANTED[kind.partition('_')[0]]}"
    text = str(detail["msg"]).removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _remedy(path: str, details: list[Any]) -> str:
    allowed = details[0].get("ctx", {}).get("expected") if len(details) == 1 else None
    if allowed:
        if suggestion := _meant(details[0]["input"], re.findall(r"'([^']+)'", allowed)):
            return f"did you mean {suggestion}?"
        return f"use {allowed}" if allowed.count("'") == 2 else f"use one of {allowed}"
    if any(d["type"] in _SECTION_EXPECTED for d in details):
        keys = ", ".join(_known_at(tuple(path.split("."))))
        return f"{_EXAMPLES[path]} (settings: {keys})" if path in _EXAMPLES else f"{path} takes {keys}"
    along = _fields_along(details[0]["loc"] if details else tuple(path.split(".")))
    description = next((str(f.description) for f in reversed(along) if f.description), None)
    if description is None:
        return "see `shardwise config --schema` for what is allowed here"
    return f"{written(path)}: {description}"


def _meant(value: Any, choices: list[str]) -> str | None:
    """The intended choice: another spelling, or a name used elsewhere."""
    if not isinstance(value, str):
        return None
    written = value.lower().replace("_", "-")
    if (other := _SYNONYMS.get(written)) in choices:
        return other
    return next(iter(difflib.get_close_matches(written, choices, n=1)), None)


def takes_text(path: str) -> bool:
    """Whether a setting takes text, such as a folder."""
    parts = path.split(".")
    fields = _fields_along(tuple(parts))
    return len(fields) == len(parts) and str in (fields[-1].annotation, *get_args(fields[-1].annotation))


def _nearest(loc: tuple[int | str, ...]) -> str:
    """Suggestion for an unknown key: the same name elsewhere, else the closest here, else the closest elsewhere."""
    key = str(loc[-1])
    section = _field_path(loc[:-1])
    known = _known_at(loc[:-1])
    if others := [kind for kind, fields in _KINDS.get(section, {}).items() if key in fields.model_fields]:
        return f"{key} is a setting of {' and '.join(others)}; {loc[-2]} takes {', '.join(known)}"
    leaves = _ELSEWHERE if section in _KINDS else _old_leaves() | _leaves() | _ELSEWHERE
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if key in leaves:
        suggestion = leaves[key]
    elif near:
        suggestion = f"{section}.{near[0]}" if section else near[0]
    else:
        suggestion = next((leaves[k] for k in difflib.get_close_matches(key, list(leaves), n=1, cutoff=0.7)), "")
    return f"did you mean {suggestion}?" if suggestion else f"known here: {', '.join(known)}"


def _leaves() -> dict[str, str]:
    """Every key of every section with its full path; users often write `learning_rate:` at the top."""
    paths = [
        f"{name}.{key}"
        for name, info in Run.model_fields.items()
        for key in getattr(_section_in(info.annotation), "model_fields", {})
    ]
    places = [written(path) for path in reversed([*Run.model_fields, *paths]) if path not in DEEPSPEED_ONLY]
    return {place.rpartition(".")[2]: place for place in [*INSIDE, *places]}


def _old_leaves() -> dict[str, str]:
    """Old names of renamed settings, for those who write them in another section."""
    return {old.rpartition(".")[2]: written(new) for old, new in RENAMED.items()}


def _fields_along(loc: tuple[int | str, ...]) -> list[Any]:
    fields: list[Any] = []
    section: Any = Run
    for part in map(str, loc):
        info = getattr(section, "model_fields", {}).get(part)
        if info is not None:
            fields.append(info)
            section = _section_in(info.annotation)
        elif part in _ALTERNATIVES:
            section = _ALTERNATIVES[part]
        elif not part.isdigit():
            break
    return fields


def _section_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((inner for part in get_args(annotation) if (inner := _section_in(part)) is not None), None)


def _keys_at(loc: tuple[int | str, ...]) -> list[str]:
    section: Any = Run
    for part in loc:
        if isinstance(part, str) and part in getattr(section, "model_fields", {}):
            section = _section_in(section.model_fields[part].annotation) or section
        elif part in _ALTERNATIVES:  # pydantic names the one it took
            section = _ALTERNATIVES[str(part)]
    return list(section.model_fields)


def _known_at(loc: tuple[int | str, ...]) -> list[str]:
    """What RUN.yaml may have in a section: not what it has below `advanced`."""
    section = _field_path(loc)
    paths = {key: f"{section}.{key}" if section else key for key in _keys_at(loc)}
    known = [key for key, path in paths.items() if written(path) == path and path not in DEEPSPEED_ONLY]
    return known if section else [*known, "advanced"]


def _field_path(loc: tuple[int | str, ...]) -> str:
    """The location as the user wrote it, without the alternatives that pydantic inserts."""
    return ".".join(
        str(part)
        for above, part in zip((None, *loc), loc, strict=False)
        if isinstance(part, int) or above in _ALTERNATIVES or not ("[" in part or "(" in part or part in _MARKERS)
    )


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
