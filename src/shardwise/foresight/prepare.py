"""Everything that is known before a process starts: the resolved run, the model's files, the data.

`prepare_run` is called once by the launcher, where all mistakes surface, and its outcome goes to the ranks as one file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.config.axes import data_ranks
from shardwise.config.load import LoadedRun
from shardwise.config.resolve import (
    check_output,
    check_room,
    purpose_of,
    resolve_machine,
    resolve_model,
    resolve_objective,
    resolve_steps,
    task_wanted,
    world_size,
)
from shardwise.config.schema import Run
from shardwise.core.errors import UserError
from shardwise.core.printable import counted
from shardwise.data.epochs import Epochs
from shardwise.data.prepare import Contents, ProgressReport, prepare_data
from shardwise.nn.models.adapt import adapt_model, labels_of, settle_attention
from shardwise.nn.models.build import vocabulary_size
from shardwise.nn.models.source import ModelSource, find_model
from shardwise.nn.models.teacher import find_teacher
from shardwise.resolved_run import ResolvedRun

if TYPE_CHECKING:
    from shardwise.nn.adapters.apply import Adapted


Gate = Callable[[ModelSource, Run, "Adapted"], Run]


def prepare_run(
    loaded: LoadedRun,
    say: Callable[[str], None] = lambda _: None,
    tell: ProgressReport | None = None,
    gate: Gate = lambda source, run, adapted: run,
    epochs: Epochs | None = None,
    contents: Contents | None = None,
) -> ResolvedRun:
    """Resolves and checks everything; raises UserError for any mistake, having written nothing but the cache.

    `gate` is asked once the model is known and before the data are read: it may refuse the run, or make it smaller.
    `epochs`, `contents`: how long epochs are and what the data are, where another process has found out.
    """
    from shardwise.checkpoint.store import choose_checkpoint
    from shardwise.nn.adapters.apply import apply_method
    from shardwise.nn.models.build import build_on_meta, check_shared
    from shardwise.nn.models.heads import listed
    from shardwise.nn.models.origin import counted, origin_of
    from shardwise.nn.models.readable import readable
    from shardwise.nn.models.weights import new_parameters
    from shardwise.parallel.offload.disk import check_disk
    from shardwise.parallel.offload.policy import disk_bytes
    from shardwise.parallel.routers.settings import resolve_routers

    answers: dict[str, str] = {}
    if loaded.run.left_open:
        from shardwise.foresight.plan.auto import answered

        planned = answered(loaded.run, say)
        loaded, answers = replace(loaded, run=planned.run), planned.reasons
    result = resolve_machine(loaded.run)
    result.reasons |= answers
    check_output(result.run)
    choose_checkpoint(result.run.resume, Path(result.run.output).expanduser() / "checkpoints")  # it must be there
    say("finding the model")
    source = find_model(result.run.model, say, task_wanted(result.run))
    resolve_objective(result, source.task)
    tokenizer = source.load_tokenizer()
    stops = source.stop_tokens(tokenizer)
    source = adapt_model(result, source, tokenizer)
    resolve_model(result, source.config)
    source = settle_attention(result, source, say)
    model = build_on_meta(source)
    check_shared(model, source.label)
    source = readable(source, model, say)
    if source.weights is not None and (new := new_parameters(model, source.weights)):
        say(listed(new))
    if (kept := origin_of(source) if source.extra else None) is not None:
        alone = (
            counted(list(kept.untouched), "tensor") + " of the source are not trained; exports copy them as they are"
        )
        for line in [*([alone] if kept.untouched else []), *kept.notes()]:
            say(line)
    adapted = apply_method(model, result.run, source.weights)
    resolve_routers(result, source, model)
    check_room(result.run, adapted.trainable, adapted.frozen)
    if (fitting := gate(source, result.run, adapted)) is not result.run:
        result.put("train.micro_batch_size", fitting.train.micro_batch_size, "the largest that fits")
    vocabulary = vocabulary_size(model)
    teacher = find_teacher(result.run, tokenizer, vocabulary, say)
    if teacher is not None:
        from shardwise.objectives.distill import check_teacher_axes

        check_teacher_axes(result.run, teacher, world_size(result.run))
    purpose = purpose_of(result.run)
    wanted = result.run.train.epochs or (None if result.run.train.steps is not None else 1.0)
    early = wanted is None or epochs is not None  # a run that counts in epochs must know how long they are
    known: dict[str, Any] = {"purpose": purpose, "labels": labels_of(result.run), "stops": stops, "read": contents}
    data = prepare_data(result.run.data, tokenizer, result.run.train.seed, say, vocabulary, early, tell, **known)
    output = Path(result.run.output).expanduser()
    job = ResolvedRun(result.run, result.reasons, source, tokenizer, data, adapted, output, teacher, epochs)
    if not early:
        assert wanted is not None
        epochs = Epochs.of(wanted, job.loader().epoch_sequences)
        rows = result.run.train.batch_size
        resolve_steps(result, wanted, epochs.steps(rows), epochs.in_words(wanted, rows, None))
        if (asked := loaded.run.train.steps) is not None and asked > epochs.steps(rows):
            say(f"train.epochs={wanted:g} ends at step {epochs.steps(rows)}, before train.steps={asked}")
        if max(epochs.sizes) < rows:
            say(_never_full(result.run, max(epochs.sizes), loaded.run.train.micro_batch_size != "auto"))
    job = replace(job, run=result.run, reasons=result.reasons, epochs=epochs)
    if size := disk_bytes(job.run, adapted.trainable, adapted.frozen_bytes):
        check_disk(job.offload_folder, size)
    _check_resume(job)
    return job


def _never_full(run: Run, sequences: int, micro_given: bool) -> str:
    """What to say where an epoch has fewer sequences than a batch: its only step is a smaller one."""
    ranks, micro = data_ranks(run.parallel, world_size(run)), int(run.train.micro_batch_size)
    fits = sequences // ranks * ranks
    remedy = f"train.batch_size={fits}" if fits else f"{counted(sequences, 'rank', 'ranks')} or fewer"
    if fits and micro_given and fits % (micro * ranks):
        remedy += " train.micro_batch_size=1"
    if run.data.packing:
        remedy += ", or data.packing=false (a sequence for each document)"
    packed = "packed " * bool(run.data.packing)
    return (
        f"an epoch has {counted(sequences, f'{packed}sequence', f'{packed}sequences')}, fewer than train.batch_size "
        f"{run.train.batch_size}: it is one step of {sequences}\n    → for full steps: {remedy}"
    )


def _check_resume(job: ResolvedRun) -> None:
    """A checkpoint that cannot be gone on from is told before any process starts; its files are hashed by the ranks."""
    from shardwise.checkpoint.integrity import verify
    from shardwise.checkpoint.store import check_same_data, choose_checkpoint
    from shardwise.train.describe_method import check_same_method

    folder = choose_checkpoint(job.run.resume, job.output / "checkpoints")
    if folder is None:
        return
    try:
        check_same_data(folder, job.data.fingerprint)
        check_same_method(folder, job.run)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # damaged: the ranks will find and name it, and may go on from an earlier one
        pass
    except UserError:
        if not verify(folder):  # else a flipped bit makes it look like another run's
            raise


def write_resolved_run(job: ResolvedRun, file: Path) -> None:
    """Hands a prepared job to the ranks."""
    values: dict[str, Any] = {"run": job.run.model_dump(mode="json"), "reasons": job.reasons}
    values["epochs"] = None if job.epochs is None else job.epochs.sizes
    values["contents"] = {"digests": job.data.digests, "rows": job.data.counts}
    file.write_text(json.dumps(values, indent=1))


def read_resolved_run(file: Path) -> ResolvedRun:
    """The run as the launcher prepared it, in a rank: nothing of the data is read again but the cache."""
    values = json.loads(file.read_text())
    epochs = None if values["epochs"] is None else Epochs(tuple(values["epochs"]))
    contents = Contents(**values["contents"])
    job = prepare_run(LoadedRun(Run.model_validate(values["run"])), epochs=epochs, contents=contents)
    return replace(job, reasons=values["reasons"])
