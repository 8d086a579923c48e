"""Byte streams of files with any compression; errors are reported with file and line.

Everything here reads forward in blocks: memory does not grow with the file.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tempfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

from shardwise.core.errors import UserError

COMPRESSED = {".gz", ".zst", ".zstd", ".bz2", ".xz"}
BLOCK = 1 << 20
ZSTD_STEP = 256  # compressed bytes at a time: zstd makes at most 32,768 times as much of them, 8 MB


def plain_suffix(path: Path) -> str:
    """Suffix of the file without compression: `.jsonl` of `a.JSONL.gz`."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def is_compressed(path: Path) -> bool:
    """Whether the file has a compression suffix."""
    return path.suffix.lower() in COMPRESSED


def open_bytes(path: Path) -> BinaryIO:
    """Opens a file, decompressed as it is read. Raises OSError, EOFError or what `broken` explains."""
    file = path.open("rb")
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if suffix == ".bz2":
        return cast(BinaryIO, bz2.BZ2File(file))
    if suffix == ".xz":
        return cast(BinaryIO, lzma.LZMAFile(file))
    if suffix in (".zst", ".zstd"):
        return io.BufferedReader(_Zstd(file), BLOCK)
    return file


BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError)  # what reading a damaged file raises


def broken(error: Exception) -> tuple[str, str]:
    """Problem and remedy for an error while reading a file."""
    if isinstance(error, EOFError):
        return "ends early: the compressed data are cut off", "copy or download the file again"
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot be read ({error.strerror})", "change its permissions, or leave it out"
    return f"is damaged, or not compressed as its suffix says ({error})", "copy or download the file again"


class _Zstd(io.RawIOBase):
    """Decompresses zstd frame by frame; the library's own reader accepts truncated files."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.held = memoryview(b"")
        self.tail = b""
        self.frame: Any = None
        self.library: Any = zstd_library()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.held:
            data = self.tail or self.file.read(ZSTD_STEP)
            data, self.tail = data[:ZSTD_STEP], data[ZSTD_STEP:]
            if not data:
                if self.frame is not None:
                    raise EOFError("cut off within a frame")
                return 0
            self.frame = self.frame or self.library.ZstdDecompressor().decompressobj()
            try:
                self.held = memoryview(self.frame.decompress(data))
            except self.library.ZstdError as error:
                raise OSError(str(error)) from None
            if self.frame.eof:
                self.frame, self.tail = None, self.frame.unused_data + self.tail
        size = min(len(buffer), len(self.held))
        buffer[:size] = self.held[:size]
        self.held = self.held[size:]
        return size

    def close(self) -> None:
        self.file.close()
        super().close()


class MissingLibrary(OSError):
    """A library required for this kind of file is not installed."""


def zstd_library() -> Any:
    """Imports the zstd library; raises MissingLibrary."""
    try:
        import zstandard
    except ImportError:
        raise MissingLibrary("reading .zst needs a library: pip install zstandard") from None
    return zstandard


IMPOSTORS = (  # how files begin that are not what their suffix says
    (b"\xff\xfe", "is not UTF-8 text (it is UTF-16)", "convert the file to UTF-8"),
    (b"\xfe\xff", "is not UTF-8 text (it is UTF-16)", "convert the file to UTF-8"),
    (b"\x1f\x8b", "is compressed by gzip, which its name does not say", "add .gz to its name"),
    (b"\x28\xb5\x2f\xfd", "is compressed by zstd, which its name does not say", "add .zst to its name"),
    (b"version https://git-lfs", "is a Git LFS pointer to the data, not the data", "fetch them with `git lfs pull`"),
)


class Input:
    """A file read forward; errors are reported with the current line."""

    def __init__(self, path: Path, field: str) -> None:
        self.path = path
        self.field = field
        self.line = 1
        try:
            self.file = open_bytes(path)
            self.head: bytes = self.file.peek(64)[:64]  # type: ignore[attr-defined]
        except BROKEN as error:
            raise self.mistake(error) from None
        for start, problem, remedy in IMPOSTORS:
            if self.head.startswith(start):
                raise UserError(field, str(path), problem, remedy)

    def read(self, size: int) -> bytes:
        """Returns the next bytes; fewer than `size` only at the end."""
        try:
            return self.file.read(size)
        except BROKEN as error:
            raise self.mistake(error) from None

    def readline(self, limit: int) -> bytes:
        """Returns the next line, or its first `limit` bytes."""
        try:
            return self.file.readline(limit)
        except BROKEN as error:
            raise self.mistake(error) from None

    def mistake(self, error: Exception) -> UserError:
        """Converts a read failure to a UserError."""
        problem, remedy = broken(error)
        if isinstance(error, MissingLibrary):
            problem, _, remedy = str(error).partition(": ")
        where = str(self.path) if self.line == 1 else f"{self.path}:{self.line}"
        return UserError(self.field, where, problem, remedy)

    def __enter__(self) -> Input:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def seekable(path: Path, field: str) -> BinaryIO:
    """Opens a file for random access; a compressed one is unpacked to an anonymous temporary file."""
    with Input(path, field) as stream:
        if not is_compressed(path):
            return path.open("rb")
        copy = tempfile.TemporaryFile()  # noqa: SIM115 (the caller's)
        while block := stream.read(8 * BLOCK):
            copy.write(block)
        copy.seek(0)
        return cast(BinaryIO, copy)
