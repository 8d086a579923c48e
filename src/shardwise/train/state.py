"""The state of a run between two steps, and how a checkpoint saves and restores it.

Random generators are not part of it: each step seeds itself from (seed, step, rank), so resuming is
exact by construction.
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.adapter_state import write_adapter_config
from shardwise.checkpoint.store import check_same_data, load_tensors, read_trainer
from shardwise.core.safe_pickle import SafeReader
from shardwise.data.fingerprint import write_fingerprint
from shardwise.nn.models.adapt import changed_settings
from shardwise.nn.models.build import FLAG, class_name
from shardwise.nn.models.origin import raw_config, same_class, write_origin
from shardwise.parallel.offload.checkpoint_entries import entries
from shardwise.parallel.offload.optimizer import OffloadedOptimizer
from shardwise.parallel.zero.stages import ShardedModel

if TYPE_CHECKING:
    from shardwise.data.loader import StepBatch
    from shardwise.resolved_run import ResolvedRun


@dataclass
class Position:
    """Where the run stands: steps done, sequences consumed, tokens seen, best evaluation."""

    step: int = 0
    sequences: int = 0
    tokens: int = 0
    supervised: int = 0
    seconds: float = 0.0
    best_value: float | None = None  # of the figure best_metric, at best_step
    best_step: int | None = None
    best_metric: str | None = None
    waiting: int = 0  # evaluations since waiting_metric last improved, to waiting_value
    waiting_value: float | None = None
    waiting_metric: str | None = None
    scaler: dict[str, Any] = field(default_factory=dict)
    # DiLoCo: the last round, and the number of trained tokens up to it.
    apart: dict[str, int] = field(default_factory=dict)
    fp32: list[str] = field(default_factory=list)  # tensors, as patterns, that exports keep in fp32

    def advance(self, batch: StepBatch) -> None:
        """Counts a step over a batch."""
        self.step += 1
        self.sequences += batch.sequences
        self.tokens += batch.tokens
        self.supervised += batch.supervised

    def to_json(self, fingerprint: str) -> dict[str, Any]:
        """The contents of trainer.json."""
        return asdict(self) | {"data_fingerprint": fingerprint}


def tensors_of(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every tensor of a checkpoint: model.<parameter>, optimizer.<parameter>.<state>."""
    model = sharded.model
    names = sharded.kept  # the tensors to save; None = all
    result: dict[str, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=names is None):
        if names is None or name in names:
            result[f"model.{name}"] = parameter
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent and (not names or name in names):
            result[f"model.{name}"] = buffer
    if isinstance(optimizer, OffloadedOptimizer):
        return result | entries(optimizer, model if names is None else None)
    for name, parameter in sharded.parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            result[f"optimizer.{name}.{key}"] = value
    return result


def write_model(folder: Path, model: Any, job: ResolvedRun) -> None:
    """Writes config, generation settings and tokenizer, for users of the trained model."""
    # A fresh config's defaults are token ids of some other vocabulary: use the tokenizer's.
    ids: dict[str, Any] = {}
    if job.run.model.config is not None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if name not in job.run.model.config:
                ids[name] = getattr(job.tokenizer, name)
    config = _config(model, job)
    # Not the padding id: an embedding would exclude its row from further training.
    config |= {name: value for name, value in ids.items() if name != "pad_token_id"}
    _keep_recording(config, job.source.config.to_dict())
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str))
    source = job.source.origin or job.source.weights
    original = source / "generation_config.json" if source is not None else None
    if original is not None and original.is_file():
        shutil.copy(original, folder)
    elif getattr(model, "generation_config", None) is not None:
        generation = copy.deepcopy(model.generation_config)
        generation.update(use_cache=True, **ids)  # training turned the cache off in the config
        generation.save_pretrained(folder)
    job.tokenizer.save_pretrained(folder)
    write_fingerprint(folder, job.tokenizer)
    write_origin(folder, job.source, own_tokenizer=job.run.model.tokenizer is None)
    write_adapter_config(folder, model, job)


def _config(model: Any, job: ResolvedRun) -> dict[str, Any]:
    """The source's config with the run's changes of the model, without those for training alone.

    Not `model.config`: building set its type and turned its cache off, and modules store in it how
    they compute.
    """
    name = class_name(model)
    raw = raw_config(job.source)
    if raw is None:
        given = job.run.model.config or {}
        dtype = str(given.get("dtype") or given.get("torch_dtype") or "float32")
        config: dict[str, Any] = model.config.to_dict()
        config.pop("_name_or_path", None)
        return config | {
            "architectures": [name],
            "dtype": dtype.removeprefix("torch."),
            "use_cache": bool(given.get("use_cache", True)),
        }
    raw.pop("quantization_config", None)
    if not same_class(job.source, raw) or not raw.get("architectures"):
        raw["architectures"] = [name]
    return raw | changed_settings(job.source)


def _keep_recording(config: dict[str, Any], given: dict[str, Any]) -> None:
    """Restores whether the model returns router logits, which training turns off."""
    for name, value in given.items():
        if name == FLAG:
            config[name] = value
        elif isinstance(value, dict) and isinstance(config.get(name), dict):
            _keep_recording(config[name], value)


def prime_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Allocates the optimizer's states, to load a checkpoint into.

    Takes one step with learning rate and gradients 0.
    """
    if isinstance(optimizer, OffloadedOptimizer):
        return  # allocates its states when built
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def restore(
    folder: Path,
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    fingerprint: str,
    group: Any,
    reader: SafeReader | None = None,
) -> Position:
    """Loads a verified checkpoint; rejects those of another model or other data.

    `reader`: of a copy in memory.
    """
    check_same_data(folder, fingerprint)
    values = read_trainer(folder)
    values.pop("data_fingerprint")
    if "best_loss" in values:  # format before the metric became configurable
        values |= {"best_value": values.pop("best_loss"), "best_metric": "eval_loss"}
    prime_optimizer(optimizer)
    load_tensors(folder, tensors_of(sharded, optimizer), group, reader)
    sharded.updated()
    return Position(**values)
