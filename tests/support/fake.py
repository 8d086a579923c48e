"""A step of one rank of a world that is not there: every collective returns at once, with whatever lay in memory.

Run as `python -m support.fake RUN.json RANK RANKS KNOWN`: KNOWN is a file in which the stages of a pipeline leave what
they hand on, each for the next.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any


def step(run: dict[str, Any], rank: int, ranks: int, known: Path) -> dict[str, Any]:
    """What the rank holds and sends in a step."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)

    from shardwise.parallel.zero.accounting import WireCount
    from shardwise.train.loop import accumulate
    from support.scenarios import batch_of, parts_of

    parts = parts_of(run)
    pipeline = parts.context.pipeline
    if pipeline is not None and known.exists():
        pipeline._known.update(pickle.loads(known.read_bytes()))
    with WireCount() as wire:
        accumulate(parts, batch_of(parts, 0))
    parts.update()
    if pipeline is not None:
        known.write_bytes(pickle.dumps(pipeline._known))
    place = parts.world.place
    return {
        "place": [place.pipeline, place.data, place.context, place.tensor],
        "bytes": sum(p.to_local().numel() * 4 for p in parts.sharded.parameters.values()),
        "wire": dict(wire.bytes),
        "names": sorted(parts.sharded.parameters),
    }


if __name__ == "__main__":
    file, rank, ranks, known = sys.argv[1:]
    print(json.dumps(step(json.loads(Path(file).read_text()), int(rank), int(ranks), Path(known))))
