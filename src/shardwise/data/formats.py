"""Detects the format of a source's rows, with the reason, and parses each row into an example.

[Note: formats] A format is a set of names (prompt, completion …) with the columns that usually hold them. `fields`
maps a name to another column. Several formats may fit; the first of FORMATS that does is the most specific, and the
reason lists the others. Labels are looked for only by the classification objective: a corpus with a column of topics is
plain text to other objectives.

To add one: its row in FORMATS here, its parser in row_parsers.py, its name in config/schema.py, and for conversations
TURNS here and CHAT in statistics.py.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.config.objectives import Purpose
from shardwise.config.schema import Source
from shardwise.core.errors import UserError
from shardwise.data.examples import BadRow, Example, Raw
from shardwise.data.labels import label_name
from shardwise.data.messages import Misfit, absent, checked_text
from shardwise.data.row_parsers import READERS, flag_of, has_messages, look_up

SAMPLE = 100  # rows that detection looks at
TEXTS = ("text", "content", "code", "body", "document", "raw_content", "page_content", "passage", "markdown")
SENTENCES = (
    "sentence",
    "review",
    "comment",
    "tweet",
    "question",
    "title",
    "sentence1",
    "premise",
    "question1",
    "text1",
)
LABELS = ("label", "labels", "class", "category", "sentiment", "intent", "topic", "emotion")
CHATS = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns", "chat")
SHAREGPT = {"messages": "conversations", "role": "from", "content": "value"}  # chat's names for the same
MEDIA = frozenset(f"{medium}{s}" for medium in ("image", "audio", "video") for s in ("", "s"))
TURNS = {"chat", "sharegpt", "preference", "kto"}
EXTRAS = {"system": ("system", "system_prompt"), "tools": ("tools", "functions")}


@dataclass(frozen=True)
class Format:
    """The names a format requires and allows, with the column sets that usually hold the required ones."""

    needed: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...]
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    inner: tuple[str, ...] = ()  # names of keys within the column, which `fields` may change


def _usual(pairs: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(pair.split("/")) for pair in pairs.split())


FORMATS: dict[str, Format] = {
    "preference": Format(
        ("chosen", "rejected"), (("chosen", "rejected"),), EXTRAS | {"prompt": ("prompt", "question")}
    ),
    "kto": Format(("prompt", "completion", "label"), (("prompt", "completion", "label"),), EXTRAS),
    "tokens": Format(
        ("input_ids",),
        (("input_ids",),),
        {
            "labels": ("labels",),
            "attention_mask": ("attention_mask",),
            "loss_mask": ("loss_mask", "completion_mask", "assistant_masks"),
        },
    ),
    "segments": Format(("segments",), (("segments",),), inner=("text", "label")),
    "chat": Format(("messages",), tuple((c,) for c in CHATS), EXTRAS, inner=("role", "content")),
    "sharegpt": Format(
        ("conversations",), tuple((c,) for c in ("conversations", *CHATS)), EXTRAS, inner=("from", "value")
    ),
    "alpaca": Format(
        ("instruction", "output"),
        (("instruction", "output"), ("instruction", "response")),
        {"input": ("input", "context"), "system": ("system", "system_prompt"), "history": ("history",)},
    ),
    "pair": Format(
        ("source", "target"),
        _usual(
            "source/target document/summary article/highlights article/summary dialogue/summary text/summary "
            "src/tgt inputs/targets input_text/target_text text/target"
        ),
    ),
    "prompt": Format(
        ("prompt", "completion"),
        _usual(
            "prompt/completion prompt/response prompt/answer prompt/output question/answer question/response "
            "instruction/completion instruction/response instruction/answer query/answer query/response input/output "
            "inputs/outputs input/response"
        ),
        EXTRAS,
    ),
    "label": Format(
        ("text", "label"),
        tuple((text, label) for label in LABELS for text in (*TEXTS, *SENTENCES)),
        {"second": ("sentence2", "hypothesis", "question2", "text2", "text_pair")},
    ),
    "text": Format(("text",), tuple((c,) for c in TEXTS)),
}


@dataclass(frozen=True)
class Detected:
    """The detected format of a source, the reason, and the column of each name."""

    format: str
    reason: str
    columns: dict[str, str] = field(default_factory=dict)
    conversations: bool = False  # whether what is chosen is a whole conversation, not an answer alone


# Detection


def detect(raws: Sequence[Raw], source: Source, field: str, purpose: Purpose = "causal") -> Detected:
    """Detects the format of these rows; raises UserError if none fits."""
    raws = raws[:SAMPLE]
    if not raws:
        raise UserError(field, source.path, "holds no rows", "check the file, or leave it out")
    _check_fields(source, field)
    if all(isinstance(raw.value, str) for raw in raws):
        if source.format not in ("auto", "text") or purpose == "classify":
            problem = f"{raws[0].where} is plain text"
            expected = "rows with a text and a label" if purpose == "classify" else "rows, or format: text"
            raise UserError(f"{field}.format", source.format, problem, f"use files of {expected}")
        return Detected("text", "plain text: each file is one row", {"text": "text"})
    rows = [raw.value for raw in raws if isinstance(raw.value, dict)]
    looked_for = ["label"] if purpose == "classify" else [name for name in FORMATS if name != "label"]
    names = looked_for if source.format == "auto" else [source.format]
    scored = [(name, columns, share) for name in names for columns, share in [_fit(name, rows, source)] if columns]
    # A few bad rows are borne; where formats are mixed, the one that most rows have.
    best = max((share for _, _, share in scored), default=0.0)
    fits = [(name, columns) for name, columns, share in scored if share >= 0.8 * best]
    if not fits:
        raise _no_format_error(rows, raws[0].where, source, field, purpose)
    name, columns = fits[0]
    reason = _reason(name, columns, rows, best, source, [other for other, _ in fits[1:]], purpose)
    chosen = look_up(rows[0], columns.get("chosen", ""))
    conversation = isinstance(chosen, list) and len(chosen) > 1
    return Detected(name, reason, columns, conversation)


def _check_fields(source: Source, field: str) -> None:
    formats = FORMATS.values() if source.format == "auto" else [FORMATS[source.format]]
    known = sorted({name for f in formats for name in (*f.needed, *f.optional, *f.inner)})
    for name in source.fields:
        if name not in known and not (source.format == "sharegpt" and name in SHAREGPT):
            problem = f"{name} is no name of ours" + (f" for {source.format}" if source.format != "auto" else "")
            raise UserError(f"{field}.fields", source.fields, problem, f"use {', '.join(known)}")


def _fit(name: str, rows: list[dict[str, Any]], source: Source) -> tuple[dict[str, str], float]:
    """The columns for the names of a format, and the fraction of rows they suit."""
    shape = FORMATS[name]
    fields = source.fields
    if name == "sharegpt":
        fields = {SHAREGPT.get(key, key): column for key, column in fields.items()}
    own = {*shape.needed, *shape.optional, *shape.inner}
    if any(key not in own for key in fields):
        return {}, 0.0
    best: dict[str, str] = {}
    share = 0.0
    candidates = list(shape.columns)
    if name in ("chat", "sharegpt"):  # any column that holds messages will do, unless it means something else
        claimed = {c for f in FORMATS.values() for candidate in f.columns for c in candidate}
        key = fields.get(shape.inner[0], shape.inner[0])
        holding = dict.fromkeys(c for row in rows[:10] for c, value in row.items() if has_messages(value, key))
        candidates += [(c,) for c in holding if c not in claimed]
    if shape.needed not in candidates:
        candidates.append(shape.needed)
    for candidate in candidates:
        columns = dict(zip(shape.needed, candidate, strict=True))
        columns |= {key: fields[key] for key in fields}
        suited = sum(_suits(name, row, columns, source.format != "auto") for row in rows) / max(1, len(rows))
        if suited > share:
            best, share = columns, suited
    if best:
        for key, usual in shape.optional.items():
            present = next((c for c in usual if any(not absent(row.get(c)) for row in rows)), None)
            if key not in best and present is not None and present not in best.values():
                best[key] = present
    return best, share


def _suits(name: str, row: dict[str, Any], columns: dict[str, str], forced: bool) -> bool:
    """Whether a row has what a format requires; types are checked unless the user named the format."""
    values = {key: look_up(row, columns[key]) for key in FORMATS[name].needed}
    if any(absent(value) for value in values.values()):
        return False
    if forced:
        return True
    if name == "alpaca":
        plain = columns["output"] == "response" and absent(row.get("input")) and absent(row.get("context"))
        return not plain and all(isinstance(v, str) for v in values.values())
    if name in ("chat", "sharegpt"):
        keys = ("role", "content") if name == "chat" else ("from", "value")
        return has_messages(next(iter(values.values())), columns.get(keys[0], keys[0]))
    if name == "preference":
        return all(isinstance(v, (str, list)) for v in values.values())
    if name == "kto":
        return flag_of(values["label"]) is not None
    if name == "tokens":
        return isinstance(values["input_ids"], list)
    if name == "segments":
        return isinstance(values["segments"], list)
    if name == "label":
        return isinstance(values["text"], str) and label_name(values["label"]) is not None
    if name == "prompt":
        return all(isinstance(v, str) or has_messages(v, "role") for v in values.values())
    return all(isinstance(v, str) for v in values.values())


def _reason(
    name: str,
    columns: dict[str, str],
    rows: list[dict[str, Any]],
    share: float,
    source: Source,
    others: list[str],
    purpose: Purpose,
) -> str:
    mapped = {key: column for key, column in columns.items() if key not in FORMATS[name].inner}
    listed = ", ".join(f"{c} (as {k})" if c != k else c for k, c in mapped.items())
    many = "the rows have" if share >= 1 else f"{share:.0%} of the first {len(rows)} rows have"
    reason = f"{name}: {many} {listed}" if source.format == "auto" else f"{name}, as set: {many} {listed}"
    if name in ("prompt", "pair") and purpose == "causal":
        plain = isinstance(look_up(rows[0], columns[FORMATS[name].needed[0]]), str)
        reason += "; joined as they stand, without a chat template" if plain else ""
    if others:
        reason += f"; {' and '.join(others)} would fit too, which is less specific (set format to choose)"
    used = {c.split(".")[0] for c in columns.values()}
    seen = dict.fromkeys(column for row in rows for column in row)
    unused = [column for column in seen if column not in used]
    if unused:
        more = f" and {len(unused) - 8} more" if len(unused) > 8 else ""
        reason += f"; not used: {', '.join(map(str, unused[:8]))}{more}"
    return reason


def _no_format_error(rows: list[dict[str, Any]], where: str, source: Source, field: str, purpose: Purpose) -> UserError:
    counts = Counter(column for row in rows for column in row)
    columns = ", ".join(str(c) for c, _ in counts.most_common(12)) or "none"
    texts = [c for c in counts if any(isinstance(row.get(c), str) for row in rows)]
    if source.fields or source.format != "auto":
        expected = "the columns that fields names" if source.fields else f"the columns of format {source.format}"
        problem = f"no row has {expected} (its columns: {columns})"
        if source.format != "auto":
            problem += f"; needed: {', '.join(FORMATS[source.format].needed)}"
        key = "fields" if source.fields else "format"
        value: Any = source.fields or source.format
        remedy = _suggest_columns(source, counts) if source.fields else _suggest_format(rows, texts, source, purpose)
        return UserError(f"{field}.{key}", value, problem, remedy)
    problem = f"no format fits the rows (the columns of {where}: {columns})"
    if purpose == "classify":
        others = [c for c in counts if c not in texts[:1]]
        example = f"{{text: {texts[0] if texts else 'column'}, label: {others[0] if others else 'column'}}}"
    elif any(isinstance(row.get("translation"), dict) for row in rows):
        keys = [*next(row["translation"] for row in rows if isinstance(row.get("translation"), dict)), "a", "b"]
        example = f"{{source: translation.{keys[0]}, target: translation.{keys[1]}}}"
    elif len(texts) >= 2:
        example = f"{{prompt: {texts[0]}, completion: {texts[1]}}}"
    else:
        example = f"{{text: {texts[0] if texts else 'column'}}}"
    return UserError(field, source.path, problem, f"say which column is what, e.g. fields: {example}")


def _suggest_columns(source: Source, columns: Iterable[str]) -> str:
    """Suggested `fields` where no row has the columns it names."""
    known = [str(column) for column in columns]
    for name, column in source.fields.items():
        if column.split(".")[0] not in known and (near := difflib.get_close_matches(column, known, 1)):
            return f"did you mean fields: {{{name}: {near[0]}}}?"
    return "name columns that the rows have, a.b for nested: fields: {our name: their column}"


def _suggest_format(rows: list[dict[str, Any]], texts: list[str], source: Source, purpose: Purpose) -> str:
    """Suggested setting where rows do not have the named format: a format that fits, or likely columns."""
    free = source.model_copy(update={"format": "auto"})
    names = ["label"] if purpose == "classify" else [name for name in FORMATS if name != "label"]
    fits = [(share, name, columns) for name in names for columns, share in [_fit(name, rows, free)] if columns]
    needed = FORMATS[source.format].needed
    if not fits:
        columns = texts[: len(needed)] if len(texts) >= len(needed) else ["column"] * len(needed)
        mapped = ", ".join(f"{name}: {column}" for name, column in zip(needed, columns, strict=True))
        return f"map them, a.b for nested, e.g. fields: {{{mapped}}}"
    _, name, mapping = max(fits, key=lambda fit: fit[0])
    columns = [mapping[key] for key in FORMATS[name].needed]
    other = f"set format: {name}, which these rows are, or leave it to auto"
    if source.format in ("chat", "sharegpt") and name in ("prompt", "pair"):
        mapped = f"{{instruction: {columns[0]}, output: {columns[1]}}}"
        turns = f"set format: alpaca with fields: {mapped} to make turns of them"
        return f"{turns}, or format: {name} to join them as they stand"
    if len(columns) == len(needed) == 2:
        mapped = f"{{{needed[0]}: {columns[0]}, {needed[1]}: {columns[1]}}}"
        return f"{other}; or keep format: {source.format} and map them: fields: {mapped}"
    return other


# Understanding


def understand(raw: Raw, detected: Detected, source: Source) -> Example:
    """Parses a row into an example; raises BadRow, and nothing else, if it does not fit."""
    try:
        if not isinstance(raw.value, dict):
            if detected.format != "text" or not isinstance(raw.value, str):
                raise Misfit(
                    f"is plain text, but the source is read as {detected.format}", "give it a source of its own"
                )
            return Example(raw.where, raw.number, "text", text=checked_text(raw.value))
        if detected.format in TURNS and not MEDIA.isdisjoint(raw.value):
            _refuse_media(raw)
        return READERS[detected.format](raw, detected.columns)
    except Misfit as error:
        raise error.in_row(raw) from None
    except RecursionError:
        raise BadRow(raw.where, raw.number, "the row is nested too deeply", "flatten or delete it") from None
    except Exception as error:  # one odd row must not end a run of many hours
        problem = f"the row cannot be understood ({type(error).__name__}: {error})"
        raise BadRow(raw.where, raw.number, problem, "mend or delete the row") from None


def _refuse_media(raw: Raw) -> None:
    """Rejects rows with images or other media, whose text would be trained on without them."""
    for column in MEDIA & raw.value.keys():
        if raw.value[column] and not absent(raw.value[column]):
            problem = f'the row has something under "{column}"; only text can be learned'
            raise Misfit(problem, "leave such rows out (data.on_bad_row: skip), or remove the column")
