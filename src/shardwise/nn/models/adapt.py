"""Makes a model fit the run before it is built: its classes, its tokenizer's ids, and the path its attention takes.

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
from shardwise.nn.attention.definition import AttentionPath, path_for
from shardwise.nn.models.source import ModelSource, load_config
from shardwise.nn.models.tasks import class_names


def padding_id(tokenizer: Any) -> int:
    """The id for padding; never learned, so any will do where the tokenizer has none."""
    pad = tokenizer.pad_token_id
    return int(pad if pad is not None else tokenizer.eos_token_id or 0)


def labels_of(run: Any) -> tuple[str, ...]:
    """The classes of a run that classifies, once they are known; else none."""
    return tuple(getattr(run.objective, "labels", None) or ())


def adapt_model(result: Resolution, source: ModelSource, tokenizer: Any) -> ModelSource:
    """The source with a config that fits; the classes, where they are read from the data, become part of the run."""
    given = result.run.model.config
    if source.task == "causal" and given is None:
        return source
    config = copy.deepcopy(source.config)
    if given is not None and "vocab_size" not in given and hasattr(config, "vocab_size"):
        config.vocab_size = len(tokenizer)
    if source.task == "causal":
        return replace(source, config=_with_ends(config, tokenizer, given or {}))
    if given is not None:
        _take_ids(config, tokenizer, given)
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
    """The source with the fastest attention that computes what the model's definition says for the rows of this run.

    Where packed rows would be computed otherwise than single documents, `data.packing: auto` is answered with no;
    where padded rows would, with rows one at a time.
    """
    own = attention_of(source.config)
    if own not in (None, "sdpa", "eager"):
        return source  # a kernel that the user chose
    run, kind = result.run, source.config.model_type
    if run.data.packing and purpose_of(run) not in ROW_PURPOSES:
        path = path_for(source, "packed", documents=run.attention == "auto")
        if not path.trouble:
            result.put("data.packing", True, None)
            return _on_path(source, path, say)
        why = f"{kind} computes something else for a document in a packed row than alone ({path.trouble})"
        if run.data.packing is True:
            raise UserError("data.packing", True, why, "set data.packing: false, or leave it out")
        result.put("data.packing", False, why)
    path = path_for(source, "padded")
    if path.trouble:
        why = f"{kind} computes something else for a row with padding than without ({path.trouble})"
        path = path_for(source, "single")
        if path.trouble:
            problem = f"{kind} computes something else than its own definition with eager attention ({path.trouble})"
            raise UserError("model", source.label, problem, "use another model, or another version of transformers")
        if run.train.micro_batch_size != 1:
            result.put("train.micro_batch_size", 1, why)
    return _on_path(source, path, say)


def on_rows_of(run: Run, source: ModelSource) -> ModelSource:
    """A second model's source, with the attention that is right for the rows of a run."""
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
    """What `adapt_model` set in the config of a model that has files."""
    if source.origin is None or source.task == "causal":
        return {}
    plain = load_config(source.origin, source.label, source.trust_remote_code).to_dict()
    now = source.config.to_dict()
    keys = ["pad_token_id", *(["decoder_start_token_id"] if source.task == "seq2seq" else [])]
    keys += ["id2label", "label2id"] if source.task == "classify" else []
    return {key: now[key] for key in keys if key in now and now[key] != plain.get(key)}


def _with_ends(config: Any, tokenizer: Any, given: dict[str, Any]) -> Any:
    """A fresh causal config with the tokenizer's beginning and end, by which whoever generates knows when to stop.

    Not its padding: some models keep the row of that token at zero, and tokenizers without one pad with the end.
    """
    for kind in ("bos", "eos"):
        if f"{kind}_token_id" not in given:
            setattr(config, f"{kind}_token_id", getattr(tokenizer, f"{kind}_token_id"))
    pad = getattr(config, "pad_token_id", None)
    if "pad_token_id" not in given and isinstance(pad, int) and pad >= getattr(config, "vocab_size", pad + 1):
        config.pad_token_id = None
    return config


def _take_ids(config: Any, tokenizer: Any, given: dict[str, Any]) -> None:
    """The tokenizer's own special tokens, where the run does not give others."""
    usual = type(config)()
    roles = {getattr(usual, f"{kind}_token_id", None): kind for kind in ("pad", "bos", "eos")}
    ids = {kind: getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    ids["pad"] = padding_id(tokenizer)
    for kind, number in ids.items():
        if f"{kind}_token_id" not in given:
            setattr(config, f"{kind}_token_id", number)
    if config.is_encoder_decoder and "decoder_start_token_id" not in given:
        # BART begins with its end, T5 with padding: the same role, as this tokenizer numbers it.
        role = roles.get(getattr(usual, "decoder_start_token_id", None), "pad")
        number = ids[role] if ids[role] is not None else ids["pad"]
        config.decoder_start_token_id = number


def _first_id(source: ModelSource, config: Any) -> int:
    """With what a pretrained decoder begins: newer files say so beside the config."""
    file = source.weights / "generation_config.json" if source.weights is not None else None
    said = json.loads(file.read_text()).get("decoder_start_token_id") if file is not None and file.is_file() else None
    return int(said if isinstance(said, int) else config.pad_token_id)


def _classes(result: Resolution, source: ModelSource) -> tuple[str, ...]:
    """The classes: as set, or those of the model's own head if the rows have no others, or those of the rows."""
    labels = labels_of(result.run)
    has_head = source.weights is not None and class_names("classify") & set(source.config.architectures or [])
    own = tuple(str(source.config.id2label[i]) for i in sorted(source.config.id2label)) if has_head else ()
    if not labels:
        labels = collect_labels(result.run.data)
        if own and all(class_of(name, own) is not None for name in labels):
            labels = own
            result.put("objective.labels", list(labels), "the model's own classes")
        else:
            result.put("objective.labels", list(labels), "the labels of the training rows")
    if len(set(labels)) < max(2, len(labels)):
        problem = "a class is named twice" if len(labels) > 1 else "one class cannot be told from others"
        raise UserError("objective.labels", list(labels), problem, "name each class once, at least two")
    generic = all(name.startswith("LABEL_") for name in own)
    if own and (len(own) != len(labels) or (not generic and own != labels)):
        problem = f"the model has a head for the classes {', '.join(own[:8])}"
        remedy = "use rows with these labels, or a model without such a head"
        raise UserError("objective.labels", list(labels), problem, remedy)
    return labels
