"""Adapts a model's config to the run before it is built: its classes, its token ids, and its attention path.

A fresh config has the ids of some other vocabulary, and encoder–decoders begin every target with one of them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardwise.config.resolve import Resolution, purpose_of
from shardwise.config.schema import Run
from shardwise.core.compat.hf_private import attention_of
from shardwise.core.errors import UserError
from shardwise.data.labels import class_of, collect_labels
from shardwise.data.row_renderers import ROW_PURPOSES
from shardwise.nn.attention.path_selection import AttentionPath, path_for
from shardwise.nn.models.source import ModelSource, load_config
from shardwise.nn.models.tasks import class_names


def padding_id(tokenizer: Any) -> int:
    """Returns the id for padding; never trained on, so any will do if the tokenizer has none."""
    pad = tokenizer.pad_token_id
    return int(pad if pad is not None else tokenizer.eos_token_id or 0)


def labels_of(run: Any) -> tuple[str, ...]:
    """Returns the classes of a classification run, once they are known; else none."""
    return tuple(getattr(run.objective, "labels", None) or ())


def adapt_model(result: Resolution, source: ModelSource, tokenizer: Any) -> ModelSource:
    """Returns the source with a config that fits the run; classes read from the data become part of the run."""
    run_config = result.run.model.config
    if source.task == "causal" and run_config is None:
        return source
    config = copy.deepcopy(source.config)
    if run_config is not None and "vocab_size" not in run_config and hasattr(config, "vocab_size"):
        config.vocab_size = len(tokenizer)
    if source.task == "causal":
        return replace(source, config=_with_ends(config, tokenizer, run_config or {}))
    if run_config is not None:
        _take_ids(config, tokenizer, run_config)
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = padding_id(tokenizer)
    if source.task == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = _first_id(source, config)
    if source.task == "classify":
        labels = _classes(result, source)
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: number for number, name in enumerate(labels)}
    return replace(source, config=config)


def settle_attention(result: Resolution, source: ModelSource, say: Callable[[str], None]) -> ModelSource:
    """Returns the source with the fastest attention that matches the model's definition for this run's rows.

    If packed rows would differ from single documents, `data.packing: auto` resolves to false; if padded rows would, the
    micro-batch size becomes 1.
    """
    implementation = attention_of(source.config)
    if implementation not in (None, "sdpa", "eager"):
        return source  # a kernel that the user chose
    run = result.run
    kind = source.config.model_type
    if run.data.packing and purpose_of(run) not in ROW_PURPOSES:
        path = path_for(source, "packed", documents=run.attention == "auto")
        if not path.trouble:
            result.put("data.packing", True, None)
            return _on_path(source, path, say)
        reason = f"{kind} computes something else for a document in a packed row than alone ({path.trouble})"
        if run.data.packing is True:
            raise UserError("data.packing", True, reason, "set data.packing: false, or leave it out")
        result.put("data.packing", False, reason)
    path = path_for(source, "padded")
    if path.trouble:
        reason = f"{kind} computes something else for a row with padding than without ({path.trouble})"
        path = path_for(source, "single")
        if path.trouble:
            problem = f"{kind} computes something else than its own definition with eager attention ({path.trouble})"
            raise UserError("model", source.label, problem, "use another model, or another version of transformers")
        if run.train.micro_batch_size != 1:
            result.put("train.micro_batch_size", 1, reason)
    return _on_path(source, path, say)


def on_rows_of(run: Run, source: ModelSource) -> ModelSource:
    """Returns a second model's source, with the attention that is right for the rows of a run."""
    path = path_for(source, "packed" if run.data.packing else "padded", documents=run.attention == "auto")
    if path.trouble:
        problem = f"computes something else for the rows of this run than for one document at a time ({path.trouble})"
        raise UserError("model", source.label, problem, "set data.packing: false and train.micro_batch_size: 1")
    return _on_path(source, path, lambda _: None)


