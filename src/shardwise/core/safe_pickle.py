"""Reads PyTorch's distributed checkpoints without executing code they might contain.

Their index is a pickle, which can call anything when loaded normally. Here it may only refer to the classes of an
index; a checkpoint that refers to anything else is rejected before any of it runs. Tensors are read by PyTorch with
weights_only; objects besides tensors are not part of our checkpoints and are rejected.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from shardwise.core.compat.torch_private import index_path
from shardwise.core.errors import UserError

_METADATA = "torch.distributed.checkpoint.metadata"
ALLOWED = {
    (_METADATA, "Metadata"), (_METADATA, "TensorStorageMetadata"), (_METADATA, "TensorProperties"),
    (_METADATA, "ChunkStorageMetadata"), (_METADATA, "BytesStorageMetadata"), (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"), (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"),
    ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"), ("pathlib", "PosixPath"),
}  # fmt: skip


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"names {module}.{name}")


def global_in(error: BaseException) -> str | None:
    """The global that torch rejected with weights_only; None for another failure."""
    match = re.search(r"GLOBAL (\S+)", str(error))
    return match[1] if match and "eights only" in str(error) else None


class SafeReader(FileSystemReader):
    """PyTorch's reader, with safe loading of the index."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._indexes: dict[Any, Metadata] = {}  # each load asks for it, an export loads tensor by tensor

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the index of the checkpoint."""
        path = index_path(self, kwargs.get("rank"))
        if path not in self._indexes:
            with self.fs.create_stream(path, "rb") as stream:
                self._indexes[path] = read_index(stream.read(), Path(self.path))
        metadata = self._indexes[path]
        meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        meta.load_id = self.load_id
        metadata.storage_meta = meta
        return metadata


def read_index(data: bytes, folder: Path) -> Metadata:
    """Parses an index from its bytes; raises UserError if it is not one."""
    try:
        index = _Index(io.BytesIO(data)).load()
    except Exception as error:
        problem = f"its index is no index of tensors ({error}); it was not loaded, and nothing in it was run"
        raise UserError("checkpoint", str(folder), problem, "use a checkpoint that you trust, of Shardwise") from None
    if not isinstance(index, Metadata):
        raise UserError("checkpoint", str(folder), "its index is no index of tensors", "use a checkpoint of Shardwise")
    for info in (index.storage_data or {}).values():
        name = Path(info.relative_path)
        if name.is_absolute() or ".." in name.parts:
            raise UserError("checkpoint", str(folder), f"its index names a file outside it ({name})", "do not use it")
    return index
