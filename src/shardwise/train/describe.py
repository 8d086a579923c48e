"""Terminal output around a run: its plan before, its result after, and the resolved config."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardwise.checkpoint.folders import step_folder
from shardwise.config.advanced import DEEPSPEED_ONLY, written
from shardwise.config.combinations import remarks
from shardwise.config.paths import flatten
from shardwise.config.renamed import read_saved
from shardwise.config.units import human
from shardwise.data.epochs import stream_in_words
from shardwise.distributed.mesh import MeshLayout, layout_of
from shardwise.distributed.mesh_diagram import axis_lines, picture
from shardwise.nn.adapters.apply import apply_method
from shardwise.nn.models.build import build_on_meta, find_blocks
from shardwise.objectives.cost import extra_model_memory
from shardwise.observe.curve import series_from, terminal_curve
from shardwise.parallel.offload.policy import float8_gathers, held_by_place
from shardwise.parallel.pipeline.schedule import bubble, schedule_of, simulate
from shardwise.parallel.routers.settings import chosen_in, describe_choice
from shardwise.parallel.zero.plusplus import describe_collectives
from shardwise.parallel.zero.stages import unmanaged
from shardwise.parallel.zero.units import choose_units, describe_units
from shardwise.train.describe_method import method_lines

if TYPE_CHECKING:
    from shardwise.config.deepspeed import KeyAccount
    from shardwise.config.load import LoadedRun
    from shardwise.config.resolve import Resolution
    from shardwise.config.schema import Run
    from shardwise.resolved_run import ResolvedRun
    from shardwise.train.result import Result

STAGES = {
    0: "nothing is sharded (every rank holds everything)",
    1: "optimizer states are sharded",
    2: "optimizer states and gradients are sharded",
    3: "optimizer states, gradients and parameters are sharded",
}

# Prefixes of settings that may differ from those of the run that saved a checkpoint.
NOT_COMPARED = (
    "output",
    "resume",
    "ranks",
    "device",
    "backend",
    "log.",
    "timeout",
    "export.",
    "checkpoint.",
)


def _data_lines(job: ResolvedRun) -> Iterator[tuple[str, str]]:
    """Table rows: the amount of data, and what happened to rows that were changed or dropped."""
    data = job.data
    if data.complete:
        held_out = data.total("held_out")
        held_out += sum(int(part.known["documents"]) for part in data.eval)
        counts = f"{data.total('documents'):,} documents, {data.total('tokens'):,} tokens"
        if job.source.task in ("causal", "seq2seq"):
            counts += f", {data.total('supervised'):,} of them learned"
        if held_out:
            counts += f"; {held_out:,} held out"
        yield "data", counts
    else:
        yield "data", "the first windows of its sources; the rest is being tokenised"
    for part in data.train:
        fates = (part.facts or {}).get("fates", {})
        if fates:
            counts = ", ".join(f"{count:,} {fate}" for fate, count in fates.items())
            listed = f"listed in {part.folder / 'fates.jsonl'}"
            yield "", f"[yellow]{escape(part.spec.source.path)}: {counts} ({listed})[/yellow]"


def _aim(job: ResolvedRun) -> str | None:
    """What the model is trained to do; None where the objective has no row of its own."""
    objective: Any = job.run.objective
    match objective.type:
        case "seq2seq":
            return "write targets from sources"
        case "masked":
            words = ", whole words together" if objective.whole_words else ""
            return f"fill in masked tokens, {objective.mlm_probability:.0%} of all{words}"
        case "classify":
            labels = objective.labels
            listed = ", ".join(labels[:12])
            if len(labels) > 12:
                listed += " …"
            return f"tell {len(labels)} classes apart: {listed}"
    return None


def print_plan(job: ResolvedRun, console: Console | None = None) -> None:
    """The run in a dozen lines: model, data, batch arithmetic, sharding and memory per rank."""
    layout = layout_of(job.run.parallel, job.ranks)
    table = _table("plan of the run")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows: list[tuple[str, str | Text]] = [*_training_rows(job, layout)]
    rows += _parallel_rows(job, layout)
    rows += _memory_rows(job, layout)
    for title, content in rows:
        table.add_row(title, content)
    train = job.run.train
    rate = f"{train.learning_rate:g} {_named(train.schedule)}, {train.optimizer}"
    table.add_row("rate", f"{rate}, max_grad_norm {train.max_grad_norm}")
    table.add_row("output", str(job.output))
    (console or Console()).print(table)


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0)
    )


def _training_rows(job: ResolvedRun, layout: MeshLayout) -> Iterator[tuple[str, str]]:
    """Model, objective, data, steps and batch."""
    run = job.run
    batch = run.train.batch_size
    yield from method_lines(job)
    if (aim := _aim(job)) is not None:
        yield "objective", aim
    if routers := describe_choice(chosen_in(run, job.reasons), run.router.balance):
        yield "routers", routers
    yield from _data_lines(job)
    sequences = f"{batch} sequences of up to {run.data.sequence_length} tokens"
    if run.data.packing:
        sequences += " (packed)"
    times = "×" if job.epochs is None else "of up to"
    yield "steps", f"{run.train.steps} {times} {sequences}; {_epochs(job)}"
    data_ranks = f"{layout.data} ranks"
    if run.parallel.uses_model_parallelism:
        data_ranks += " with different data"
    micro = int(run.train.micro_batch_size)
    rounds = _rounds(run, layout)
    yield "batch", f"{batch} = {micro} per forward × {data_ranks} × {rounds} accumulated"


def _parallel_rows(job: ResolvedRun, layout: MeshLayout) -> Iterator[tuple[str, str | Text]]:
    """Ranks, ZeRO stage, axes and buckets."""
    run = job.run
    parallel = run.parallel
    shard = layout.shard
    ranks = f"{job.ranks} on {run.device} ({run.backend}), {run.computes_in}"
    sharding = f"ZeRO {parallel.zero}: {_sharding(run, layout)}"
    if layout.replicate > 1 and shard > 1:
        sharding += f"; {layout.replicate} groups of {shard}"
    sharding += describe_collectives(parallel, shard, int(run.ranks), float8_gathers(run, shard))
    yield "ranks", f"{ranks}, {sharding}"
    if parallel.uses_model_parallelism:
        yield "axes", "; ".join(axis_lines(layout))
        yield "", Text(picture(layout, int(run.ranks)), no_wrap=True)
        if layout.pipeline > 1:
            yield "pipeline", _pipeline(run, layout.pipeline, _rounds(run, layout))
    if isinstance(parallel.bucket, int):
        model = build_on_meta(job.source)
        apply_method(model, run, job.source.weights)
        plain = unmanaged(model, parallel.zero, run.precision)
        units = choose_units(model, find_blocks(model), parallel.bucket, shard, plain)
        yield "buckets", describe_units(units, parallel.bucket)


def _memory_rows(job: ResolvedRun, layout: MeshLayout) -> Iterator[tuple[str, str]]:
    """What each rank holds, by place."""
    pieces = layout.pipeline * layout.tensor
    trainable = job.adapted.trainable // pieces
    frozen_bytes = job.adapted.frozen_bytes // pieces
    for place, kinds in held_by_place(job.run, trainable, layout.shard, frozen_bytes).items():
        title, more = _place(place, job.run.offload.optimizer)
        yield title, ", ".join(f"{kind} {human(size)}" for kind, size in kinds.items()) + more
    for name, what, size, more in extra_model_memory(job):
        amount = f"{human(size)} per rank" if size else "nothing is held besides"
        content = f"{what}: {amount}"
        if more:
            content += f"; {more}"
        yield name, escape(content)


def _rounds(run: Run, layout: MeshLayout) -> int:
    return run.train.batch_size // (int(run.train.micro_batch_size) * layout.data)


def _sharding(run: Run, layout: MeshLayout) -> str:
    if layout.replicate * layout.shard > 1:
        return STAGES[run.parallel.zero]
    if layout.ranks == 1:
        return "alone, nothing to divide"
    return "no rank besides that has the same weights"


def _pipeline(run: Run, stages: int, micros: int) -> str:
    """The pipeline's schedule, its predicted idle time, and what would shorten that."""
    schedule = schedule_of(run.parallel)
    timeline = simulate(schedule, stages, micros, lambda a: 2.0 if a.kind == "backward" else 1.0)
    idle = bubble(timeline, stages)
    text = f"{run.parallel.pipeline_schedule}, {micros} micro-batches through {stages} stages: "
    text += f"{idle:.0%} of the time idle"
    if idle > 0.25:
        text += "; a smaller micro_batch_size or a larger batch_size makes it less"
    return text


