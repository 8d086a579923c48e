"""Memory over one step of a strategy, for a picture: a rehearsal of a few layers in a process of its own.

Besides, which part of a block's computation is attention: that grows with the square of the sequence's length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.config.schema import Run
from shardwise.core.errors import RunFailed, UserError
from shardwise.core.hardware.specs import Device
from shardwise.foresight.plan.estimate import Estimate, without_pipeline
from shardwise.foresight.plan.quick import Quick, Strategy
from shardwise.foresight.plan.time import kernel
from shardwise.foresight.rehearse.ledger import MemoryLedger, ledger_of
from shardwise.foresight.rehearse.step import rehearse
from shardwise.foresight.rehearse.subprocess import apart
from shardwise.foresight.rehearse.tally import head_of
from shardwise.nn.models.source import ModelSource
from shardwise.nn.tiny.shrink import depths_of, first_layers

PHASES = ("forward", "backward", "update")
LAYERS = 4  # enough to see forward fill and backward empty the memory


@dataclass(frozen=True)
class Moments:
    """Bytes by category along a step of so many micro-batches, where its phases begin, and attention's seconds."""

    curve: list[tuple[float, dict[str, int]]]
    phases: list[tuple[float, str]]
    layers: int
    micro_batches: int
    attention: tuple[float, float]  # seconds of a layer and micro-batch, forward and backward


def moments_of(source: ModelSource, found: Estimate) -> Moments | str:
    """The step's course, or why there is none: a report is worth writing without it."""
    depths = depths_of(source.config)
    whole = max(depths, default=1)
    layers = LAYERS if len(depths) == 1 and whole > LAYERS else whole
    flat, ranks = without_pipeline(found.run), found.cluster.ranks // found.run.parallel.pipeline
    try:
        return apart(_rehearsed, source, flat, ranks, layers, whole, min(2, found.micro_batches), found.cluster.device)
    except (RunFailed, UserError) as error:
        return str(error).strip().splitlines()[-1]


def _rehearsed(
    source: ModelSource, run: Run, ranks: int, layers: int, whole: int, micro_batches: int, device: Device
) -> Moments:
    small = source if layers == whole else replace(source, config=first_layers(source.config, layers))
    tracker = rehearse(small, run, 0, ranks, micro_batches=micro_batches).tracker
    ledger = ledger_of(tracker, head_of(tracker))
    spent = [0.0, 0.0]
    for work, count in tracker.work.items():
        if "attn" in work.operator or "attention" in work.operator:
            back = "backward" in work.operator
            if back or work.phase == "forward":  # what is computed again is scored apart
                spent[back] += count * kernel(work, device, run.compiled)
    each = layers * micro_batches
    return Moments(*_course(ledger), layers, micro_batches, (spent[0] / each, spent[1] / each))


def _course(ledger: MemoryLedger) -> tuple[list[tuple[float, dict[str, int]]], list[tuple[float, str]]]:
    """The curve, and where forward, backward and update begin: by the first block of memory that each of them makes.

    Before the first such block what is held is counted, and after the last it is let go: neither is part of a step.
    """
    made = [block for block, _ in ledger.blocks if block.operator != "held" and block.phase in PHASES]
    made.sort(key=lambda block: block.born)
    end = max(1, ledger.end)
    first, last = (made[0].born / end, made[-1].born / end) if made else (0.0, 1.0)
    wide = (last - first) or 1.0
    phases: list[tuple[float, str]] = []
    for block in made:
        if not phases or phases[-1][1] != block.phase:
            phases.append(((block.born / end - first) / wide, block.phase))
    return [((share - first) / wide, at) for share, at in ledger.curve() if first <= share <= last], phases


def attention_shares(quick: Quick, strategy: Strategy | None, moments: Moments | None) -> tuple[float, float]:
    """Which part of a block's forward and of its backward is attention; by arithmetic alone where nothing was seen."""
    of, length = quick.of, quick.run.data.sequence_length
    if strategy is not None and moments is not None and of.forward and of.backward:
        part = strategy.micro / (strategy.tensor * strategy.context)
        forward, backward = (spent / part for spent in moments.attention)
        return min(1.0, forward / of.forward), min(1.0, backward / of.backward)
    attends = 2.0 * length * of.sizes.width  # per token, causal: half of the keys
    share = attends / (attends + 2 * max(1.0, of.sizes.block))
    return share, share
