"""Renders examples to tokens and loss masks.

Each example becomes one text and the spans in it that are trained on; texts are tokenised in batches and spans are
mapped to tokens through the tokenizer's offsets. The spans of a conversation are determined in template.py.

[Note: boundaries] A token belongs to the part it begins in. One that begins in a prompt and reaches into the answer is
not trained on: the prompt at inference ends differently. Nor is one that begins in an answer and reaches into the words
of the next turn. An end of turn that includes the newline behind it (as in Phi-3) is trained on.

[Note: begin and end] A chat template writes its own BOS, so none is added to what it renders. Everything else gets the
BOS that the tokenizer adds by itself, and an EOS; neither is doubled where the text has it. Plain text, segments and
prompts without a template may spell special tokens: there they are what the author of the corpus wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.config.objectives import Purpose
from shardwise.core.errors import UserError
from shardwise.data.encode import Encoded, Encoder, Joined
from shardwise.data.examples import BadRow, Document, Example, Message
from shardwise.data.row_renderers import ROW_PURPOSES, RowRenderer
from shardwise.data.row_warnings import (
    BLANK_BEFORE,
    EMPTY_ANSWER,
    FIRST_WORD,
    FIRST_WORD_CHAT,
    NOT_WRITTEN,
    RUN_TOGETHER,
    THOUGHTS_DROPPED,
)
from shardwise.data.template import SAYING, ChatTemplate, RowFault, Span, TemplateFault
from shardwise.data.turns import THOUGHTS

BATCH = 256  # examples that are rendered in one call


@dataclass(frozen=True)
class _RenderPlan:
    """A text and its spans to train on; `plain` ones get BOS and EOS, the latter trained on if `ends`."""

    text: str
    spans: list[Span]
    plain: bool = False
    ends: bool = False
    remarks: tuple[str, ...] = ()


class Renderer:
    """Renders examples to documents with one tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        loss_on: str,
        field: str,
        purpose: Purpose = "causal",
        labels: Sequence[str] = (),
        stops: Sequence[str] = (),
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            problem = "has no fast version (tokenizer.json), which exact loss masks need"
            remedy = "convert it with transformers, or use the tokenizer of a sibling model"
            raise UserError("model.tokenizer", type(tokenizer).__name__, problem, remedy)
        self.tokenizer = tokenizer
        self.loss_on = loss_on
        self.field = field
        self.purpose = purpose
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.first = [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []
        self.last = [eos] if eos is not None else []
        self.template = ChatTemplate(tokenizer, stops)
        self.encoder = Encoder(_backend_tokenizer(tokenizer))
        self.rows = RowRenderer(tokenizer, field, purpose, labels) if purpose in ROW_PURPOSES else None

    def render(self, examples: Sequence[Example]) -> Iterator[Document | BadRow]:
        """Yields for each example, in order, its document or the BadRow that says why there is none."""
        for at in range(0, len(examples), BATCH):
            batch = examples[at : at + BATCH]
            if self.rows is not None:
                yield from self.rows.render(batch)
            elif self.purpose in ("preference", "kto"):
                yield from map(self._preference_document, batch)
            else:
                yield from self._documents(batch, self._plans(batch))

    def render_preference(self, example: Example) -> tuple[Document, Document]:
        """Returns the chosen and the rejected conversation; only the answers have a loss, prompts are equal."""
        chosen, rejected = self._answers(example, (example.chosen, example.rejected))
        prompts = [d.tokens[: np.argmax(d.learned)] for d in (chosen, rejected)]
        if not np.array_equal(prompts[0], prompts[1]):
            problem = "the template renders the prompt differently before the chosen and the rejected answer"
            raise BadRow(example.where, example.number, problem, "let both answer the same messages")
        return chosen, rejected

    def render_kto(self, example: Example) -> Document:
        """Returns the conversation of a KTO example; only the answer has a loss."""
        (document,) = self._answers(example, (example.chosen,))
        return document

    def _preference_document(self, example: Example) -> Document | BadRow:
        """Document of a preference or KTO example; see the table in layout.py."""
        try:
            if self.purpose == "kto":
                return replace(self.render_kto(example), head=int(bool(example.label)))
            both = self.render_preference(example)
        except BadRow as bad:
            return bad
        tokens, learned = (np.concatenate([getattr(d, name) for d in both]) for name in ("tokens", "learned"))
        remarks = tuple(dict.fromkeys(remark for d in both for remark in d.remarks))
        return Document(example.where, example.number, tokens, learned, len(both[0].tokens), remarks)

    def _answers(self, example: Example, endings: Iterable[tuple[dict[str, Any], ...]]) -> list[Document]:
        chats = []
        for ending in endings:
            weights = (0,) * len(example.messages) + tuple(int(m["role"] == "assistant") for m in ending)
            messages = (*example.messages, *ending)
            place = (example.where, example.number, "chat", messages, example.tools, weights)
            chats.append(Example(*place))  # type: ignore[arg-type]
        documents = []
        for document in self._documents(chats, self._plans(chats)):
            if isinstance(document, BadRow):
                raise document
            if not document.learned.any():
                raise BadRow(example.where, example.number, "has no answer to learn from", "add one, or delete the row")
            documents.append(document)
        return documents

    # --- text and places -------------------------------------------------------------------------------------------

    def _plans(self, examples: Sequence[Example]) -> list[_RenderPlan | BadRow | None]:
        """Render plan of each example; None for examples that are already tokens."""
        chats = [e for e in examples if e.kind == "chat" and not e.tools]
        rendered = dict(zip(map(id, chats), self.template.render_many([e.messages for e in chats]), strict=True))
        plans: list[_RenderPlan | BadRow | None] = []
        for example in examples:
            try:
                plans.append(self._plan(example, rendered.get(id(example))))
            except RowFault as fault:
                where = example.where if fault.message is None else f"{example.where} message {fault.message + 1}"
                plans.append(BadRow(where, example.number, fault.problem, fault.remedy))
            except TemplateFault as fault:
                raise UserError("model.tokenizer", example.where, fault.problem, fault.remedy) from None
        return plans

    def _plan(self, example: Example, rendered: str | RowFault | None) -> _RenderPlan | None:
        match example.kind:
            case "chat":
                return self._chat(example, rendered)
            case "text":  # an empty text teaches nothing, not even to end at once
                text = example.text
                return _RenderPlan(text, [(0, len(text))] if text else [], plain=True, ends=bool(text))
            case "segments":
                return _segments(example.segments)
            case "pair":
                text = example.prompt + example.text
                begin = 0 if self.loss_on == "all" else len(example.prompt)
                empty = () if example.text.strip() else (EMPTY_ANSWER,)
                return _RenderPlan(text, [(begin, len(text))], plain=True, ends=True, remarks=empty)
            case "tokens":
                return None
        problem = f"{example.kind} rows cannot be learned as they stand"
        raise UserError(self.field, example.where, problem, "use rows with messages, text or a prompt and its answer")

    def _chat(self, example: Example, rendered: str | RowFault | None) -> _RenderPlan:
        self.template.check_spelling(example.messages, example.tools)
        if isinstance(rendered, RowFault):
            raise rendered
        messages = example.messages
        tools = example.tools
        text = self.template.render(messages, tools) if rendered is None else rendered
        weights = example.weights or (None,) * len(messages)
        unwritten = self.template.unwritten(text, messages, tools)
        remarks = tuple(NOT_WRITTEN + field for field in unwritten)
        if self.loss_on == "all":
            left_out = tuple(i for i, w in enumerate(weights) if w == 0)
            spans = self.template.mask(text, messages, left_out, tools).spans if left_out else []
            return _RenderPlan(text, _complement(spans, len(text)), remarks=remarks)
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if not answers and 1 not in weights:
            problem = "the conversation has no assistant message, so nothing would be learned"
            raise RowFault(problem, "add one, delete the row, or use data.loss_on: all")
        default = answers if self.loss_on == "assistant" else answers[-1:]
        trained = tuple(i for i, w in enumerate(weights) if (i in default if w is None else w))
        if any(not messages[i]["content"].strip() and _has_no_output(messages[i], unwritten) for i in trained):
            remarks = (*remarks, EMPTY_ANSWER)
        if any(thought not in text for i in trained for thought in _reasoning_texts(messages[i], unwritten)):
            remarks = (*remarks, THOUGHTS_DROPPED)
        if not trained:
            return _RenderPlan(text, [], remarks=remarks)
        mask = self.template.mask(text, messages, trained, tools)
        return _RenderPlan(mask.text, mask.spans, remarks=(*remarks, *mask.notes))

    # --- tokens ----------------------------------------------------------------------------------------------------

    def _documents(
        self, examples: Sequence[Example], plans: list[_RenderPlan | BadRow | None]
    ) -> Iterator[Document | BadRow]:
        encodings = self.encoder.encode([p.text for p in plans if isinstance(p, _RenderPlan)])
        for example, plan in zip(examples, plans, strict=True):
            if plan is None:
                yield self._tokens(example)
            elif isinstance(plan, BadRow):
                yield plan
            else:
                yield self._document(example, plan, next(encodings))

    def _document(self, example: Example, plan: _RenderPlan, encoded: Encoded | Joined) -> Document | BadRow:
        ids = encoded.ids
        remarks = plan.remarks
        learned = np.zeros(len(ids), dtype=bool)
        for begin, end in plan.spans:  # tokens that begin within them
            (start, reach), (stop, beyond) = encoded.edge(begin), encoded.edge(end)
            if beyond > end and not plan.plain and stop > start and plan.text[end:beyond].strip():
                stop -= 1  # the token is the next turn's as well
            learned[start:stop] = True
            if reach > begin and not plan.plain and plan.text[begin:reach].strip():
                remarks += (FIRST_WORD_CHAT,) if FIRST_WORD_CHAT not in remarks else ()
                if not self.template.markers.all.sub("", plan.text[reach:end]).strip():
                    problem = "an answer is part of the token that ends the prompt, so none of its words is trained on"
                    return BadRow(example.where, example.number, problem, "use a template whose prompt ends otherwise")
        if plan.plain:
            if example.kind == "pair" and example.text and not learned.any():
                problem = "the answer is part of the token that ends the prompt, so none of it would be learned"
                remedy = "begin the answer with a blank or a newline, or set format: alpaca to make turns of them"
                if example.prompt[-1:].isspace():
                    remedy = "take the blank from the end of the prompt to the beginning of the answer"
                return BadRow(example.where, example.number, problem, remedy)
            remarks += tuple(
                dict.fromkeys(r for begin, _ in plan.spans for r in _boundary_remarks(plan.text, begin, encoded))
            )
            first = [] if ids[:1].tolist() == self.first else self.first
            last = [] if ids[-1:].tolist() == self.last else self.last
            ids = np.concatenate([first, ids, last]).astype(np.int32)
            learned = np.concatenate([[False] * len(first), learned, [plan.ends] * len(last)]).astype(bool)
        learned[:1] = False
        return Document(example.where, example.number, ids, learned, remarks=remarks)

    def _tokens(self, example: Example) -> Document | BadRow:
        count = len(self.tokenizer)
        problem = ""
        wrong = next((t for t in example.tokens if not 0 <= t < count), None)
        if wrong is not None:
            problem = f"has token {wrong}, the tokenizer knows 0 to {count - 1}"
        elif example.learned is not None and len(example.learned) != len(example.tokens):
            problem = f"has {len(example.tokens)} tokens but {len(example.learned)} marks of what is learned"
        if problem:
            return BadRow(example.where, example.number, problem, "tokenise it again with this tokenizer")
        tokens = np.array(example.tokens, dtype=np.int32)
        learned = np.ones(len(tokens), dtype=bool) if example.learned is None else np.array(example.learned, dtype=bool)
        learned[:1] = False
        return Document(example.where, example.number, tokens, learned)


def _segments(segments: Sequence[tuple[str, bool]]) -> _RenderPlan:
    """Plan for concatenated segments; adjacent ones that are trained on become one span."""
    spans: list[Span] = []
    at = 0
    for text, learned in segments:
        if learned and text:
            spans = [*spans[:-1], (spans[-1][0], at + len(text))] if spans and spans[-1][1] == at else [
                *spans, (at, at + len(text))]  # fmt: skip
        at += len(text)
    return _RenderPlan(
        "".join(text for text, _ in segments), spans, plain=True, ends=bool(segments) and segments[-1][1]
    )


def _has_no_output(message: Message, unwritten: Sequence[str]) -> bool:
    """Whether a message without content has no other field that the template writes either."""
    return not any(message.get(key) for key in SAYING if key not in unwritten)


def _reasoning_texts(message: Message, unwritten: Sequence[str]) -> Iterator[str]:
    """Yields the reasoning text of a message, from its content or from fields that the template writes."""
    before, tag, _ = str(message["content"]).partition("</think>")
    if tag:
        yield before.removeprefix("<think>").strip()
    if len(message) > 2:
        fields = (message.get(key) for key in THOUGHTS if key not in unwritten)
        yield from (field.strip() for field in fields if isinstance(field, str))


def _boundary_remarks(text: str, begin: int, encoded: Encoded | Joined) -> Iterator[str]:
    """Yields warnings about the boundary where the loss begins: see [Note: boundaries]."""
    if not 0 < begin < len(text):
        return
    if text[begin : encoded.reaches(begin)].strip():
        yield BLANK_BEFORE if text[begin - 1].isspace() else FIRST_WORD
    elif text[begin - 1 : begin + 1].isascii() and text[begin - 1 : begin + 1].isalnum():
        yield RUN_TOGETHER


def _complement(spans: list[Span], length: int) -> list[Span]:
    """The gaps between spans."""
    edges = [0, *(min(edge, length) for span in sorted(spans) for edge in span), length]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def _backend_tokenizer(tokenizer: Any) -> Any:
    """The backend tokenizer, with untrimmed offsets.

    Byte-level tokenizers may trim blanks from offsets. A token that has the blank at the end of a prompt would then
    seem to begin with the answer, so we take a copy that does not trim: all that its last stage does besides is to add
    special tokens, which we do not ask for.
    """
    inner = tokenizer.backend_tokenizer
    inner.no_truncation()  # as the tokenizer's own call does
    inner.no_padding()
    encoding = inner.encode("a a", add_special_tokens=False)
    if len(encoding) > 1 and encoding.token_to_chars(len(encoding) - 1)[0] == 2 and _blank_first(encoding.tokens[-1]):
        from tokenizers import Tokenizer, processors

        inner = Tokenizer.from_str(inner.to_str())
        inner.post_processor = processors.Sequence([])
    return inner


def _blank_first(token: str) -> bool:
    return token[:1] in ("Ġ", "▁", " ")


def check_template(tokenizer: Any, field: str, stops: Sequence[str] = ()) -> None:
    """Raises UserError, before any row is read, if the chat template hides where answers are or end."""
    if not tokenizer.chat_template:
        problem = "the data are conversations, but the tokenizer has no chat template"
        remedy = "train an instruct model, set model.tokenizer to one that has a template, or use rows with text"
        raise UserError(field, None, problem, remedy)
    try:
        ChatTemplate(tokenizer, stops).check()
    except TemplateFault as fault:
        raise UserError(field, None, fault.problem, fault.remedy) from None
