"""PEFT's adapter folder: adapter_config.json and adapter_model.safetensors, read and written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.config.objectives import Task
from shardwise.core.errors import UserError
from shardwise.nn.adapters.layers import is_transposed
from shardwise.nn.adapters.targets import shortest

if TYPE_CHECKING:
    from torch import nn

    from shardwise.nn.adapters.plan import AdapterPlan

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
TASKS: dict[Task, str | None] = {
    "causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "classify": "SEQ_CLS", "masked": None,
}  # fmt: skip
ENDINGS = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector",
           "ia3_l": "ia3_l"}  # fmt: skip
# Keys that change what an adapter computes in ways that are not known here, with the values that do not.
REFUSED: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"), "lora_bias": (None, False), "layer_replication": (None,), "use_qalora": (None, False),
    "trainable_token_indices": (None,), "target_parameters": (None, []), "alora_invocation_tokens": (None,),
    "use_bdlora": (None,), "arrow_config": (None,), "megatron_config": (None,), "velora_config": (None,),
    "kasa_config": (None,), "monteclora_config": (None,),
}  # fmt: skip


@dataclass(frozen=True)
class PeftAdapter:
    """Contents of a folder: by module the rank, alpha or kind of factor, and the names of tensors here and there."""

    kind: str
    base: str | None
    rslora: bool = False
    dora: bool = False
    dropout: float = 0.0
    ranks: dict[str, int] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)
    feedforward: dict[str, bool] = field(default_factory=dict)
    fully_trained: tuple[str, ...] = ()
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)  # (in, out) where the tensors tell both
    keys: dict[str, str] = field(default_factory=dict)  # our parameter: their tensor


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (folder / CONFIG).is_file()


def read_config(folder: Path, field: str = "adapter") -> dict[str, Any]:
    """Returns adapter_config.json; rejects what is not a supported adapter."""
    try:
        config = json.loads((folder / CONFIG).read_text())
        kind = str(config["peft_type"]).upper()
    except FileNotFoundError:
        problem = f"has no {CONFIG}" if folder.is_dir() else "there is no such folder"
        run = is_adapter(folder / "model")  # of a run the output folder was given
        remedy = f"give {folder / 'model'}" if run else "give a folder that peft or shardwise wrote"
        raise UserError(field, str(folder), problem, remedy) from None
    except (ValueError, KeyError, TypeError) as error:
        problem = f"its {CONFIG} is not valid ({error})"
        raise UserError(field, str(folder), problem, "fetch the adapter again") from None
    if kind not in ("LORA", "IA3"):
        raise UserError(field, str(folder), f"is a {kind} adapter", "use one of type LORA or IA3")
    for key, harmless in REFUSED.items():
        if key in config and config[key] not in harmless:
            problem = f"uses {key} = {config[key]}, which is not known here"
            raise UserError(field, str(folder), problem, "merge it with peft (merge_and_unload), and use the model")
    return dict(config)


def read_adapter(folder: Path, field: str = "adapter") -> PeftAdapter:
    """Returns what a folder holds; names and shapes of the tensors tell the modules, whatever pattern chose them."""
    config = read_config(folder, field)
    shapes = _shapes(folder, field)
    keys = {".".join(_split(key)): key for key in shapes}
    unsupported = next((k for k, s in shapes.items() if "lora_embedding" in k or ("lora_" in k and len(s) > 2)), None)
    if unsupported is not None:
        problem = f"holds {unsupported}, which adapts something other than a linear layer"
        raise UserError(field, str(folder), problem, "merge it with peft (merge_and_unload), and use the model")
    return adapter_of(config, {name: shapes[key] for name, key in keys.items()}, keys)


def adapter_of(
    config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], keys: dict[str, str] | None = None
) -> PeftAdapter:
    """Returns the adapter that a config and the shapes of our parameters describe."""
    ranks: dict[str, int] = {}
    sides: dict[tuple[str, int], int] = {}
    factors: dict[str, bool] = {}
    saved_modules: dict[str, None] = {}
    for parameter, shape in shapes.items():
        name, _, end = parameter.rpartition(".")
        if end == "lora_A":
            ranks[name], sides[name, 0] = shape[0], shape[1]
        elif end == "lora_B":
            sides[name, 1] = shape[0]
        elif end == "ia3_l":
            factors[name] = is_feedforward(name, config)
        elif end != "lora_magnitude":
            saved_modules[_saved_module(name, config.get("modules_to_save") or ())] = None
    alpha = float(config.get("lora_alpha") or 0)
    pattern = config.get("alpha_pattern") or {}
    return PeftAdapter(
        str(config["peft_type"]).lower(), config.get("base_model_name_or_path"), bool(config.get("use_rslora")),
        bool(config.get("use_dora")), float(config.get("lora_dropout") or 0), ranks,
        {n: float(_by_pattern(pattern, n, alpha)) for n in ranks}, factors, tuple(saved_modules),
        {n: (sides[n, 0], sides[n, 1]) for n in ranks if (n, 1) in sides}, keys or {},
    )  # fmt: skip


def is_feedforward(name: str, config: Mapping[str, Any]) -> bool:
    """PEFT's rule for which factors scale inputs."""
    endings = config.get("feedforward_modules") or ()
    return bool(re.fullmatch(endings, name)) if isinstance(endings, str) else any(name.endswith(e) for e in endings)


