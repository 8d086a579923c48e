"""Exports of a run: a Hugging Face folder or a GGUF file, each with its card and compared with the trained model.

An export that fails its comparison never replaces the target: it is left beside it as TARGET.rejected.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from shardwise.checkpoint.adapter_state import base_of, holds_adapter, read_run
from shardwise.checkpoint.hf import ExportOptions, export_checkpoint, find_checkpoint
from shardwise.checkpoint.store import MODEL, RUN, read_trainer
from shardwise.config.renamed import read_saved
from shardwise.config.schema import Model
from shardwise.core.errors import UserError
from shardwise.export.card import make_card, write_card
from shardwise.export.check import (
    CHANGES,
    Mismatch,
    check_config,
    check_export,
    check_peft,
    check_tensors,
    compare_tokens,
    load_folder,
    sample_ids,
    too_large,
)
from shardwise.export.facts import CardFacts, gather, output_of, read_samples
from shardwise.export.families import family_of, window_of
from shardwise.export.gguf_compat import judge
from shardwise.export.gguf_file import KINDS, GgufPlan, plan_gguf, write_gguf
from shardwise.export.inference import from_checkpoint, with_adapter
from shardwise.export.vocabulary import vocabulary_of
from shardwise.nn.adapters.peft import WEIGHTS, is_adapter
from shardwise.nn.models.origin import Origin, counted, read_origin
from shardwise.nn.models.source import config_from, find_model, load_config
from shardwise.nn.models.tasks import task_of

Say = Callable[[str], None]
Check = bool | Literal["auto"]
SOON = 2_000_000_000  # parameters up to which a comparison at the end of a run takes no time that anybody minds
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Exported:
    """Result of an export: its path, its card, the result of the comparison, and notes."""

    path: Path
    card: str
    checked: str | None
    notes: tuple[str, ...] = ()


def export_folder(
    checkpoint: Path,
    target: Path,
    options: ExportOptions | None = None,
    say: Say = lambda _: None,
    check: Check = "auto",
    most: int | None = None,
) -> Exported:
    """Writes a checkpoint as a Hugging Face folder with a card, compared with the checkpoint before it appears.

    `check`: auto compares where memory allows, and only models of up to `most` parameters. See `export_checkpoint` for
    the rest.
    """
    options = options or ExportOptions()
    exported: list[Exported] = []
    notes: list[str] = []

    def note(line: str) -> None:
        say(line)
        notes.append(line)

    def finish(folder: Path) -> None:
        checked = _check_folder(checkpoint, folder, target, check, most, options)
        facts = _facts_of(checkpoint)
        adapter = is_adapter(folder)
        config_folder = checkpoint / MODEL if adapter else folder  # an adapter's folder has no config of the model
        config = json.loads((config_folder / "config.json").read_text())
        library = "peft" if adapter else "transformers"
        place = target.absolute()
        name = place.parent.name if place.name == "model" else place.name  # every run calls its folder that
        task = _task(config_folder, options.trust)
        card = make_card(facts, name, task, _kind(config), library, _check_lines(checked, notes))
        write_card(folder, facts, card)
        exported.append(Exported(target, card, checked, tuple(notes)))

    path = export_checkpoint(checkpoint, target, options, say, note, finish)
    return replace(exported[0], path=path)


def _check_lines(checked: str | None, notes: Sequence[str]) -> list[str]:
    return [*(checked or "").splitlines(), *notes]


def export_gguf(
    origin: str,
    target: Path,
    kind: str,
    options: ExportOptions | None = None,
    say: Say = lambda _: None,
    check: Check = "auto",
    unreadable: bool = False,
) -> Exported:
    """Writes a run, a checkpoint, a model's folder or a model by name as one GGUF file, compared before it appears.

    A file that neither llama.cpp nor transformers reads as the model is rejected, unless `unreadable`. Of the options
    `overwrite`, `changed_tokenizer` and `trust` apply.
    """
    options = options or ExportOptions()
    _check_file(target, kind, options.overwrite)
    path = Path(origin).expanduser()
    if (path / "config.json").is_file() or not path.is_dir():
        source = find_model(Model(name=str(path) if path.exists() else origin), say)
        plan = plan_gguf(source, kind, unreadable=unreadable)
        assert plan.source.weights is not None
        load = partial(load_folder, plan.source.weights, extra=None)
        trained = _TrainedModel(load, CardFacts(base_name=path.name), extra=plan.source.extra)
        return _write_file(plan, target, trained, check, unreadable, say)
    checkpoint = find_checkpoint(path)
    _check_early(checkpoint, unreadable)
    record = read_origin(checkpoint / MODEL)
    extra = (*record.untouched, *record.dropped) if record is not None else ()
    samples = read_samples(output_of(checkpoint))
    trained = _TrainedModel(partial(from_checkpoint, checkpoint), _facts_of(checkpoint), samples, extra)
    # In fp32: rounded once, from the master weights to the file.
    full_folder = target.with_name(f".{target.name}.folder")
    full = ExportOptions(
        "fp32",
        overwrite=True,
        changed_tokenizer=options.changed_tokenizer,
        merged=holds_adapter(checkpoint),
        plain=True,
        trust=options.trust,
    )
    try:
        export_checkpoint(checkpoint, full_folder, full)
        plan = plan_gguf(find_model(Model(name=str(full_folder))), kind, unreadable=unreadable)
        return _write_file(plan, target, trained, check, unreadable, say)
    finally:
        shutil.rmtree(full_folder, ignore_errors=True)


@dataclass(frozen=True)
class _TrainedModel:
    """What a GGUF file is compared with: the trained model, and what is known about it."""

    load: Callable[[], Any]
    facts: CardFacts
    samples: Sequence[Sequence[int]] = ()
    extra: Sequence[str] = ()  # tensors of the source that the file has no place for


def _write_file(
    plan: GgufPlan, target: Path, trained: _TrainedModel, check: Check, unreadable: bool, say: Say
) -> Exported:
    unfinished = target.with_name(f".{target.name}.partial.gguf")
    config = plan.source.config
    notes = [line for line in (window_of(config), _without(trained.extra)) if line is not None]
    try:
        write_gguf(plan, unfinished, target.stem, say)
        tokenizer = plan.source.load_tokenizer()
        notes.append(compare_tokens(tokenizer, unfinished, plan.vocabulary))
        parameters = sum(math.prod(tensor.shape) for tensor in plan.tensors)
        checked = too_large(parameters, 3) if check == "auto" else None
        if check is not False and checked is None:
            say("reading it back as its readers do, and comparing with the trained model")
            longest = plan.family.settings(config)["context_length"]
            ids = [sequence[:, :longest] for sequence in sample_ids(tokenizer, config.vocab_size, trained.samples)]
            verdicts = judge(trained.load(), unfinished, ids, plan.kind, plan.family.problem(config))
            lines = "\n".join(verdict.line for verdict in verdicts)
            if verdicts[0].wrong:
                raise Mismatch(f"{target}: the exported model is not the trained one\n{lines}")
            if not any(verdict.reads for verdict in verdicts) and not unreadable:
                raise Mismatch(f"{target}: no reader reads it as the trained model\n{lines}")
            tokens = sum(sequence.numel() for sequence in ids)
            checked = f"who reads this file as the trained model ({plan.kind}, {tokens} tokens):\n{lines}"
        os.replace(unfinished, target)
    except Mismatch as error:
        raise _set_aside(error, unfinished, target) from None
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise UserError("target", str(target), problem, "choose a place you may write to, with room enough") from None
    finally:
        unfinished.unlink(missing_ok=True)
    for line in notes:
        say(line)
    card = make_card(trained.facts, target.name, plan.source.task, plan.kind, "gguf", _check_lines(checked, notes))
    return Exported(target, card, checked, tuple(notes))


def _without(extra: Sequence[str]) -> str | None:
    return f"without {counted(list(extra), 'tensor')} of the source: GGUF has no place for them" if extra else None


def _check_file(target: Path, kind: str, overwrite: bool) -> None:
    if kind not in KINDS:
        raise UserError("--gguf", kind, "is not known", f"use one of {', '.join(KINDS)}")
    if target.suffix != ".gguf":
        raise UserError("target", str(target), "is no name for a GGUF file", f"write {target.name}.gguf")
    if target.is_dir() or (target.exists() and not overwrite):
        raise UserError("target", str(target), "exists", "choose another name or pass --overwrite")
    target.parent.mkdir(parents=True, exist_ok=True)


def _check_early(checkpoint: Path, unreadable: bool) -> None:
    """Rejects what a GGUF file cannot hold before the checkpoint is read."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(checkpoint / MODEL, trust_remote_code=False)
    family_of(config, "--gguf", unreadable).settings(config)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / MODEL, trust_remote_code=False)
    vocabulary_of(tokenizer, config.vocab_size, "--gguf")


