"""Faults from within: a rank told to go wrong at a step, through Python's own start-up file; no code knows of it."""

from __future__ import annotations

import os
from pathlib import Path

SITE = """
import sys
if "shardwise.launch.worker" in sys.orig_argv:
    import os, pathlib, time
    import torch
    from shardwise.train import loop
    plain = loop.accumulate
    fault, rank, step, mark = os.environ["FAULT"].split(",")
    def accumulate(parts, batch):
        began = time.monotonic()
        summed = plain(parts, batch)
        mine = rank in ("all", os.environ["RANK"])
        done = pathlib.Path(mark)
        own = done.with_name(done.name + os.environ["RANK"])
        if fault == "slow" and mine and parts.position.step + 1 >= int(step):
            time.sleep(0.05 + 2 * (time.monotonic() - began))  # in every step, twice as long as it computes
        elif mine and parts.position.step + 1 == int(step) and not own.exists():
            own.touch()  # once a rank, whatever is started again
            if fault == "nan":
                for parameter in parts.sharded.parameters.values():
                    parameter.grad.mul_(float("nan"))
            elif fault == "leap":
                summed = summed * 50
            elif fault == "flip":
                local = next(iter(parts.sharded.parameters.values()))
                local = getattr(local, "_local_tensor", local)
                local.data.view(-1).view(torch.int32)[0] ^= 1
            elif fault == "sleep":
                time.sleep(3600)
            elif fault == "hang":
                import ctypes
                while True:  # a signal ends a sleep
                    ctypes.PyDLL(None).sleep(3600)  # with Python's lock, as some calls of a driver
            elif fault == "raise":
                raise ValueError("a fault of the test's own")
        return summed
    loop.accumulate = accumulate
    if fault in ("slow", "even"):
        loop.EVERY = 1.0
"""


def environment(folder: Path, fault: str, rank: int | str, step: int) -> dict[str, str]:
    """For `cli.start`, once, in one rank or all: nan (gradients), leap (told loss), flip (a bit), sleep, hang,
    raise, slow.

    A slow rank naps in each step from that one on, and ranks are compared once a second.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "FAULT": f"{fault},{rank},{step},{folder / 'done-'}"}
