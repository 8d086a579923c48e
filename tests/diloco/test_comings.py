"""Workers and meeting points that are killed, stopped and started again: real commands, `kill -9` by id."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import cli
from support.meeting import Point, meeting_point, meetings, worker_run
from support.tiny import PAIRS

STEPS, EVERY = 15, 3
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def _remarks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_PROGRESS", "plain")


def run_file(folder: Path, point: Point, name: str, index: int, **changes: Any) -> Path:
    """A worker with rows of its own; steps are slow enough to be met in the middle."""
    rows = PAIRS.read_text().splitlines()[index::2]
    (folder / f"{name}.jsonl").write_text("".join(row + "\n" for row in rows))
    run = worker_run(
        folder, point, name, EVERY, data__train=str(folder / f"{name}.jsonl"), train__steps=STEPS, train__batch_size=4,
        checkpoint__every=2, **changes,
    )  # fmt: skip
    return cli.write_run(folder / f"{name}.run", run)


def final(output: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(output / "model" / "model.safetensors"))


def rounds_done(point: Point, number: int, timeout: float = 240) -> None:
    deadline = time.monotonic() + timeout
    while len(point.rounds()) < number:
        assert time.monotonic() < deadline, f"round {number} did not come"
        time.sleep(0.05)


def joined(point: Point, name: str, timeout: float = 180) -> None:
    deadline = time.monotonic() + timeout
    while name not in json.loads((point.state / "state.json").read_text())["members"]:
        assert time.monotonic() < deadline, f"{name} did not join"
        time.sleep(0.05)


def ended(process: Any) -> str:
    code, out, err = cli.finish(process, 400)
    assert code == 0, out + err
    return str(out + err)


def test_a_worker_is_killed_and_comes_back(tmp_path: Path) -> None:
    """The others go on without it after `wait`; it comes back at their round, and all end with the same model."""
    with meeting_point(tmp_path / "meet", "--wait", "5s") as point:
        files = {name: run_file(tmp_path, point, name, index) for index, name in enumerate(("stays", "dies"))}
        stays, dies = (cli.start(files[name]) for name in files)
        rounds_done(point, 1)
        cli.wait_for_step(dies, tmp_path / "dies", EVERY + 1)
        dies.kill()  # its ranks die with it
        dies.communicate()
        rounds_done(point, 2)
        ranks = cli.rank_processes(stays)
        for rank in ranks:  # or it might be through before the other one is up again
            rank.suspend()
        back = cli.start(files["dies"])
        joined(point, "dies")
        for rank in ranks:
            rank.resume()
        said = ended(back)
        ended(stays)
        rounds = point.rounds()
    alone = [r["round"] for r in rounds if r["workers"] == ["stays"]]
    assert alone and any(r["dropped"] == ["dies"] for r in rounds)
    assert "took the parameters of the others" in said
    assert any(r["workers"] == ["dies", "stays"] for r in rounds if r["round"] > alone[0])
    records = meetings(tmp_path / "dies")
    assert [r["step"] for r in records] == sorted({r["step"] for r in records}) and records[-1]["step"] == STEPS
    last = rounds[-1]["workers"]
    state = load_file(tmp_path / "meet" / f"round-{len(rounds):08d}" / "global-00000")["values"]
    for name in last:
        model = final(tmp_path / name)
        assert torch.equal(torch.cat([model[key].flatten() for key in sorted(model)]), state)


def test_the_meeting_point_is_killed_and_started_again(tmp_path: Path) -> None:
    """Twice, once while nobody listens for a while: no round is lost but the one under way, no worker notices more."""
    with meeting_point(tmp_path / "meet", "--dtype", "int8", "--min-workers", "2") as point:
        started = [cli.start(run_file(tmp_path, point, name, i)) for i, name in enumerate(("x", "y"))]
        rounds_done(point, 1)
        point.kill()
        point.start()
        rounds_done(point, 2)
        point.kill()
        time.sleep(1.0)
        point.start()
        for process in started:
            ended(process)
        rounds = point.rounds()
    assert [r["round"] for r in rounds] == list(range(STEPS // EVERY))
    assert all(r["workers"] == ["x", "y"] for r in rounds)
    ours, theirs = final(tmp_path / "x"), final(tmp_path / "y")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_worker_is_stopped_and_goes_on_within_the_round(tmp_path: Path) -> None:
    """Nobody else is there to move on: what it computed since the last meeting is kept, and the run is as if whole."""
    with meeting_point(tmp_path / "whole-meet", "--method", "fedavg") as point:
        ended(cli.start(run_file(tmp_path, point, "whole", 0)))
    with meeting_point(tmp_path / "meet", "--method", "fedavg") as point:
        file = run_file(tmp_path, point, "stopped", 0)
        process = cli.start(file)
        cli.wait_for_step(process, tmp_path / "stopped", EVERY + 1)
        process.send_signal(signal.SIGTERM)
        code, _, err = cli.finish(process)
        assert code == 143, err
        step = json.loads(max((tmp_path / "stopped" / "checkpoints").glob("step-*/trainer.json")).read_text())["step"]
        said = ended(cli.start(file))
        status = point.stop()[1]
    assert "stopped left" in status
    assert ("going on within the round" in said) == (step % EVERY != 0)
    ours, theirs = final(tmp_path / "stopped"), final(tmp_path / "whole")
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)
