"""Computes and stores a teacher's answers once ([Note: answers] in data/distillation_batch.py).

The teacher is sharded, so all ranks run it together: in each round every rank has a micro-batch of
its own, and one rank of each host writes the answers of all ranks. Finished chunks are saved, and
an interrupted run resumes after them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
import torch.distributed as dist

from shardwise.config.units import human
from shardwise.core.errors import UserError
from shardwise.data.distillation_batch import DistillationBatch, DistillationLayout
from shardwise.data.mixing import SourceStream
from shardwise.data.packing import DOCUMENT
from shardwise.data.store import TokenStore
from shardwise.objectives.distill import TeacherLogProbs, likeliest

if TYPE_CHECKING:
    from shardwise.distributed.mesh import World
    from shardwise.resolved_run import ResolvedRun

REPORT_EVERY = 5.0  # seconds
SLICE = 1024  # tokens whose top k are computed at a time
Chunks = list[tuple[TokenStore, int]]


def missing_answers(job: ResolvedRun, world: World) -> Chunks:
    """The chunks that lack answers on some host, the same on every rank; waits for the data."""
    assert job.teacher is not None and job.teacher.answers is not None
    job.data.wait()
    answers = job.teacher.answers
    chunks: Chunks = []
    for source in job.data.train + job.data.eval:
        for store in (source.store, source.held_out):
            count = int(store.wait()["chunks"])
            chunks += [(store, chunk) for chunk in range(count) if len(store.table(chunk))]
    lacking = [not answers.file(store, chunk).is_file() for store, chunk in chunks]
    hosts = torch.tensor(lacking, dtype=torch.int32)
    dist.all_reduce(hosts, group=world.control)
    return [chunk for chunk, count in zip(chunks, hosts.tolist(), strict=True) if count]


def ask_teacher(
    job: ResolvedRun,
    world: World,
    teacher: TeacherLogProbs,
    missing: Chunks,
    say: Callable[[str], None],
) -> None:
    """Computes and stores the answers for these chunks, and reports progress."""
    assert job.teacher is not None and job.teacher.answers is not None
    answers = job.teacher.answers
    width = 2 * answers.k + 1
    total = sum(_supervised(store, chunk) for store, chunk in missing)
    _check_room(answers.root, total * width * 4)
    say(f"asking {job.teacher.source.label} about {total:,} tokens (once)")
    done = 0
    reported = time.monotonic()
    for store, chunk in missing:
        output: AbstractContextManager[BinaryIO | None] = nullcontext()
        if world.local_rank == 0:
            file = answers.file(store, chunk)
            output = _array_file(file, _supervised(store, chunk), width, world.rank)
        with output as out:
            for lines in _answers(job, world, teacher, store, chunk, answers.k):
                done += len(lines)
                if out is not None:
                    out.write(lines.tobytes())
                if time.monotonic() - reported > REPORT_EVERY:
                    reported = time.monotonic()
                    share = f"{done:,} of {total:,} tokens ({done / total:.0%})"
                    say(f"asked the teacher about {share}")
    dist.barrier(group=world.control)


def _supervised(store: TokenStore, chunk: int) -> int:
    """The number of supervised tokens of a chunk."""
    return int(store.table(chunk)["supervised"].sum())


def _answers(
    job: ResolvedRun, world: World, teacher: TeacherLogProbs, store: TokenStore, chunk: int, k: int
) -> Iterator[np.ndarray]:
    """The answers of a chunk in order, one round of all ranks at a time; the same on every rank."""
    data = job.run.data
    micro = int(job.run.train.micro_batch_size)
    rows = list(_rows(store.table(chunk), chunk, data.sequence_length if data.packing else 0))
    batches = [rows[i : i + micro] for i in range(0, len(rows), micro)]
    reader = _SingleStoreReader(store, bool(data.packing))
    layout = DistillationLayout(job.pad_id)
    for first in range(0, len(batches), world.size):
        turn = batches[first : first + world.size]
        # A rank without a batch takes part with another's: the forward is collective.
        own = turn[world.rank] if world.rank < len(turn) else turn[0]
        batch = layout.collate(reader, own, 0)
        counts = [sum(int(row["supervised"].sum()) for row in rows) for rows in turn]
        lines = _ask(teacher, batch.to(world.device), k)
        sent = torch.zeros(max(counts), 2 * k + 1, dtype=torch.int32)
        sent[: min(len(lines), len(sent))] = lines[: len(sent)]
        received = [torch.empty_like(sent) for _ in range(world.size)]
        dist.all_gather(received, sent, group=world.control)
        parts = [part[:count] for part, count in zip(received, counts, strict=False)]
        yield torch.cat(parts).numpy()


def _ask(teacher: TeacherLogProbs, batch: DistillationBatch, k: int) -> torch.Tensor:
    lines = []
    for part in teacher(batch).split(SLICE):
        tokens, log_probs = likeliest(part, k)
        lines.append(torch.cat([tokens.int(), log_probs.contiguous().view(torch.int32)], 1).cpu())
    return torch.cat(lines)


def _rows(table: np.ndarray, chunk: int, width: int) -> Iterator[np.ndarray]:
    """A chunk's documents in order, in rows of up to `width` tokens (0: one document a row)."""
    documents = np.zeros(len(table), dtype=DOCUMENT)
    documents["chunk"] = chunk
    documents["index"] = np.arange(len(table))
    documents["length"] = table["length"]
    documents["supervised"] = table["supervised"]
    start = used = 0
    for index, length in enumerate(documents["length"].tolist()):
        if index > start and used + length > width:
            yield documents[start:index]
            start = index
            used = 0
        used += length
    yield documents[start:]


class _SingleStoreReader:
    """Reads one store, with the interface of the training reader."""

    source_count = 1

    def __init__(self, store: TokenStore, packing: bool) -> None:
        self.packing = packing
        self.sources = [SourceStream("", store)]

    def marked(self, source: int, chunk: int, index: int) -> np.ndarray:
        return self.sources[0].store.marked(chunk, index)


@contextmanager
def _array_file(file: Path, lines: int, width: int, rank: int) -> Iterator[BinaryIO]:
    """Opens a .npy file of int32 lines for writing in order; it appears when it is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{rank}")
    with partial.open("wb") as out:
        shape = {"descr": "<i4", "fortran_order": False, "shape": (lines, width)}
        np.lib.format.write_array_header_1_0(out, shape)
        yield out
    partial.rename(file)


def _check_room(folder: Path, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < size:
        problem = f"the teacher's answers take {human(size)}, {folder} has {human(free)} free"
        remedy = "lower objective.top_k, set SHARDWISE_CACHE to a larger disk"
        remedy += ", or leave objective.cache out"
        raise UserError("objective.cache", True, problem, remedy)
