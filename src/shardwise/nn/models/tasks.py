"""Which class of model an objective trains: transformers' auto classes, by task."""

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
    """The class whose `from_config` and `from_pretrained` make such a model."""
    import transformers

    return getattr(transformers, CLASSES[task][0])


def _names(task: Task) -> tuple[set[str], set[str]]:
    """Model types and class names that can do a task."""
    from transformers.models.auto import modeling_auto

    table = getattr(modeling_auto, CLASSES[task][1])
    names: set[str] = set()
    for value in table.values():
        names |= {value} if isinstance(value, str) else set(value)
    return set(table), names


def class_names(task: Task) -> set[str]:
    """Names of the classes that can do a task."""
    return _names(task)[1]


def task_of(config: Any) -> Task:
    """What the class that a config names is for; causal where it names none that we know."""
    classes = set(config.architectures or [])
    for task in CLASSES:
        if classes & _names(task)[1]:
            return task
    return "seq2seq" if getattr(config, "is_encoder_decoder", False) else "causal"


def check_talks(config: Any, label: str) -> None:
    """Refuses to talk to a model that does not go on with a text."""
    if (task := task_of(config)) != "causal":
        what = (config.architectures or [config.model_type])[0]
        problem = f"is {CLASSES[task][2]} ({what}), which cannot be talked to"
        remedy = f"load it with transformers' {CLASSES[task][0]}, or give a causal model"
        raise UserError("model", label, problem, remedy)


def check_task(config: Any, task: Task, label: str) -> None:
    """Refuses a model whose files are of another class; a body without a head (or another one) may get a new head."""
    kinds, names = _names(task)
    auto, _, called = CLASSES[task]
    kind, classes = config.model_type, config.architectures or []
    custom = auto in (getattr(config, "auto_map", None) or {})
    fitting = next((t for t in CLASSES if set(classes) & _names(t)[1]), None)
    other = classes and not names & set(classes) and not custom and task != "classify"
    headless = task in ("masked", "seq2seq") and fitting is None  # the body alone: BertModel, T5Model
    # Transformers also lists models for sound there, which go on with a text.
    decoder_alone = task == "seq2seq" and not custom and not config.is_encoder_decoder
    if (kind not in kinds and not custom) or (other and not headless) or decoder_alone:
        what = classes[0] if classes else kind
        remedy = (
            f"set objective: {fitting}, or use another model" if fitting and fitting != task else "use another model"
        )
        if task == "causal" and fitting is None:
            remedy = "use a model whose config names a …ForCausalLM class, e.g. smollm2-135m-instruct"
        raise UserError("model", label, f"is a {what}, which is not {called}", remedy)
