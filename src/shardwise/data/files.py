"""Resolves a source to its files, and splits these into chunks of rows for worker processes.

A source is a file, a folder, a glob, a saved dataset or a dataset of the hub. Nothing is selected or skipped silently:
an explicitly named file of unknown kind is an error, one inside a folder is counted in `source_notes`, and settings
that do not apply to a source are rejected.

To add a kind of file: its suffixes in KINDS here, and what counts and cuts its rows beside those of line_files.py,
jsonfile.py or tables.py.
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from shardwise.config.schema import Source
from shardwise.core.errors import UserError
from shardwise.core.printable import counted
from shardwise.data import tables
from shardwise.data.jsonfile import cut_json, json_layout
from shardwise.data.line_files import CHUNK_ROWS, ChunkPart, Rows, cut_lines, cut_records, cut_texts
from shardwise.data.streams import Input, broken, plain_suffix

__all__ = [
    "CHUNK_ROWS",
    "ChunkTask",
    "chunk_tasks",
    "content_digest",
    "count_rows",
    "read_chunk",
    "source_files",
    "source_notes",
]

TEXT = """.txt .text .md .markdown .mdx .rst .adoc .org .tex .html .htm .xml .css .scss .py .pyi .ipynb .js .mjs .jsx
.ts .tsx .vue .java .kt .kts .scala .groovy .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .cs .go .rs .rb .php .pl .pm .lua .r
.jl .m .mm .swift .dart .hs .ml .mli .fs .fsx .ex .exs .erl .clj .cljs .lisp .el .scm .rkt .sh .bash .zsh .fish .ps1
.bat .sql .yaml .yml .toml .ini .cfg .proto .graphql .cmake .mk .tf .v .sv .vhd .vhdl .asm .s .f .f90 .f95 .pas .nim
.zig .d .lean .sol .dockerfile"""
KINDS = {".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".tab": "tsv"}
KINDS |= {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"}
KINDS |= dict.fromkeys(TEXT.split(), "text")
KNOWN = "JSONL, JSON, CSV, TSV, Parquet, Arrow, text, Markdown or code files, plain or .gz, .zst, .bz2, .xz"
CARDS = {"readme", "license", "licence", "notice", "changelog", "citation", "contributing"}
SPLITS = {"train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval"}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
DELIMITERS = {"csv": ",;\t|", "tsv": "\t"}


@dataclass(frozen=True)
class ChunkTask:
    """Consecutive rows for one worker: the chunk's index in the source, the number of its first row, its data."""

    index: int
    first_row: int
    field: str
    part: ChunkPart

    @property
    def rows(self) -> int:
        """Number of rows, including bad ones."""
        return self.part.rows


def chunk_tasks(source: Source, field: str) -> Iterator[ChunkTask]:
    """Yields the chunks of a source in order, lazily."""
    first = 0
    for index, part in enumerate(_parts(source, field)):
        yield ChunkTask(index, first, field, part)
        first += part.rows


def read_chunk(task: ChunkTask) -> Rows:
    """Yields the rows of a chunk in order; an unreadable row comes as a BadRow."""
    try:
        yield from task.part.read(task.first_row)
    except OSError as error:
        raise UserError(task.field, error.filename, *broken(error)) from None


def count_rows(source: Source, field: str) -> int | None:
    """Number of rows of a source, including bad ones; None if that requires reading it in full."""
    if _is_hub(source):
        return tables.count_hub(source, field)
    count = 0
    for kind, files in _by_kind(source, field):
        if kind in ("parquet", "arrow"):
            count += sum(tables.count_table(file, kind, field) for file in files)
        else:
            count += sum(part.rows for part in _cut(kind, files, source, field))
    return count


def content_digest(source: Source, field: str) -> str:
    """Digest that changes when any byte of the data does."""
    digest = hashlib.sha256()
    if _is_hub(source):
        return hashlib.sha256(tables.hub_digest(source, field).encode()).hexdigest()
    for file in source_files(source, field):
        digest.update(_kind(file).encode())
        try:
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        except OSError as error:
            raise UserError(field, str(file), *broken(error)) from None
    return digest.hexdigest()


