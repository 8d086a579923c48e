"""From a checkpoint to a Hugging Face folder, tensor group by tensor group in bounded memory."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from shardwise.checkpoint.adapter_state import (
    checkpoint_plan,
    holds_adapter,
    lacks_base,
    read_run,
    read_tensors,
    stored_tensors,
    write_adapter,
)
from shardwise.checkpoint.folders import list_checkpoints
from shardwise.checkpoint.store import MODEL, RUN, STATE, check_whole, read_trainer
from shardwise.config.resolve import task_wanted
from shardwise.core.errors import RunFailed, UserError
from shardwise.core.safe_pickle import SafeReader
from shardwise.data.fingerprint import FILE, check_fingerprint
from shardwise.nn.adapters.merge import Merger, find_base
from shardwise.nn.adapters.peft import CONFIG, is_adapter
from shardwise.nn.models.build import build_on_meta
from shardwise.nn.models.names import TensorNames, TensorPart, link, natural_order
from shardwise.nn.models.origin import FILES, RECORD, Origin, counted, find_untouched, origin_of, read_origin
from shardwise.nn.models.source import ModelSource, find_model, is_gguf, load_config, quiet
from shardwise.nn.models.stored import INDEX, read_stored
from shardwise.nn.models.stored import stored_tensors as stored_in
from shardwise.nn.models.tasks import task_of
from shardwise.parallel.tensor.roles import pattern_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def find_checkpoint(path: Path) -> Path:
    """Returns a checkpoint folder from the folder itself, a run's output folder, or its checkpoints folder."""
    if (path / STATE).is_dir():
        return path
    for root in (path / "checkpoints", path):
        if checkpoints := list_checkpoints(root):
            return checkpoints[-1]
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


@dataclass(frozen=True)
class ExportOptions:
    """How a checkpoint is exported."""

    dtype: str = "auto"
    shard_size: int = 4 << 30  # bytes of a file of tensors
    overwrite: bool = False
    verified: bool = False  # the checkpoint was verified already
    changed_tokenizer: bool = False  # allow a tokenizer that gives other tokens than the model was trained on
    merged: bool = False  # of an adapter run, the full model instead of PEFT's folder
    allow_missing: bool = False  # drop tensors of the source that were not trained, if the source is gone
    plain: bool = False  # under the model's own tensor names, and no others
    trust: bool = False  # the model's own code may be run


def export_checkpoint(
    checkpoint: Path,
    target: Path,
    options: ExportOptions | None = None,
    say: Callable[[str], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
    finish: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Writes a folder that `transformers` loads; the folder appears complete or not at all.

    For an adapter run it is PEFT's folder of the adapter, unless `merged`. `finish` may add to the folder, or raise to
    have none, before it appears.
    """
    options = options or ExportOptions()
    target = Path(os.path.abspath(target.expanduser()))  # "." has a name too
    _check_target(target, checkpoint, options.overwrite)
    if options.merged and not holds_adapter(checkpoint):
        raise UserError("--merged", True, "this run trained no adapter", "leave it out: the folder is a whole model")
    if not options.verified:
        check_whole(checkpoint)
        if not options.changed_tokenizer:
            _check_tokenizer(checkpoint, options.trust)
    _check_code(checkpoint, options.trust)
    unfinished = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        if holds_adapter(checkpoint) and not options.merged:
            write_adapter(checkpoint, unfinished, None if options.dtype == "auto" else DTYPES[options.dtype])
        else:
            entries = _entries(checkpoint, options.dtype, options.plain, options.allow_missing, note)
            _write_folder(checkpoint, unfinished, entries, options.shard_size, options.dtype, say)
        finish(unfinished)
        _replace(target, unfinished)
    except (OSError, SafetensorError) as error:
        problem = f"cannot be written ({getattr(error, 'strerror', None) or error})"
        raise UserError("target", str(target), problem, "choose a folder you may write to, with room enough") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _check_tokenizer(checkpoint: Path, trust: bool) -> None:
    """Its files are intact, but another version of transformers may read them differently."""
    from transformers import AutoTokenizer

    if not (checkpoint / MODEL / FILE).is_file():
        return  # written before checkpoints had one
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(checkpoint / MODEL, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        problem = f"its tokenizer cannot be loaded ({str(error).splitlines()[0]})"
        remedy = "pass --changed-tokenizer to export it as it is"
        raise UserError("checkpoint", str(checkpoint), problem, remedy) from None
    check_fingerprint(checkpoint / MODEL, tokenizer, "checkpoint")


def _check_code(checkpoint: Path, trust: bool) -> None:
    """A model with code of its own is built with it; a checkpoint does not decide by itself that it is run."""
    if read_run(checkpoint).model.trust_remote_code and not trust:
        problem = "its model brings code of its own, which an export has to run"
        raise UserError("checkpoint", str(checkpoint), problem, "pass --trust-remote-code if you trust it")


def _check_target(target: Path, checkpoint: Path, overwrite: bool) -> None:
    """Rejects overwriting anything without permission, and with it, anything that is not a model's folder."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise UserError("target", str(target), "exists and is not empty", "choose another folder or pass --overwrite")
    is_model = (target / "config.json").is_file() or (target / CONFIG).is_file()
    if not is_model or checkpoint.resolve().is_relative_to(target.resolve()):
        problem = "holds something other than a model, which --overwrite would delete"
        raise UserError("target", str(target), problem, "choose another folder")


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor of the folder: its dtype there, and how to read it (in any dtype)."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.shape.numel() * self.dtype.itemsize


def _write_folder(checkpoint: Path, folder: Path, entries: list[ExportedTensor], shard_size: int, explicit: str,
                  say: Callable[[str], None]) -> None:  # fmt: skip
    shutil.copytree(checkpoint / MODEL, folder, ignore=shutil.ignore_patterns(RECORD, FILES, CONFIG))
    for file in sorted((checkpoint / MODEL / FILES).glob("*")):
        shutil.copyfile(file, folder / file.name)
    groups = list(_groups(entries, shard_size))
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write_group(group, folder / name)
        weight_map |= dict.fromkeys((entry.name for entry in group), name)
        say(f"wrote {name}")
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(entry.size for entry in entries)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=1))
    _stamp_dtype(folder / "config.json", entries, explicit)
    shutil.copy(checkpoint / RUN, folder / "shardwise_run.json")