def read_tensors(folder: Path, adapter: PeftAdapter) -> dict[str, torch.Tensor]:
    """Returns the adapter's tensors under the names of our parameters."""
    from safetensors.torch import load_file

    stored = load_file(folder / WEIGHTS)
    return {n: stored[k].flatten() if n.endswith(".ia3_l") else stored[k] for n, k in adapter.keys.items()}


def peft_tensors(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns tensors under PEFT's names and in its shapes."""
    result = {}
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        if end == "ia3_l":
            tensor = tensor[None] if is_feedforward(module, config) else tensor[:, None]
        result[f"{PREFIX}{module}.{ENDINGS.get(end, end)}"] = tensor
    return result


def peft_config(model: nn.Module, plan: AdapterPlan, base: str, task: Task, revision: str | None) -> dict[str, Any]:
    """Returns adapter_config.json of a plan; targets are named by the shortest unambiguous suffixes."""
    module_names = [name for name, _ in model.named_modules() if name]
    config: dict[str, Any] = {
        "peft_type": plan.kind.upper(),
        "task_type": TASKS[task],
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "target_modules": sorted(shortest(plan.targets, module_names)),
        "fan_in_fan_out": any(is_transposed(model.get_submodule(name)) for name in plan.targets),
        "modules_to_save": sorted(shortest(plan.fully_trained, module_names, dotted=False)) or None,
    }
    if plan.kind == "ia3":
        input_scaled = shortest(
            [n for n, scales_input in plan.feedforward.items() if scales_input], module_names, dotted=False
        )
        output_scaled = shortest([n for n, scales_input in plan.feedforward.items() if not scales_input], module_names)
        return config | {
            "target_modules": sorted({*input_scaled, *output_scaled}),
            "feedforward_modules": sorted(input_scaled),
        }
    rank = max(set(plan.ranks.values()), key=list(plan.ranks.values()).count)
    alpha = max(set(plan.alphas.values()), key=list(plan.alphas.values()).count)
    return config | {
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": plan.dropout,
        "bias": "none",
        "use_rslora": plan.rslora,
        "use_dora": plan.dora,
        "init_lora_weights": True,
        "rank_pattern": {f"^{re.escape(n)}": r for n, r in plan.ranks.items() if r != rank},
        "alpha_pattern": {f"^{re.escape(n)}": a for n, a in plan.alphas.items() if a != alpha},
    }


def _shapes(folder: Path, field: str) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    file = folder / WEIGHTS
    if not file.is_file():
        remedy = "save it as safetensors with peft" if (folder / "adapter_model.bin").is_file() else "fetch it again"
        raise UserError(field, str(folder), f"has no {WEIGHTS}", remedy)
    try:
        with safe_open(file, framework="pt") as handle:
            return {key: tuple(handle.get_slice(key).get_shape()) for key in handle.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(field, str(file), f"is damaged ({error})", "fetch it again") from None


def _split(key: str) -> tuple[str, str]:
    """Module and kind of a stored tensor."""
    bare = key.removeprefix(PREFIX)
    for end, suffix in ENDINGS.items():
        if bare.endswith(f".{suffix}"):
            return bare.removesuffix(f".{suffix}"), end
    module, _, end = bare.rpartition(".")
    return module, end


def _saved_module(name: str, saved: Sequence[str]) -> str:
    """The module in PEFT's `modules_to_save` that contains a tensor's module."""
    parts = name.split(".")
    prefixes = (".".join(parts[:size]) for size in range(1, len(parts) + 1))
    return next((module for module in prefixes if any(module.endswith(end) for end in saved)), name)


def _by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """PEFT's rule: the first pattern that matches the end of a name as a regular expression."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)
