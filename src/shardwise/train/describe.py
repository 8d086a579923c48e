"""What the terminal shows around a run: its plan before, its result after, and the resolved config."""

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
from shardwise.objectives.cost import held_besides
from shardwise.observe.curve import series_from, terminal_curve
from shardwise.parallel.offload.policy import float8_gathers, held_by_place
from shardwise.parallel.pipeline.schedule import bubble, schedule_of, simulate
from shardwise.parallel.routers.settings import chosen_in, told
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


def _data_lines(job: ResolvedRun) -> Iterator[str]:
    """What the run learns from, and what became of rows that did not go in as they are."""
    data = job.data
    if data.complete:
        held = data.total("held_out") + sum(int(one.known["documents"]) for one in data.eval)
        learned = (
            f", {data.total('supervised'):,} of them learned"
            if job.source.task in ("causal", "seq2seq")
            else ""
        )
        counts = f"{data.total('documents'):,} documents, {data.total('tokens'):,} tokens{learned}"
        yield f"data{counts}" + (f"; {held:,} held out" if held else "")
    else:
        yield "datathe first windows of its sources; the rest is being tokenised"
    for one in data.train:
        fates = (one.facts or {}).get("fates", {})
        if fates:
            said = ", ".join(f"{count:,} {fate}" for fate, count in fates.items())
            yield f"[yellow]{escape(one.spec.source.path)}: {said} (listed in {one.folder / 'fates.jsonl'})[/yellow]"


def _aim(job: ResolvedRun) -> str | None:
    """What the model is trained to do, where it is not to go on with a text."""
    objective: Any = job.run.objective
    match objective.type:
        case "seq2seq":
            return "write targets from sources"
        case "masked":
            whole = ", whole words together" if objective.whole_words else ""
            return f"fill in masked tokens, {objective.mlm_probability:.0%} of all{whole}"
        case "classify":
            labels = objective.labels
            return f"tell {len(labels)} classes apart: {', '.join(labels[:12])}{' …' if len(labels) > 12 else ''}"
    return None


