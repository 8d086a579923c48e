"""Parquet, Arrow and Hugging Face datasets: tables read in batches and sent to workers as Arrow buffers.

A saved dataset is a folder of Arrow files with an index, so it is read without the `datasets` library, which is only
needed for datasets of the hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config.schema import Source
from shardwise.core.compat.hf_private import dataset_fingerprint
from shardwise.core.errors import UserError
from shardwise.data.examples import BadRow, Raw
from shardwise.data.line_files import CHUNK_BYTES, CHUNK_ROWS, Rows, not_a_row
from shardwise.data.streams import seekable


@dataclass(frozen=True)
class ArrowBatch:
    """Rows of a table as an Arrow stream; `row` is the number of the first one in its file, from 1."""

    name: str
    row: int
    rows: int
    data: bytes

    def read(self, first: int) -> Rows:
        import pyarrow as pa

        table = pa.ipc.open_stream(self.data).read_all()
        nested = [f.name for f in table.schema if pa.types.is_nested(f.type)]
        try:
            values = table.to_pylist(maps_as_pydicts="lossy")
        except (ValueError, OverflowError, pa.ArrowException):  # one value that Python cannot hold: find its row
            values = [_split_row(table.slice(index, 1)) for index in range(len(table))]
        for index, value in enumerate(values):
            where = f"{self.name} row {self.row + index}"
            number = first + index
            if isinstance(value, str):
                yield BadRow(where, number, f"a value cannot be read ({value})", "mend or delete the row")
                continue
            for column in nested:
                value[column] = _present(value[column])
            yield Raw(where, number, value)


def _split_row(table: Any) -> dict[str, Any] | str:
    try:
        row: dict[str, Any] = table.to_pylist(maps_as_pydicts="lossy")[0]
        return row
    except Exception as error:
        return str(error)


def _present(value: Any) -> Any:
    """Nested values without nulls: Arrow gives every struct the keys of all others, with null where there were none."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_present(item) for item in value]
    return value


@dataclass(frozen=True)
class Plain:
    """Rows that are Python values; `name` and the row number give their location."""

    name: str
    row: int
    values: tuple[Any, ...]

    @property
    def rows(self) -> int:
        return len(self.values)

    def read(self, first: int) -> Rows:
        for index, value in enumerate(self.values):
            where = f"{self.name} row {self.row + index}"
            yield (
                Raw(where, first + index, value) if isinstance(value, dict) else not_a_row(value, where, first + index)
            )


def arrow_library(field: str, path: str) -> Any:
    """Imports pyarrow; raises UserError with how to install it."""
    try:
        import pyarrow
    except ImportError:
        raise UserError(field, path, "reading tables needs pyarrow", "pip install pyarrow") from None
    return pyarrow


def cut_table(path: Path, kind: str, field: str) -> Iterator[ArrowBatch]:
    """Yields the chunks of a Parquet or Arrow file."""
    pa = arrow_library(field, str(path))
    row = 1
    with seekable(path, field) as file:
        try:
            for batch in _parquet(pa, file) if kind == "parquet" else _arrow(pa, file):
                for piece in _pieces(batch):
                    yield _batch(pa, str(path), row, piece)
                    row += len(piece)
        except (pa.ArrowException, OSError, ValueError, EOFError) as error:
            raise _no_table(error, path, kind, row, field) from None


def count_table(path: Path, kind: str, field: str) -> int:
    """Number of rows of a Parquet or Arrow file, from its metadata where possible."""
    pa = arrow_library(field, str(path))
    with seekable(path, field) as file:
        try:
            if kind == "parquet":
                import pyarrow.parquet as parquet

                return int(parquet.ParquetFile(file).metadata.num_rows)
            return sum(batch.num_rows for batch in _arrow(pa, file))
        except (pa.ArrowException, OSError, ValueError, EOFError) as error:
            raise _no_table(error, path, kind, 1, field) from None


