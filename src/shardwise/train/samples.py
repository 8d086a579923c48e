"""What the model writes during training: greedy answers to a few prompts, kept in samples.jsonl.

Every rank takes part, since with ZeRO-3 none can compute alone: all run the same forwards, and the main rank's choice
of each token goes to all, so that rounding that differs between devices can never send ranks different ways. Rows have
one length throughout (prompt, answer, and padding that a causal model cannot see): blocks are compiled once.
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

ROUND = 16  # tokens: rows are as long as a multiple of that, which products in 8 bits want


def write_samples(state: TrainState, last: bool) -> None:
    """On all ranks, where samples are due: asks the model, and on the main rank keeps what it wrote."""
    settings, step = state.job.run.log.samples, state.position.step
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
    """The most likely answers to the prompts, the same on every rank."""
    tokenizer, model = state.job.tokenizer, state.sharded.model
    asked = [
        prompt_ids(tokenizer, [{"role": "user", "content": p}]) if chat else text_ids(tokenizer, p)
        for p in prompts
    ]
    limit = context_length(model) or state.job.run.data.sequence_length
    asked = [ids[-max(1, limit - tokens) :] or [state.job.pad_id] for ids in asked]
    longest = max(map(len, asked))
    width = min(limit, -(-(longest + min(tokens, limit - longest)) // ROUND) * ROUND)
    rows = torch.full((len(asked), width), state.job.pad_id)
    for row, ids in zip(rows, asked, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    ends, stops = torch.tensor([len(ids) for ids in asked]), stop_ids(tokenizer, model)
    open_ = torch.ones(len(asked), dtype=torch.bool)
    device: Any = state.world.device
    with state.sharded.evaluation(), fast_attention(device), as_written(state.job.run.compiled):
        for _ in range(min(tokens, width - longest)):
            logits = torch.as_tensor(model(input_ids=rows.to(device), use_cache=False).logits)
            chosen = (
                logits[torch.arange(len(asked)), (ends - 1).to(device)].float().argmax(-1).cpu()
            )
            dist.broadcast(chosen, group=state.world.control, group_src=0)
            open_ &= torch.tensor([int(token) not in stops for token in chosen])
            rows[torch.arange(len(asked))[open_], ends[open_]] = chosen[open_]
            ends += open_
            if not open_.any():
                break
    begun = [len(ids) for ids in asked]
    return [
        str(tokenizer.decode(row[start:end].tolist(), skip_special_tokens=True))
        for row, start, end in zip(rows, begun, ends.tolist(), strict=True)
    ]


def forget_samples_after(state: TrainState) -> None:
    """Drops samples of later steps, so that a resumed run does not tell the same steps twice."""
    file = state.job.output / "samples.jsonl"
    if not state.world.is_main or not file.is_file():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= state.position.step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # a line that a crash has torn
    file.write_text("".join(kept), encoding="utf-8")
