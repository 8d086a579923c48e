"""Runs that are killed, stopped or moved go on exactly."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
from support import cli, scenarios
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder


def the_run(tmp: Path, steps: int, name: str, **changes: object) -> dict:
    return tiny_run(
        tmp,
        train__steps=steps,
        train__micro_batch_size=3,
        ranks=2,
        parallel__zero=3,
        checkpoint__every=2,
        output=str(tmp / name),
        **changes,
    )


DISK = {"offload": {"optimizer": "disk", "parameters": "disk"}}


def killed_again_and_again(tmp: Path, steps: int, kills: int, seed: int, **changes: object) -> None:
    """kill -9 of a random rank at a random step, `kills` times; losses bit-identical to an uninterrupted run."""
    draw = random.Random(seed)
    whole = cli.write_run(tmp / "whole", the_run(tmp, steps, "whole"))  # nothing offloaded
    code, _, err = cli.train(whole)
    assert code == 0, err
    file = cli.write_run(tmp / "killed", the_run(tmp, steps, "killed", **changes))
    moments = sorted(draw.sample(range(1, steps), kills))
    for moment in moments:
        rank = draw.randrange(2)
        process = cli.start(file)
        cli.wait_for_step(process, tmp / "killed", moment)
        cli.kill_rank(process, rank)
        code, _, err = cli.finish(process)
        assert code == 1, err
        assert f"rank {rank} failed at step" in err and "SIGKILL" in err and f"rank-{rank}.log" in err, err
        assert "Traceback" not in err
        assert not (tmp / "killed/offload").exists(), "the working files of a killed rank are removed"
        if changes:  # what a supervisor that was killed too would leave; it is never trusted
            (tmp / "killed/offload/rank-1").mkdir(parents=True)
            (tmp / "killed/offload/rank-1/parameters.bin").write_bytes(b"\x7f" * 3_000_000)
    code, _, err = cli.train(file)
    assert code == 0, err
    assert cli.losses(tmp / "killed") == cli.losses(tmp / "whole")
    assert not (tmp / "killed/offload").exists()


@pytest.mark.timeout(600)
def test_killed_twice(tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    killed_again_and_again(tmp_path, steps=10, kills=2, seed=0)


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_killed_with_everything_on_disk(tmp_path: Path) -> None:
    """In fp32 a disk-offloaded run equals the plain one, so it is held to that, kill or no kill."""
    tokenizer_folder(tmp_path / "tokenizer")
    killed_again_and_again(tmp_path, steps=6, kills=1, seed=2, **DISK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("changes", [{}, DISK], ids=["plain", "disk"])
def test_killed_ten_times(tmp_path: Path, changes: dict[str, object]) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    killed_again_and_again(tmp_path, steps=40, kills=10, seed=1, **changes)


@pytest.mark.timeout(600)
def test_stopped_with_everything_on_disk(tmp_path: Path) -> None:
    """Ctrl-C leaves a checkpoint and no working files, not even those of a run on more ranks."""
    tokenizer_folder(tmp_path / "tokenizer")
    left_over = tmp_path / "out/offload/rank-7/optimizer.bin"
    left_over.parent.mkdir(parents=True)
    left_over.write_bytes(b"old")
    file = cli.write_run(tmp_path, the_run(tmp_path, 200, "out", **DISK) | {"checkpoint": {"every": None}})
    process = cli.start(file)
    cli.wait_for_step(process, tmp_path / "out", 2)
    working = {f"{f.parent.name}/{f.name}" for f in (tmp_path / "out/offload").glob("*/*")}
    assert working == {f"rank-{r}/{kind}.bin" for r in (0, 1) for kind in ("optimizer", "parameters", "gradients")}
    process.send_signal(signal.SIGINT)
    code, _, err = cli.finish(process)
    assert code == 128 + signal.SIGINT, err
    assert not (tmp_path / "out/offload").exists()
    assert len(list((tmp_path / "out/checkpoints").iterdir())) == 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, id="ctrl-c"), pytest.param(signal.SIGTERM, id="sigterm", marks=pytest.mark.slow)],
)
def test_asked_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    """Saves and leaves; the same command finishes the run, losing and repeating nothing."""
    tokenizer_folder(tmp_path / "tokenizer")
    steps = 30
    file = cli.write_run(tmp_path, the_run(tmp_path, steps, "out") | {"checkpoint": {"every": None}})
    process = cli.start(file)
    cli.wait_for_step(process, tmp_path / "out", 3)
    process.send_signal(number)
    code, _, err = cli.finish(process)
    assert code == 128 + number and "the same command goes on" in err and "Traceback" not in err, err
    stopped_at = cli.steps_done(tmp_path / "out")
    assert 3 <= stopped_at < steps
    assert [p.name for p in (tmp_path / "out/checkpoints").iterdir()] == [f"step-{stopped_at:08d}"]
    code, out, err = cli.train(file)
    assert code == 0 and f"going on from {tmp_path}/out/checkpoints/step-{stopped_at:08d}" in out, out + err
    assert sorted(cli.losses(tmp_path / "out")) == list(range(1, steps + 1))


@pytest.mark.parametrize(
    ("ranks", "zero", "shard"), [(2, 1, None), pytest.param(1, 0, None, marks=pytest.mark.slow), (4, 2, 2)]
)
def test_go_on_elsewhere(tmp_path: Path, ranks: int, zero: int, shard: int | None) -> None:
    """Saved by four ranks at stage 3; goes on with other ranks and stages, no conversion, same losses."""
    tokenizer_folder(tmp_path / "tokenizer")
    whole = tiny_run(
        tmp_path, train__steps=12, checkpoint__every=6, checkpoint__keep=2, parallel__zero=3, output=str(tmp_path / "a")
    )
    reference = run_ranks(scenarios.train, 4, whole)[0][0]
    moved = tiny_run(
        tmp_path,
        train__steps=12,
        parallel__zero=zero,
        parallel__dp_shard_size=shard,
        output=str(tmp_path / "b"),
        resume=str(tmp_path / "a/checkpoints/step-00000006"),
    )
    losses = run_ranks(scenarios.train, ranks, moved)[0][0]
    assert len(losses) == 6
    assert max(abs(a - b) for a, b in zip(losses, reference[6:], strict=True)) <= 1e-5


def test_other_data_are_refused(tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    run = tiny_run(tmp_path, train__steps=2)
    run_ranks(scenarios.train, 1, run)
    changed = tiny_run(tmp_path, train__steps=4, data__sequence_length=128)
    with pytest.raises(AssertionError, match="other data"):
        run_ranks(scenarios.train, 1, changed)


def test_best_and_last_are_kept(tmp_path: Path) -> None:
    """A learning rate that ruins the model after a good start: the best checkpoint survives the pruning."""
    tokenizer_folder(tmp_path / "tokenizer")
    run = tiny_run(
        tmp_path,
        train__steps=8,
        data__eval="10%",
        train__eval_every=2,
        checkpoint__every=2,
        checkpoint__keep=1,
        train__warmup=8,
        train__learning_rate=2.0,
        train__max_grad_norm=None,
    )
    run_ranks(scenarios.train, 1, run)
    folders = sorted(p.name for p in (tmp_path / "out/checkpoints").iterdir())
    trainer = json.loads((tmp_path / "out/checkpoints/step-00000008/trainer.json").read_text())
    assert trainer["best_step"] < 8
    assert folders == [f"step-{trainer['best_step']:08d}", "step-00000008"]
