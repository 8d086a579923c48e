"""What a run is between two steps, and how it becomes a checkpoint and comes back.

Randomness is no state: each step seeds itself from (seed, step, rank), so resuming is exact by construction.
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
    apart: dict[str, int] = field(
        default_factory=dict
    )  # round of the last meeting, and learned tokens up to it
    fp32: list[str] = field(default_factory=list)  # tensors, as patterns, that exports keep in fp32

    def advance(self, batch: StepBatch) -> None:
        """After a step over a batch."""
        self.step += 1
        self.sequences += batch.sequences
        self.tokens += batch.tokens
        self.supervised += batch.supervised

    def to_json(self, fingerprint: str) -> dict[str, Any]:
        """For trainer.json."""
        return asdict(self) | {"data_fingerprint": fingerprint}


def tensors_of(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every tensor that must survive, by name: model.<parameter>, optimizer.<parameter>.<state>."""
    model, kept = sharded.model, sharded.kept
    if kept is None:
        result: dict[str, Any] = {f"model.{n}": p for n, p in model.named_parameters()}
    else:
        result = {
            f"model.{n}": p for n, p in model.named_parameters(remove_duplicate=False) if n in kept
        }
    persistent = model.state_dict().keys()
    result |= {
        f"model.{n}": b
        for n, b in model.named_buffers()
        if n in persistent and (not kept or n in kept)
    }
    if isinstance(optimizer, OffloadedOptimizer):
        return result | entries(optimizer, model if kept is None else None)
    for name, parameter in sharded.parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            result[f"optimizer.{name}.{key}"] = value
    return result


def write_model(folder: Path, model: Any, job: ResolvedRun) -> None:
    """Config, generation settings and tokenizer, as those who load the trained model should find them."""
    # The defaults of a fresh config are token ids of some other vocabulary.
    given, kinds = job.run.model.config, ("bos", "eos", "pad")
    names = (
        []
        if given is None
        else [f"{kind}_token_id" for kind in kinds if f"{kind}_token_id" not in given]
    )
    ids = {name: getattr(job.tokenizer, name) for name in names}
    config = _config(model, job)
    # Not the id for padding: an embedding would leave its row out of further training.
    config |= {name: value for name, value in ids.items() if name != "pad_token_id"}
    _keep_recording(config, job.source.config.to_dict())
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str))
    source = job.source.origin or job.source.weights
    original = source / "generation_config.json" if source is not None else None
    if original is not None and original.is_file():
        shutil.copy(original, folder)
    elif getattr(model, "generation_config", None) is not None:
        generation = copy.deepcopy(model.generation_config)
        generation.update(
            use_cache=True, **ids
        )  # it was made from a config that training had told to use no cache
        generation.save_pretrained(folder)
    job.tokenizer.save_pretrained(folder)
    write_fingerprint(folder, job.tokenizer)
    write_origin(folder, job.source, own_tokenizer=job.run.model.tokenizer is None)
    write_adapter_config(folder, model, job)


def _config(model: Any, job: ResolvedRun) -> dict[str, Any]:
    """The source's own config with what the run changed about the model; nothing that it set for training alone.

    Not `model.config`: building set its type and turned its cache off, and parts note in it how they compute.
    """
    name, raw = class_name(model), raw_config(job.source)
    if raw is None:
        given = job.run.model.config or {}
        dtype = str(given.get("dtype") or given.get("torch_dtype") or "float32").removeprefix(
            "torch."
        )
        own = {
            "architectures": [name],
            "dtype": dtype,
            "use_cache": bool(given.get("use_cache", True)),
        }
        return {
            key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"
        } | own
    raw.pop("quantization_config", None)
    if not same_class(job.source, raw) or not raw.get("architectures"):
        raw["architectures"] = [name]
    return raw | changed_settings(job.source)


def _keep_recording(config: dict[str, Any], given: dict[str, Any]) -> None:
    """Whether router logits are asked for stays as it was: the model that is trained is not asked for any."""
    for name, value in given.items():
        if name == FLAG:
            config[name] = value
        elif isinstance(value, dict) and isinstance(config.get(name), dict):
            _keep_recording(config[name], value)


def prime_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Allocates the optimizer's states, for a checkpoint to be read into them: one step with rate and gradients 0."""
    if isinstance(optimizer, OffloadedOptimizer):
        return  # they are there from the start
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
    """Reads a verified checkpoint into the parts; refuses another model, other data. `reader`: of a copy in memory."""
    check_same_data(folder, fingerprint)
    values = read_trainer(folder)
    values.pop("data_fingerprint")
    if "best_loss" in values:  # written before another figure could decide
        values |= {"best_value": values.pop("best_loss"), "best_metric": "eval_loss"}
    prime_optimizer(optimizer)
    load_tensors(folder, tensors_of(sharded, optimizer), group, reader)
    sharded.updated()
    return Position(**values)