def _no_table(error: Exception, path: Path, kind: str, row: int, field: str) -> UserError:
    where = str(path) if row == 1 else f"{path} row {row}"
    name = "Parquet" if kind == "parquet" else "Arrow"
    lines = str(error).splitlines() or [type(error).__name__]
    problem = f"is no {name} file, or a damaged one ({lines[0]})"
    return UserError(field, where, problem, "write it again, or give it the suffix of what it is")


def _parquet(pa: Any, file: Any) -> Iterator[Any]:
    import pyarrow.parquet as parquet

    table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)
    rows = table.metadata.num_rows
    size = 0
    for group in range(table.metadata.num_row_groups):
        size += table.metadata.row_group(group).total_byte_size
    fit = CHUNK_ROWS if not size else max(1, min(CHUNK_ROWS, rows * CHUNK_BYTES // size))
    yield from table.iter_batches(batch_size=fit, use_threads=False)


def _arrow(pa: Any, file: Any) -> Iterator[Any]:
    head = file.read(6)
    file.seek(0)
    source = pa.PythonFile(file) if not isinstance(file.name, str) else pa.memory_map(file.name)
    if head == b"ARROW1":
        reader = pa.ipc.open_file(source)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)
    elif head:
        yield from pa.ipc.open_stream(source)


def _pieces(batch: Any) -> Iterator[Any]:
    """Splits a batch into pieces of at most CHUNK_ROWS rows and CHUNK_BYTES bytes (or one row)."""
    for start in range(0, len(batch), CHUNK_ROWS):
        pending = [batch.slice(start, CHUNK_ROWS)]
        while pending:
            piece = pending.pop()
            if piece.nbytes <= CHUNK_BYTES or len(piece) == 1:
                yield piece
            else:
                half = len(piece) // 2
                pending += [piece.slice(half), piece.slice(0, half)]


def _batch(pa: Any, name: str, row: int, piece: Any) -> ArrowBatch:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, piece.schema) as writer:
        writer.write(piece)
    return ArrowBatch(name, row, len(piece), sink.getvalue().to_pybytes())


# Saved datasets


