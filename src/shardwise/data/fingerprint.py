"""Fingerprint of the tokenizer and chat template a model was trained with, to detect changes before inference.

A model used with another chat template or vocabulary answers badly without any error. The fingerprint has two parts,
template and tokenizer, so that a message can say which one differs. It is stored beside the tokenizer's files in every
checkpoint and exported folder.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from shardwise.core.errors import UserError

FILE = "shardwise_tokens.json"


def template_fingerprint(tokenizer: Any) -> str:
    """Two hashes, `template-tokenizer`; equal if the same conversation gives the same tokens."""
    return f"{_template(tokenizer)}-{_tokenizer(tokenizer)}"


def _template(tokenizer: Any) -> str:
    return _digest(tokenizer.chat_template)


def _tokenizer(tokenizer: Any) -> str:
    """Hash of what decides the tokens: the vocabulary, how text is split, and the special tokens added at both ends."""
    inner = json.loads(tokenizer.backend_tokenizer.to_str())
    added = sorted((t["id"], t["content"], t["special"], t["lstrip"], t["rstrip"]) for t in inner["added_tokens"])
    model = inner["model"]
    words = model.get("vocab")
    # A word that is added as well may or may not stand in the vocabulary of a saved file: either way it has its id.
    names = {content for _, content, *_ in added}
    if isinstance(words, dict):
        words = sorted((word, index) for word, index in words.items() if word not in names)
    settings = {key: value for key, value in model.items() if key not in ("vocab", "merges") and value is not None}
    ends = [tokenizer.bos_token, tokenizer.eos_token]
    sample = tokenizer("a")["input_ids"]  # what the last stage adds, whichever way it is written down
    return _digest(
        [words, model.get("merges"), settings, inner["normalizer"], inner["pre_tokenizer"], added, ends, sample]
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def write_fingerprint(folder: Path, tokenizer: Any) -> None:
    """Writes the tokenizer's fingerprint to a model folder."""
    (folder / FILE).write_text(json.dumps({"fingerprint": template_fingerprint(tokenizer)}))


def check_fingerprint(folder: Path, tokenizer: Any, field: str = "model") -> None:
    """Raises UserError if the model in the folder was trained with another tokenizer or template."""
    if not (folder / FILE).is_file():
        return
    try:
        trained = str(json.loads((folder / FILE).read_text())["fingerprint"]).split("-")
    except (ValueError, KeyError, TypeError):
        raise UserError(field, str(folder / FILE), "cannot be read", "export the model again") from None
    now = template_fingerprint(tokenizer).split("-")
    differs = [name for name, a, b in zip(("chat template", "tokenizer"), trained, now, strict=False) if a != b]
    if differs:
        problem = (
            f"its {' and '.join(differs)} changed since the model was trained, so it would be asked in other words"
        )
        remedy = "bring the old files back (export the checkpoint again), or pass --changed-tokenizer to go on"
        raise UserError(field, str(folder), problem, remedy)