def print_plan(job: ResolvedRun, console: Console | None = None) -> None:
    """The run in a dozen lines: model, data, batch arithmetic, sharding and what each rank will hold."""
    run, ranks = job.run, job.ranks
    layout = layout_of(run.parallel, ranks)
    shard = layout.shard
    micro = int(run.train.micro_batch_size)
    rounds = run.train.batch_size // (micro * layout.data)
    table = Table(
        title="plan of the run",
        title_justify="left",
        show_header=False,
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for title, words in method_lines(job):
        table.add_row(title, words)
    if (aim := _aim(job)) is not None:
        table.add_row("objective", aim)
    if routers := told(chosen_in(run, job.reasons), run.router.balance):
        table.add_row("routers", routers)
    for words in _data_lines(job):
        table.add_row("data" if words.startswith("data") else "", words.removeprefix("data"))
    packed = " (packed)" if run.data.packing else ""
    sequences = (
        f"{run.train.batch_size} sequences of up to {run.data.sequence_length} tokens{packed}"
    )
    times = "×" if job.epochs is None else "of up to"
    table.add_row("steps", f"{run.train.steps} {times} {sequences}; {_epochs(job)}")
    table.add_row(
        "batch",
        f"{run.train.batch_size} = {micro} per forward × {layout.data} ranks{_apart(run)} × {rounds} accumulated",
    )
    groups = f"; {layout.replicate} groups of {shard}" if layout.replicate > 1 < shard else ""
    groups += describe_collectives(run.parallel, shard, int(run.ranks), float8_gathers(run, shard))
    divided = STAGES[run.parallel.zero] if layout.replicate * shard > 1 else _nothing(layout)
    where = f"{ranks} on {run.device} ({run.backend}), {run.computes_in}"
    table.add_row("ranks", f"{where}, ZeRO {run.parallel.zero}: {divided}{groups}")
    if run.parallel.beyond_data:
        table.add_row("axes", "; ".join(axis_lines(layout)))
        table.add_row("", Text(picture(layout, int(run.ranks)), no_wrap=True))
        if layout.pipeline > 1:
            table.add_row("pipeline", _pipeline(run, layout.pipeline, rounds))
    if isinstance(run.parallel.bucket, int):
        model = build_on_meta(job.source)
        apply_method(model, run, job.source.weights)
        plain = unmanaged(model, run.parallel.zero, run.precision)
        units = choose_units(model, find_blocks(model), run.parallel.bucket, shard, plain)
        table.add_row("buckets", describe_units(units, run.parallel.bucket))
    pieces = layout.pipeline * layout.tensor
    for place, kinds in held_by_place(
        run, job.adapted.trainable // pieces, shard, job.adapted.frozen_bytes // pieces
    ).items():
        where, more = _place(place, run.offload.optimizer)
        parts = ", ".join(f"{kind} {human(size)}" for kind, size in kinds.items())
        table.add_row(where, parts + more)
    for name, what, size, more in held_besides(job):
        held = f": {human(size)} per rank" if size else ": nothing is held besides"
        table.add_row(name, escape(f"{what}{held}{'; ' * bool(more)}{more}"))
    table.add_row(
        "rate",
        f"{run.train.learning_rate:g} {_named(run.train.schedule)}, {run.train.optimizer}, "
        f"max_grad_norm {run.train.max_grad_norm}",
    )
    table.add_row("output", str(job.output))
    (console or Console()).print(table)


def _nothing(layout: MeshLayout) -> str:
    return (
        "alone, nothing to divide"
        if layout.ranks == 1
        else "no rank besides that has the same weights"
    )


def _pipeline(run: Run, stages: int, micros: int) -> str:
    """The order of a pipeline's work, how long stages will wait for one another, and what would help."""
    schedule = schedule_of(run.parallel)
    idle = bubble(
        simulate(schedule, stages, micros, lambda a: 2.0 if a.kind == "backward" else 1.0), stages
    )
    advice = (
        "; a smaller micro_batch_size or a larger batch_size makes it less" if idle > 0.25 else ""
    )
    order = run.parallel.pipeline_schedule
    return f"{order}, {micros} micro-batches through {stages} stages: {idle:.0%} of the time idle{advice}"


def _epochs(job: ResolvedRun) -> str:
    """How many epochs the steps are."""
    train = job.run.train
    assert train.steps is not None
    if job.epochs is None and not job.data.complete:
        return "how many epochs that is, metrics.jsonl will tell once the data are tokenised"
    if job.epochs is None:
        return stream_in_words(train.steps, train.batch_size, job.loader().epoch_sequences())
    assert train.epochs is not None
    return job.epochs.in_words(train.epochs, train.batch_size, train.steps)


def _apart(run: Run) -> str:
    return " with different data" if run.parallel.beyond_data else ""


def _place(place: str, states: str) -> tuple[str, str]:
    """A place as the plan calls it, and what it adds to what is there."""
    if place == "auto":
        away = "host" if states == "cpu" else states
        return (
            "per rank",
            f"; offload.ratio: auto decides at the start how much of it goes to the {away}",
        )
    if place == "device":
        return "per rank", ", and activations"
    return f"per rank, {'host' if place == 'cpu' else place}", ""


def print_account(
    account: tuple[KeyAccount, ...], run: Run, console: Console | None = None
) -> None:
    """What became of each key of a DeepSpeed config, with the answers to "auto"; nothing where there is none."""
    if not account:
        return
    from shardwise.config.deepspeed import line

    table = Table(
        title="DeepSpeed config, key by key",
        title_justify="left",
        show_header=False,
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column(style="bold", overflow="fold")
    table.add_column()
    table.add_column(overflow="fold")
    resolved = run.model_dump(mode="json")
    for entry in account:
        met, verdict, done = line(entry, resolved)
        table.add_row(
            Text(met), Text(verdict, style="" if verdict == "honoured" else "dim"), Text(done)
        )
    (console or Console()).print(table, highlight=False)


def print_result(result: Result, job: ResolvedRun, console: Console | None = None) -> None:
    """The curve and where things lie."""
    console = console or Console()
    ascii_only = not (console.encoding or "").lower().startswith("utf")
    console.print(
        terminal_curve(
            series_from(result.metrics), width=min(72, console.width - 4), ascii_only=ascii_only
        ),
        highlight=False,
        markup=False,
    )
    loss = f"loss {result.loss:.4f}" if result.loss is not None else "finished already"
    held = f", evaluation loss {result.eval_loss:.4f}" if result.eval_loss is not None else ""
    seen = [record["epoch"] for record in result.metrics if record["kind"] == "train"]
    console.print(
        f"done: {result.step} steps, {loss}{held}{f'; {seen[-1]:.2f} epochs' if seen else ''}"
    )
    talk = (
        f"   (talk to it: shardwise chat {shlex.quote(str(job.output))})"
        if job.source.task == "causal"
        else ""
    )
    console.print(f"  model    {result.model}{talk}", highlight=False)
    if (
        result.exported and result.exported != step_folder(job.output, result.step).name
    ):  # the figures above are the last step's
        console.print(
            f"           of {result.exported}, the best by {job.run.checkpoint.best.metric}",
            highlight=False,
        )
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
    still_open = [p for p, v in values if p == "train.steps" and v is None]
    if still_open:
        console.print("train.steps follows from train.epochs once the data are read", style="dim")
    for note in loaded.notes:
        console.print(note, style="dim", highlight=False)
    for remark in remarks(result.run):
        console.print(
            f"{remark.field}: {remark.problem}\n  → {remark.remedy}", style="dim", highlight=False
        )


def _named(schedule: Any) -> str:
    return schedule if isinstance(schedule, str) else str(schedule.type)


def changed_settings(checkpoint: Path, run: Run) -> list[str]:
    """What differs from the run that wrote a checkpoint, apart from where it runs and writes."""
    before = dict(flatten(read_saved(checkpoint / "run.json")))
    now = dict(flatten(run.model_dump(mode="json")))
    own = (
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
    return [
        f"{written(path)} {before.get(path)} → {value}"
        for path, value in now.items()
        if before.get(path) != value and not path.startswith(own)
    ]
