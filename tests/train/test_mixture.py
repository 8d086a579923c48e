"""A real run over several sources: each example once per epoch whatever the ranks, and a loss for each source."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import scenarios
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder

from shardwise.observe.metrics import read_metrics

ROWS = {"easy": 70, "hard": 40, "rare": 9}


def the_run(folder: Path, steps: int, **changes: Any) -> dict[str, Any]:
    sources = []
    for name, count in ROWS.items():
        # Each text is unlike any other: the tokens of a document tell which row it was.
        word = {"easy": "shard ", "hard": "quixotic jackdaws vex ", "rare": "zero "}[name]
        most = 23 if name == "easy" else 7  # none is so long that it would be split
        rows = [{"text": f"{name} {i} {word * (1 + i * 5 % most)}"} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        sources.append(str(folder / f"{name}.jsonl"))
    return tiny_run(
        folder, data__train=sources, data__sequence_length=128, data__packing_window=32, train__batch_size=6,
        train__steps=steps, checkpoint__every=None, **changes,
    )  # fmt: skip


@pytest.mark.slow  # of a run that counts in steps; in epochs: test_epochs.py
@pytest.mark.timeout(600)
def test_an_epoch_on_one_then_three_then_two_ranks(tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    found: list[tuple[int, list[tuple[int, ...]]]] = []
    for ranks, steps in ((1, 2), (3, 4), (2, 12)):
        results = run_ranks(scenarios.train_and_record, ranks, the_run(tmp_path, steps))
        found += [sequence for seen, _ in results for sequence in seen]
        size = results[0][1]
    assert 4 * 6 < size < 12 * 6, "the changes of ranks are in the middle of the epoch"
    inside = [(position, documents) for position, documents in found if position < size]
    assert sorted(position for position, _ in inside) == list(range(size))
    often = Counter(document for _, documents in inside for document in documents)
    assert set(often.values()) == {1} and len(often) == sum(ROWS.values())
    records = [r for r in read_metrics(tmp_path / "out/metrics.jsonl") if r["kind"] == "train"]
    assert [r["step"] for r in records] == list(range(1, 13))


def test_a_loss_for_each_source(tmp_path: Path) -> None:
    """They make up the total, in training and in evaluation, on several ranks as on one."""
    tokenizer_folder(tmp_path / "tokenizer")
    told = []
    for ranks in (1, 2):
        changes = {"data__eval": 0.2, "output": str(tmp_path / f"out{ranks}"), "train__micro_batch_size": 3}
        run_ranks(scenarios.train, ranks, the_run(tmp_path, 8, **changes))
        told.append(read_metrics(tmp_path / f"out{ranks}/metrics.jsonl"))
    for one, two in zip(*told, strict=True):
        counts, losses = one["supervised_by_source"], one["losses"]
        assert set(counts) == set(losses) <= set(ROWS) and len(losses) > 1
        total = sum(counts[n] * losses[n] for n in losses) / sum(counts.values())
        assert total == pytest.approx(one["loss"], rel=1e-5)
        assert one["kind"] == "eval" or sum(counts.values()) == one["supervised_tokens"]
        assert two["supervised_by_source"] == counts and two["losses"] == pytest.approx(losses, abs=1e-4)
    (evaluated,) = [r for r in told[0] if r["kind"] == "eval"]
    assert set(evaluated["losses"]) == set(ROWS)
    assert "Loss by source" in (tmp_path / "out1/loss.html").read_text()


def test_one_source_is_not_told_twice(tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    run_ranks(scenarios.train, 1, tiny_run(tmp_path, train__steps=2, data__eval=0.1))
    for record in read_metrics(tmp_path / "out/metrics.jsonl"):
        assert "losses" not in record and "supervised_by_source" not in record