def source_files(source: Source, field: str) -> list[Path]:
    """Files of a source in row order; empty for a dataset of the hub."""
    return [] if _is_hub(source) else _find(source, field)[0]


def source_notes(source: Source, field: str) -> list[str]:
    """Notes about how the source was interpreted: ignored files, chosen lists and splits."""
    if _is_hub(source):
        return [] if source.split else [f"split train of {tables.hub_name(source.path)} is taken"]
    files, notes = _find(source, field)
    if empty := [str(file) for file in files if not file.stat().st_size]:
        some = ", ".join(empty[:4]) + (" …" if len(empty) > 4 else "")
        notes.append(f"{counted(len(empty), 'file is', 'files are')} empty ({some})")
    for file in files:
        if _kind(file) == "lines" and _begins_a_list(file, field):
            notes.append(f"{file}: not lines but one JSON list, and read as that")
        if _kind(file) == "json":
            _, note = json_layout(file, source, field)
            notes += [f"{file}: {note}"] if note else []
    return notes


def _begins_a_list(file: Path, field: str) -> bool:
    """Whether a .jsonl file is in fact a JSON list, of which no line would be a row."""
    with Input(file, field) as stream:
        return re.match(rb"(\xef\xbb\xbf)?\s*\[\s*\{", stream.head) is not None


# Which files


def _is_hub(source: Source) -> bool:
    if source.path.startswith("hf:"):
        return True
    path = Path(source.path).expanduser()
    known = _kind(path) != "" or glob.has_magic(source.path)
    return not known and HUB_ID.fullmatch(source.path) is not None and not path.exists()


def _kind(file: Path) -> str:
    if file.name.lower() in ("dockerfile", "makefile"):
        return "text"
    return KINDS.get(plain_suffix(file), "")


def _find(source: Source, field: str) -> tuple[list[Path], list[str]]:
    path = Path(source.path).expanduser()
    notes: list[str] = []
    if path.is_dir() and tables.is_saved_dataset(path):
        _reject_settings(source, field, "subset", "streaming")
        files = tables.saved_files(path, source.split, field)
        return files, [f"{path}: a saved dataset, {files[0].parent.name} is taken"] if not source.split else notes
    if path.is_dir():
        candidates = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
        files = [p for p in candidates if _kind(p)]
        if unknown := Counter(p.suffix.lower() or p.name for p in candidates if not _kind(p)):
            listed = ", ".join(f"{count} {suffix}" for suffix, count in unknown.most_common(8))
            notes.append(f"{path}: {unknown.total()} files of other kinds are left aside ({listed})")
        files = _drop_cards(files, path, notes)
        files = _select_split(files, path, source, field, notes)
    elif glob.has_magic(source.path) and not path.exists():
        _reject_settings(source, field, "subset", "streaming", "split")
        files = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
    else:
        _reject_settings(source, field, "subset", "streaming", *([] if _kind(path) == "json" else ["split"]))
        files = [path]
    if not files:
        relative = "" if path.is_absolute() else f", which is relative to {Path.cwd()}"
        remedy = f"check the path{relative}; read are {KNOWN}"
        raise UserError(field, source.path, "matches no file of a known kind", remedy)
    for file in files:
        if not file.is_file():
            remedy = "check the path" if file.is_absolute() else f"check the path, which is relative to {Path.cwd()}"
            raise UserError(field, str(file), "there is no such file", remedy)
        if not _kind(file):
            problem = f"files of kind {''.join(file.suffixes[-2:]) or '(no suffix)'} are not understood"
            raise UserError(field, str(file), problem, f"use {KNOWN}")
    if path.is_dir() or glob.has_magic(source.path):
        _reject_outside_links(files, path, field)
    _check_one_kind(files, source, field)
    return files, notes


