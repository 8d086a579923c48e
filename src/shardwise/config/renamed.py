"""Settings that were renamed: until the next release the old name is accepted, with a note.

One table, old dotted path → new dotted path. It is applied to RUN.yaml and to overrides before they are validated, and
to the settings saved by a previous version (run.json of a checkpoint, shardwise_run.json of an exported model).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.config.paths import ABSENT, find, flatten, place, remove
from shardwise.core.errors import UserError

# Keys of a renamed section come before the section: what is left of it then moves as a whole.
RENAMED: dict[str, str] = {
    "apart.meet": "diloco.server",
    "apart.every": "diloco.sync_every",
    "apart.patience": "diloco.connect_timeout",
    "apart": "diloco",
    "parallel.shard": "parallel.dp_shard_size",
    "parallel.secondary_shard": "parallel.hpz_size",
    "parallel.gradient_feedback": "parallel.error_feedback",
    "parallel.reduce": "parallel.reduce_dtype",
    "parallel.schedule": "parallel.pipeline_schedule",
    "parallel.chunks": "parallel.virtual_stages",
    "train.masters": "train.master_weights",
    "train.in_backward": "train.optimizer_in_backward",
    "train.clip": "train.max_grad_norm",
    "train.stop_early": "train.early_stopping",
    "train.final_learning_rate": "train.min_lr_ratio",
    "loss_scale.growth_every": "loss_scale.growth_interval",
    "loss_scale.refill": "loss_scale.consecutive_hysteresis",
    "fp8.keep": "fp8.modules_to_not_convert",
    "fp8.least": "fp8.min_features",
    "fp8.fast": "fp8.use_fast_accum",
    "tile": "tiled_mlp",
    "method.targets": "method.target_modules",
    "method.ranks": "method.rank_pattern",
    "method.also": "method.modules_to_save",
    "method.feedforward": "method.feedforward_modules",
    "method.double": "method.double_quant",
    "objective.share": "objective.mlm_probability",
    "objective.desirable": "objective.desirable_weight",
    "objective.undesirable": "objective.undesirable_weight",
    "checkpoint.background": "checkpoint.async_save",
    "guard.most": "guard.max_recoveries",
    "log.samples.tokens": "log.samples.max_new_tokens",
}
# Settings that are gone: until the next release they are accepted, without effect, and the note says why.
DROPPED = {"log.refresh": "the live line is redrawn every 0.2 s"}


def note(old: str, new: str, where: str | None = None) -> str:
    """What is said about an old name that was given."""
    place_given = f" ({where})" if where else ""
    return f"{old} is now {new}; the old name works until the next release{place_given}"


def new_path(path: str, table: dict[str, str] = RENAMED) -> str:
    """Today's name of a dotted path; below a renamed section too."""
    for old, new in table.items():
        if path == old or path.startswith(f"{old}."):
            return new_path(new + path.removeprefix(old), table)
    return path


def rename(values: dict[str, Any], origin: dict[str, str] | None = None, table: dict[str, str] = RENAMED) -> list[str]:
    """Moves what is given under an old name to the new one, in place, origins too; returns the notes.

    Raises UserError where both names are given.
    """
    origin = {} if origin is None else origin
    for old, new in table.items():
        if find(values, old) is not ABSENT and find(values, new) is not ABSENT:
            raise both_given(old, new, origin.get(old))
    notes: list[str] = []
    moved: list[str] = []
    for old, new in table.items():
        value = find(values, old)
        if value is ABSENT:
            continue
        remove(values, old)
        there = find(values, new)
        if there is not ABSENT and not isinstance(there, dict):  # by another old name
            raise both_given(old, new, origin.get(old))
        emptied = value == {} and any(one.startswith(f"{old}.") for one in moved)
        moved.append(old)
        if value or (there is ABSENT and not emptied):  # else all of a section has moved already, key by key
            place(values, new, value | there if isinstance(there, dict) else value)
            notes.append(note(old, new, origin.get(old)))
        for path in [path for path in origin if path == old or path.startswith(f"{old}.")]:
            origin[new + path.removeprefix(old)] = origin.pop(path)
    return notes


def drop(values: dict[str, Any], origin: dict[str, str] | None = None) -> list[str]:
    """Removes settings that are gone, in place; returns the notes."""
    notes = []
    for path, why in DROPPED.items():
        if find(values, path) is not ABSENT:
            remove(values, path)
            where = f" ({origin[path]})" if origin and path in origin else ""
            notes.append(f"{path} has no effect any more: {why}; it is accepted until the next release{where}")
    return notes


def rename_override(path: str, value: Any, table: dict[str, str] = RENAMED) -> tuple[list[tuple[str, Any]], list[str]]:
    """The settings of an override under today's names, which may be in several sections, and the notes."""
    values: dict[str, Any] = {}
    place(values, path, value)
    notes = rename(values, dict.fromkeys(table, "command line"), table)
    new = new_path(path, table)
    main = find(values, new)
    remove(values, new)
    moved = [(elsewhere, item) for elsewhere, item in flatten(values) if item != {}]
    return [(new, main), *moved], notes


def both_given(old: str, new: str, where: str | None = None) -> UserError:
    """The mistake of giving a setting under its old and its new name."""
    place_given = f" (at {where})" if where else ""
    return UserError(old, None, f"is the old name of {new}, which is given too{place_given}", f"remove {old}")


def read_saved(file: Path) -> dict[str, Any]:
    """The settings that a run saved, under today's names."""
    values: dict[str, Any] = json.loads(file.read_text())
    rename(values)
    drop(values)
    return values
