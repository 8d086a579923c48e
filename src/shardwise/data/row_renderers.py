"""Renders rows to documents for models that read one row at a time: encoder–decoders, masked models, classifiers.

Each text gets the special tokens that its tokenizer adds by itself. The contents of a document are listed in layout.py.

[Note: lengths] `data.sequence_length` bounds what one stack of the model reads: source and target each, or the text. A
text to be masked is split if it is too long, each piece with its own special tokens. A source or a classified text that
is truncated (`over_length: truncate`) keeps the special tokens at its end; a truncated target has no end, so that the
model does not learn to stop there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.config.objectives import Purpose
from shardwise.core.errors import UserError
from shardwise.data.examples import BadRow, Document, Example, RowOutcomes
from shardwise.data.labels import class_of
from shardwise.data.word_hashes import text_of

if TYPE_CHECKING:
    from shardwise.data.tokenise import Spec

ROW_PURPOSES: tuple[Purpose, ...] = ("seq2seq", "masked", "classify")


class RowRenderer:
    """Renders examples to documents with one tokenizer, for one of ROW_PURPOSES."""

    def __init__(self, tokenizer: Any, field: str, purpose: Purpose, labels: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.field = field
        self.labels = labels
        self.special = special_ids(tokenizer)
        renderers: dict[Purpose, Callable[[Sequence[Example]], Iterator[Document | BadRow]]] = {
            "seq2seq": self._pairs, "masked": self._texts, "classify": self._labelled,
        }  # fmt: skip
        self.render = renderers[purpose]
        _check_tokens(tokenizer, purpose)

    def _encode(self, texts: list[str], **more: Any) -> list[np.ndarray]:
        if not texts:
            return []
        encoded = self.tokenizer(texts, **more, verbose=False)  # no word on lengths: they are our concern
        return [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]

    # --- seq2seq ---------------------------------------------------------------------------------------------------

    def _pairs(self, examples: Sequence[Example]) -> Iterator[Document | BadRow]:
        pairs = [self._pair(example) for example in examples]
        valid = [pair for pair in pairs if not isinstance(pair, BadRow)]
        sources = iter(self._encode([source for source, _ in valid]))
        targets = iter(self._targets([target for _, target in valid]))
        for example, pair in zip(examples, pairs, strict=True):
            if isinstance(pair, BadRow):
                yield pair
                continue
            source, target = next(sources), next(targets)
            if not len(source):
                yield BadRow(example.where, example.number, "the source has no token", "give it a text, or delete it")
                continue
            yield _document(example, source, target)

    def _targets(self, texts: list[str]) -> list[np.ndarray]:
        if not texts:
            return []
        encoded = self.tokenizer(text_target=texts, verbose=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        ends = [ids if end in ids[-2:] else [*ids, end] for ids in encoded]  # some put the language behind it
        return [np.array(ids, dtype=np.int32) for ids in ends]

    def _pair(self, example: Example) -> tuple[str, str] | BadRow:
        if example.kind == "pair":
            source, target = example.prompt, example.text
        elif example.kind == "chat":
            roles = [m["role"] for m in example.messages]
            if roles not in (["user", "assistant"], ["system", "user", "assistant"]) or example.tools:
                problem = f"is a conversation ({', '.join(roles)}), which is no source with its target"
                remedy = "use rows of one question and one answer, or a causal model"
                return BadRow(example.where, example.number, problem, remedy)
            *before, answer = [str(m["content"]) for m in example.messages]
            source, target = "\n\n".join(before), answer
        else:
            problem = f"{example.kind} rows have no source and target"
            raise UserError(self.field, example.where, problem, "use rows with source and target, or set its fields")
        if not target.strip():
            return BadRow(example.where, example.number, "the target is empty", "give it a text, or delete the row")
        return source, target

    # --- masked ----------------------------------------------------------------------------------------------------

    def _texts(self, examples: Sequence[Example]) -> Iterator[Document | BadRow]:
        encoded = iter(self._encode([text_of(e) for e in examples if e.kind != "tokens"]))
        for example in examples:
            tokens = np.array(example.tokens, np.int32) if example.kind == "tokens" else next(encoded)
            yield Document(example.where, example.number, tokens, ~np.isin(tokens, self.special))

    # --- classify --------------------------------------------------------------------------------------------------

    def _labelled(self, examples: Sequence[Example]) -> Iterator[Document | BadRow]:
        for example in examples:
            if example.kind != "label":
                problem = f"{example.kind} rows have no class"
                raise UserError(self.field, example.where, problem, "use rows with a text and a label, or set fields")
        singles = iter(self._encode([e.text for e in examples if not e.second]))
        both = [e for e in examples if e.second]
        pairs = iter(self._encode([e.text for e in both], text_pair=[e.second for e in both]))
        for example in examples:
            tokens = next(pairs if example.second else singles)
            number = class_of(example.category, self.labels)
            if number is None:
                listed = ", ".join(self.labels[:12]) + (" …" if len(self.labels) > 12 else "")
                problem = f'its label "{example.category}" is none of the classes ({listed})'
                yield BadRow(example.where, example.number, problem, "mend the row, or add it to objective.labels")
            elif not len(tokens):
                yield BadRow(example.where, example.number, "the text has no token", "give it a text, or delete it")
            else:
                yield _document(example, tokens, np.array([number], np.int32))


def _check_tokens(tokenizer: Any, purpose: Purpose) -> None:
    """Raises UserError if the tokenizer lacks a special token that the purpose requires."""
    problem = ""
    if purpose == "seq2seq" and tokenizer.eos_token_id is None:
        problem = "has no end-of-sequence token, so the model would never learn where a target ends"
    if purpose == "masked" and tokenizer.mask_token_id is None:
        problem = "has no mask token, so nothing can be masked"
    if problem:
        remedy = f"use the tokenizer of a {'masked' if purpose == 'masked' else 'seq2seq'} model"
        raise UserError("model.tokenizer", type(tokenizer).__name__, problem, remedy)


def special_ids(tokenizer: Any) -> np.ndarray:
    """Ids of the special tokens."""
    return np.array(sorted(set(tokenizer.all_special_ids)), dtype=np.int64)


def _document(example: Example, read: np.ndarray, learned: np.ndarray) -> Document:
    mask = np.repeat([False, True], [len(read), len(learned)])
    return Document(example.where, example.number, np.concatenate([read, learned]), mask)


def read_and_learned(document: Document) -> tuple[np.ndarray, np.ndarray]:
    """Splits a seq2seq or classify document into input tokens and target tokens."""
    at = int(np.argmax(document.learned))
    return document.tokens[:at], document.tokens[at:]


def note_of(document: Document, purpose: Purpose, labels: Sequence[str]) -> tuple[Document, str]:
    """A document in readable form, with a note about its target."""
    if purpose not in ("seq2seq", "classify"):
        return document, ""
    read, learned = read_and_learned(document)
    if purpose == "seq2seq":
        return document, f"source {len(read):,} tokens, target {len(learned):,}"
    text = Document(document.where, document.number, read, np.zeros(len(read), dtype=bool))
    return text, f"class {labels[int(learned[0])]}"


# --- fitting -------------------------------------------------------------------------------------------------------


def fit_row(
    document: Document, spec: Spec, special: np.ndarray, fates: RowOutcomes, refused: list[Document]
) -> list[Document]:
    """The document split, truncated or dropped as data.over_length says ([Note: lengths])."""
    limit = spec.data.sequence_length
    longest = _longest_part(document, spec.purpose)
    length = len(longest.tokens)
    if length <= limit:
        return [document]
    policy = spec.data.over_length or ("split" if spec.purpose == "masked" else "error")
    if policy == "split":
        return _pieces(document, limit)
    if policy == "truncate":
        fates.add("truncated", document.where, f"{length} tokens")
        return [_truncated(document, spec.purpose, limit, special)]
    if policy == "drop":
        fates.add("dropped", document.where, f"{length} tokens")
    else:
        refused.append(longest)
    return []


def _longest_part(document: Document, purpose: Purpose) -> Document:
    if purpose == "masked":
        return document
    read, learned = read_and_learned(document)
    part = max(read, learned, key=len)
    return Document(document.where, document.number, part, np.zeros(len(part), dtype=bool))


def _pieces(document: Document, limit: int) -> list[Document]:
    """Splits a text into pieces of equal length, each with the special tokens of the full text."""
    text = np.flatnonzero(document.learned)
    first, end = int(text[0]), int(text[-1]) + 1
    room = max(1, limit - first - (len(document.tokens) - end))
    count = -(-(end - first) // room)
    pieces = []
    for part in np.array_split(np.arange(first, end), count):
        place = np.concatenate([np.arange(first), part, np.arange(end, len(document.tokens))])
        pieces.append(Document(document.where, document.number, document.tokens[place], document.learned[place]))
    return pieces


def _truncated(document: Document, purpose: Purpose, limit: int, special: np.ndarray) -> Document:
    if purpose == "masked":
        return _pieces(document, limit)[0]
    read, learned = read_and_learned(document)
    if len(read) > limit:
        body = np.flatnonzero(~np.isin(read, special))
        trailing = min(len(read) - int(body[-1]) - 1 if len(body) else 0, limit - 1)
        read = np.concatenate([read[: limit - trailing], read[len(read) - trailing :]])
    learned = learned[:limit]
    mask = np.repeat([False, True], [len(read), len(learned)])
    return Document(document.where, document.number, np.concatenate([read, learned]), mask)
