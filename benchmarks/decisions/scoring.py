"""Likelihoods of choices by this project and by lm-eval on the same model and questions: same numbers? CPU time.

    pip install lm-eval
    PYTHONPATH=src python benchmarks/decisions/scoring.py OUT.json --layers 4

Questions of the demo with the right answer and three others; SmolLM2-135M-Instruct (or its first --layers) in fp32, one
thread. Three kinds: choices as text, the same after three worked examples, and choices by letter. Contestants take
turns.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

ROUNDS = 2


def questions(count: int) -> list[tuple[str, list[str], int]]:
    """Question, four choices, index of the right one."""
    rows = [json.loads(line) for line in (files("shardwise.demo") / "pairs.jsonl").read_text().splitlines()]
    first = {row["fact"]: [m["content"] for m in row["messages"]] for row in reversed(rows)}
    pairs = list(first.values())
    draw = random.Random(0)
    made = []
    for number, (question, answer) in enumerate(pairs[:count]):
        choices = [answer, *draw.sample([a for n, (_, a) in enumerate(pairs) if n != number], 3)]
        draw.shuffle(choices)
        made.append((question, choices, choices.index(answer)))
    return made


def prompts(kind: str, count: int) -> list[list[tuple[str, str]]]:
    """Context and continuation for each choice of each question."""
    asked = questions(count + 3)
    shots = "".join(f"Question: {q}\nAnswer: {c[a]}\n\n" for q, c, a in asked[:3]) if kind == "shots" else ""
    rows = []
    for question, choices, _ in asked[3:]:
        if kind == "letter":
            shown = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=True))
            rows.append([(f"Question: {question}\n{shown}\nAnswer:", f" {letter}") for letter in "ABCD"])
        else:
            rows.append([(f"{shots}Question: {question}\nAnswer:", f" {choice}") for choice in choices])
    return rows


def ours(model: Any, tokenizer: Any, rows: list[list[tuple[str, str]]]) -> list[float]:
    from shardwise.evaluate.likelihood import fit_context, log_likelihoods, make_request

    requests = [make_request(tokenizer, context, continuation) for row in rows for context, continuation in row]
    return [one.total for one in log_likelihoods(model, fit_context(model, requests)[0])]


def lm_eval(wrapped: Any, rows: list[list[tuple[str, str]]]) -> list[float]:
    from lm_eval.api.instance import Instance

    pairs = [pair for row in rows for pair in row]
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    return [value for value, _ in wrapped.loglikelihood(asked, disable_tqdm=True)]


def main() -> None:
    """Prints one line per kind and writes all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--kinds", nargs="*", default=("text", "shots", "letter"))
    options = parser.parse_args()
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM

    from shardwise.config.schema import Model
    from shardwise.nn.models.source import find_model

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    source = find_model(Model(name="smollm2-135m-instruct"))
    tokenizer = source.load_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(source.weights, dtype=torch.float32).eval()
    model.model.layers = model.model.layers[: options.layers]
    model.config.num_hidden_layers = len(model.model.layers)
    wrappers = {size: HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size) for size in (4, 32)}
    results: dict[str, Any] = {}
    for kind in options.kinds:
        rows = prompts(kind, options.questions)
        contestants = {"ours": lambda rows=rows: ours(model, tokenizer, rows)}
        for size, wrapped in wrappers.items():
            contestants[f"lm-eval, batch {size}"] = lambda wrapped=wrapped, rows=rows: lm_eval(wrapped, rows)
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        values: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for name, score in contestants.items():
                began = time.process_time()
                values[name] = score()
                seconds[name].append(round(time.process_time() - began, 2))
        chosen = {
            name: [max(range(4), key=lambda i, at=at, v=v: v[at + i]) for at in range(0, len(v), 4)]
            for name, v in values.items()
        }
        results[kind] = {
            "requests": len(values["ours"]),
            "cpu_s": seconds,
            "largest difference": {
                n: max(abs(a - b) for a, b in zip(values["ours"], v, strict=True)) for n, v in values.items()
            },
            "same choices": {n: sum(a == b for a, b in zip(chosen["ours"], c, strict=True)) for n, c in chosen.items()},
        }
        print(kind, json.dumps(results[kind]), flush=True)
    Path(options.output).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
