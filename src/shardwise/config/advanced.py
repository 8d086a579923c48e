"""The section `advanced` of RUN.yaml: settings that hardly any run needs, out of the sight of everyone else.

In Run such a setting stays beside what it belongs to (`run.parallel.bucket`), and so it does in what runs save. The
table says where RUN.yaml, overrides, messages and references have it (`advanced.bucket`).
"""

from __future__ import annotations

import copy
from typing import Any

from shardwise.config.paths import ABSENT, find, flatten
from shardwise.config.renamed import RENAMED, rename

# Path in Run: place in RUN.yaml.
ADVANCED: dict[str, str] = {
    "train.decay_norms": "advanced.decay_norms",
    "train.master_weights": "advanced.master_weights",
    "train.optimizer_state": "advanced.optimizer_state",
    "parallel.bucket": "advanced.bucket",
    "parallel.prefetch": "advanced.prefetch",
    "parallel.error_feedback": "advanced.error_feedback",
    "parallel.virtual_stages": "advanced.virtual_stages",
    "backend": "advanced.backend",
    "checkpoint.async_save": "advanced.async_save",
    "loss_scale.initial": "advanced.loss_scale.initial",
    "loss_scale.growth_interval": "advanced.loss_scale.growth_interval",
    "loss_scale.hysteresis": "advanced.loss_scale.hysteresis",
    "loss_scale.consecutive_hysteresis": "advanced.loss_scale.consecutive_hysteresis",
    "loss_scale.minimum": "advanced.loss_scale.minimum",
    "recompute_blocks": "advanced.memory.recompute_blocks",
    "recompute_group": "advanced.memory.recompute_group",
    "recompute_attention": "advanced.memory.recompute_attention",
    "offload.activation_blocks": "advanced.memory.activation_blocks",
    "tiled_mlp": "advanced.memory.tiled_mlp",
    "attention": "advanced.kernels.attention",
    "experts": "advanced.kernels.experts",
    "loss": "advanced.kernels.loss",
    "fp8.min_features": "advanced.fp8.min_features",
    "fp8.use_fast_accum": "advanced.fp8.use_fast_accum",
    "fp8.gather": "advanced.fp8.gather",
    "data.packing_window": "advanced.data.packing_window",
    "data.workers": "advanced.data.workers",
    "data.refine.similarity": "advanced.data.similarity",
    "method.feedforward_modules": "advanced.method.feedforward_modules",
    "method.double_quant": "advanced.method.double_quant",
    "guard.window": "advanced.guard.window",
    "guard.max_recoveries": "advanced.guard.max_recoveries",
    "router.balance": "advanced.router.balance",
    "export.shard_size": "advanced.export.shard_size",
    "export.check": "advanced.export.check",
    "log.breakdown": "advanced.log.breakdown",
    "log.comms": "advanced.log.comms",
    "log.profile": "advanced.log.profile",
    "diloco.connect_timeout": "advanced.diloco.connect_timeout",
}
INSIDE = {place: path for path, place in ADVANCED.items()}
SECTIONS = tuple(dict.fromkeys(place.rpartition(".")[0] for place in INSIDE))  # `advanced` and those below it
# What RUN.yaml accepts until the next release, with a note: where it is written now.
FORMER_PLACES = {old: ADVANCED.get(new, new) for old, new in RENAMED.items()} | ADVANCED
# Set by a DeepSpeed config alone (parallel.deepspeed): by hand they work until the next release, with a note.
DEEPSPEED_ONLY = ("log.csv", "train.schedule.")
# What a text in place of a section stands for.
SHORT_FORMS = {"method": "type", "fp8": "recipe", "diloco": "server"}


def written(path: str) -> str:
    """Where RUN.yaml has a setting of Run, or what is below it."""
    for inside, place in ADVANCED.items():
        if path == inside or path.startswith(f"{inside}."):
            return place + path.removeprefix(inside)
    return path


def as_written(values: dict[str, Any]) -> dict[str, Any]:
    """Run's values as RUN.yaml has them."""
    moved = copy.deepcopy(values)
    rename(moved, table=ADVANCED)
    return {name: value for name, value in moved.items() if value != {} or values.get(name) == {}}


def is_deepspeed_only(values: dict[str, Any], path: str) -> bool:
    """Whether one of `DEEPSPEED_ONLY` is set: a name that ends with a dot is a section."""
    value = find(values, path.rstrip("."))
    return isinstance(value, dict) if path.endswith(".") else value is not ABSENT and value is not None


def move_inside(values: dict[str, Any], origin: dict[str, str]) -> dict[str, Any]:
    """Moves what is below `advanced` to where Run has it, in place, origins too; returns what is unknown, by path."""
    given = values.get("advanced")
    if given is None:
        values.pop("advanced", None)
        return {}
    found = {place: path for place, path in INSIDE.items() if find(values, place) is not ABSENT}
    if not all(_make_room(values, path) for path in found.values()):
        del values["advanced"]
        return {}  # the section in question is refused
    rename(values, origin, found)
    left = flatten(values.pop("advanced"), "advanced")
    return {path: value for path, value in left if not (path in SECTIONS and value in (None, {}))}


def _make_room(values: dict[str, Any], path: str) -> bool:
    """Writes the short form of a setting's section in full; returns whether all above the setting are sections."""
    section, *below = path.split(".")
    if below and isinstance(values.get(section), str) and section in SHORT_FORMS:
        values[section] = {SHORT_FORMS[section]: values[section]}
    elif section == "parallel" and values.get(section) == "auto":
        values[section] = {"auto": True}
    parents = [".".join([section, *below][:depth]) for depth in range(1, 1 + len(below))]
    return all(find(values, one) in (ABSENT, None) or isinstance(find(values, one), dict) for one in parents)
