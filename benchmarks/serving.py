"""Requests per second of a running `shardwise serve`: one after the other, and all at once.

    shardwise serve smollm2-135m-instruct &
    python benchmarks/serving.py http://127.0.0.1:8000/v1 --requests 50 --tokens 32

Needs the `openai` client. Prompts are the questions of the demo; answers are greedy, streamed, and cut at --tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any


def questions(count: int) -> list[str]:
    """Distinct questions."""
    lines = (files("shardwise.demo") / "pairs.jsonl").read_text().splitlines()
    return [json.loads(line)["messages"][0]["content"] for line in lines][:count]


def ask(client: Any, model: str, question: str, tokens: int) -> tuple[str, int, float]:
    """The answer, its tokens, and the seconds until its first word."""
    began, first, text, used = time.perf_counter(), None, "", 0
    for chunk in client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=tokens, temperature=0,
        stream=True, stream_options={"include_usage": True},
    ):  # fmt: skip
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - began
            text += chunk.choices[0].delta.content
        used = chunk.usage.completion_tokens if chunk.usage else used
    return text, used, first or 0.0


def main() -> None:
    """Prints one JSON line per way of asking."""
    import openai

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    client = openai.OpenAI(base_url=options.url, api_key="none", max_retries=0, timeout=3600)
    model = next(iter(client.models.list())).id
    asked = questions(options.requests)
    ask(client, model, asked[0], 2)  # warm
    texts = []
    for label, workers in (("one after the other", 1), ("all at once", len(asked))):
        began = time.perf_counter()
        with ThreadPoolExecutor(workers) as pool:
            given = list(pool.map(lambda question: ask(client, model, question, options.tokens), asked))
        seconds, tokens = time.perf_counter() - began, sum(used for _, used, _ in given)
        waits = sorted(wait for _, _, wait in given)
        texts.append([text for text, _, _ in given])
        figures = {"seconds": seconds, "tokens_per_s": tokens / seconds, "median_first_word_s": waits[len(waits) // 2]}
        print(json.dumps({"way": label, "requests": len(asked), "tokens": tokens, **figures}), flush=True)
    print(json.dumps({"same_answers": sum(a == b for a, b in zip(*texts, strict=True)), "of": len(asked)}))


if __name__ == "__main__":
    main()
