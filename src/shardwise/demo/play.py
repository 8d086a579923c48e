"""Runs the demo: ask, train on two ranks with ZeRO, ask again.

The questions are phrased differently from the training pairs; the answers are facts contained in them. The number of
pairs depends on the measured speed of this machine, so that the demo ends in time anywhere.
"""

from __future__ import annotations

import json
import shutil
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.core.errors import UserError

PHRASINGS = 3  # lines per fact in pairs.jsonl
FEWEST_FACTS = 8
EPOCHS = 3
SHOWN = (0, 5, 7)  # which held-out questions are printed: what ZeRO is, hybrid sharding, QLoRA
ANSWER_TOKENS = 48

RUN = """\
# Fine-tunes the embedded model on question–answer pairs. Relative paths are relative to where you run the command.
# Every setting and its default: shardwise config {name}
model: smollm2-135m-instruct
data:
  train: {pairs}
  sequence_length: 256
train:
  epochs: {epochs}
  batch_size: 4
  learning_rate: 4e-4
  schedule: linear
  warmup: 10%
  weight_decay: 0
parallel: {{zero: 2}}
ranks: {ranks}
checkpoint: {{every: {save}}}
output: {output}
"""


def play(output: Path, seconds: int, ranks: int) -> None:
    """Runs the demo in the terminal; leaves the model, the curve and its RUN.yaml in `output`."""
    from shardwise.launch.trainer import Trainer
    from shardwise.train.describe import print_plan, print_result

    console = Console()
    started = time.monotonic()
    console.rule("shardwise demo: teach a small model facts about distributed training", align="left")
    held_out = _lines("heldout.jsonl")
    console.print("loading SmolLM2-135M-Instruct (the first time it is converted: half a minute)")
    before, speed = _ask_and_time("smollm2-135m-instruct", held_out)
    facts = _facts_for(seconds, speed * (0.7 if ranks > 1 else 0.9))
    share = f"{facts * PHRASINGS} of {len(_lines('pairs.jsonl'))} pairs fit the time"
    console.print(f"this machine trains about {speed:.0f} tokens/s: {share}")

    output.mkdir(parents=True, exist_ok=True)
    pairs = output / "pairs.jsonl"
    chosen = _lines("pairs.jsonl")[: facts * PHRASINGS]
    pairs.write_text("".join(json.dumps(line) + "\n" for line in chosen))
    run_file = output / "run.yaml"
    run_file.write_text(RUN.format(name=run_file, pairs=pairs, epochs=EPOCHS, ranks=ranks, output=output, save="null"))
    # A demo begins anew each time, also after one that was broken off; its folder is its own.
    shutil.rmtree(output / "checkpoints", ignore_errors=True)
    trainer = Trainer(run_file, "resume=never")
    resolved = trainer.prepare()
    print_plan(resolved, console)
    result = trainer.fit(lambda text: console.print(f"  {text}", highlight=False))

    after, _ = _ask_and_time(str(result.model), held_out)
    print_result(result, resolved, console)
    _show(console, held_out[:facts], before, after)
    console.print(f"all in {time.monotonic() - started:.0f} s; the run is described in {run_file}", highlight=False)


def write_example(path: Path) -> None:
    """Writes a RUN.yaml to start from, beside a copy of the pairs."""
    if path.exists():
        raise UserError("--write", str(path), "exists already", "choose another name")
    pairs = path.with_name("pairs.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not pairs.exists():
        pairs.write_bytes((files("shardwise.demo") / "pairs.jsonl").read_bytes())
    path.write_text(RUN.format(name=path, pairs=pairs, epochs=EPOCHS, ranks=1, output="out/run", save=20))
    print(f"wrote {path} and {pairs}: now run  shardwise train {path}")


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (files("shardwise.demo") / name).read_text().splitlines()]


def _ask_and_time(model_name: str, held_out: list[dict[str, Any]]) -> tuple[list[str], float]:
    """Greedy answers to the held-out questions, and training tokens/s measured on one forward and backward."""
    import torch

    from shardwise.core.cpu_probe import gain_of_bf16
    from shardwise.export.inference import load_for_inference
    from shardwise.nn.generate import Sampling, answers

    model, tokenizer = load_for_inference(model_name)
    texts = answers(model, tokenizer, [h["question"] for h in held_out], Sampling(max_tokens=ANSWER_TOKENS))
    ids = torch.randint(0, model.config.vocab_size, (2, 256), device=model.device)
    for _ in range(2):  # the first pass pays for warming up
        started = time.monotonic()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()
        elapsed = time.monotonic() - started
    return texts, _trained(ids.numel() / elapsed, gain_of_bf16() if model.device.type == "cpu" else 0.0)


def _trained(speed: float, gain: float) -> float:
    """Training tokens/s, from those in fp32: if a CPU is fast in bf16, the matmuls (2/3 of a step) gain."""
    from shardwise.config.resolve import WORTH_BF16

    return speed if gain < WORTH_BF16 else speed / (1 / 3 + 2 / 3 / gain)


def _facts_for(seconds: int, tokens_per_second: float) -> int:
    """How many facts, in file order, can be trained on for EPOCHS epochs in the time (about 70 tokens a pair)."""
    total = len(_lines("pairs.jsonl")) // PHRASINGS
    return max(FEWEST_FACTS, min(total, int(seconds * tokens_per_second / (EPOCHS * PHRASINGS * 70))))


def right(answer: str, keywords: list[str]) -> bool:
    """Whether an answer contains every keyword."""
    return all(word.lower() in answer.lower() for word in keywords)


def _show(console: Console, questions: list[dict[str, Any]], before: list[str], after: list[str]) -> None:
    console.rule("questions in words the model never saw", align="left")
    scores = [
        (right(b, q["keywords"]), right(a, q["keywords"])) for q, b, a in zip(questions, before, after, strict=False)
    ]
    for index in SHOWN:
        question = questions[index]
        old = before[index]
        new = after[index]
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), expand=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("question", question["question"])
        table.add_row("before", " ".join(old.split()), style="red" if not right(old, question["keywords"]) else None)
        table.add_row("after", " ".join(new.split()), style="green" if right(new, question["keywords"]) else None)
        console.print(table, highlight=False)
        console.print()
    console.print(
        f"of {len(scores)} such questions the answer held every key word: "
        f"{sum(b for b, _ in scores)} before, [bold]{sum(a for _, a in scores)} after[/bold]", highlight=False,
    )  # fmt: skip
