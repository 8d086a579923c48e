"""Presents a profiled step, and suggests what would make it faster."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from shardwise.config.resolve import this_machine
from shardwise.config.schema import Run
from shardwise.observe.profile import REST, StepProfile


@dataclass(frozen=True)
class Speed:
    """Measurements of the slowest rank, and of all ranks together."""

    seconds: float  # a step
    tokens: int  # of a step, over all ranks
    mfu: float | None
    memory: int | None  # bytes at the peak, of the fullest rank; of a GPU
    room: int | None  # that it has
    device: str
    ranks: int
    rank: int  # the slowest
    profile: StepProfile
    told: list[str] = field(default_factory=list)  # what was chosen at the start, by measurement

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def advise(run: Run, speed: Speed) -> list[str]:
    """Suggestions from the measurements, the largest gain first."""
    profile = speed.profile
    step_seconds = speed.profile.whole or 1.0
    share = {kind: seconds / step_seconds for kind, seconds in profile.exposed.items()}
    idle = max(0.0, 1 - (profile.whole - profile.idle) / speed.seconds) if speed.device != "CPU" else 0.0
    cuda = run.device == "cuda"
    advice = []
    if cuda and not run.compiled and share.get(REST, 0) > 0.12:
        advice.append(
            (share[REST] / 2, f"compile: true fuses norms and elementwise work, {share[REST]:.0%} of the step")
        )
    if idle > 0.1:
        remedy_text = "a larger micro_batch_size" + ("" if run.compiled else ", or compile: true,")
        advice.append(
            (idle, f"the GPU waits for the host {idle:.0%} of the time: {remedy_text} gives it longer kernels")
        )
    if (part := share.get("communication", 0)) > 0.1:
        remedies = ["a larger micro_batch_size or more accumulation"]
        remedies += ["zero: 2, if the weights fit"] if run.parallel.zero == 3 else []
        remedies += ["parallel.hpz_size within a node"] if run.parallel.zero == 3 and speed.ranks > 1 else []
        advice.append((part, f"communication that nothing hides takes {part:.0%}: {', '.join(remedies)}"))
    summed = profile.sent.get("reductions", [0.0, 0.0])[1] / step_seconds
    spread = run.parallel
    if summed > 0.1 and spread.reduce_dtype == "fp32" and spread.zero >= 2 and not spread.quantize_gradients:
        gain = f"half of the {summed:.0%} that reductions take with nothing beside them"
        advice.append((summed / 2, f"parallel.reduce_dtype: bf16 would save up to {gain}, and round the sums to it"))
    if cuda and (part := share.get("copies", 0)) > 0.1:
        advice.append((part, f"copies that nothing hides take {part:.0%}: offload less, or compute more tokens a step"))
    if (part := share.get("optimizer", 0)) > 0.12:
        advice.append((part / 2, f"the update takes {part:.0%}: more tokens a step (train.batch_size) spread its cost"))
    free = 1 - (speed.memory or 0) / speed.room if speed.room else 0.0
    if not cuda and (waits := profile.idle / step_seconds) > 0.25:
        remedy = "more micro-batches make a pipeline's bubble smaller" if run.parallel.pipeline > 1 else (
            "a larger micro_batch_size gives operators more to do")  # fmt: skip
        advice.append((waits, f"Python, and waiting for other ranks, take {waits:.0%}: {remedy}"))
    if cuda and run.recompute == "full" and free > 0.3:
        advice.append(
            (0.2, f"{free:.0%} of the memory is free: recompute: auto keeps what fits instead of computing it twice")
        )
    elif cuda and free > 0.5 and run.train.batch_size > int(run.train.micro_batch_size) * speed.ranks:
        advice.append(
            (0.05, f"{free:.0%} of the memory is free: a larger train.micro_batch_size makes larger products")
        )
    products = share.get("products", 0)
    if cuda and products > 0.5 and run.fp8.recipe == "none" and run.precision == "bf16":
        from shardwise.config.resolve import _has_fp8

        if _has_fp8(this_machine()):
            full = run.method.type == "full"
            remedy_text = "precision: fp8 with compile: true" if full else "method: {type: qlora, bits: fp8}"
            advice.append((products / 3, f"products take {products:.0%}: {remedy_text} makes them in 8 bits"))
    return [text for _, text in sorted(advice, key=lambda item: -item[0])]


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
