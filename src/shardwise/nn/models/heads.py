"""Heads that a model's files may lack: a classifier on a pretrained body, or a masked-LM head.

Their tensors are new: initialised by the model's own rule and the run's seed, and reported. Whatever else is missing
means that the files are not those of the model.
"""

from __future__ import annotations

from typing import Any

from shardwise.config.objectives import Task
from shardwise.nn.models.tasks import class_names


def head_parameters(model: Any) -> set[str]:
    """Returns the names of parameters that may be new, tied ones under each of their names."""
    class_hierarchy = {c.__name__ for c in type(model).__mro__}
    others: tuple[Task, ...] = ("causal", "seq2seq")
    if any(class_hierarchy & class_names(task) for task in others):
        return set()
    if not class_hierarchy & (class_names("masked") | class_names("classify")):
        return set()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    body = f"{model.base_model_prefix}."
    if not any(name.startswith(body) for name in names):
        return set()
    # A pooler belongs to the body, but only models that use one are saved with it.
    return {name for name in names if not name.startswith(body) or name.startswith(f"{body}pooler.")}


def listed(names: list[str]) -> str:
    """Returns the message about new tensors."""
    others = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"{', '.join(names[:3])}{others} {'are' if len(names) > 1 else 'is'} new: the model's files have no such head"
    )
