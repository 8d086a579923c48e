"""Compares the `{% generation %}` tags of a chat template with the spans derived from its renderings.

[Note: tags] A template may mark what the assistant wrote. If it does, the tags decide where an answer begins: they may
exclude what the template writes before the content itself (an empty block of thoughts). Published tags are wrong in two
ways: they exclude the end of turn, and they cover other roles. The end of turn is trained on regardless and the
difference is reported; a template that marks text of another role is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shardwise.data.row_warnings import TAGS_DIFFER, TAGS_NO_END
from shardwise.data.turns import Mask, Span, TemplateFault

TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Tags:
    """Spans of a template's generation tags in its renderings."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def spans(self, text: str, messages: Sequence[Any], tools: Sequence[Any]) -> list[Span] | None:
        """Tagged spans of `text`, the rendering of these messages; None if the template has no tags."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.tokenizer.get_chat_template(None, list(tools) or None)
        if not TAG.search(template):
            return None
        rendered: Any = render_jinja_template(
            [list(messages)], list(tools) or None, chat_template=template, return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )  # fmt: skip
        (same,), (spans,) = rendered
        return [(a, b) for a, b in spans if a < b] if same == text else None


def held_against(mask: Mask, words: Sequence[Span], tagged: Sequence[Span], others: Sequence[int]) -> Mask:
    """Returns the mask adjusted to the tags, with a note where they differ.

    `words` are the content spans of the messages trained on; `others` are the end positions of other roles' contents.
    """
    for begin, end in tagged:
        if any(begin < place <= end for place in others):
            excerpt = " ".join(mask.text[begin:end].split())[:80]
            problem = (
                f"the {{% generation %}} tags of the chat template cover what is not the assistant's ({excerpt!r})"
            )
            raise TemplateFault(problem, "correct the tags, or take them out: the answers are found without them")
    spans = []
    notes = dict.fromkeys(mask.notes)
    for (begin, end), (first, last) in zip(mask.spans, words, strict=True):
        marked = [(a, b) for a, b in tagged if a < end and b > begin]
        begins = max(begin, min((a for a, _ in marked), default=begin))
        start = begins if begins <= first else begin
        missing = _outside((start, last), marked)
        beyond = [part for span in marked for part in _outside(span, [(begin, end)])]
        if any(mask.text[a:b].strip() for a, b in missing + beyond):
            notes[TAGS_DIFFER] = None
        if any(mask.text[a:b].strip() for a, b in _outside((last, end), marked)):
            notes[TAGS_NO_END] = None
        spans.append((start, end))
    return Mask(mask.text, spans, tuple(notes))


def _outside(span: Span, others: Sequence[Span]) -> list[Span]:
    """The parts of a span that no other span covers."""
    begin, end = span
    parts = []
    for a, b in sorted(others):
        if a > begin:
            parts.append((begin, min(a, end)))
        begin = max(begin, b)
    return [(a, b) for a, b in [*parts, (begin, end)] if a < b]
