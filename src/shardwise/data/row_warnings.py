"""Warnings about rows that are trained on but look wrong, counted per source and shown in the data report.

A fate (examples.py) means that a row was dropped or changed; a remark means that it is used but may not teach what was
intended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwise.core.printable import counted

NOT_WRITTEN = "not written: "  # and the name of the field
BLANK_BEFORE = "first word not learned, blank before it"
FIRST_WORD = "first word not learned"
FIRST_WORD_CHAT = "first word not learned, blank at the end of the template's prompt"
RUN_TOGETHER = "words run together"
EMPTY_ANSWER = "empty answer"
EMPTY_PIECE = "piece without a learned token"
THOUGHTS_DROPPED = "thoughts not written"
# What is unusual about the chat template; the text in question follows where there is a colon.
END_ONCE = "answers without an end of turn"
END_ADDED = "end of turn added: "
END_PLAIN = "end of turn in plain text: "
END_NEXT = "end of turn is a marker of the next turn: "
TAGS_NO_END = "generation tags without the end of turn"
TAGS_DIFFER = "generation tags differ"
UNUSUAL = {
    THOUGHTS_DROPPED: (
        "{many} thoughts that the chat template does not write, as it drops those of earlier answers: they are not "
        "trained on; make a row of each answer to train on all of them"
    ),
    END_ONCE: (
        "{many} answers that the chat template does not end, as it writes an end of turn once, behind the last "
        "message: they are trained on without one, and only last answers teach the model to stop; use a template that "
        "ends every answer, or rows of one answer each"
    ),
    END_ADDED: (
        "{many} a last answer that the chat template leaves open: {text}, with which it ends earlier answers, is added "
        "and trained on; look at the preview"
    ),
    END_PLAIN: (
        "{many} answers that end with {text}, which is plain text to this tokenizer: generation does not stop at it; "
        "use the tokenizer that the template was written for"
    ),
    END_NEXT: (
        "{many} answers that are trained to end with {text}, which opens the next turn: the model's generation config "
        "lists it as a token to stop at"
    ),
    TAGS_NO_END: (
        "{many} answers whose end of turn lies outside the generation tags of the chat template; it is trained on all "
        "the same, or the model would not learn to stop"
    ),
    TAGS_DIFFER: (
        "{many} answers that the generation tags of the chat template mark otherwise (with a part of the prompt, or "
        "without some words): what is trained on is the answer and its end of turn; look at the preview"
    ),
}
MOST_TOGETHER = 0.5  # of the rows: less is text that was cut within a word on purpose

Count = tuple[int, str]  # how many, and where the first one is


def add_remarks(counts: dict[str, Count], remarks: Iterable[tuple[str, Count]]) -> None:
    """Adds to the counts; the first location of each remark is kept."""
    for remark, (count, where) in remarks:
        before, first = counts.get(remark, (0, where))
        counts[remark] = (before + count, first)


def explained(remarks: Mapping[str, Count], rows: int, format: str, columns: Mapping[str, str]) -> dict[str, str]:
    """A sentence for each remark worth reporting: the count, what it means, what to do."""
    sentences = {}
    for remark, (count, where) in remarks.items():
        if remark == RUN_TOGETHER and count <= MOST_TOGETHER * rows:
            continue
        many = counted(count, "row has", "rows have")
        sentences[remark] = f"{_sentence(remark, count, many, format, columns)} (the first: {where})"
    return sentences


def _sentence(remark: str, count: int, many: str, format: str, columns: Mapping[str, str]) -> str:
    if remark.startswith(NOT_WRITTEN):
        field = remark.removeprefix(NOT_WRITTEN)
        text = f"{many} `{field}`, which this model's chat template does not write, so the model will not see it"
        return f"{text}; put it into the content, use a template that knows it, or take it out of the rows"
    if remark == BLANK_BEFORE:
        text = f"{many} a prompt that ends with a blank, which makes one token with the first word of the answer, so"
        return f"{text} that word is not learned; take the blank from the prompt to the beginning of the answer"
    if remark == FIRST_WORD:
        text = f"{many} a prompt whose end makes one token with the first word of the answer, so that word is not"
        return f"{text} learned; {_separation_remedy(format, columns)}"
    if remark == FIRST_WORD_CHAT:
        text = f"{many} answers whose first word makes one token with the blank at the end of the template's prompt, so"
        return f"{text} that word is not trained on; use a template whose prompt has no blank at its end"
    if remark == RUN_TOGETHER:
        return f"{many} a prompt and an answer whose words run together; {_separation_remedy(format, columns)}"
    kind, colon, marked = remark.partition(": ")
    if (unusual := UNUSUAL.get(kind + colon)) is not None:
        return unusual.format(many=many, text=marked)
    if remark == EMPTY_ANSWER:
        text = f"{many} an empty answer, which teaches the model to end at once and nothing else"
        return f"{text}; delete them, or leave them out with data.refine.filter"
    assert remark == EMPTY_PIECE
    text = counted(count, "piece of a row that was split has", "pieces of rows that were split have")
    return f"{text} no token to learn and go for nothing; raise data.sequence_length to keep answers with their prompts"


def _separation_remedy(format: str, columns: Mapping[str, str]) -> str:
    """Remedy for a prompt and answer that run together when concatenated."""
    remedy = "begin the answers with a blank or a newline"
    prompt = columns.get("prompt", columns.get("source"))
    answer = columns.get("completion", columns.get("target"))
    if format not in ("prompt", "pair") or not prompt or not answer:
        return remedy
    fields = f"format: alpaca with fields: {{instruction: {prompt}, output: {answer}}}"
    return f"{remedy}, or make turns of the chat template of them ({fields})"
