"""Loads models for inference: an exported folder, a run, a checkpoint, or a model by name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.adapter_state import (
    PREFIX,
    base_of,
    checkpoint_plan,
    holds_adapter,
    lacks_base,
    read_run,
    stored_tensors,
)
from shardwise.checkpoint.folders import list_checkpoints
from shardwise.checkpoint.hf import find_checkpoint
from shardwise.checkpoint.store import MODEL, check_whole, load_tensors
from shardwise.config.schema import Model
from shardwise.core.errors import UserError
from shardwise.data.fingerprint import check_fingerprint
from shardwise.nn.adapters.library import load_adapters, use_adapter
from shardwise.nn.adapters.merge import find_base
from shardwise.nn.adapters.peft import is_adapter, read_adapter
from shardwise.nn.adapters.plan import attach
from shardwise.nn.attention.path_selection import set_path
from shardwise.nn.models.source import ModelSource, find_model
from shardwise.nn.models.tasks import auto_class, check_talks, task_of

ADAPTER = "adapter"  # what the adapter of a folder is called on its base


def load_for_inference(name: str, changed_tokenizer: bool = False, talks: bool = True) -> tuple[Any, Any]:
    """Returns model and tokenizer, on the GPU if there is one, else in fp32 on the CPU.

    A tokenizer or chat template other than in training is rejected, unless `changed_tokenizer`; with `talks`, so is a
    model that does not generate text.
    """
    from transformers import AutoConfig, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = Path(name).expanduser()
    if _is_model(path / "model") and not (path / "state").is_dir():
        path = path / "model"  # a finished run's output folder
    if not _is_model(path) and path.is_dir() and _has_checkpoint(path):
        checkpoint = find_checkpoint(path)
        check_whole(checkpoint)
        if talks:
            check_talks(AutoConfig.from_pretrained(checkpoint / MODEL, trust_remote_code=False), name)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint / MODEL, trust_remote_code=False)
        if not changed_tokenizer:
            check_fingerprint(checkpoint / MODEL, tokenizer)
        return from_checkpoint(checkpoint, device), tokenizer
    if is_adapter(path):
        return with_adapter(path, device, changed_tokenizer)
    source = find_model(Model(name=str(path) if path.exists() else name))
    if talks:
        check_talks(source.config, name)
    tokenizer = source.load_tokenizer()
    if not changed_tokenizer:
        check_fingerprint(Path(source.tokenizer), tokenizer)
    return _pretrained(source, device), tokenizer


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() or is_adapter(path)


def _has_checkpoint(path: Path) -> bool:
    return (path / "state").is_dir() or bool(list_checkpoints(path) or list_checkpoints(path / "checkpoints"))


def _pretrained(source: ModelSource, device: str, brought: Collection[str] = ()) -> Any:
    """A model from files; missing tensors are an error, except `brought`, which the caller fills in."""
    from transformers.utils import logging as transformers_logging

    assert source.weights is not None
    # fp32 on a CPU: half precision is slower there and on some machines not even executable.
    dtype: Any = "auto" if device == "cuda" else torch.float32
    transformers_logging.disable_progress_bar()  # a second or two; the answer is what people wait for
    model, report = auto_class(source.task).from_pretrained(
        source.weights,
        config=source.config,
        dtype=dtype,
        output_loading_info=True,
        trust_remote_code=source.trust_remote_code,
    )
    if missing := sorted(set(report["missing_keys"]) - set(brought)):
        # transformers would fill them at random and say so in a log; a model that talks nonsense is no help.
        problem = f"its files lack {len(missing)} tensors, {missing[0]} among them"
        raise UserError("model", source.label, problem, "fetch it again")
    model.config.use_cache = True
    set_path(model, source.task)
    return model.to(device).eval()


def with_adapter(folder: Path, device: str, changed_tokenizer: bool = True) -> tuple[Any, Any]:
    """Returns a base with the adapter of a folder: `use_adapter` (nn/adapters/library.py) removes it again."""
    source = base_of(folder)
    has_tokenizer = (folder / "tokenizer.json").is_file()
    tokenizer = (replace(source, tokenizer=str(folder)) if has_tokenizer else source).load_tokenizer()
    if not changed_tokenizer:
        check_fingerprint(folder, tokenizer)
    model = _pretrained(source, device, read_adapter(folder).keys)
    load_adapters(model, {ADAPTER: folder})
    use_adapter(model, ADAPTER)
    return model, tokenizer


def from_checkpoint(checkpoint: Path, device: str = "cpu", trust: bool = False) -> Any:
    """Returns the trained model in fp32; tensors that are not in the checkpoint come from its base.

    `trust`: the model's own code may be run.
    """
    from transformers import AutoConfig, GenerationConfig

    if lacks_base(checkpoint):
        source, _ = find_base(read_run(checkpoint))
        names = set(stored_tensors(checkpoint))
        model = _pretrained(source, "cpu", names).float()
        if (plan := checkpoint_plan(checkpoint)) is not None:
            attach(model, plan)
    else:
        config = AutoConfig.from_pretrained(checkpoint / MODEL, trust_remote_code=trust)
        config.use_cache = True
        model = auto_class(task_of(config)).from_config(config, dtype=torch.float32, trust_remote_code=trust)
        set_path(model, task_of(config))
        if (checkpoint / MODEL / "generation_config.json").is_file():  # what it stops at may stand there alone
            model.generation_config = GenerationConfig.from_pretrained(checkpoint / MODEL)
        names = set(model.state_dict().keys())
    # Tied tensors are stored once; of an adapter run by each of their names.
    parameters = model.named_parameters(remove_duplicate=not holds_adapter(checkpoint))
    tensors = dict(parameters) | dict(model.named_buffers())
    load_tensors(checkpoint, {PREFIX + n: t for n, t in tensors.items() if n in names}, None)
    return model.to(device).eval()
