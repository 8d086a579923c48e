"""Memory over one step of a strategy, for the report: a rehearsal of a few layers in a process of its own.

Also the share of a block's computation that is attention, which grows with the square of the sequence length.
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
from shardwise.foresight.rehearse.subprocess import run_isolated
from shardwise.foresight.rehearse.tally import head_of
from shardwise.nn.models.source import ModelSource
from shardwise.nn.tiny.shrink import depths_of, first_layers

PHASES = ("forward", "backward", "update")
LAYERS = 4  # enough to see forward fill and backward empty the memory


@dataclass(frozen=True)
class StepMemory:
    """Bytes by category along a step of `micro_batches`, where its phases begin, and seconds of attention."""

    curve: list[tuple[float, dict[str, int]]]
    phases: list[tuple[float, str]]
    layers: int
    micro_batches: int
    attention: tuple[float, float]  # seconds of a layer and micro-batch, forward and backward


def step_memory_of(source: ModelSource, estimate: Estimate) -> StepMemory | str:
    """Returns memory over the step, or the reason why it is unknown: the report is written without it then."""
    depths = depths_of(source.config)
    total_layers = max(depths, default=1)
    layers = LAYERS if len(depths) == 1 and total_layers > LAYERS else total_layers
    stage_run = without_pipeline(estimate.run)
    ranks = estimate.cluster.ranks // estimate.run.parallel.pipeline
    try:
        return run_isolated(
            _rehearsed,
            source,
            stage_run,
            ranks,
            layers,
            total_layers,
            min(2, estimate.micro_batches),
            estimate.cluster.device,
        )
    except (RunFailed, UserError) as error:
        return str(error).strip().splitlines()[-1]


def _rehearsed(
    source: ModelSource, run: Run, ranks: int, layers: int, total_layers: int, micro_batches: int, device: Device
) -> StepMemory:
    small = source if layers == total_layers else replace(source, config=first_layers(source.config, layers))
    tracker = rehearse(small, run, 0, ranks, micro_batches=micro_batches).tracker
    ledger = ledger_of(tracker, head_of(tracker))
    seconds = [0.0, 0.0]
    for work, count in tracker.work.items():
        if "attn" in work.operator or "attention" in work.operator:
            is_backward = "backward" in work.operator
            if is_backward or work.phase == "forward":  # what is computed again is scored apart
                seconds[is_backward] += count * kernel(work, device, run.compiled)
    layer_passes = layers * micro_batches
    return StepMemory(
        *_curve_and_phases(ledger), layers, micro_batches, (seconds[0] / layer_passes, seconds[1] / layer_passes)
    )


def _curve_and_phases(ledger: MemoryLedger) -> tuple[list[tuple[float, dict[str, int]]], list[tuple[float, str]]]:
    """The curve, and where forward, backward and update begin: at the first block of memory that each allocates.

    Before the first allocation the model's state is counted, after the last it is freed: neither is part of a step.
    """
    allocated = [block for block, _ in ledger.blocks if block.operator != "held" and block.phase in PHASES]
    allocated.sort(key=lambda block: block.born)
    end = max(1, ledger.end)
    first, last = (allocated[0].born / end, allocated[-1].born / end) if allocated else (0.0, 1.0)
    span = (last - first) or 1.0
    phases: list[tuple[float, str]] = []
    for block in allocated:
        if not phases or phases[-1][1] != block.phase:
            phases.append(((block.born / end - first) / span, block.phase))
    return [((share - first) / span, at) for share, at in ledger.curve() if first <= share <= last], phases


def attention_shares(quick: Quick, strategy: Strategy | None, moments: StepMemory | None) -> tuple[float, float]:
    """Returns the share of attention in a block's forward and backward; by FLOPs if there was no rehearsal."""
    profile = quick.of
    length = quick.run.data.sequence_length
    if strategy is not None and moments is not None and profile.forward and profile.backward:
        scale = strategy.micro / (strategy.tensor * strategy.context)
        forward, backward = (spent / scale for spent in moments.attention)
        return min(1.0, forward / profile.forward), min(1.0, backward / profile.backward)
    attention_flops = 2.0 * length * profile.sizes.width  # per token, causal: half of the keys
    share = attention_flops / (attention_flops + 2 * max(1.0, profile.sizes.block))
    return share, share