def _entries(
    checkpoint: Path, dtype: str, plain: bool, allow_missing: bool, note: Callable[[str], None]
) -> list[ExportedTensor]:
    """Every tensor of the folder: trained ones under the names of the source, then the untrained ones.

    `plain`: under the model's own names, and no others.
    """
    names, read, model = _trained(checkpoint)
    if plain:
        return [ExportedTensor(name, shape, DTYPES[dtype] if kind.is_floating_point else kind, partial(read, name))
                for name, (shape, kind) in names.items()]  # fmt: skip
    origin = read_origin(checkpoint / MODEL) or _origin_from_source(checkpoint, model, note)
    types = origin.tensors if origin is not None else {}
    linked = link(model, types or None)
    back = _SourceReader(linked, read)
    default = _config_dtype(checkpoint)
    result = []
    fp32_patterns = read_trainer(checkpoint).get("fp32", [])  # moved by less than a half precision holds
    for part in sorted(linked.parts, key=lambda entry: natural_order(entry.writes[0])):
        if not all(name in names for name in part.reads):
            continue  # a buffer that neither the checkpoint nor the base has
        empty = {name: torch.empty(names[name][0], dtype=names[name][1], device="meta") for name in part.reads}
        for name, tensor in linked.back(part, empty).items():
            kind = _kind(tensor.dtype, types.get(name), default, DTYPES.get(dtype))
            kind = torch.float32 if all(pattern_of(read) in fp32_patterns for read in part.reads) else kind
            result.append(ExportedTensor(name, tensor.shape, kind, partial(back, part, name)))
    if unplaced := names.keys() - {name for part in linked.parts for name in part.reads}:
        raise RunFailed(
            f"{checkpoint}: {counted(sorted(unplaced), 'trained tensor')} have no place in the exported model"
        )
    if linked.lost:
        raise RunFailed(f"{checkpoint}: {counted(sorted(linked.lost), 'tensor')} of the source would not come back")
    for line in origin.notes() if origin is not None else ():
        note(line)
    return result + _untouched(origin, checkpoint, allow_missing, note)


def _origin_from_source(checkpoint: Path, model: Any, note: Callable[[str], None]) -> Origin | None:
    """For a checkpoint without a record, written by an earlier version: what its source has, if it still exists."""
    run = read_run(checkpoint)
    if run.model.name is None or is_gguf(run.model.name):
        return None
    try:
        source = find_model(run.model, task=task_wanted(run))
        assert source.origin is not None
        return origin_of(replace(source, extra=tuple(link(model, stored_in(source.origin)).extra)))
    except UserError as error:
        note(
            f"its source is not there ({error.value}): whether it had tensors that training did not touch is not known"
        )
        return None