def _reject_outside_links(files: list[Path], path: Path, field: str) -> None:
    """Rejects symbolic links that lead out of the folder: such files must be named explicitly to be read."""
    while glob.has_magic(str(path)):
        path = path.parent
    root = path.resolve()
    # The hub's cache keeps contents in blobs/, and snapshots/REVISION/ has links to them.
    blobs = next((above.parent / "blobs" for above in (root, *root.parents) if above.name == "snapshots"), root)
    for file in files:
        real = file.resolve()
        if not real.is_relative_to(root) and not real.is_relative_to(blobs):
            problem = f"is a link that leads out of {path}, to {real}"
            raise UserError(field, str(file), problem, "name that file itself as a source, or take the link away")


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _reject_settings(source: Source, field: str, *settings: str) -> None:
    """Rejects settings that apply to datasets only."""
    for name in settings:
        if value := getattr(source, name):
            problem = f"has no meaning here: {source.path} is no dataset of that sort"
            raise UserError(
                f"{field}.{name}", value, problem, f"remove {name}, or give the dataset's id (hf:owner/name)"
            )


def _drop_cards(files: list[Path], folder: Path, notes: list[str]) -> list[Path]:
    """Drops README and licence files that lie beside files of rows."""
    if all(_kind(f) == "text" for f in files):
        return files
    cards = [f for f in files if (_kind(f) == "text" and f.stem.lower() in CARDS) or f.name == "dataset_info.json"]
    if cards:
        notes.append(f"{folder}: left aside as being about the data: {', '.join(f.name for f in cards[:8])}")
    return [f for f in files if f not in cards]


def _select_split(files: list[Path], folder: Path, source: Source, field: str, notes: list[str]) -> list[Path]:
    """Selects the files of one split; a folder with several splits must not be read as one."""
    _reject_settings(source, field, "subset", "streaming")
    splits: dict[str, list[Path]] = {}
    for file in files:
        if _kind(file) != "text" and (name := _split_of(file.relative_to(folder))):
            splits.setdefault(name, []).append(file)
    if source.split is not None:
        if source.split not in splits:
            problem = f"no file of {folder} is named after this split (found: {', '.join(splits) or 'none'})"
            raise UserError(f"{field}.split", source.split, problem, "set split to one that is there, or give a glob")
        return splits[source.split]
    if len(splits) > 1:
        listed = ", ".join(f"{name} ({len(members)})" for name, members in splits.items())
        problem = f"the folder holds files of several splits: {listed}"
        raise UserError(field, source.path, problem, f"set split: {next(iter(splits))}, or give a glob")
    return files


def _split_of(file: Path) -> str | None:
    for part in reversed(file.parts):
        word = re.split(r"[-_.]", part.lower())[0]
        if word in SPLITS:
            return word
    return None


def _check_one_kind(files: list[Path], source: Source, field: str) -> None:
    """Rejects a mix of text files (one row each) and files of rows, as the intent is ambiguous."""
    texts = [f for f in files if _kind(f) == "text"]
    if texts and len(texts) < len(files):
        rows = next(f for f in files if _kind(f) != "text")
        problem = f"holds both files of rows ({rows.name}, …) and texts ({texts[0].name}, …)"
        remedy = f"give a glob for one of them, such as *{''.join(rows.suffixes[-2:])}, or two sources"
        raise UserError(field, source.path, problem, remedy)


# Chunks


def _parts(source: Source, field: str) -> Iterator[ChunkPart]:
    if _is_hub(source):
        yield from tables.cut_hub(source, field)
        return
    for kind, files in _by_kind(source, field):
        yield from _cut(kind, files, source, field)


def _by_kind(source: Source, field: str) -> Iterator[tuple[str, list[Path]]]:
    for kind, files in groupby(source_files(source, field), _kind):
        yield kind, list(files)


def _cut(kind: str, files: list[Path], source: Source, field: str) -> Iterator[ChunkPart]:
    if kind == "text":
        yield from cut_texts(files)
        return
    for file in files:
        if kind in ("parquet", "arrow"):
            yield from tables.cut_table(file, kind, field)
        elif kind == "json" or (kind == "lines" and _begins_a_list(file, field)):
            yield from cut_json(file, source, field)
        else:
            with Input(file, field) as stream:
                yield from cut_lines(stream) if kind == "lines" else cut_records(stream, DELIMITERS[kind])
