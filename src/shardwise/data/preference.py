"""Answers that are judged: pairs of a chosen and a rejected one, and single ones that are wanted or not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardwise.config.objectives import Purpose
from shardwise.core.errors import UserError
from shardwise.data.examples import Document
from shardwise.data.formats import Detected

JUDGED = {"preference": "objective: dpo (or orpo)", "kto": "objective: kto"}  # purposes, and who has them


def check_format(detected: Detected, purpose: Purpose, field: str, path: str) -> None:
    """Rows that say what to prefer are for objectives that prefer, and the other way round."""
    found = detected.format
    if purpose in JUDGED and found != purpose:
        columns = "prompt, chosen and rejected" if purpose == "preference" else "prompt, completion and label"
        problem = f"the rows are {found} data, but the objective needs rows with {columns}"
        remedy = f"use {JUDGED.get(found, 'objective: causal')}, or other data"
        raise UserError(field, path, problem, remedy)
    if purpose not in JUDGED and found in JUDGED:
        problem = f"the rows are {found} data, which say what to prefer, not what to write"
        remedy = f"use {JUDGED[found]} to learn what to prefer; or, to learn the good answers alone, {_good(detected)}"
        raise UserError(field, path, problem, remedy)


def _good(detected: Detected) -> str:
    """What makes plain examples of rows that are judged."""
    columns = detected.columns
    if detected.format == "kto":
        return f"format: prompt and data.refine.filter: {columns.get('label', 'label')}"
    chosen = columns.get("chosen", "chosen")
    if detected.conversations or "prompt" not in columns:
        return f"format: chat with fields: {{messages: {chosen}}}"
    return f"fields: {{prompt: {columns['prompt']}, completion: {chosen}}}"


def truncated(pair: Document, limit: int) -> Document | None:
    """A pair whose conversations are cut at their ends, the longer one first, until both fit together.

    None where an answer would be gone: then there is nothing to compare.
    """
    assert pair.head is not None
    a, b = pair.head, len(pair.tokens) - pair.head
    kept = min(a, max(limit // 2, limit - b)), min(b, max(limit // 2, limit - a))
    place = np.r_[: kept[0], pair.head : pair.head + kept[1]]
    learned = pair.learned[place]
    if not learned[: kept[0]].any() or not learned[kept[0] :].any():
        return None
    return replace(pair, tokens=pair.tokens[place], learned=learned, head=kept[0])


def describe_head(document: Document, purpose: Purpose) -> str:
    """What a document's head says, for people."""
    if document.head is None:
        return ""
    if purpose == "kto":
        return "wanted" if document.head else "not wanted"
    return f"chosen: the first {document.head:,} tokens, rejected: the other {len(document.tokens) - document.head:,}"
