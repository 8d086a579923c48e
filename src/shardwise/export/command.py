"""The ways out of a run: a Hugging Face folder or a GGUF file, each with its card and compared with the trained model.

An export that fails its comparison never takes the target's place: it is left beside it as TARGET.rejected.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shardwise.adapters.export import base_of, holds_adapter
from shardwise.adapters.peft import WEIGHTS, is_adapter
from shardwise.checkpoint.hf import export_checkpoint, find_checkpoint
from shardwise.checkpoint.store import MODEL, RUN, read_trainer
from shardwise.config.schema import Model
from shardwise.errors import UserError
from shardwise.export.card import make_card, write_card
from shardwise.export.check import (
    Mismatch,
    check_export,
    compare_tokens,
    load_folder,
    load_gguf,
    sample_ids,
    too_large,
)
from shardwise.export.facts import Facts, gather, output_of, read_samples
from shardwise.export.families import family_of
from shardwise.export.gguf_file import KINDS, Plan, plan_gguf, write_gguf
from shardwise.export.vocabulary import vocabulary_of
from shardwise.models.inference import from_checkpoint, with_adapter
from shardwise.models.source import find_model
from shardwise.models.tasks import task_of

Say = Callable[[str], None]
Check = bool | Literal["auto"]
SOON = 2_000_000_000  # parameters up to which a comparison at the end of a run takes no time that anybody minds
TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Exported:
    """What an export hands over: where it lies, its card, and what the comparison said."""

    path: Path
    card: str
    checked: str | None


def export_folder(
    checkpoint: Path,
    target: Path,
    dtype: str = "auto",
    shard_size: int = 4 << 30,
    overwrite: bool = False,
    say: Say = lambda _: None,
    verified: bool = False,
    changed_tokenizer: bool = False,
    check: Check = "auto",
    most: int | None = None,
    merged: bool = False,
) -> Exported:
    """Writes a checkpoint as a Hugging Face folder with a card, compared with the checkpoint before it appears.

    `check`: auto compares where memory allows, and only models of up to `most` parameters. An adapter's folder is
    PEFT's, unless it is to be `merged` with its base.
    """
    told: list[Exported] = []

    def finish(folder: Path) -> None:
        checked = _check_folder(checkpoint, folder, target, check, most)
        facts = _facts_of(checkpoint)
        adapter = is_adapter(folder)
        described = checkpoint / MODEL if adapter else folder  # an adapter's folder has no config of the model
        config, library = json.loads((described / "config.json").read_text()), "peft" if adapter else "transformers"
        place = target.absolute()
        name = place.parent.name if place.name == "model" else place.name  # every run calls its folder that
        card = make_card(facts, name, _task(described), _kind(config), library, checked)
        write_card(folder, facts, card)
        told.append(Exported(target, card, checked))

    path = export_checkpoint(
        checkpoint, target, dtype, shard_size, overwrite, say, verified, changed_tokenizer, merged, finish
    )
    return replace(told[0], path=path)


def export_gguf(
    origin: str, target: Path, kind: str, overwrite: bool = False, say: Say = lambda _: None,
    changed_tokenizer: bool = False, check: Check = "auto",
) -> Exported:  # fmt: skip
    """Writes a run, a checkpoint, a model's folder or a model by name as one GGUF file, compared before it appears."""
    _check_file(target, kind, overwrite)
    path = Path(origin).expanduser()
    if (path / "config.json").is_file() or not path.is_dir():
        source = find_model(Model(name=str(path) if path.exists() else origin), say)
        plan = plan_gguf(source, kind)
        assert plan.source.weights is not None
        folder = plan.source.weights
        return _write_file(plan, target, Facts(base_name=path.name), lambda: load_folder(folder), (), check, say)
    checkpoint = find_checkpoint(path)
    _check_early(checkpoint)
    facts, samples = _facts_of(checkpoint), read_samples(output_of(checkpoint))
    whole = target.with_name(f".{target.name}.folder")  # in fp32: rounded once, from the master weights to the file
    try:
        options: dict[str, Any] = {"changed_tokenizer": changed_tokenizer, "merged": holds_adapter(checkpoint)}
        export_checkpoint(checkpoint, whole, "fp32", overwrite=True, **options)
        plan = plan_gguf(find_model(Model(name=str(whole))), kind)
        return _write_file(plan, target, facts, lambda: from_checkpoint(checkpoint), samples, check, say)
    finally:
        shutil.rmtree(whole, ignore_errors=True)


