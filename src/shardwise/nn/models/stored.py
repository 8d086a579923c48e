"""The tensors in the weight files of a model's folder: which there are, and reading one by itself."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from shardwise.core.errors import UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
WINDOW = 1 << 16  # bytes of each of the three places that a digest looks at


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file."""

    file: Path
    dtype: torch.dtype
    shape: torch.Size


def tensor_files(folder: Path) -> dict[str, Path]:
    """Returns the safetensors file of each tensor, among the files that transformers would read."""
    index = folder / INDEX
    if index.is_file():
        try:
            file_names = {k: str(f) for k, f in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError("model", str(index), "is not a valid weight index", "fetch the model again") from None
        if outside := next((f for f in file_names.values() if Path(f).name != f), None):
            problem = f"names a file outside the model's folder ({outside})"
            raise UserError("model", str(index), problem, "do not use it, or fetch the model again")
        return {k: folder / f for k, f in file_names.items()}
    # Beside it there may be the same weights under other names (consolidated.safetensors), which nobody loads.
    files = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    return {name: file for file in files for name in _opened(file)}


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns every tensor of a folder's safetensors files; if there are none, of its pytorch_model*.bin."""
    files = tensor_files(folder)
    if files:
        headers = {file: _opened(file) for file in dict.fromkeys(files.values())}
        if missing := next((name for name, file in files.items() if name not in headers[file]), None):
            problem = f"lacks {missing}, which the index says it holds"
            raise UserError("model", str(files[missing]), problem, "fetch the model again")
        return {name: headers[file][name] for name, file in files.items()}
    return {
        name: StoredTensor(file, tensor.dtype, tensor.shape)
        for file in sorted(folder.glob("pytorch_model*.bin"))
        for name, tensor in _pickled(file).items()
    }


def read_stored(name: str, stored: StoredTensor) -> torch.Tensor:
    """Reads one tensor unchanged from its file."""
    if stored.file.suffix == ".bin":
        return _pickled(stored.file)[name]
    from safetensors import safe_open

    with safe_open(stored.file, framework="pt") as handle:
        tensor: torch.Tensor = handle.get_tensor(name)
    return tensor


def sample_digest(tensor: torch.Tensor) -> str:
    """Returns a digest of dtype, shape, and the bytes at both ends and in the middle of a tensor."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    middle = max(0, len(flat) // 2 - WINDOW // 2)
    digest = hashlib.sha256(f"{tensor.dtype}:{list(tensor.shape)}".encode())
    for start in (0, middle, max(0, len(flat) - WINDOW)):
        digest.update(flat[start : start + WINDOW].numpy().tobytes())
    return digest.hexdigest()[:16]


def damaged(file: Path, error: Exception) -> UserError:
    """Returns the error for a weight file that cannot be read."""
    problem = f"is damaged ({error})" if file.is_file() else "is missing"
    return UserError("model", str(file), problem, "fetch the file again")


def _opened(file: Path) -> dict[str, StoredTensor]:
    try:
        stat = file.stat()
    except OSError as error:
        raise damaged(file, error) from None
    return _headers(file, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1024)
def _headers(file: Path, size: int, time: int) -> dict[str, StoredTensor]:
    """What a file's header lists; cached, since a model of many experts has tens of thousands of tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            parts = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            return {
                name: StoredTensor(file, _dtype(part), torch.Size(part.get_shape())) for name, part in parts.items()
            }
    except (SafetensorError, OSError) as error:
        raise damaged(file, error) from None


def _dtype(part: Any) -> torch.dtype:
    """Determined without reading data; a scalar has to be read."""
    empty: torch.Tensor = part[:0] if part.get_shape() else part[...]
    return empty.dtype


def _pickled(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file that torch.save wrote, without running anything in it, mapped rather than read."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # written before torch 1.6, as one pickle
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    return {str(name): tensor for name, tensor in loaded.items() if isinstance(tensor, torch.Tensor)}
