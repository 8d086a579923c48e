"""What a rank is doing now: pending collectives, module and stack, read by another thread.

torch's flight recorders know every collective that was begun and not yet finished, with its number
in its group, and NCCL's knows sends and receives too. The Python frames of the rank's threads show
where in the model that is. Neither costs the step anything.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise.core.compat.torch_private import flight_recording, fsdp_module_name, process_groups

DEEPEST = 40  # innermost frames of a stack that are saved


@dataclass(frozen=True)
class PendingCollective:
    """A collective that was begun and is not done: its number in its group, its kind and age.

    `peers`: of sends and receives, which have numbers of their own, the ranks at the other end.
    """

    group: str
    number: int
    kind: str
    shape: str
    seconds: float
    peers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scene:
    """What a rank was doing when it was asked."""

    rank: int
    host: str
    process: int
    step: int
    doing: str
    module: str
    line: str  # function, file and line number
    waiting: tuple[PendingCollective, ...] = ()
    begun: dict[str, int] = field(default_factory=dict)  # collectives of each group
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stack: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Scene:
        values = json.loads(text)
        waiting = []
        for entry in values["waiting"]:
            waiting.append(PendingCollective(**entry | {"peers": tuple(entry["peers"])}))
        values["waiting"] = tuple(waiting)
        values["members"] = {name: tuple(ranks) for name, ranks in values["members"].items()}
        return cls(**values)


def look(rank: int, step: int, doing: str, model: nn.Module | None) -> Scene:
    """The scene of this process; to be called from a thread that does not train."""
    threads = _training_threads()
    groups = {str(pg.group_name): pg for pg in process_groups()}
    members = {name: tuple(dist.get_process_group_ranks(pg)) for name, pg in groups.items()}
    waiting, begun = read_recording(flight_recording(False), members)
    names: dict[int, str] = {}
    if model is not None:
        names = {id(module): name for name, module in model.named_modules()}
    stacks = ["".join(traceback.format_stack(frame, DEEPEST)) for frame in threads]
    return Scene(
        rank=rank,
        host=socket.gethostname(),
        process=os.getpid(),
        step=step,
        doing=doing,
        module=next(filter(None, (_module(frame, names) for frame in threads)), ""),
        line=next(filter(None, map(_line, threads)), ""),
        waiting=waiting,
        begun=begun,
        members=members,
        stack="\n".join(stacks),
    )


def _training_threads() -> list[FrameType]:
    """The main thread first, then those that no Python code started: autograd's."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    python_threads = {thread.ident for thread in threading.enumerate()}
    excluded = python_threads | {main, threading.get_ident()}
    others = [frame for ident, frame in frames.items() if ident not in excluded]
    return [frames[main], *others] if main in frames else others


def longest_wait(patient: Collection[str]) -> tuple[float, float]:
    """How many seconds this rank has waited in a collective, and in one of a `patient` group."""
    entries = [entry for entry in flight_recording(True) if _is_pending(entry)]
    if any(entry.get("is_p2p") for entry in entries):
        entries = flight_recording(False)  # see _parts_of_batches
    impatient = 0.0
    patiently = 0.0
    for pending in read_recording(entries, {})[0]:
        if pending.group in patient:
            patiently = max(patiently, pending.seconds)
        else:
            impatient = max(impatient, pending.seconds)
    return impatient, patiently


def read_recording(
    entries: list[dict[str, Any]], members: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[PendingCollective, ...], dict[str, int]]:
    """Pending collectives, oldest first, and the number of the last one begun in each group."""
    now = time.time_ns()
    waiting = []
    begun: dict[str, int] = {}
    parts = _parts_of_batches(entries)
    batched = {id(entry) for batch in parts.values() for entry in batch}
    for entry in entries:
        group = str(entry["process_group"][0])
        number = int(entry["p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"])
        if not entry.get("is_p2p"):
            begun[group] = max(begun.get(group, 0), number)
        if not _is_pending(entry) or id(entry) in batched:
            continue
        ends = parts.get((group, number), [entry]) if entry.get("is_p2p") else []
        kind = ", ".join(str(end["profiling_name"]).split(":")[-1] for end in ends or [entry])
        age = (now - int(entry["time_created_ns"])) / 1e9
        peers = tuple(sorted({rank for end in ends for rank in _peer(end, members.get(group, ()))}))
        waiting.append(
            PendingCollective(group, number, kind, _shape(ends[0] if ends else entry), age, peers)
        )
    return tuple(sorted(waiting, key=lambda pending: -pending.seconds)), begun


def _is_pending(entry: Mapping[str, Any]) -> bool:
    return not entry.get("retired") and entry.get("state") != "completed"


def _parts_of_batches(
    entries: list[dict[str, Any]],
) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Sends and receives that NCCL was given together, by their group and number.

    NCCL records each of them, without noting its end, and then the batch, which has an end.
    """
    keys = set()
    parts: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for entry in entries:
        if not entry.get("is_p2p"):
            continue
        key = (str(entry["process_group"][0]), int(entry["p2p_seq_id"]))
        if str(entry["profiling_name"]).endswith("coalesced"):
            keys.add(key)
        else:
            parts.setdefault(key, []).append(entry)
    return {key: batch for key, batch in parts.items() if key in keys}


def _peer(entry: Mapping[str, Any], ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The rank at the other end of a send or receive, which is named by its place in the group."""
    match = re.search(r"(?:->|<-)\s*(\d+)$", str(entry["profiling_name"]))
    if match is None or int(match[1]) >= len(ranks):
        return ()
    return (ranks[int(match[1])],)


def _shape(entry: Mapping[str, Any]) -> str:
    """Sizes and dtypes of the first two inputs."""
    sizes = entry.get("input_sizes") or []
    dtypes = entry.get("input_dtypes") or []
    inputs = []
    for size, dtype in zip(sizes[:2], dtypes[:2], strict=False):
        shape = "×".join(map(str, size)) or "one"
        inputs.append(f"{shape} {dtype}")
    return ", ".join(inputs)


def _module(frame: FrameType | None, names: dict[int, str]) -> str:
    """The innermost module whose code runs, or whose parameters FSDP is communicating."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        name = names.get(id(owner)) or fsdp_module_name(owner)
        if name:
            return name
        frame = frame.f_back
    return ""


def _line(frame: FrameType | None) -> str:
    """The innermost line outside torch."""
    inner = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}" not in file and not file.startswith("<frozen"):
            break
        frame = frame.f_back
    frame = frame or inner
    if frame is None:
        return ""
    name = os.sep.join(frame.f_code.co_filename.split(os.sep)[-2:])
    return f"{frame.f_code.co_name} ({name}:{frame.f_lineno})"
