"""Asks a teacher once about every loss token and stores the answers ([Note: answers] in data/distillation_batch.py).

The teacher is divided over the ranks, so they ask together: in each round every rank has a micro-batch of its own, and
one rank of each host writes what all of them got. What is done is kept, chunk by chunk: who starts again goes on.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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

TOLD_EVERY = 5.0  # seconds
SLICE = 1024  # tokens whose likeliest are looked for at a time
Missing = list[tuple[TokenStore, int]]


def missing_answers(job: ResolvedRun, world: World) -> Missing:
    """The chunks for which some host has no answers yet; the same on every rank. Waits for the data."""
    assert job.teacher is not None and job.teacher.answers is not None
    job.data.wait()
    stores = [s for one in job.data.train + job.data.eval for s in (one.store, one.held_out)]
    chunks = [(store, chunk) for store in stores for chunk in range(int(store.wait()["chunks"]))]
    chunks = [(store, chunk) for store, chunk in chunks if len(store.table(chunk))]
    lacking = torch.tensor(
        [not job.teacher.answers.file(s, c).is_file() for s, c in chunks], dtype=torch.int32
    )
    dist.all_reduce(lacking, group=world.control)
    return [place for place, lacks in zip(chunks, lacking.tolist(), strict=True) if lacks]


def ask_teacher(
    job: ResolvedRun,
    world: World,
    teacher: TeacherLogProbs,
    missing: Missing,
    say: Callable[[str], None],
) -> None:
    """Stores the answers for these chunks, telling how far it is."""
    assert job.teacher is not None and job.teacher.answers is not None
    answers = job.teacher.answers
    total = sum(int(store.table(chunk)["supervised"].sum()) for store, chunk in missing)
    _check_room(answers.root, total * (2 * answers.k + 1) * 4)
    say(f"asking {job.teacher.source.label} about {total:,} tokens (once)")
    done, told = 0, time.monotonic()
    for store, chunk in missing:
        lines, width = int(store.table(chunk)["supervised"].sum()), 2 * answers.k + 1
        writes = world.local_rank == 0
        with (
            _written(answers.file(store, chunk), lines, width, world.rank)
            if writes
            else nullcontext() as out
        ):
            for some in _answers(job, world, teacher, store, chunk, answers.k):
                done += len(some)
                if out is not None:
                    out.write(some.tobytes())
                if time.monotonic() - told > TOLD_EVERY:
                    told = time.monotonic()
                    say(
                        f"asked the teacher about {done:,} of {total:,} tokens ({done / total:.0%})"
                    )
    dist.barrier(group=world.control)


def _answers(
    job: ResolvedRun, world: World, teacher: TeacherLogProbs, store: TokenStore, chunk: int, k: int
) -> Iterator[np.ndarray]:
    """The lines of a chunk in order, as many as one round of all ranks gives at a time; the same on every rank."""
    data, micro = job.run.data, int(job.run.train.micro_batch_size)
    rows = list(_rows(store.table(chunk), chunk, data.sequence_length if data.packing else 0))
    batches = [rows[i : i + micro] for i in range(0, len(rows), micro)]
    reader, layout = _OneStore(store, bool(data.packing)), DistillationLayout(job.pad_id)
    for first in range(0, len(batches), world.size):
        turn = batches[first : first + world.size]
        # A rank that has no batch left still takes part: the forward is collective.
        mine = layout.collate(reader, turn[world.rank] if world.rank < len(turn) else turn[0], 0)
        counts = [sum(int(row["supervised"].sum()) for row in batch) for batch in turn]
        lines = _ask(teacher, mine.to(world.device), k)
        sent = torch.zeros(max(counts), 2 * k + 1, dtype=torch.int32)
        sent[: min(len(lines), len(sent))] = lines[: len(sent)]
        got = [torch.empty_like(sent) for _ in range(world.size)]
        dist.all_gather(got, sent, group=world.control)
        yield torch.cat([part[:count] for part, count in zip(got, counts, strict=False)]).numpy()


def _ask(teacher: TeacherLogProbs, batch: DistillationBatch, k: int) -> torch.Tensor:
    lines = []
    for part in teacher(batch).split(SLICE):
        tokens, log_probs = likeliest(part, k)
        lines.append(torch.cat([tokens.int(), log_probs.contiguous().view(torch.int32)], 1).cpu())
    return torch.cat(lines)


def _rows(table: np.ndarray, chunk: int, width: int) -> Iterator[np.ndarray]:
    """The documents of a chunk in order, in rows of at most so many tokens; 0 = one a row."""
    documents = np.zeros(len(table), dtype=DOCUMENT)
    documents["chunk"], documents["index"] = chunk, np.arange(len(table))
    documents["length"], documents["supervised"] = table["length"], table["supervised"]
    start = used = 0
    for index, length in enumerate(documents["length"].tolist()):
        if index > start and used + length > width:
            yield documents[start:index]
            start, used = index, 0
        used += length
    yield documents[start:]


class _OneStore:
    """A reader of one store."""

    source_count = 1

    def __init__(self, store: TokenStore, packing: bool) -> None:
        self.packing, self.sources = packing, [SourceStream("", store)]

    def marked(self, source: int, chunk: int, index: int) -> np.ndarray:
        return self.sources[0].store.marked(chunk, index)


@contextmanager
def _written(file: Path, lines: int, width: int, rank: int) -> Iterator[BinaryIO]:
    """A file of lines of whole numbers, to be written in order; it is there when it is whole."""
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
        remedy = "lower objective.top_k, set SHARDWISE_CACHE to a larger disk, or leave objective.cache out"
        raise UserError("objective.cache", True, problem, remedy)