def is_saved_dataset(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`, of a dataset or a DatasetDict."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def saved_files(folder: Path, split: str | None, field: str) -> list[Path]:
    """Arrow files of a saved dataset, in order."""
    if (listing := folder / "dataset_dict.json").is_file():
        splits = [str(s) for s in _listed(listing, "splits", field)]
        split = split or ("train" if len(splits) != 1 else splits[0])
        if outside := [name for name in splits if Path(name).name != name]:
            problem = f"the saved dataset names a folder outside its own ({outside[0]})"
            raise UserError(field, str(listing), problem, "do not use it, or save the dataset again")
        if split not in splits:
            problem = f"the dataset has no split of this name (it has {', '.join(splits) or 'none'})"
            raise UserError(f"{field}.split", split, problem, "set split to one of them")
        folder = folder / split
    elif split is not None:
        problem = "the saved dataset is a single split"
        raise UserError(f"{field}.split", split, problem, "leave split out, or save the dataset with its splits")
    state = folder / "state.json"
    names = [f.get("filename") for f in _listed(state, "_data_files", field) if isinstance(f, dict)]
    files = [folder / name for name in names if isinstance(name, str)]
    if escaping := [file for file in files if file.parent != folder or file.name == ".."]:
        problem = f"the saved dataset names a file outside its folder ({escaping[0]})"
        raise UserError(field, str(state), problem, "do not use it, or save the dataset again")
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(field, str(missing[0]), "the saved dataset lacks this file", "copy or save the dataset again")
    if not files:
        raise UserError(field, str(folder), "the saved dataset holds no data", "save the dataset again")
    return files


def _listed(file: Path, key: str, field: str) -> list[Any]:
    try:
        listed = json.loads(file.read_text())[key]
        assert isinstance(listed, list)
        return listed
    except (OSError, ValueError, KeyError, TypeError, AssertionError, RecursionError):
        raise UserError(field, str(file), "is not as a saved dataset has it", "save the dataset again") from None


# The hub


def hub_name(path: str) -> str:
    """Hub id of a dataset, without the `hf:` prefix."""
    return path.removeprefix("hf:")


def hub_label(source: Source) -> str:
    """Label for the rows of a hub dataset in messages."""
    subset = f" {source.subset}" if source.subset else ""
    return f"hf:{hub_name(source.path)}{subset} {source.split or 'train'}"


def load_hub(source: Source, field: str) -> Any:
    """Loads a dataset of the hub, from its cache if it was downloaded before."""
    try:
        import datasets
    except ImportError:
        raise UserError(field, source.path, "reading hub datasets needs a library", "pip install datasets") from None
    name = hub_name(source.path)
    try:
        loaded = datasets.load_dataset(name, source.subset, split=source.split or "train", streaming=source.streaming)
    except Exception as error:
        raise _load_error(error, source, field) from None
    return loaded


def _load_error(error: Exception, source: Source, field: str) -> UserError:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    kinds = {kind.__name__ for kind in type(error).__mro__}
    name = hub_name(source.path)
    prefix = "" if source.path.startswith("hf:") else f"there is no such path here, and as a hub dataset {name} "
    if kinds & {"DatasetNotFoundError"}:
        problem = f"{prefix or 'the dataset '}is not on the hub, or not for you ({text})"
        return UserError(field, source.path, problem, "check the name; log in with `hf auth login` if it is private")
    if kinds & {"ConnectionError", "OfflineModeIsEnabled", "ConnectTimeout", "HfHubHTTPError", "TransportError"}:
        problem = f"{prefix or 'the dataset '}cannot be fetched: the hub is not reachable ({text})"
        return UserError(field, source.path, problem, "check the connection, or give files or a saved dataset")
    if "split" in text.lower():
        return UserError(f"{field}.split", source.split or "train", text, "set split to one that the dataset has")
    if "config" in text.lower():
        return UserError(f"{field}.subset", source.subset, text, "set subset to one that the dataset has")
    return UserError(field, source.path, f"the dataset does not load ({text})", "see its page on the hub")


def cut_hub(source: Source, field: str) -> Iterator[ArrowBatch | Plain]:
    """Yields the chunks of a hub dataset; of a streamed one as it arrives."""
    loaded = load_hub(source, field)
    name = hub_label(source)
    row = 1
    if not source.streaming:
        import pyarrow as pa

        for table in loaded.with_format("arrow").iter(batch_size=CHUNK_ROWS):
            for batch in table.combine_chunks().to_batches():
                for piece in _pieces(batch):
                    yield _batch(pa, name, row, piece)
                    row += len(piece)
        return
    chunk: list[Any] = []
    size = 0
    rows = iter(loaded.decode(False) if hasattr(loaded, "decode") and loaded.features else loaded)  # images stay bytes
    while True:
        try:
            value = next(rows)
        except StopIteration:
            break
        except Exception as error:
            raise _load_error(error, source, field) from None
        length = len(str(value))
        if len(chunk) == CHUNK_ROWS or (chunk and size + length > CHUNK_BYTES):
            yield Plain(name, row, tuple(chunk))
            row += len(chunk)
            chunk = []
            size = 0
        chunk.append(value)
        size += length
    if chunk:
        yield Plain(name, row, tuple(chunk))


def count_hub(source: Source, field: str) -> int | None:
    """Number of rows; None for a streamed dataset."""
    return None if source.streaming else len(load_hub(source, field))


def hub_digest(source: Source, field: str) -> str:
    """Identifies the data: the library's fingerprint, or the revision of a streamed dataset."""
    if not source.streaming:
        return dataset_fingerprint(load_hub(source, field))
    from huggingface_hub import HfApi

    try:
        sha = HfApi().dataset_info(hub_name(source.path)).sha
    except Exception as error:
        raise _load_error(error, source, field) from None
    return f"{sha} {source.subset} {source.split}"
