"""Reads PyTorch's distributed checkpoints without running what they might carry.

Their index is a pickle, which may call anything when it is read as usual. Here it may only name what an index is made
of; a checkpoint that names anything else is refused, and nothing of it has been run. Tensors are read by PyTorch with
weights_only; objects beside tensors are not part of our checkpoints and are refused.
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
    """What a pickle names that torch would not load with weights_only; None for another failure."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return found[1] if found and "eights only" in str(error) else None


class SafeReader(FileSystemReader):
    """PyTorch's reader, with an index that is only data."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the checkpoint."""
        path = index_path(self, kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as stream:
            metadata = read_index(stream.read(), Path(self.path))
        meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        meta.load_id = self.load_id
        metadata.storage_meta = meta
        return metadata


def read_index(data: bytes, folder: Path) -> Metadata:
    """An index from its bytes; refuses what is none."""
    try:
        found = _Index(io.BytesIO(data)).load()
    except Exception as error:
        problem = f"its index is no index of tensors ({error}); it was not loaded, and nothing in it was run"
        raise UserError("checkpoint", str(folder), problem, "use a checkpoint that you trust, of Shardwise") from None
    if not isinstance(found, Metadata):
        raise UserError("checkpoint", str(folder), "its index is no index of tensors", "use a checkpoint of Shardwise")
    for info in (found.storage_data or {}).values():
        name = Path(info.relative_path)
        if name.is_absolute() or ".." in name.parts:
            raise UserError("checkpoint", str(folder), f"its index names a file outside it ({name})", "do not use it")
    return found
