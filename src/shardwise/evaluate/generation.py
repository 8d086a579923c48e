"""Greedy answers to a file of prompts, scored by a rule and all of them saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwise.evaluate.bars import Bar
from shardwise.evaluate.figures import TaskResult, by_group, ratio
from shardwise.evaluate.rows import EvalRow, read_rows
from shardwise.evaluate.scorers import Scorer
from shardwise.evaluate.settings import GenerateTask
from shardwise.nn.generate import Sampling, prompt_ids, replies

PROMPT = ("question", "instruction", "input", "query")
ANSWER = ("answers", "target", "output", "completion", "expected", "reference")
BATCH = {"cuda": 64, "cpu": 8}


@dataclass(frozen=True)
class _Item:
    row: EvalRow
    messages: list[dict[str, str]]
    wanted: list[str]
    group: str | None


def _item(row: EvalRow, task: GenerateTask, needs_answer: bool) -> _Item:
    messages = row.get(task.fields, "messages")
    if isinstance(messages, list) and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages):
        messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]
        answer = row.get(task.fields, "answer", ANSWER)
        if messages and messages[-1]["role"] == "assistant":  # a row of training data: its last turn is what is wanted
            answer = messages.pop()["content"] if answer is None else answer
    else:
        messages = [{"role": "user", "content": str(row.need(task.fields, "prompt", PROMPT))}]
        answer = row.get(task.fields, "answer", ANSWER)
    if answer is None and needs_answer:
        row.need(task.fields, "answer", ANSWER)
    answers = answer if isinstance(answer, list) else [answer]
    expected = [] if answer is None else [str(a) for a in answers]
    if task.system is not None:
        messages = [{"role": "system", "content": task.system}, *messages]
    group = row.get(task.fields, "category", ("subject",))
    return _Item(row, messages, expected, None if group is None else str(group))


def measure_generation(
    task: GenerateTask,
    model: Any,
    tokenizer: Any,
    bar: Bar,
    keep: Callable[[dict[str, Any]], None],
) -> TaskResult:
    """Returns the share of answers that the task's scorer accepts."""
    scorer = Scorer(task)
    items = [_item(row, task, scorer.needs_answer) for row in read_rows(task.path, "path", task.limit)]
    order = sorted(range(len(items)), key=lambda i: -len(prompt_ids(tokenizer, items[i].messages)))
    advance = bar(len(items))
    size = BATCH.get(model.device.type, 8)
    right = [0.0] * len(items)
    sampling = Sampling(max_tokens=task.max_tokens)
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        outputs = replies(model, tokenizer, [items[i].messages for i in batch], sampling, size)
        for i, output in zip(batch, outputs, strict=True):
            item = items[i]
            right[i] = float(scorer(output, item.wanted))
            keep({
                "where": item.row.where, "messages": item.messages, "output": output, "wanted": item.wanted,
                "correct": bool(right[i]),
            })  # fmt: skip
        advance(len(batch))
    groups = by_group(task.scorer, right, [item.group for item in items])
    return TaskResult(task.label, "generate", [ratio(task.scorer, right)], groups)