def _write_file(
    plan: Plan, target: Path, facts: Facts, reference: Callable[[], Any], samples: Sequence[Sequence[int]],
    check: Check, say: Say,
) -> Exported:  # fmt: skip
    partial, config = target.with_name(f".{target.name}.partial.gguf"), plan.source.config
    try:
        write_gguf(plan, partial, target.stem, say)
        tokenizer = plan.source.load_tokenizer()
        say(compare_tokens(tokenizer, partial, config, plan.vocabulary))
        parameters = sum(_product(one.shape) for one in plan.tensors)
        checked = too_large(parameters, 3) if check == "auto" else None
        if check is not False and checked is None:
            say("reading it back and comparing with the trained model")
            ids = sample_ids(tokenizer, config.vocab_size, samples)
            checked = check_export(reference, lambda: load_gguf(partial, config), ids, plan.kind, target)
        os.replace(partial, target)
    except Mismatch as error:
        raise _set_aside(error, partial, target) from None
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise UserError("target", str(target), problem, "choose a place you may write to, with room enough") from None
    finally:
        partial.unlink(missing_ok=True)
    card = make_card(facts, target.name, plan.source.task, plan.kind, "gguf", checked)
    return Exported(target, card, checked)


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for one in shape:
        size *= one
    return size


def _check_file(target: Path, kind: str, overwrite: bool) -> None:
    if kind not in KINDS:
        raise UserError("--gguf", kind, "is not known", f"use one of {', '.join(KINDS)}")
    if target.suffix != ".gguf":
        raise UserError("target", str(target), "is no name for a GGUF file", f"write {target.name}.gguf")
    if target.is_dir() or (target.exists() and not overwrite):
        raise UserError("target", str(target), "exists", "choose another name or pass --overwrite")
    target.parent.mkdir(parents=True, exist_ok=True)


def _check_early(checkpoint: Path) -> None:
    """What a GGUF file cannot hold is told before the checkpoint is read."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(checkpoint / MODEL, trust_remote_code=False)
    family_of(config, "--gguf").settings(config)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / MODEL, trust_remote_code=False)
    vocabulary_of(tokenizer, config.vocab_size, "--gguf")


def _facts_of(checkpoint: Path) -> Facts:
    run = json.loads((checkpoint / RUN).read_text())
    return gather(run, output_of(checkpoint), int(read_trainer(checkpoint)["step"]))


def _task(folder: Path) -> str:
    from transformers import AutoConfig

    return task_of(AutoConfig.from_pretrained(folder, trust_remote_code=False))


def _kind(config: dict[str, Any]) -> str:
    return TYPES.get(str(config.get("dtype")), "fp32")


def _adapter_kind(folder: Path) -> str:
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return TYPES.get(str(file.get_tensor(next(iter(file.keys()))).dtype).removeprefix("torch."), "fp32")


def _check_folder(checkpoint: Path, folder: Path, target: Path, check: Check, most: int | None) -> str | None:
    from transformers import AutoTokenizer

    if check is False:
        return None
    adapter = is_adapter(folder)
    config = json.loads(((checkpoint / MODEL if adapter else folder) / "config.json").read_text())
    kind = _adapter_kind(folder) if adapter else _kind(config)
    weights = base_of(folder).weights if adapter else folder
    size = sum(file.stat().st_size for file in weights.glob("*.safetensors")) if weights else 0
    parameters = size // (4 if kind == "fp32" and not adapter else 2)  # files of a base are in half precision, mostly
    if check == "auto" and (reason := too_large(parameters, 2.2) or _too_slow(parameters, most)):
        return reason
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    ids = sample_ids(tokenizer, config["vocab_size"], read_samples(output_of(checkpoint)))
    try:
        exported = (lambda: with_adapter(folder, "cpu")[0]) if adapter else (lambda: load_folder(folder))
        return check_export(lambda: from_checkpoint(checkpoint), exported, ids, kind, target)
    except Mismatch as error:
        raise _set_aside(error, folder, target) from None


def _too_slow(parameters: int, most: int | None) -> str | None:
    return f"not checked: {parameters / 1e9:.1f}B parameters" if most is not None and parameters > most else None


def _set_aside(error: Mismatch, made: Path, target: Path) -> Mismatch:
    """Keeps a rejected export for whoever wants to know why, under a name that nobody takes for the model."""
    rejected = target.with_name(f"{target.name}.rejected")
    if rejected.is_dir():
        shutil.rmtree(rejected, ignore_errors=True)
    os.replace(made, rejected)
    return Mismatch(f"{error}\n  → it was left as {rejected}; nothing was put in its place")
