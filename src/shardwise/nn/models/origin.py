"""What a checkpoint stores about the folder that its model came from, so that an export restores everything in it.

Training reads a config, a tokenizer and those tensors that transformers builds a model from. The rest (layers of
multi-token prediction, processors, code, a licence) it does not touch. A checkpoint has the small files, and of the
tensors names, dtypes and digests; an export copies these tensors from the folder, bit by bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardwise.config.schema import Run
from shardwise.core.errors import UserError
from shardwise.nn.models.source import ModelSource, find_model
from shardwise.nn.models.stored import StoredTensor, read_stored, sample_digest, stored_tensors
from shardwise.nn.models.tasks import CLASSES, class_names

RECORD, FILES = "source.json", "source"  # in a checkpoint's model folder
LARGEST = 32 << 20  # bytes of a file that is copied
WEIGHTS = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".onnx_data", ".h5", ".msgpack", ".npz", ".ot",
    ".tflite", ".mlmodel", ".pkl", ".nemo", ".llamafile", ".index.json",
}  # fmt: skip
# Its card and its adapter tell of another model; config and generation settings are written anew.
OWN = ("config.json", "generation_config.json", "README.md", "adapter_config.json", "shardwise_run.json", "loss.svg")
TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template", "spiece",
             "sentencepiece")  # fmt: skip


@dataclass(frozen=True)
class Origin:
    """The source folder, the dtypes of its tensors, and those that were not trained."""

    folder: Path
    tensors: dict[str, torch.dtype] = field(default_factory=dict)  # none: named as transformers names them
    untouched: dict[str, str] = field(default_factory=dict)  # with a digest of each
    dropped: tuple[str, ...] = ()  # tensors that no export of this model can have
    reason: str = ""  # why not
    not_copied: tuple[str, ...] = ()  # files
    config: dict[str, Any] = field(default_factory=dict)  # as the folder has it

    def notes(self) -> list[str]:
        """Returns what an export does not include, in words."""
        lines = []
        if self.dropped:
            lines.append(f"left out: {counted(self.dropped, 'tensor')} of the source, {self.reason}")
        if self.not_copied:
            lines.append(f"not copied from the source's folder: {_first(self.not_copied)}")
        return lines


def counted(names: Sequence[str], noun: str) -> str:
    """Returns the number of names, and the first of them."""
    return f"{len(names)} {noun}{'s' * (len(names) != 1)} ({_first(names)})"


def _first(names: Sequence[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def raw_config(source: ModelSource) -> dict[str, Any] | None:
    """Returns the config as the source's folder has it; None without such a folder."""
    if source.origin is None:
        return None
    return dict(json.loads((source.origin / "config.json").read_text()))


def same_class(source: ModelSource, raw: dict[str, Any]) -> bool:
    """Whether the trained class is that of the files, not its body with another head."""
    architectures = set(raw.get("architectures") or ())
    return (
        not architectures
        or bool(architectures & class_names(source.task))
        or CLASSES[source.task][0] in (raw.get("auto_map") or {})
    )


def origin_of(source: ModelSource) -> Origin | None:
    """Returns the record of a source's folder; None if the model came from none."""
    raw = raw_config(source)
    if source.origin is None or raw is None:
        return None
    stored = stored_tensors(source.origin)
    extra = set(source.extra)
    folder = source.origin.absolute()
    if raw.get("quantization_config") is not None:
        # Scales and the like belong to a module of the model; what belongs to none was quantised with the rest.
        modules = {_module(name) for name in stored.keys() - extra}
        dropped = tuple(name for name in source.extra if _module(name) not in modules)
        return Origin(folder, dropped=dropped, reason="which are quantised, as the trained model is not", config=raw)
    if not same_class(source, raw):
        types = {name: tensor.dtype for name, tensor in stored.items() if name not in extra}
        reason = f"which belong to {', '.join(raw['architectures'])} and not to the class that was trained"
        return Origin(folder, types, dropped=source.extra, reason=reason, config=raw)
    untouched = {name: sample_digest(read_stored(name, stored[name])) for name in source.extra}
    return Origin(folder, {name: tensor.dtype for name, tensor in stored.items()}, untouched, config=raw)


def write_origin(folder: Path, source: ModelSource, own_tokenizer: bool) -> None:
    """Writes the record, and the small files that are missing, to a checkpoint's model folder."""
    origin = origin_of(source)
    if origin is None or source.origin is None:
        return
    record = {
        "folder": str(origin.folder),
        "tensors": {name: str(kind).removeprefix("torch.") for name, kind in origin.tensors.items()},
        "untouched": origin.untouched,
        "dropped": origin.dropped,
        "reason": origin.reason,
        "not_copied": _copy_files(source.origin, folder, own_tokenizer),
        "config": origin.config,
    }
    (folder / RECORD).write_text(json.dumps(record))


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _copy_files(origin: Path, folder: Path, own_tokenizer: bool) -> list[str]:
    """Copies files that belong to the model and are no weights; returns the names of the others."""
    skipped = []
    for file in sorted(origin.iterdir()):
        name = file.name
        is_tokenizer_file = name.startswith(TOKENIZER) or name.endswith((".model", ".tiktoken"))
        if name in OWN or name.startswith(".") or (folder / name).exists() or (is_tokenizer_file and not own_tokenizer):
            continue
        if file.is_dir():
            skipped.append(f"{name}/")
        elif any(name.endswith(end) for end in WEIGHTS) or file.stat().st_size > LARGEST:
            skipped += (
                [] if name.endswith((".safetensors", ".index.json")) or name.startswith("pytorch_model") else [name]
            )
        else:
            target = folder if file.suffix == ".py" else folder / FILES  # code is needed to read the config beside it
            target.mkdir(exist_ok=True)
            shutil.copyfile(file, target / name)
    return skipped


def read_origin(folder: Path) -> Origin | None:
    """Returns the record in a checkpoint's model folder; None if its model came from no folder."""
    if not (folder / RECORD).is_file():
        return None
    record = json.loads((folder / RECORD).read_text())
    types = {name: _dtype(str(kind)) for name, kind in record["tensors"].items()}
    return Origin(Path(record["folder"]), types, record["untouched"], tuple(record["dropped"]), record["reason"],
                  tuple(record["not_copied"]), record["config"])  # fmt: skip


def _dtype(name: str) -> torch.dtype:
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        raise UserError("checkpoint", name, f"is no type of tensors ({RECORD})", "use a checkpoint of Shardwise")
    return kind


def find_untouched(origin: Origin, run: Run) -> dict[str, StoredTensor]:
    """Returns the tensors that were not trained, from the source's folder; raises UserError if it lacks them."""
    if not origin.untouched:
        return {}
    folders: list[Callable[[], Path | None]] = [lambda: origin.folder, lambda: find_model(run.model).origin]
    for locate in folders:
        try:
            folder = locate()
            tensors = stored_tensors(folder) if folder is not None else {}
            if all(sample_digest(read_stored(n, tensors[n])) == digest for n, digest in origin.untouched.items()):
                return {name: tensors[name] for name in origin.untouched}
        except (UserError, OSError, KeyError):
            continue
    names = counted(list(origin.untouched), "tensor")
    problem = f"is gone or changed, and {names} that training did not touch have to be copied from it"
    raise UserError("source", str(origin.folder), problem,
                    "bring the folder back, or export without them: --allow-missing-tensors")  # fmt: skip
