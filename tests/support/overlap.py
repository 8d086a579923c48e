"""What ranks do in the tests of overlap: steps whose collectives are seen in order; see ranks.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.scenarios import batch_of, parts_of


class _Seen(TorchDispatchMode):
    """Gathers, reductions and forwards of blocks, in the order in which they are begun."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        for start, word in (("c10d::_allgather_base", "gather"), ("c10d::_reduce_scatter_base", "reduce")):
            if name.startswith(start):
                self.events.append(word)
        return func(*args, **(kwargs or {}))


def each(runs: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """`steps` of several runs, one after the other in the same processes."""
    return {name: steps(run) for name, run in runs.items()}


def steps(run: dict[str, Any], count: int = 3) -> dict[str, Any]:
    """A few steps by hand: losses, final shards, the events of the last step and how many reductions were left."""
    from shardwise.nn.models.build import find_blocks
    from shardwise.parallel.zero.overlap import _PendingReductions
    from shardwise.train.loop import accumulate, seed_step

    parts = parts_of(run)
    left: list[int] = []
    plain = _PendingReductions.add

    def add(self: Any, *args: Any) -> None:
        plain(self, *args)
        left.append(len(self._works))

    _PendingReductions.add = add  # type: ignore[method-assign]
    losses, seen = [], _Seen()
    try:
        for name, block in find_blocks(parts.sharded.model):
            block.register_forward_pre_hook(lambda *_, n=name: seen.events.append(n.rpartition(".")[2]))
        for step in range(count):
            seen.events.clear()
            seed_step(0, step, parts.world.rank)
            with seen:
                losses.append(accumulate(parts, batch_of(parts, step)).item())
                seen.events.append("update")
            parts.sharded.clip(0.5)
            parts.optimizer.step()
            parts.optimizer.zero_grad()
    finally:
        _PendingReductions.add = plain  # type: ignore[method-assign]
    final = {n: p.to_local().clone() for n, p in parts.sharded.parameters.items()}
    return {"losses": losses, "final": final, "events": list(seen.events), "left": left}


def tuned(run: dict[str, Any], small: int) -> dict[str, Any]:
    """What a run's `auto` came to where models of `small` bytes are measured, and what it is when the run goes on."""
    from shardwise.nn.models.build import build_on_meta, find_blocks
    from shardwise.parallel.zero import tuning

    tuning.SMALL = small
    parts, said = parts_of(run), []
    model = build_on_meta(parts.job.source)
    output = parts.job.output / "tuned"
    found = [
        tuning.tune(parts.job.run, parts.world, model, find_blocks(model), said.append, output) for _ in range(2)
    ]  # fmt: skip
    return {"sending": found[0], "kept": found[1], "said": said}


def same(mine: dict[str, Any], other: dict[str, Any]) -> bool:
    """Bit for bit."""
    final = all(torch.equal(mine["final"][n], other["final"][n]) for n in mine["final"])
    return final and mine["losses"] == other["losses"]
