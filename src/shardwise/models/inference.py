"""Loads what users want to talk to: an exported folder, a run, a checkpoint, or a model by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.hf import PREFIX, find_checkpoint
from shardwise.checkpoint.store import MODEL, check_whole, list_checkpoints, load_tensors
from shardwise.config.schema import Model
from shardwise.data.fingerprint import check_fingerprint
from shardwise.errors import UserError
from shardwise.models.source import find_model
from shardwise.models.tasks import auto_class, task_of


def load_for_inference(name: str, changed_tokenizer: bool = False) -> tuple[Any, Any]:
    """Model and tokenizer, on the GPU if there is one, else in fp32 on the CPU.

    A tokenizer or chat template other than in training is refused, unless `changed_tokenizer`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # fp32 on a CPU: half precision is slower there and on some machines not even executable.
    dtype: Any = "auto" if device == "cuda" else torch.float32
    path = Path(name).expanduser()
    if (path / "model" / "config.json").is_file() and not (path / "state").is_dir():
        path = path / "model"  # a finished run's output folder
    if not (path / "config.json").is_file() and path.is_dir() and _has_checkpoint(path):
        checkpoint = find_checkpoint(path)
        check_whole(checkpoint)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint / MODEL)
        if not changed_tokenizer:
            check_fingerprint(checkpoint / MODEL, tokenizer)
        return from_checkpoint(checkpoint).to(device).eval(), tokenizer
    source = find_model(Model(name=str(path) if path.exists() else name))
    assert source.weights is not None
    tokenizer = source.load_tokenizer()
    if not changed_tokenizer:
        check_fingerprint(source.weights, tokenizer)
    transformers_logging.disable_progress_bar()  # a second or two; the answer is what people wait for
    model, report = AutoModelForCausalLM.from_pretrained(source.weights, dtype=dtype, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        # transformers would fill them at random and say so in a log; a model that talks nonsense is no help.
        problem = f"its files lack {len(missing)} tensors, {missing[0]} among them"
        raise UserError("model", name, problem, "fetch it again")
    model.config.use_cache = True
    return model.to(device).eval(), tokenizer


def _has_checkpoint(path: Path) -> bool:
    return (path / "state").is_dir() or bool(list_checkpoints(path) or list_checkpoints(path / "checkpoints"))


def from_checkpoint(checkpoint: Path) -> Any:
    """The trained model in fp32 on the CPU, as its checkpoint holds it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint / MODEL)
    config.use_cache = True
    model = auto_class(task_of(config)).from_config(config, dtype=torch.float32)
    persistent = set(model.state_dict().keys())
    tensors = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n in persistent}
    load_tensors(checkpoint, {PREFIX + n: t for n, t in tensors.items()}, None)
    return model.eval()
