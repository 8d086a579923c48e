"""Conversations that teach a small model the form of a judge's verdict, made from multiple-choice questions.

    python judge_rows.py openbookqa-train.jsonl judge-rows.jsonl [--rows 400]
    shardwise train judge_lora.yaml

A right choice earns a high grade and wins, a wrong one a low grade and loses, in either place. What is asked is, word
for word, what `shardwise eval --judge` asks.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from shardwise.evaluate.verdicts import JudgedTurns, pair_prompt, single_prompt

GOOD, BAD = "The reply is correct.\nRating: 9", "The reply is wrong.\nRating: 2"


def conversation(row: dict[str, Any], draw: random.Random) -> list[dict[str, str]]:
    """A question with its right or a wrong choice to be graded, or both to be compared."""
    right = row["choices"][row["answer"]]
    wrong = draw.choice([choice for choice in row["choices"] if choice != right])
    first, second = draw.sample([right, wrong], 2)
    one, two = (JudgedTurns([row["question"]], [said]) for said in (first, second))
    if draw.random() < 0.5:
        asked, said = single_prompt(one), GOOD if first == right else BAD
    else:
        winner = "A" if first == right else "B"
        asked, said = pair_prompt(one, two), f"Assistant {winner} is right, the other is wrong.\nVerdict: {winner}"
    return [*asked, {"role": "assistant", "content": said}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--rows", type=int, default=400)
    arguments = parser.parse_args()
    draw = random.Random(0)
    rows = [json.loads(line) for line in arguments.questions.read_text(encoding="utf-8").splitlines()]
    told = [{"messages": conversation(row, draw)} for row in rows[: arguments.rows]]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in told)
    arguments.target.write_text(text, encoding="utf-8")
    print(f"{len(told)} conversations written to {arguments.target}")


if __name__ == "__main__":
    main()
