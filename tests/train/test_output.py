"""The output folder: one run at a time, room on the disk, starting afresh, and what changed since."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from filelock import FileLock
from support import cli, scenarios
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder

from shardwise.config.load import load_run
from shardwise.config.resolve import check_room
from shardwise.core.errors import UserError
from shardwise.launch.trainer import Trainer
from shardwise.train.describe import changed_settings


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    trainer = Trainer(tiny_run(tmp_path, train__steps=1))
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out/.lock"), pytest.raises(UserError, match="another run is using this folder"):
        trainer.fit()


def test_it_is_refused_before_anything_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the folder is held from then on; a run that cannot be prepared lets it go."""
    said: list[str] = []

    def prepared(*_: object) -> None:
        said.append("prepared")
        with pytest.raises(UserError, match="another run is using"):
            Trainer(tiny_run(tmp_path)).prepare()
        raise UserError("data.train", None, "is bad", "mend it")

    monkeypatch.setattr("shardwise.launch.trainer.prepare_run", prepared)
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out/.lock"), pytest.raises(UserError, match="another run is using this folder"):
        Trainer(tiny_run(tmp_path)).prepare()
    assert not said
    for _ in range(2):
        with pytest.raises(UserError, match="is bad"):
            Trainer(tiny_run(tmp_path)).prepare()
    assert len(said) == 2


def test_a_mistake_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        Trainer(tiny_run(tmp_path), "data.train=nowhere.jsonl").fit()
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_found_before_the_start(tmp_path: Path) -> None:
    run = load_run(tiny_run(tmp_path)).run
    check_room(run, 1000)
    with pytest.raises(UserError, match="GiB free; a checkpoint and the model take"):
        check_room(run, 1 << 50)


def test_never_sets_the_earlier_run_aside(tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    run_ranks(scenarios.train, 1, tiny_run(tmp_path, train__steps=3))
    run_ranks(scenarios.train, 1, tiny_run(tmp_path, train__steps=2, resume="never"))
    out = tmp_path / "out"
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-00000002"]
    assert [p.name for p in (out / "checkpoints.1").iterdir()] == ["step-00000003"]
    assert len(cli.losses(out)) == 2
    assert len((out / "metrics.1.jsonl").read_text().splitlines()) == 3


def test_an_evaluation_file_may_change_on_resume(tmp_path: Path) -> None:
    """Only what decides the training sequences binds a checkpoint to its data."""
    tokenizer_folder(tmp_path / "tokenizer")
    held = tmp_path / "held.txt"
    held.write_text("a rank holds a shard of the states. " * 20)
    run_ranks(scenarios.train, 1, tiny_run(tmp_path, train__steps=2))
    more = tiny_run(tmp_path, train__steps=4, data__eval=str(held), train__learning_rate=1e-4)
    losses = run_ranks(scenarios.train, 1, more)[0][0]
    assert len(losses) == 4
    changes = changed_settings(tmp_path / "out/checkpoints/step-00000002", load_run(more).run)
    assert any(c.startswith("train.learning_rate 0.003 → 0.0001") for c in changes)
    assert any(c.startswith("train.steps 2 → 4") for c in changes)


def test_a_skipped_fp16_step_is_recorded(tmp_path: Path, cpu_precision_env: dict[str, str]) -> None:
    """A loss scale that overflows once: the update is skipped, and the record says so."""
    tokenizer_folder(tmp_path / "tokenizer")
    run_ranks(
        scenarios.overflowing_step, 1, tiny_run(tmp_path, train__steps=3, precision="fp16"), env=cpu_precision_env
    )
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [bool(r.get("skipped")) for r in records] == [True, False, False]
