"""From a checkpoint to a standard Hugging Face folder, tensor group by tensor group in bounded memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError

from shardwise.adapters.export import (
    checkpoint_plan,
    holds_adapter,
    lacks_base,
    read_run,
    read_tensor,
    stored_tensors,
    write_adapter,
)
from shardwise.adapters.merge import Merger, find_base
from shardwise.adapters.peft import CONFIG, is_adapter
from shardwise.checkpoint.folders import list_checkpoints
from shardwise.checkpoint.store import MODEL, RUN, STATE, check_whole, read_trainer
from shardwise.data.fingerprint import FILE, check_fingerprint
from shardwise.errors import UserError
from shardwise.parallel.roles import pattern_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Entry = tuple[str, torch.Size, torch.dtype]


def find_checkpoint(path: Path) -> Path:
    """A checkpoint folder from what users give: the folder itself, a run's output folder, or its checkpoints folder."""
    if (path / STATE).is_dir():
        return path
    for root in (path / "checkpoints", path):
        if found := list_checkpoints(root):
            return found[-1]
    remedy = "give a run's output folder or one of its checkpoints/step-… folders"
    if not path.exists():
        raise UserError("checkpoint", str(path), "there is no such folder", remedy)
    if is_adapter(path):
        remedy = "give the run that trained it (--merged and --gguf put its base in), or merge it with peft"
        raise UserError("checkpoint", str(path), "is an adapter, not a run: its base is not in it", remedy)
    if (path / "config.json").is_file():
        raise UserError(
            "checkpoint", str(path), "is a Hugging Face folder already, not a run", f"{remedy}, or a --gguf"
        )
    raise UserError("checkpoint", str(path), "holds no checkpoint", remedy)


def export_checkpoint(
    checkpoint: Path,
    target: Path,
    dtype: str = "auto",
    shard_size: int = 4 << 30,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda _: None,
    verified: bool = False,
    changed_tokenizer: bool = False,
    merged: bool = False,
    finish: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Writes a folder that `transformers` loads; the folder appears whole or not at all.

    Of an adapter run it is PEFT's folder of the adapter, or with `merged` the whole model. `finish` may add to the
    folder, or raise to have none, before it appears. Unless `changed_tokenizer`, the checkpoint's tokenizer must still
    give the tokens that the model was trained on.
    """
    target = Path(os.path.abspath(target.expanduser()))  # "." has a name too
    _check_target(target, checkpoint, overwrite)
    if merged and not holds_adapter(checkpoint):
        raise UserError("--merged", True, "this run trained no adapter", "leave it out: the folder is a whole model")
    if not verified:
        check_whole(checkpoint)
        if not changed_tokenizer:
            _check_tokenizer(checkpoint)
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        if holds_adapter(checkpoint) and not merged:
            write_adapter(checkpoint, partial, None if dtype == "auto" else DTYPES[dtype])
        else:
            _write_folder(checkpoint, partial, _dtype(checkpoint, dtype), shard_size, say)
        finish(partial)
        _replace(target, partial)
    except (OSError, SafetensorError) as error:
        problem = f"cannot be written ({getattr(error, 'strerror', None) or error})"
        raise UserError("target", str(target), problem, "choose a folder you may write to, with room enough") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _check_tokenizer(checkpoint: Path) -> None:
    """Its files are whole, but another version of transformers may read them otherwise."""
    from transformers import AutoTokenizer

    if not (checkpoint / MODEL / FILE).is_file():
        return  # written before checkpoints had one
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint / MODEL, trust_remote_code=False)
    except (OSError, ValueError) as error:
        problem = f"its tokenizer cannot be loaded ({str(error).splitlines()[0]})"
        remedy = "pass --changed-tokenizer to export it as it is"
        raise UserError("checkpoint", str(checkpoint), problem, remedy) from None
    check_fingerprint(checkpoint / MODEL, tokenizer, "checkpoint")


def _check_target(target: Path, checkpoint: Path, overwrite: bool) -> None:
    """Refuses to write over anything without leave, and with it, over anything that is not a model's folder."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise UserError("target", str(target), "exists and is not empty", "choose another folder or pass --overwrite")
    known = (target / "config.json").is_file() or (target / CONFIG).is_file()
    if not known or checkpoint.resolve().is_relative_to(target.resolve()):
        problem = "holds something other than a model, which --overwrite would delete"
        raise UserError("target", str(target), problem, "choose another folder")


def _write_folder(
    checkpoint: Path, folder: Path, kind: torch.dtype, shard_size: int, say: Callable[[str], None]
) -> None:
    outline, read = _tensors(checkpoint)
    shutil.copytree(checkpoint / MODEL, folder)
    (folder / CONFIG).unlink(missing_ok=True)
    groups = list(_groups(outline, kind, shard_size))
    fp32 = read_trainer(checkpoint).get("fp32", [])
    weight_map: dict[str, str] = {}
    total = 0
    for number, group in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        total += _write_group(group, read, folder / name, kind, fp32)
        weight_map |= dict.fromkeys(group, name)
        say(f"wrote {name}")
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    _stamp_dtype(folder / "config.json", kind)
    shutil.copy(checkpoint / RUN, folder / "shardwise_run.json")


def _tensors(checkpoint: Path) -> tuple[list[Entry], Callable[[str], torch.Tensor]]:
    """What the whole model consists of, and how to read it: from the checkpoint, and what it lacks from the base."""
    stored = stored_tensors(checkpoint)

    def read(name: str) -> torch.Tensor:
        return read_tensor(checkpoint, name, *stored[name])

    if not lacks_base(checkpoint):
        return [(name, *entry) for name, entry in stored.items()], read
    source, model = find_base(read_run(checkpoint))
    assert source.weights is not None
    merger = Merger(model, source.weights, checkpoint_plan(checkpoint), stored, read)
    return merger.outline(), merger


def _replace(target: Path, new: Path) -> None:
    """Puts the new folder in the target's place; the old one goes only when the new one stands."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _groups(outline: Sequence[Entry], kind: torch.dtype, limit: int) -> Iterator[list[str]]:
    """Tensors of the model, in files of at most `limit` bytes (a larger tensor gets a file of its own)."""
    group: list[str] = []
    size = 0
    for name, shape, saved in outline:
        bytes_ = shape.numel() * (kind if saved.is_floating_point else saved).itemsize
        if group and size + bytes_ > limit:
            yield group
            group, size = [], 0
        group.append(name)
        size += bytes_
    if group:
        yield group


def _write_group(
    names: list[str], read: Callable[[str], torch.Tensor], file: Path, kind: torch.dtype, fp32: Sequence[str]
) -> int:
    from safetensors.torch import save_file

    tensors = {}
    for name in names:  # one at a time: besides the group only one tensor in its saved type is held
        tensor = read(name)
        stays = not tensor.is_floating_point() or pattern_of(name) in fp32
        tensors[name] = tensor if stays else tensor.to(kind)
    save_file(tensors, file, metadata={"format": "pt"})
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _dtype(checkpoint: Path, dtype: str) -> torch.dtype:
    if dtype != "auto":
        return DTYPES[dtype]
    config = json.loads((checkpoint / MODEL / "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name, torch.float32)


def _stamp_dtype(file: Path, kind: torch.dtype) -> None:
    config = json.loads(file.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(kind).removeprefix("torch.")
    config["use_cache"] = True
    file.write_text(json.dumps(config, indent=2))
