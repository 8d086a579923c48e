"""What a rank is doing at this moment: the collectives it waits in, the module, the stack; read by another thread.

torch's flight recorder knows every collective that was begun and not yet finished, with its number in its group; the
Python frames of the rank's threads tell where in the model that is. Neither costs the step anything.
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

DEEPEST = 40  # frames of a stack that are kept, the innermost


@dataclass(frozen=True)
class PendingCollective:
    """A collective that was begun and is not done: its group, its number there, what it is and since when."""

    group: str
    number: int
    kind: str
    shape: str
    seconds: float


@dataclass(frozen=True)
class Scene:
    """One rank, as it stood when it was asked."""

    rank: int
    host: str
    process: int
    step: int
    doing: str
    module: str
    line: str  # where it is: function and place in a file
    waiting: tuple[PendingCollective, ...] = ()
    begun: dict[str, int] = field(default_factory=dict)  # collectives of each group
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stack: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Scene:
        values = json.loads(text)
        values["waiting"] = tuple(PendingCollective(**one) for one in values["waiting"])
        values["members"] = {name: tuple(ranks) for name, ranks in values["members"].items()}
        return cls(**values)


def look(rank: int, step: int, doing: str, model: nn.Module | None) -> Scene:
    """The scene of this process; called from any thread but the ones that train."""
    threads = _training_threads()
    waiting, begun = _collectives()
    groups = {str(pg.group_name): pg for pg in process_groups()}
    members = {name: tuple(dist.get_process_group_ranks(pg)) for name, pg in groups.items()}
    names = (
        {id(module): name for name, module in model.named_modules()} if model is not None else {}
    )
    module = next((found for frame in threads if (found := _module(frame, names))), "")
    line = next((found for frame in threads if (found := _line(frame))), "")
    stack = "\n".join("".join(traceback.format_stack(frame, DEEPEST)) for frame in threads)
    return Scene(
        rank,
        socket.gethostname(),
        os.getpid(),
        step,
        doing,
        module,
        line,
        waiting,
        begun,
        members,
        stack,
    )


def _training_threads() -> list[FrameType]:
    """The main thread first, then those that no Python code started: autograd's."""
    frames, mine = sys._current_frames(), threading.get_ident()
    main = threading.main_thread().ident
    ours = {thread.ident for thread in threading.enumerate()} - {main}
    others = [frame for ident, frame in frames.items() if ident not in ours | {main, mine}]
    return [frames[main], *others] if main in frames else others


def under_way() -> tuple[PendingCollective, ...]:
    """The collectives that this rank waits in, the oldest first; cheap enough for every second."""
    return _collectives(only_active=True)[0]


def _collectives(only_active: bool = False) -> tuple[tuple[PendingCollective, ...], dict[str, int]]:
    """Those under way, oldest first, and the number of the last one begun in each group."""
    now, waiting = time.time_ns(), []
    begun: dict[str, int] = {}
    for entry in json.loads(flight_recording(only_active)).get("entries", ()):
        group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
        if not entry.get("is_p2p"):
            begun[group] = max(begun.get(group, 0), number)
        if not entry.get("retired") and entry.get("state") != "completed":
            kind = str(entry["profiling_name"]).split(":")[-1]
            age = (now - int(entry["time_created_ns"])) / 1e9
            waiting.append(PendingCollective(group, number, kind, _shape(entry), round(age, 1)))
    return tuple(sorted(waiting, key=lambda one: -one.seconds)), begun


def _shape(entry: dict[str, Any]) -> str:
    sizes, kinds = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    return ", ".join(
        f"{'×'.join(map(str, s)) or 'one'} {k}" for s, k in zip(sizes[:2], kinds[:2], strict=False)
    )


def _module(frame: FrameType | None, names: dict[int, str]) -> str:
    """The module whose code runs, from the innermost frame out: its own, or the one whose weights FSDP is at."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        known = names.get(id(owner)) or fsdp_module_name(owner)
        if known:
            return known
        frame = frame.f_back
    return ""


def _line(frame: FrameType | None) -> str:
    """The innermost line that is not torch's own."""
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
