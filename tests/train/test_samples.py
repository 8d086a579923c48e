"""Samples during training: every rank takes part, they are the model's greedy answers, and training is as without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import scenarios
from support.ranks import run_ranks
from support.tiny import LLAMA, saved_model, tiny_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.config.load import load_run
from shardwise.config.resolve import check_samples
from shardwise.core.errors import UserError
from shardwise.observe.metrics import read_metrics

PROMPTS = ("What is ZeRO?", "Name a stage of sharding, and what it shards first of all.")


def greedy(folder: Path, prompt: str, tokens: int) -> str:
    """What transformers itself says."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def test_sharded_ranks_write_what_the_model_says(tmp_path: Path) -> None:
    model = saved_model(tmp_path / "model", LLAMA)
    settings = {"prompts": list(PROMPTS), "every": 2, "max_new_tokens": 12}
    told = []
    for name, samples in (("with", settings), ("without", None)):
        run = tiny_run(
            tmp_path,
            {"name": model},
            train__steps=3,
            parallel__zero=3,
            output=str(tmp_path / name),
            log__samples=samples,
        )
        run_ranks(scenarios.train, 2, run)
        told.append([r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl") if r["kind"] == "train"])
    assert told[0] == told[1], "to the bit"
    lines = [json.loads(line) for line in (tmp_path / "with/samples.jsonl").read_text().splitlines()]
    assert [(one["step"], one["prompt"]) for one in lines] == [(step, p) for step in (2, 3) for p in PROMPTS]
    last = [one["text"] for one in lines[-2:]]
    assert last == [greedy(tmp_path / "with/model", prompt, 12) for prompt in PROMPTS] and all(last)
    assert not (tmp_path / "without/samples.jsonl").exists()


@pytest.mark.parametrize(("changes", "purpose", "words"), [
    ({}, "masked", "does not go on with a text"),
    ({"pipeline": 2}, "causal", "divided along pipeline"),
    ({"tensor": 2}, "causal", "divided along tensor"),
])  # fmt: skip
def test_where_it_cannot_work_it_is_refused(changes: dict[str, Any], purpose: str, words: str) -> None:
    run = load_run({"model": "x", "data": {"train": "x.jsonl"}, "log": {"samples": {"prompts": "Hi"}}}).run
    check_samples(run, "causal")
    run = run.model_copy(update={"parallel": run.parallel.model_copy(update=changes)})
    with pytest.raises(UserError, match=words):
        check_samples(run, purpose)
