"""Samples during training: greedy answers to a few prompts, saved in samples.jsonl.

Every rank takes part, since with ZeRO-3 none can compute alone. All run the same forwards, and the
main rank broadcasts its choice of each token, so that rounding that differs between devices cannot
make ranks diverge. Rows have one length throughout (prompt, answer, and padding that a causal model
cannot see), so that blocks are compiled once.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.effective_device import as_written
from shardwise.nn.attention.varlen import fast_attention
from shardwise.nn.generate import context_length, prompt_ids, stop_ids, text_ids
from shardwise.train.setup import TrainState

ROUND = 16  # row lengths are multiples of this, as 8-bit matrix products require


def write_samples(state: TrainState, last: bool) -> None:
    """Generates samples if they are due, on all ranks; the main rank appends them to the file."""
    settings = state.job.run.log.samples
    step = state.position.step
    if settings is None or not (last or step % settings.every == 0):
        return
    before = state.status.doing
    state.status.set("writing samples")
    with state.meter.paused():
        texts = written(state, settings.prompts, settings.max_new_tokens, settings.chat)
    if state.world.is_main:
        with (state.job.output / "samples.jsonl").open("a", encoding="utf-8") as file:
            for prompt, text in zip(settings.prompts, texts, strict=True):
                line = {"kind": "sample", "step": step, "prompt": prompt, "text": text}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    state.status.set(before)


def written(state: TrainState, prompts: tuple[str, ...], tokens: int, chat: bool) -> list[str]:
    """Greedy answers to the prompts, the same on every rank."""
    tokenizer = state.job.tokenizer
    model = state.sharded.model
    limit = context_length(model) or state.job.run.data.sequence_length
    inputs = []
    for prompt in prompts:
        if chat:
            ids = prompt_ids(tokenizer, [{"role": "user", "content": prompt}])
        else:
            ids = text_ids(tokenizer, prompt)
        inputs.append(ids[-max(1, limit - tokens) :] or [state.job.pad_id])
    count = len(inputs)
    begins = [len(ids) for ids in inputs]
    longest = max(begins)
    width = min(limit, -(-(longest + min(tokens, limit - longest)) // ROUND) * ROUND)
    rows = torch.full((count, width), state.job.pad_id)
    for row, ids in zip(rows, inputs, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    ends = torch.tensor(begins)
    stops = stop_ids(tokenizer, model)
    unfinished = torch.ones(count, dtype=torch.bool)
    device: Any = state.world.device
    with state.sharded.evaluation(), fast_attention(device), as_written(state.job.run.compiled):
        for _ in range(min(tokens, width - longest)):
            logits = torch.as_tensor(model(input_ids=rows.to(device), use_cache=False).logits)
            last = logits[torch.arange(count), (ends - 1).to(device)]
            chosen = last.float().argmax(-1).cpu()
            dist.broadcast(chosen, group=state.world.control, group_src=0)
            unfinished &= torch.tensor([int(token) not in stops for token in chosen])
            rows[torch.arange(count)[unfinished], ends[unfinished]] = chosen[unfinished]
            ends += unfinished
            if not unfinished.any():
                break
    return [
        str(tokenizer.decode(row[begin:end].tolist(), skip_special_tokens=True))
        for row, begin, end in zip(rows, begins, ends.tolist(), strict=True)
    ]


def forget_samples_after(state: TrainState) -> None:
    """Drops samples of later steps, so that a resumed run does not record a step twice."""
    file = state.job.output / "samples.jsonl"
    if not state.world.is_main or not file.is_file():
        return
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= state.position.step:
                lines.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # a line cut off by a crash
    file.write_text("".join(lines), encoding="utf-8")