def _epochs(job: ResolvedRun) -> str:
    """The number of epochs that the steps make."""
    train = job.run.train
    assert train.steps is not None
    if job.epochs is None and not job.data.complete:
        return "how many epochs that is, metrics.jsonl will tell once the data are tokenised"
    if job.epochs is None:
        return stream_in_words(train.steps, train.batch_size, job.loader().epoch_sequences())
    assert train.epochs is not None
    return job.epochs.in_words(train.epochs, train.batch_size, train.steps)


def _place(place: str, states: str) -> tuple[str, str]:
    """The plan's title for a place, and a remark on its content."""
    if place == "auto":
        target = "host" if states == "cpu" else states
        share = f"auto decides at the start how much of it goes to the {target}"
        return "per rank", f"; offload.ratio: {share}"
    if place == "device":
        return "per rank", ", and activations"
    name = "host" if place == "cpu" else place
    return f"per rank, {name}", ""


def print_account(
    account: tuple[KeyAccount, ...], run: Run, console: Console | None = None
) -> None:
    """What happened to each key of a DeepSpeed config, with the values chosen for "auto"."""
    if not account:
        return
    from shardwise.config.deepspeed import line

    table = _table("DeepSpeed config, key by key")
    table.add_column(style="bold", overflow="fold")
    table.add_column()
    table.add_column(overflow="fold")
    resolved = run.model_dump(mode="json")
    for entry in account:
        key, verdict, action = line(entry, resolved)
        style = "" if verdict == "honoured" else "dim"
        table.add_row(Text(key), Text(verdict, style=style), Text(action))
    (console or Console()).print(table, highlight=False)


