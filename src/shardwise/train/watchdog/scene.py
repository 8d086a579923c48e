"""What a rank is doing now: pending collectives, module and stack, read by another thread.

torch's flight recorder knows every collective that was begun and not yet finished, with its number
in its group. The Python frames of the rank's threads show where in the model that is. Neither costs
the step anything.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise.core.compat.torch_private import flight_recording, fsdp_module_name, process_groups

DEEPEST = 40  # innermost frames of a stack that are saved


@dataclass(frozen=True)
class PendingCollective:
    """A collective that was begun and is not done: its number in its group, its kind and age."""

    group: str
    number: int
    kind: str
    shape: str
    seconds: float


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
        values["waiting"] = tuple(PendingCollective(**entry) for entry in values["waiting"])
        values["members"] = {name: tuple(ranks) for name, ranks in values["members"].items()}
        return cls(**values)


def look(rank: int, step: int, doing: str, model: nn.Module | None) -> Scene:
    """The scene of this process; to be called from a thread that does not train."""
    threads = _training_threads()
    waiting, begun = _collectives()
    groups = {str(pg.group_name): pg for pg in process_groups()}
    members = {name: tuple(dist.get_process_group_ranks(pg)) for name, pg in groups.items()}
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


def under_way() -> tuple[PendingCollective, ...]:
    """The collectives that this rank waits in, oldest first; cheap enough for every second."""
    return _collectives(only_active=True)[0]


def _collectives(only_active: bool = False) -> tuple[tuple[PendingCollective, ...], dict[str, int]]:
    """Pending collectives, oldest first, and the number of the last one begun in each group."""
    now = time.time_ns()
    waiting = []
    begun: dict[str, int] = {}
    for entry in json.loads(flight_recording(only_active)).get("entries", ()):
        group = str(entry["process_group"][0])
        number = int(entry["collective_seq_id"])
        if not entry.get("is_p2p"):
            begun[group] = max(begun.get(group, 0), number)
        if not entry.get("retired") and entry.get("state") != "completed":
            kind = str(entry["profiling_name"]).split(":")[-1]
            age = (now - int(entry["time_created_ns"])) / 1e9
            waiting.append(PendingCollective(group, number, kind, _shape(entry), round(age, 1)))
    return tuple(sorted(waiting, key=lambda pending: -pending.seconds)), begun


def _shape(entry: dict[str, Any]) -> str:
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