def _on_path(source: ModelSource, path: AttentionPath, say: Callable[[str], None]) -> ModelSource:
    kind = source.config.model_type
    if path.bypassed:
        problem = f"{kind} calls the forward of its block {path.bypassed} directly, which sharding cannot see"
        raise UserError("model", source.label, problem, "use another model")
    if path.untried:
        say(f"attention: no tiny {kind} model could be compared with its definition ({path.untried})")
        return source
    if path.slower:
        say(f"attention: eager, which is slower; SDPA would compute something else for {kind} ({path.slower})")
    return replace(source, attention=path.implementation, documents=path.documents)


def changed_settings(source: ModelSource) -> dict[str, Any]:
    """Returns what `adapt_model` set in the config of a model that has files."""
    if source.origin is None or source.task == "causal":
        return {}
    original = load_config(source.origin, source.label, source.trust_remote_code).to_dict()
    current = source.config.to_dict()
    keys = ["pad_token_id", *(["decoder_start_token_id"] if source.task == "seq2seq" else [])]
    keys += ["id2label", "label2id"] if source.task == "classify" else []
    return {key: current[key] for key in keys if key in current and current[key] != original.get(key)}


def _with_ends(config: Any, tokenizer: Any, run_config: dict[str, Any]) -> Any:
    """A fresh causal config with the tokenizer's bos and eos, by which generation knows when to stop.

    Not its padding: some models keep the row of that token at zero, and tokenizers without one pad with eos.
    """
    for kind in ("bos", "eos"):
        if f"{kind}_token_id" not in run_config:
            setattr(config, f"{kind}_token_id", getattr(tokenizer, f"{kind}_token_id"))
    pad = getattr(config, "pad_token_id", None)
    if "pad_token_id" not in run_config and isinstance(pad, int) and pad >= getattr(config, "vocab_size", pad + 1):
        config.pad_token_id = None
    return config


def _take_ids(config: Any, tokenizer: Any, run_config: dict[str, Any]) -> None:
    """Sets the tokenizer's own special tokens, unless the run gives others."""
    defaults = type(config)()
    roles = {getattr(defaults, f"{kind}_token_id", None): kind for kind in ("pad", "bos", "eos")}
    ids = {kind: getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    ids["pad"] = padding_id(tokenizer)
    for kind, number in ids.items():
        if f"{kind}_token_id" not in run_config:
            setattr(config, f"{kind}_token_id", number)
    if config.is_encoder_decoder and "decoder_start_token_id" not in run_config:
        # BART begins with its end, T5 with padding: the same role, as this tokenizer numbers it.
        role = roles.get(getattr(defaults, "decoder_start_token_id", None), "pad")
        number = ids[role] if ids[role] is not None else ids["pad"]
        config.decoder_start_token_id = number


def _first_id(source: ModelSource, config: Any) -> int:
    """The start token of a pretrained decoder: newer files have it beside the config."""
    file = source.weights / "generation_config.json" if source.weights is not None else None
    configured = (
        json.loads(file.read_text()).get("decoder_start_token_id") if file is not None and file.is_file() else None
    )
    return int(configured if isinstance(configured, int) else config.pad_token_id)


def _classes(result: Resolution, source: ModelSource) -> tuple[str, ...]:
    """The classes: as set, or those of the model's own head if the rows have no others, or those of the rows."""
    labels = labels_of(result.run)
    has_head = source.weights is not None and class_names("classify") & set(source.config.architectures or [])
    head_classes = tuple(str(source.config.id2label[i]) for i in sorted(source.config.id2label)) if has_head else ()
    if not labels:
        labels = collect_labels(result.run.data)
        if head_classes and all(class_of(name, head_classes) is not None for name in labels):
            labels = head_classes
            result.put("objective.labels", list(labels), "the model's own classes")
        else:
            result.put("objective.labels", list(labels), "the labels of the training rows")
    if len(set(labels)) < max(2, len(labels)):
        problem = "a class is named twice" if len(labels) > 1 else "one class cannot be told from others"
        raise UserError("objective.labels", list(labels), problem, "name each class once, at least two")
    generic = all(name.startswith("LABEL_") for name in head_classes)
    if head_classes and (len(head_classes) != len(labels) or (not generic and head_classes != labels)):
        problem = f"the model has a head for the classes {', '.join(head_classes[:8])}"
        remedy = "use rows with these labels, or a model without such a head"
        raise UserError("objective.labels", list(labels), problem, remedy)
    return labels
