"""Presents a profiled step, and suggests what would make it faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from shardwise.config.resolve import this_machine
from shardwise.config.schema import Run
from shardwise.observe.profile import REST, StepProfile


@dataclass(frozen=True)
class Speed:
    """Measurements of the slowest rank, and of all ranks together."""

    seconds: float  # per step
    tokens: int  # per step, over all ranks
    mfu: float | None
    memory: int | None  # peak GPU bytes of the fullest rank; None on a CPU
    room: int | None  # bytes of GPU memory; None on a CPU
    device: str
    ranks: int
    rank: int  # the slowest one
    profile: StepProfile
    told: list[str] = field(default_factory=list)  # settings chosen by measurement at the start
    host: float = 0.0  # CPU seconds of the process per step
    simulated: bool = False  # one rank alone, whose collectives return at once

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all ranks together."""
        return self.tokens / self.seconds


def advise(run: Run, speed: Speed) -> list[str]:
    """Suggestions from the measurements, the largest gain first."""
    step = _ProfiledStep(run, speed)
    suggestions = [suggestion for rule in RULES if (suggestion := rule(step)) is not None]
    return [text for _, text in sorted(suggestions, key=lambda suggestion: -suggestion[0])]


Suggestion = tuple[float, str]  # the share of the step that it may save, and the text


@dataclass(frozen=True)
class _ProfiledStep:
    """A profiled step as the rules see it: shares of its time and memory."""

    run: Run
    speed: Speed

    @property
    def seconds(self) -> float:
        return self.speed.profile.whole or 1.0

    @property
    def cuda(self) -> bool:
        return self.run.device == "cuda"

    @property
    def free_memory(self) -> float:
        if not self.speed.room:
            return 0.0
        return 1 - (self.speed.memory or 0) / self.speed.room

    def share(self, kind: str) -> float:
        """Share of the step in which nothing runs beside this kind of work."""
        return self.speed.profile.exposed.get(kind, 0) / self.seconds


def _fuse_elementwise(step: _ProfiledStep) -> Suggestion | None:
    share = step.share(REST)
    if not step.cuda or step.run.compiled or share <= 0.12:
        return None
    return share / 2, f"compile: true fuses norms and elementwise work, {share:.0%} of the step"


def _feed_the_gpu(step: _ProfiledStep) -> Suggestion | None:
    speed = step.speed
    if speed.device == "CPU":
        return None
    idle = max(0.0, 1 - (speed.profile.whole - speed.profile.idle) / speed.seconds)
    if idle <= 0.1:
        return None
    remedy = "a larger micro_batch_size"
    if not step.run.compiled:
        remedy += ", or compile: true,"
    return idle, f"the GPU waits for the host {idle:.0%} of the time: {remedy} gives it longer kernels"


def _communicate_less(step: _ProfiledStep) -> Suggestion | None:
    share = step.share("communication")
    if share <= 0.1:
        return None
    remedies = ["a larger micro_batch_size or more accumulation"]
    if step.run.parallel.zero == 3:
        remedies.append("zero: 2, if the weights fit")
        if step.speed.ranks > 1:
            remedies.append("parallel.hpz_size within a node")
    return share, f"communication that nothing hides takes {share:.0%}: {', '.join(remedies)}"


def _reduce_in_bf16(step: _ProfiledStep) -> Suggestion | None:
    parallel = step.run.parallel
    share = step.speed.profile.sent.get("reductions", [0.0, 0.0])[1] / step.seconds
    if share <= 0.1 or parallel.reduce_dtype != "fp32" or parallel.zero < 2 or parallel.quantize_gradients:
        return None
    gain = f"half of the {share:.0%} that reductions take with nothing beside them"
    return share / 2, f"parallel.reduce_dtype: bf16 would save up to {gain}, and round the sums to it"


def _copy_less(step: _ProfiledStep) -> Suggestion | None:
    share = step.share("copies")
    if not step.cuda or share <= 0.1:
        return None
    return share, f"copies that nothing hides take {share:.0%}: offload less, or compute more tokens a step"