def print_result(result: Result, job: ResolvedRun, console: Console | None = None) -> None:
    """The loss curve, the last figures, and the paths of the results."""
    console = console or Console()
    ascii_only = not (console.encoding or "").lower().startswith("utf")
    width = min(72, console.width - 4)
    curve = terminal_curve(series_from(result.metrics), width=width, ascii_only=ascii_only)
    console.print(curve, highlight=False, markup=False)
    summary = f"done: {result.step} steps, "
    summary += f"loss {result.loss:.4f}" if result.loss is not None else "finished already"
    if result.eval_loss is not None:
        summary += f", evaluation loss {result.eval_loss:.4f}"
    epochs = [record["epoch"] for record in result.metrics if record["kind"] == "train"]
    if epochs:
        summary += f"; {epochs[-1]:.2f} epochs"
    console.print(summary)
    model = f"  model    {result.model}"
    if job.source.task == "causal":
        model += f"   (talk to it: shardwise chat {shlex.quote(str(job.output))})"
    console.print(model, highlight=False)
    # The figures above are the last step's; the exported checkpoint may be an earlier one.
    if result.exported and result.exported != step_folder(job.output, result.step).name:
        metric = job.run.checkpoint.best.metric
        console.print(f"           of {result.exported}, the best by {metric}", highlight=False)
    if result.check:
        console.print(f"  check    {result.check}", highlight=False, markup=False)
    for note in result.notes:
        console.print(f"  export   {note}", highlight=False, markup=False)
    if result.foresight:
        console.print(f"  foreseen {result.foresight}", highlight=False, markup=False)
    console.print(f"  curve    {job.output / 'loss.html'}", highlight=False)
    console.print(f"  metrics  {job.output / 'metrics.jsonl'}", highlight=False)


def print_config(result: Resolution, loaded: LoadedRun, advanced: bool = False) -> None:
    """Every value of the run beside its origin; of `advanced` what was set, or all of it."""
    console = Console()
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("setting", style="bold", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", style="dim", overflow="fold")
    values = flatten(result.run.model_dump(mode="json"))
    hidden = 0
    for path, value in sorted(values, key=lambda item: written(item[0]) != item[0]):
        shown = written(path)
        origin = loaded.origin_of(path)
        if origin == "default" and path in DEEPSPEED_ONLY:
            continue
        if origin == "default" and shown != path and not advanced:
            hidden += 1
            continue
        reason = result.reasons.get(path)
        origin = f"auto: {reason}" if reason else origin
        table.add_row(shown, json.dumps(value, ensure_ascii=False), origin)
    console.print(table, highlight=False)
    if hidden:
        console.print(
            f"{hidden} settings of advanced are not set; --advanced lists them", style="dim"
        )
    if ("train.steps", None) in values:
        console.print("train.steps follows from train.epochs once the data are read", style="dim")
    for note in loaded.notes:
        console.print(note, style="dim", highlight=False)
    for remark in remarks(result.run):
        text = f"{remark.field}: {remark.problem}\n  → {remark.remedy}"
        console.print(text, style="dim", highlight=False)


def _named(schedule: Any) -> str:
    return schedule if isinstance(schedule, str) else str(schedule.type)


def changed_settings(checkpoint: Path, run: Run) -> list[str]:
    """Settings that differ from the run that saved a checkpoint, but for device and output."""
    before = dict(flatten(read_saved(checkpoint / "run.json")))
    now = dict(flatten(run.model_dump(mode="json")))
    return [
        f"{written(path)} {before.get(path)} → {value}"
        for path, value in now.items()
        if before.get(path) != value and not path.startswith(NOT_COMPARED)
    ]
