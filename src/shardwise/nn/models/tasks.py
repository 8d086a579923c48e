"""The model class that an objective trains: transformers' auto classes, by task."""

from __future__ import annotations

from typing import Any

from shardwise.config.objectives import Task
from shardwise.core.errors import UserError

CLASSES: dict[Task, tuple[str, str, str]] = {  # auto class, its table of model types, what to call such a model
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "a causal language model"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "an encoder–decoder model"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "a masked language model"),
    "classify": ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
                 "a model that classifies"),
}  # fmt: skip


def auto_class(task: Task) -> Any:
    """Returns the auto class of a task."""
    import transformers

    return getattr(transformers, CLASSES[task][0])


def _names(task: Task) -> tuple[set[str], set[str]]:
    """Model types and class names that support a task."""
    from transformers.models.auto import modeling_auto

    table = getattr(modeling_auto, CLASSES[task][1])
    names: set[str] = set()
    for value in table.values():
        names |= {value} if isinstance(value, str) else set(value)
    return set(table), names


def class_names(task: Task) -> set[str]:
    """Returns the names of the classes that support a task."""
    return _names(task)[1]


def task_of(config: Any) -> Task:
    """Returns the task of the class that a config names; causal if it names none that we know."""
    classes = set(config.architectures or [])
    for task in CLASSES:
        if classes & _names(task)[1]:
            return task
    return "seq2seq" if getattr(config, "is_encoder_decoder", False) else "causal"


def check_talks(config: Any, label: str) -> None:
    """Raises an error for a model that does not generate text."""
    if (task := task_of(config)) != "causal":
        class_name = (config.architectures or [config.model_type])[0]
        problem = f"is {CLASSES[task][2]} ({class_name}), which cannot be talked to"
        remedy = f"load it with transformers' {CLASSES[task][0]}, or give a causal model"
        raise UserError("model", label, problem, remedy)


def check_task(config: Any, task: Task, label: str) -> None:
    """Raises an error for a model whose files are of another class; a body may get a new head."""
    kinds, names = _names(task)
    auto, _, description = CLASSES[task]
    kind = config.model_type
    classes = config.architectures or []
    custom = auto in (getattr(config, "auto_map", None) or {})
    fitting = next((t for t in CLASSES if set(classes) & _names(t)[1]), None)
    other = classes and not names & set(classes) and not custom and task != "classify"
    headless = task in ("masked", "seq2seq") and fitting is None  # the body alone: BertModel, T5Model
    # Transformers also lists models for sound there, which go on with a text.
    decoder_alone = task == "seq2seq" and not custom and not config.is_encoder_decoder
    if (kind not in kinds and not custom) or (other and not headless) or decoder_alone:
        class_name = classes[0] if classes else kind
        remedy = (
            f"set objective: {fitting}, or use another model" if fitting and fitting != task else "use another model"
        )
        if task == "causal" and fitting is None:
            remedy = "use a model whose config names a …ForCausalLM class, e.g. smollm2-135m-instruct"
        raise UserError("model", label, f"is a {class_name}, which is not {description}", remedy)
