"""Odd descriptions of data: each is prepared or refused in words, and none hangs."""

from __future__ import annotations

import gzip
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from support.chat import chat_tokenizer
from support.tiny import CHATML

from shardwise.config.load import load_run
from shardwise.core.errors import UserError
from shardwise.data.prepare import prepare_data

ODD = [None, True, False, 0, -1, 1, 2.5, 1e400, float("nan"), "", " ", "auto", "none", "5%", "200%", [], {}, [1],
       {"a": 1}, "\x00", "é\u202e", "../../etc", "x" * 5000, 10**30, "nan", "1e3", "[", "{", "*", "~", "hf:", "a/b/c",
       ["a", None]]  # fmt: skip
GOOD: dict[str, list[Any]] = {
    "sequence_length": [8, 64, 512, "1k"], "packing": [True, False], "packing_window": [1, 7, 1000],
    "loss_on": ["assistant", "last", "all"], "over_length": ["error", "drop", "truncate", "split", None],
    "on_bad_row": ["error", "skip"], "temperature": [0.5, 1, 4], "workers": ["auto", 1, 2],
    "eval": [0, "10%", 0.5, "chat.jsonl", ["words.txt"]],
}  # fmt: skip
REFINE: dict[str, list[Any]] = {
    "min_tokens": [0, 3], "max_tokens": [None, 5, 100], "duplicates": ["keep", "exact", "near"],
    "similarity": [0.5, 0.9, 1], "decontaminate": [0, 3, 13],
    "filter": [None, "len(text) > 3", "turns > 1", "lang == 'en'", "1 +", "__import__('os')", "a.b.c in [1]",
               "not not x"],
}  # fmt: skip
SOURCE: dict[str, list[Any]] = {
    "format": ["auto", "chat", "sharegpt", "alpaca", "prompt", "text", "segments", "tokens", "preference", "kto",
               "pair"],
    "fields": [{}, {"prompt": "question"}, {"messages": "a.b"}, {"text": "content"}, {"nonsense": "x"}],
    "weight": [1, 2, 0.1], "epochs": [None, 1, 0.5, 3], "name": [None, "mine", "a\nb"],
    "split": [None, "train", "test"], "subset": [None, "en"], "streaming": [False, True],
}  # fmt: skip


def files(folder: Path) -> list[str]:
    chats = [{"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a {n}"}]}
             for n in range(30)]  # fmt: skip
    rows = {
        "chat.jsonl": "".join(json.dumps(c) + "\n" for c in chats),
        "alpaca.json": json.dumps([{"instruction": "do", "input": "", "output": f"it {n}"} for n in range(9)]),
        "pairs.csv": "question,answer\nwhy,because\n\"a\nb\",\"c,d\"\n",
        "words.txt": "some words " * 40, "empty.jsonl": "", "broken.jsonl": '{"messages": [\n{"text": 3}\n[]\nnull\n',
        "tokens.jsonl": '{"input_ids": [1, 2, 3]}\n{"input_ids": [4, 99999999]}\n',
        "prefer.jsonl": '{"prompt": "p", "chosen": "c", "rejected": "r"}\n' * 3,
        "odd.bin": "\x00\x01", "notes.md": "# Notes\n\nWords.",
    }  # fmt: skip
    for name, content in rows.items():
        (folder / name).write_text(content)
    with gzip.open(folder / "chat.jsonl.gz", "wt") as out:
        out.write(rows["chat.jsonl"])
    (folder / "sub").mkdir()
    (folder / "sub" / "more.jsonl").write_text(rows["chat.jsonl"])
    return [*rows, "chat.jsonl.gz", "sub", "*.jsonl", "none.jsonl", "sub/*"]


def pick(rng: random.Random, choices: dict[str, list[Any]], chance: float, odd: float) -> dict[str, Any]:
    found = {key: rng.choice(ODD if rng.random() < odd else values)
             for key, values in choices.items() if rng.random() < chance}  # fmt: skip
    if rng.random() < odd:
        found[rng.choice(["colour", "Weight", "pathh", "", "0"])] = rng.choice(ODD)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("count", "seed"), [(200, 1), pytest.param(1000, 0, marks=pytest.mark.slow)])
def test_configs(count: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    paths, tokenizer, rng = files(tmp_path), chat_tokenizer(CHATML), random.Random(seed)
    prepared, refused, slowest = 0, 0, 0.0
    for number in range(count):
        odd = rng.choice([0.0, 0.0, 0.02, 0.3])
        sources: Any = [
            rng.choice(paths) if rng.random() < 0.5 else {"path": rng.choice(paths)} | pick(rng, SOURCE, 0.2, odd)
            for _ in range(rng.choice((1, 1, 1, 2, 3)))
        ]
        sources = rng.choice(ODD) if rng.random() < odd / 4 else sources
        data = {"train": sources} | pick(rng, GOOD, 0.35, odd)
        if rng.random() < 0.3:
            data["refine"] = rng.choice(ODD) if rng.random() < odd else pick(rng, REFINE, 0.4, odd)
        began = time.monotonic()
        try:
            run = load_run({"model": "m", "data": data}, []).run
            prepare_data(run.data, tokenizer, 0)
            prepared += 1
        except UserError as error:
            refused += 1
            assert error.field and error.problem and error.remedy, data
        except Exception as error:
            raise AssertionError(f"config {number}: {data!r}") from error
        slowest = max(slowest, time.monotonic() - began)
    print(f"\n{prepared} prepared, {refused} refused, slowest {slowest:.1f} s")
    assert prepared > count / 10 and refused > count / 10
    assert slowest < 120