def _untouched(
    origin: Origin | None, checkpoint: Path, allow_missing: bool, note: Callable[[str], None]
) -> list[ExportedTensor]:
    if origin is None or not origin.untouched:
        return []
    try:
        tensors = find_untouched(origin, read_run(checkpoint))
    except UserError:
        if not allow_missing:
            raise
        missing = counted(list(origin.untouched), "tensor")
        note(f"left out: {missing} of the source, since {origin.folder} is gone or changed")
        return []
    note(f"{counted(list(tensors), 'tensor')} of the source that training did not touch: copied as they are")
    return [
        ExportedTensor(name, stored.shape, stored.dtype, partial(read_stored, name, stored))
        for name, stored in tensors.items()
    ]


class _SourceReader:
    """Reads trained tensors under the names of files, converting what belongs together once."""

    def __init__(self, linked: TensorNames, read: Callable[[str], torch.Tensor]) -> None:
        self._linked = linked
        self._read = read
        self._held: tuple[TensorPart | None, dict[str, torch.Tensor]] = (None, {})

    def __call__(self, part: TensorPart, name: str) -> torch.Tensor:
        if not part.converts:
            return self._read(part.reads[0])
        if self._held[0] is not part:
            self._held = (None, {})  # the one before is given up first
            self._held = (
                part,
                self._linked.back(part, {source_name: self._read(source_name) for source_name in part.reads}),
            )
        return self._held[1].pop(name).clone()  # else a piece would keep all of what it was cut from


def _trained(
    checkpoint: Path,
) -> tuple[dict[str, tuple[torch.Size, torch.dtype]], Callable[[str], torch.Tensor], Any]:
    """What the model consists of, how to read it (from checkpoint and base), and the model itself on `meta`."""
    reader = SafeReader(checkpoint / STATE)
    stored = stored_tensors(checkpoint, reader)

    def read(name: str) -> torch.Tensor:
        return read_tensors(checkpoint, {name: stored[name]}, reader)[name]

    run = read_run(checkpoint)
    if not lacks_base(checkpoint):
        trust = run.model.trust_remote_code
        config = load_config(checkpoint / MODEL, str(checkpoint), trust)
        source = ModelSource(str(checkpoint), config, None, "", trust, task_wanted(run) or task_of(config))
        return stored, read, build_on_meta(source)
    source, model = find_base(run)
    assert source.weights is not None
    merger = Merger(model, source.weights, checkpoint_plan(checkpoint), stored, read)
    return {name: (shape, kind) for name, shape, kind in merger.outline()}, merger, model


def _replace(target: Path, new: Path) -> None:
    """Puts the new folder in the target's place; the old one is removed only when the new one is there."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _groups(entries: Sequence[ExportedTensor], limit: int) -> Iterator[list[ExportedTensor]]:
    """Tensors in files of at most `limit` bytes (a larger tensor gets a file of its own)."""
    group: list[ExportedTensor] = []
    size = 0
    for entry in entries:
        if group and size + entry.size > limit:
            yield group
            group = []
            size = 0
        group.append(entry)
        size += entry.size
    if group:
        yield group


def _write_group(group: list[ExportedTensor], file: Path) -> None:
    from safetensors.torch import save_file

    # One at a time: besides the group only one tensor in its saved type is held.
    tensors = {entry.name: entry.read().to(entry.dtype).contiguous() for entry in group}
    save_file(tensors, file, metadata={"format": "pt"})


def _kind(
    saved: torch.dtype, source: torch.dtype | None, default: torch.dtype, explicit: torch.dtype | None
) -> torch.dtype:
    """The dtype of a tensor in the folder: as its source has it, or as requested.

    What the source stores in a wider dtype than the rest (the biases of routers, decays) stays so: it was not by
    chance.
    """
    if not saved.is_floating_point:
        return saved
    if source is None or not source.is_floating_point or source.itemsize < 2:
        return explicit or default
    if explicit is None or (source.itemsize > default.itemsize and source.itemsize > explicit.itemsize):
        return source
    return explicit


def _config_dtype(checkpoint: Path) -> torch.dtype:
    config = json.loads((checkpoint / MODEL / "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name, torch.float32)


def _stamp_dtype(file: Path, entries: Sequence[ExportedTensor], explicit: str) -> None:
    """Sets the weights' dtype in the config if it differs, under the key that it uses."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in entries:
        sizes[entry.dtype] += entry.size * entry.dtype.is_floating_point
    config = json.loads(file.read_text())
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    kind = DTYPES.get(explicit) or (sizes.most_common(1)[0][0] if sizes else torch.float32)
    old = config.get(key)
    new = str(kind).removeprefix("torch.")
    if old == new:
        return
    for part in [config, *(value for value in config.values() if isinstance(value, dict))]:
        if part is config or part.get(key) == old is not None:
            part[key] = new
    file.write_text(json.dumps(config, indent=2))
