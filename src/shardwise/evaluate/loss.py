"""Loss per source of a loaded model, with the loader and the objective of training.

The data are read with the settings of the run that trained the model, so that what was held out then is what is
measured now, packed in the same order into the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.config.metrics import LESS
from shardwise.config.resolve import purpose_of, resolve_machine, resolve_objective
from shardwise.config.schema import Data, Offload, Parallel, Refine, Run
from shardwise.core.errors import UserError
from shardwise.data.loader import Loader, make_loader
from shardwise.data.mixing import SourceStream, source_names
from shardwise.data.prepare import prepare_data
from shardwise.evaluate.bars import Bar
from shardwise.evaluate.figures import Figure, TaskResult, ratio
from shardwise.evaluate.settings import LossTask
from shardwise.nn.adapters.apply import Adapted
from shardwise.nn.attention.varlen import set_attention
from shardwise.nn.generate import context_length
from shardwise.nn.models.adapt import settle_attention
from shardwise.nn.models.build import not_recording, vocabulary_size
from shardwise.nn.models.source import ModelSource, stop_tokens
from shardwise.nn.models.tasks import task_of
from shardwise.objectives.make import make_objective
from shardwise.parallel.routers.install import watch_routers
from shardwise.parallel.selfcheck import UnshardedModel, check_documents
from shardwise.resolved_run import ResolvedRun
from shardwise.train.evaluation import HeldoutBatching, evaluation_of, summed_losses

UNTRAINED = Adapted(0, 0, 0, 0, None, (), None)
ALONE = ("causal", "seq2seq", "masked", "classify")  # objectives that need no model besides the one that is measured


@dataclass(frozen=True)
class SingleProcess:
    """This process as a world of one."""

    device: torch.device
    rank: int = 0
    size: int = 1


def measure_loss(
    task: LossTask,
    name: str,
    model: Any,
    tokenizer: Any,
    run: Run | None,
    bar: Bar,
) -> TaskResult:
    """Returns loss and perplexity on the task's data, or on the data that the run held out."""
    run, source = _settings(task, name, model, run)
    if source.attention:
        set_attention(model, source.attention)
    vocabulary = vocabulary_size(model)
    data, held_out = _data(task, run)
    stops = stop_tokens(tokenizer, getattr(model, "generation_config", None))
    prepared = _prepared(data, tokenizer, run, vocabulary, _classes(model), stops)
    job = ResolvedRun(run, {}, source, tokenizer, prepared, UNTRAINED, Path(run.output))
    stores = [source_data.held_out if held_out else source_data.store for source_data in prepared.train]
    names = source_names(data.train)
    loader = make_loader(
        [SourceStream(n, s) for n, s in zip(names, stores, strict=True)], data, run.train.seed, job.layout, 1.0
    )
    return _measure(task.label, job, model, loader, vocabulary, bar)


def _measure(label: str, job: ResolvedRun, model: Any, loader: Loader, vocabulary: int, bar: Bar) -> TaskResult:
    unsharded: Any = UnshardedModel(model)
    world: Any = SingleProcess(model.device)
    notes: list[str] = []
    documents_separate = check_documents(unsharded, vocabulary, job, world.device, notes.append)
    routers = watch_routers(model, job.source, job.run)
    objective = make_objective(job, world, unsharded, documents_separate, routers=routers)
    micro = int(job.run.train.micro_batch_size)
    parts = []
    advance = bar(-(-loader.epoch_sequences() // micro))

    def collect(part: torch.Tensor) -> None:
        parts.append(part)
        advance(1)

    with unsharded.evaluation(), not_recording(model):
        sums = summed_losses(model, objective, loader, HeldoutBatching(micro), model.device, each=collect)
    if routers is not None:
        routers.remove()
    evaluation = evaluation_of(sums, objective, loader.names)
    columns = np.stack([part.numpy() for part in parts])  # batch, (sum, units), figure
    figures = [replace(_ratio("loss", columns[:, :, 0], more=False), value=evaluation.loss)]
    if (perplexity := evaluation.record.get("perplexity")) is not None:
        figures += [Figure("perplexity", perplexity, count=len(parts), more_is_better=False)]
    for i, figure_name in enumerate(objective.figures):
        figures.append(_ratio(figure_name, columns[:, :, 1 + i], more=not any(word in figure_name for word in LESS)))
    first_source = 1 + len(objective.figures)
    groups: dict[str, Figure] = {}
    for i, name in enumerate(loader.names if len(loader.names) > 1 else ()):
        groups[name] = _ratio("loss", columns[:, :, first_source + i], more=False)
    return TaskResult(label, "loss", figures, groups, notes)


def _ratio(name: str, pairs: np.ndarray, more: bool = True) -> Figure:
    return ratio(name, pairs[:, 0], pairs[:, 1], more)


def _settings(task: LossTask, name: str, model: Any, run: Run | None) -> tuple[Run, ModelSource]:
    """The run's own settings, or those of a default run with this model and data; and the model's source."""
    if run is None:
        if task.data is None:
            problem = "no run made this model, so nothing says what to measure it on"
            raise UserError("MODEL", name, problem, "add --data FILE, or --tasks, --choice, --generate, …")
        length = min(2048, context_length(model) or 2048)
        run = Run.model_validate({
            "model": name, "data": {"train": task.data, "sequence_length": length}, "device": model.device.type,
            "ranks": 1,
        })  # fmt: skip
    else:
        # What spread it over its machine has no meaning here, and need not be possible here.
        local_settings = {"ranks": 1, "device": model.device.type, "backend": "auto", "precision": "auto"}
        run = run.model_copy(update=local_settings | {"parallel": Parallel(), "offload": Offload()})
    result = resolve_machine(run)
    resolve_objective(result, task_of(model.config))
    settings: Any = result.run.objective
    if settings.type not in ALONE:
        problem = f"the loss of {settings.type} needs more than the model itself, and is measured while training alone"
        raise UserError("objective", settings.type, problem, "give texts with --data, or other tasks")
    source = ModelSource(name, model.config, None, name, task=task_of(model.config))
    source = settle_attention(result, source, lambda _: None)
    return result.run, source


def _data(task: LossTask, run: Run) -> tuple[Data, bool]:
    """The data to read, under `train`, and whether to measure only what was held out of it."""
    data = run.data
    if task.sequence_length is not None:
        data = data.model_copy(update={"sequence_length": task.sequence_length})
    if sources := task.data or data.eval_sources:
        return data.model_copy(update={"train": sources, "eval": 0.0, "refine": Refine()}), False
    if not data.eval_share:
        problem = "the run that made this model held nothing out (data.eval)"
        raise UserError("--data", None, problem, "give the files to measure on: --data FILE")
    return data, True


def _classes(model: Any) -> tuple[str, ...]:
    """Labels of a classifier's head by number: what it was trained for, whichever run the settings are from."""
    names = model.config.id2label if task_of(model.config) == "classify" else {}
    return tuple(str(names[number]) for number in sorted(names))


def _prepared(
    data: Data, tokenizer: Any, run: Run, vocabulary: int, labels: tuple[str, ...], stops: tuple[str, ...]
) -> Any:
    options: dict[str, Any] = {"purpose": purpose_of(run), "labels": labels, "stops": stops}
    try:
        return prepare_data(data, tokenizer, run.train.seed, vocabulary=vocabulary, **options)
    except UserError as error:
        field = error.field.replace("data.train", "data")
        raise UserError(field, error.value, error.problem, error.remedy) from None
