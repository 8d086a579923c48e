"""From a checkpoint of an adapter run to PEFT's folder, and what checkpoints need for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.store import MODEL, RUN, STATE, load_tensors
from shardwise.config.renamed import read_saved
from shardwise.config.schema import Model, Run
from shardwise.core.errors import UserError
from shardwise.core.safe_pickle import SafeReader
from shardwise.nn.adapters.merge import find_base
from shardwise.nn.adapters.peft import (
    CONFIG,
    TASKS,
    WEIGHTS,
    adapter_of,
    is_adapter,
    peft_config,
    peft_tensors,
    read_config,
)
from shardwise.nn.adapters.plan import AdapterPlan, plan_of
from shardwise.nn.models.origin import FILES, RECORD
from shardwise.nn.models.source import ModelSource, find_model

if TYPE_CHECKING:
    from shardwise.resolved_run import ResolvedRun

PREFIX = "model."


def write_adapter_config(folder: Path, model: Any, job: ResolvedRun) -> None:
    """Writes the PEFT config to a checkpoint's model folder: what its tensors are, and of which base."""
    plan = job.adapted.plan
    source = job.source
    if plan is None:
        return
    assert source.weights is not None
    local_path = Path(source.label).expanduser()
    # A hub id is one for everyone; all else is a folder here (a .gguf file's is the converted one).
    is_hub_id = not local_path.exists() and "/" in source.label
    base = source.label if is_hub_id else str((local_path if local_path.is_dir() else source.weights).absolute())
    config = peft_config(model, plan, base, source.task, job.run.model.revision)
    (folder / CONFIG).write_text(json.dumps(config, indent=2))


def read_run(checkpoint: Path) -> Run:
    """Returns the run that wrote a checkpoint."""
    return Run.model_validate(read_saved(checkpoint / RUN))


def holds_adapter(checkpoint: Path) -> bool:
    """Whether a checkpoint is an adapter's."""
    return is_adapter(checkpoint / MODEL)


def lacks_base(checkpoint: Path) -> bool:
    """Whether a checkpoint holds only trained tensors, so that a full model needs the base's files too."""
    run = json.loads((checkpoint / RUN).read_text())
    return holds_adapter(checkpoint) or (bool(run.get("freeze")) and run["model"]["name"] is not None)


def stored_tensors(checkpoint: Path, reader: SafeReader | None = None) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Returns the shapes and dtypes of the model's tensors in a checkpoint."""
    metadata = (reader or SafeReader(checkpoint / STATE)).read_metadata().state_dict_metadata
    entries: dict[str, Any] = {n.removeprefix(PREFIX): e for n, e in metadata.items() if n.startswith(PREFIX)}
    return {name: (entry.size, entry.properties.dtype) for name, entry in entries.items()}


def read_tensors(
    checkpoint: Path, entries: dict[str, tuple[torch.Size, torch.dtype]], reader: SafeReader
) -> dict[str, torch.Tensor]:
    """Returns some of a checkpoint's tensors."""
    tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in entries.items()}
    load_tensors(checkpoint, {PREFIX + name: tensor for name, tensor in tensors.items()}, None, reader)
    return tensors


def checkpoint_plan(checkpoint: Path) -> AdapterPlan | None:
    """Returns the adapters that the run of a checkpoint trained; None without adapters."""
    if not holds_adapter(checkpoint):
        return None
    config = json.loads((checkpoint / MODEL / CONFIG).read_text())
    return plan_of(adapter_of(config, {name: size for name, (size, _) in stored_tensors(checkpoint).items()}))


def write_adapter(checkpoint: Path, folder: Path, kind: torch.dtype | None) -> None:
    """Writes PEFT's folder, with the tokenizer; tensors in their trained dtype unless `kind` is given."""
    from safetensors.torch import save_file

    config = json.loads((checkpoint / MODEL / CONFIG).read_text())
    reader = SafeReader(checkpoint / STATE)
    tensors = read_tensors(checkpoint, stored_tensors(checkpoint, reader), reader)
    shutil.copytree(checkpoint / MODEL, folder, ignore=shutil.ignore_patterns(RECORD, FILES, "*.py"))
    for not_here in ("config.json", "generation_config.json"):  # the base's
        (folder / not_here).unlink(missing_ok=True)
    ready = {n: t.to(kind or t.dtype).contiguous() for n, t in peft_tensors(tensors, config).items()}
    save_file(ready, folder / WEIGHTS, metadata={"format": "pt"})
    shutil.copy(checkpoint / RUN, folder / "shardwise_run.json")


def base_of(folder: Path) -> ModelSource:
    """Returns the base model of an adapter's folder: as the run named it, or as PEFT's config does."""
    run_file = folder / "shardwise_run.json"
    if run_file.is_file():
        return find_base(Run.model_validate(read_saved(run_file)))[0]
    config = read_config(folder)
    base = config.get("base_model_name_or_path")
    if not base:
        raise UserError("adapter", str(folder), "does not say of which model it is", f"add it to its {CONFIG}")
    task = next((t for t, peft_task in TASKS.items() if peft_task and peft_task == config.get("task_type")), None)
    return find_model(Model(name=str(base), revision=config.get("revision")), task=task)
