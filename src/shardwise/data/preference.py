"""Preference data: pairs of a chosen and a rejected answer, and single answers labelled desirable or not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardwise.config.objectives import Purpose
from shardwise.core.errors import UserError
from shardwise.data.examples import Document
from shardwise.data.formats import Detected

JUDGED = {"preference": "objective: dpo (or orpo)", "kto": "objective: kto"}  # purposes, and who has them


def check_format(detected: Detected, purpose: Purpose, field: str, path: str) -> None:
    """Raises UserError if preference rows meet a non-preference objective, or the reverse."""
    format = detected.format
    if purpose in JUDGED and format != purpose:
        columns = "prompt, chosen and rejected" if purpose == "preference" else "prompt, completion and label"
        problem = f"the rows are {format} data, but the objective needs rows with {columns}"
        remedy = f"use {JUDGED.get(format, 'objective: causal')}, or other data"
        raise UserError(field, path, problem, remedy)
    if purpose not in JUDGED and format in JUDGED:
        problem = f"the rows are {format} data, which say what to prefer, not what to write"
        plain = _plain_remedy(detected)
        remedy = f"use {JUDGED[format]} to learn what to prefer; or, to learn the good answers alone, {plain}"
        raise UserError(field, path, problem, remedy)


def _plain_remedy(detected: Detected) -> str:
    """Remedy that turns preference rows into plain examples."""
    columns = detected.columns
    if detected.format == "kto":
        return f"format: prompt and data.refine.filter: {columns.get('label', 'label')}"
    chosen = columns.get("chosen", "chosen")
    if detected.conversations or "prompt" not in columns:
        return f"format: chat with fields: {{messages: {chosen}}}"
    return f"fields: {{prompt: {columns['prompt']}, completion: {chosen}}}"


def truncated(pair: Document, limit: int) -> Document | None:
    """Truncates the conversations of a pair at their ends, the longer one first, until both fit.

    Returns None if that would remove an answer: then there is nothing to compare.
    """
    assert pair.head is not None
    a, b = pair.head, len(pair.tokens) - pair.head
    sizes = min(a, max(limit // 2, limit - b)), min(b, max(limit // 2, limit - a))
    place = np.r_[: sizes[0], pair.head : pair.head + sizes[1]]
    learned = pair.learned[place]
    if not learned[: sizes[0]].any() or not learned[sizes[0] :].any():
        return None
    return replace(pair, tokens=pair.tokens[place], learned=learned, head=sizes[0])


def describe_head(document: Document, purpose: Purpose) -> str:
    """Human-readable meaning of a document's head."""
    if document.head is None:
        return ""
    if purpose == "kto":
        return "wanted" if document.head else "not wanted"
    return f"chosen: the first {document.head:,} tokens, rejected: the other {len(document.tokens) - document.head:,}"
