"""Core parity: many variants of one small run, trained one after the other in the same ranks (see ranks.py).

Every variant goes through the set-up and the loop of `shardwise train`. What they are held to is `plain_training`,
which shares nothing with them but the documents of each step.
"""

from __future__ import annotations

import gc
import json
import math
import random
from pathlib import Path
from typing import Any

import torch

from support import scenarios
from support.families import config_of
from support.tiny import changed, saved_model

STEPS = 5
CLIP = 0.25
# Shares of the peak rate: two steps of warm-up, then a cosine over the other three.
RATES = [0.5, 1.0, 1.0, 0.75, 0.25]
SYMBOLS = "#$%&*+/<=>@[]^_{|}~"  # one token each, never merged
CONTENT = 20  # symbols of a document, the prompt's and the answer's together

Trained = tuple[list[float], list[float], dict[str, torch.Tensor]]


def write_rows(file: Path, rows: int = 400) -> None:
    """Chats of one length, so that every row has the same shape, of which a different share is trained on."""
    draw = random.Random(0)
    lines = []
    for _ in range(rows):
        start, step = draw.randrange(len(SYMBOLS)), draw.choice((1, 2, 3))
        text = "".join(SYMBOLS[(start + step * n) % len(SYMBOLS)] for n in range(CONTENT))
        prompt = draw.randint(3, CONTENT - 3)
        chat = [{"role": "user", "content": text[:prompt]}, {"role": "assistant", "content": text[prompt:]}]
        lines.append(json.dumps({"messages": chat}) + "\n")
    file.write_text("".join(lines))


def write_models(folder: Path) -> None:
    """Dense ones of two and of four layers, and one with experts, with weights and tokenizer."""
    saved_model(folder / "llama", config_of("llama"))
    saved_model(folder / "deep", config_of("llama") | {"num_hidden_layers": 4})
    saved_model(folder / "mixtral", config_of("mixtral"))


def the_run(folder: Path, name: str, family: str = "llama", **changes: Any) -> dict[str, Any]:
    """Five steps of 16 rows of two packed documents each; `changes` are dotted paths with __ for dots.

    Ranks that share data take as many rows at once: on four ranks a step is four micro-batches along every axis.
    """
    sharing = math.prod(changes.get(f"parallel__{axis}", 1) for axis in ("tensor", "pipeline", "context"))
    run: dict[str, Any] = {
        "model": str(folder / family),
        "data": {"train": str(folder / "rows.jsonl"), "sequence_length": 80, "packing": True},
        "train": {
            "steps": STEPS,
            "batch_size": 16,
            "micro_batch_size": sharing,
            "learning_rate": 3e-3,
            "warmup": 2,
            "max_grad_norm": CLIP,
            "weight_decay": 0.1,
        },
        "precision": "fp32",
        "device": "cpu",
        "checkpoint": {"every": None},
        "export": {"check": False},
        "output": str(folder / "out" / name),
    }
    return changed(run, changes)


def train_each(runs: dict[str, dict[str, Any]]) -> dict[str, Trained]:
    """Losses, gradient norms and exported parameters of each run; an error names its run."""
    results = {}
    for name, run in runs.items():
        try:
            results[name] = scenarios.train(run)
        except BaseException as error:
            error.add_note(f"in the variant {name}")
            raise
        gc.collect()
    return results


def references(runs: dict[str, dict[str, Any]], plain: dict[str, dict[str, Any]]) -> tuple[dict[str, Trained], ...]:
    """On one rank: these runs, and others by plain PyTorch."""
    return train_each(runs), {name: plain_training(run) for name, run in plain.items()}


def plain_training(run: dict[str, Any]) -> Trained:
    """The same training in plain PyTorch: one document at a time, the rates written out, clipping by definition."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    train, output = run["train"], run["output"] + "-plain"
    loader = scenarios.parts_of(run | {"output": output}).loader
    model: Any = AutoModelForCausalLM.from_pretrained(run["model"], dtype=torch.float32)
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": train["weight_decay"]},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    if train.get("optimizer") == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(STEPS):
        documents = [d for row in loader.sequences(step * 16, 16) for d in row]
        read = [tuple(map(torch.as_tensor, loader.document(document))) for document in documents]
        count = sum(int(trained[1:].sum()) for _, trained in read)
        total = 0.0
        for ids, trained in read:
            log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            loss = -(log_p.gather(1, ids[1:, None])[:, 0] * trained[1:]).sum() / count
            loss.backward()
            total += loss.item()
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in parameters.values()))
        for parameter in parameters.values():
            parameter.grad.mul_(min(1.0, CLIP / norm))
        for group in optimizer.param_groups:
            group["lr"] = train["learning_rate"] * RATES[step]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        norms.append(norm)
    model.save_pretrained(output)
    return losses, norms, load_file(Path(output) / "model.safetensors")
