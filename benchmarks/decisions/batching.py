"""The batching engine beside transformers' continuous batching on a CPU: CPU time, memory, same answers?

    PYTHONPATH=src python benchmarks/decisions/batching.py OUT.json

SmolLM2-135M-Instruct in fp32 on one thread; questions of the demo, all at once, greedy, --tokens new tokens each. Each
contestant in a process of its own, in turns; loading the model is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import resource
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch


def loaded() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    from shardwise.config.schema import Model
    from shardwise.nn.models.source import find_model

    source = find_model(Model(name="smollm2-135m-instruct"))
    return AutoModelForCausalLM.from_pretrained(source.weights, dtype=torch.float32).eval(), source.load_tokenizer()


def prompts(tokenizer: Any, count: int) -> list[list[int]]:
    from shardwise.nn.generate import chat_prompt

    rows = [json.loads(line) for line in (files("shardwise.demo") / "pairs.jsonl").read_text().splitlines()]
    asked = [chat_prompt(tokenizer, row["messages"][:1]) for row in rows[:: len(rows) // count]][:count]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in asked]


def ours(model: Any, tokenizer: Any, asked: list[list[int]], tokens: int) -> list[str]:
    from shardwise.nn.generate import Sampling
    from shardwise.serve.engine import BatchingEngine, Limits
    from shardwise.serve.models import Models, Served
    from shardwise.serve.rows import AnswerEnded, Ask, Failed, TextPiece

    served = Served("model", model, tokenizer)
    engine = BatchingEngine(Models([served]), Limits())
    engine.start()
    ended: queue.Queue[int] = queue.Queue()
    texts = [""] * len(asked)

    def hear(number: int) -> Any:
        def emit(event: Any) -> None:
            if isinstance(event, TextPiece):
                texts[number] += event.text
            elif isinstance(event, (AnswerEnded, Failed)):
                ended.put(number)

        return emit

    asks = [Ask(served, prompt, Sampling(max_tokens=tokens, temperature=0.0)) for prompt in asked]
    assert engine.submit(asks, [hear(n) for n in range(len(asks))])
    for _ in asks:
        ended.get(timeout=3000)
    engine.close()
    return texts


def theirs(model: Any, tokenizer: Any, asked: list[list[int]], tokens: int) -> list[str]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    stops = [tokenizer.eos_token_id]
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=stops, pad_token_id=stops[0])
    size = ContinuousBatchingConfig(num_blocks=64, block_size=256, max_batch_tokens=512)
    found = model.generate_batch(asked, generation_config=config, continuous_batching_config=size)
    if not found:
        raise RuntimeError("no answers")
    by_prompt = {tuple(one.prompt_ids): one.generated_tokens for one in found.values()}
    return [tokenizer.decode(by_prompt[tuple(prompt)], skip_special_tokens=True) for prompt in asked]


def one_by_one(model: Any, tokenizer: Any, asked: list[list[int]], tokens: int) -> list[str]:
    texts = []
    for prompt in asked:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False,
                             attention_mask=torch.ones(1, len(prompt)), eos_token_id=tokenizer.eos_token_id,
                             pad_token_id=tokenizer.eos_token_id)  # fmt: skip
        texts.append(tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True))
    return texts


def alone(which: str, count: int, tokens: int) -> None:
    """One contestant in this process."""
    torch.set_num_threads(1)
    model, tokenizer = loaded()
    asked = prompts(tokenizer, count)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    texts = {"ours": ours, "transformers": theirs, "one by one": one_by_one}[which](model, tokenizer, asked, tokens)
    seconds, after = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"cpu_s": round(seconds, 1), "more_MiB": (after - before) // 1024, "texts": texts}))


def main() -> None:
    """Prints one line per run and writes all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alone")
    options = parser.parse_args()
    if options.alone:
        alone(options.alone, options.requests, options.tokens)
        return
    rows: dict[str, list[Any]] = {}
    for turn in range(options.rounds):
        for which in ("ours", "transformers", *(("one by one",) if not turn else ())):
            command = [sys.executable, __file__, *sys.argv[1:], "--alone", which]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
            last = done.stdout.strip().splitlines()[-1:] if done.returncode == 0 else []
            row = json.loads(last[0]) if last else {"error": done.stderr.strip().splitlines()[-1][:300]}
            rows.setdefault(which, []).append(row)
            print(which, {k: v for k, v in row.items() if k != "texts"}, flush=True)
    texts = {which: found[0].get("texts") for which, found in rows.items()}
    same = {
        which: sum(a == b for a, b in zip(answers, texts["one by one"], strict=True))
        for which, answers in texts.items()
        if answers and texts["one by one"]
    }
    print("answers equal to one by one:", same, "of", options.requests)
    Path(options.output).write_text(json.dumps(rows | {"same": same}, indent=1))


if __name__ == "__main__":
    main()