def _update_less_often(step: _ProfiledStep) -> Suggestion | None:
    share = step.share("optimizer")
    if share <= 0.12:
        return None
    return share / 2, f"the update takes {share:.0%}: more tokens a step (train.batch_size) spread its cost"


def _wait_less(step: _ProfiledStep) -> Suggestion | None:
    share = step.speed.profile.idle / step.seconds
    if step.cuda or share <= 0.25:
        return None
    remedy = "a larger micro_batch_size gives operators more to do"
    if step.run.parallel.pipeline > 1:
        remedy = "more micro-batches make a pipeline's bubble smaller"
    return share, f"Python, and waiting for other ranks, take {share:.0%}: {remedy}"


def _use_free_memory(step: _ProfiledStep) -> Suggestion | None:
    if not step.cuda:
        return None
    train = step.run.train
    free = step.free_memory
    if step.run.recompute == "full" and free > 0.3:
        remedy = "recompute: auto keeps what fits instead of computing it twice"
        return 0.2, f"{free:.0%} of the memory is free: {remedy}"
    if free > 0.5 and train.batch_size > int(train.micro_batch_size) * step.speed.ranks:
        return 0.05, f"{free:.0%} of the memory is free: a larger train.micro_batch_size makes larger products"
    return None


def _multiply_in_fp8(step: _ProfiledStep) -> Suggestion | None:
    from shardwise.config.resolve import _has_fp8

    run = step.run
    share = step.share("products")
    if not step.cuda or share <= 0.5 or run.fp8.recipe != "none" or run.precision != "bf16":
        return None
    if not _has_fp8(this_machine()):
        return None
    full = run.method.type == "full"
    remedy = "precision: fp8 with compile: true" if full else "method: {type: qlora, bits: fp8}"
    return share / 3, f"products take {share:.0%}: {remedy} makes them in 8 bits"


# Suggestions of equal gain stay in this order.
RULES: tuple[Callable[[_ProfiledStep], Suggestion | None], ...] = (
    _fuse_elementwise,
    _feed_the_gpu,
    _communicate_less,
    _reduce_in_bf16,
    _copy_less,
    _update_less_often,
    _wait_less,
    _use_free_memory,
    _multiply_in_fp8,
)


def show_profile(speed: Speed, advice: list[str], console: Console) -> None:
    """Prints the profile of a step and the advice."""
    profile = speed.profile
    of_rank = f" of rank {speed.rank}" if speed.ranks > 1 else ""
    title = f"one step{of_rank} under the profiler, which slows it down: {profile.whole * 1e3:,.1f} ms"
    table = Table(title=title, title_justify="left")
    gpu = speed.device != "CPU"
    beside = gpu or bool(profile.sent)
    for column in ("", "ms", "of the step", *(["nothing else beside it"] if beside else [])):
        table.add_column(column, justify="left" if not column else "right")
    for kind, seconds in profile.kinds.items():
        alone = [f"{profile.exposed[kind] * 1e3:,.1f}"] if beside else []
        table.add_row(kind, f"{seconds * 1e3:,.1f}", f"{seconds / profile.whole:.0%}", *alone)
    rest = "idle (waits for the host)" if gpu else "Python and the rest"
    table.add_row(
        rest, f"{profile.idle * 1e3:,.1f}", f"{profile.idle / (profile.whole or 1):.0%}", *([""] if beside else [])
    )
    console.print(table)
    for kind, (total, bare) in profile.sent.items():
        hidden = f"{(total - bare) * 1e3:,.1f} hidden behind computing, {bare * 1e3:,.1f} exposed"
        console.print(f"  {'collectives' if kind == 'all' else kind}: {total * 1e3:,.1f} ms, {hidden}", markup=False)
    for line in speed.told:
        console.print(f"  {line}", markup=False)
    for name, seconds, count in profile.largest[:5]:
        console.print(f"  {seconds * 1e3:8.1f} ms {count:5d} × {name[:90]}", style="dim", markup=False)
    for line in advice:
        console.print(f"→ {line}", markup=False)
    if not advice:
        console.print("→ nothing stands out: most of the step is the work itself")