def _facts_of(checkpoint: Path) -> CardFacts:
    run = read_saved(checkpoint / RUN)
    return gather(run, output_of(checkpoint), int(read_trainer(checkpoint)["step"]))


def _task(folder: Path, trust: bool) -> str:
    return task_of(load_config(folder, str(folder), trust))


def _kind(config: dict[str, Any]) -> str:
    return TYPES.get(str(config.get("dtype") or config.get("torch_dtype")), "fp32")


def _adapter_kind(folder: Path) -> str:
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return TYPES.get(str(file.get_tensor(next(iter(file.keys()))).dtype).removeprefix("torch."), "fp32")


def _check_folder(
    checkpoint: Path, folder: Path, target: Path, check: Check, most: int | None, options: ExportOptions
) -> str | None:
    from transformers import AutoTokenizer

    if check is False:
        return None
    trust = options.trust
    adapter = is_adapter(folder)
    origin = None if adapter else read_origin(checkpoint / MODEL)
    config = json.loads(((checkpoint / MODEL if adapter else folder) / "config.json").read_text())
    kind = _adapter_kind(folder) if adapter else _kind(config)
    weights = base_of(folder).weights if adapter else folder
    size = sum(file.stat().st_size for file in weights.glob("*.safetensors")) if weights else 0
    parameters = size // (4 if kind == "fp32" and not adapter else 2)  # files of a base are in half precision, mostly
    try:
        tensor_note = check_tensors(folder, origin, options.allow_missing)
        if not adapter:
            _check_config(checkpoint, folder, origin)
        if check == "auto" and (reason := too_large(parameters, 2.2) or _too_slow(parameters, most)):
            return f"{reason}; {tensor_note}" if tensor_note else reason
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
        vocabulary = load_config(checkpoint / MODEL, str(checkpoint), trust).get_text_config().vocab_size
        ids = sample_ids(tokenizer, vocabulary, read_samples(output_of(checkpoint)))
        if adapter:
            line = check_export(lambda: from_checkpoint(checkpoint), lambda: with_adapter(folder, "cpu")[0], ids, kind,
                                target)  # fmt: skip
            return f"{line}; {check_peft(lambda: from_checkpoint(checkpoint), folder, ids, kind, target)}"
        extra: Container[str] | None = ()
        if origin is not None:
            extra = origin.untouched
        elif read_run(checkpoint).model.name:
            extra = None
        line = check_export(lambda: from_checkpoint(checkpoint, trust=trust),
                            lambda: load_folder(folder, trust=trust, extra=extra), ids, kind, target)  # fmt: skip
        return f"{line}; {tensor_note}" if tensor_note else line
    except Mismatch as error:
        raise _set_aside(error, folder, target) from None


def _check_config(checkpoint: Path, folder: Path, origin: Origin | None) -> None:
    """Compares the config with the source's, or with the run's; for a GGUF source none is known."""
    run_config = read_run(checkpoint).model.config
    if origin is not None and origin.config:
        check_config(folder, origin.config)
    elif run_config is not None:
        ids = {"vocab_size", "bos_token_id", "eos_token_id", "transformers_version", "_name_or_path"}
        check_config(folder, json.loads(config_from(dict(run_config)).to_json_string(use_diff=False)), CHANGES | ids)


def _too_slow(parameters: int, most: int | None) -> str | None:
    return f"not checked: {parameters / 1e9:.1f}B parameters" if most is not None and parameters > most else None


def _set_aside(error: Mismatch, exported: Path, target: Path) -> Mismatch:
    """Keeps a rejected export for inspection, under a name that nobody takes for the model."""
    rejected = target.with_name(f"{target.name}.rejected")
    if rejected.is_dir():
        shutil.rmtree(rejected, ignore_errors=True)
    os.replace(exported, rejected)
    return Mismatch(f"{error}\n  → it was left as {rejected}; nothing was put in its place")
