"""The breakdown adds up to the step, the comms log to the wire; both are off by default and then leave no trace."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import cli, zeror
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder

from shardwise.observe.breakdown import OFF, PARTS, Timer, Window, breakdown_line, timer_for
from shardwise.observe.metrics import read_metrics

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("breakdown")
    tokenizer_folder(folder / "tokenizer")
    return folder


def test_regions_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("shardwise.observe.breakdown.time", SimpleNamespace(perf_counter=lambda: now[0]))
    timer = Timer(CPU)
    for _ in range(2):
        with timer.region("data"):
            sleep(0.01)
        for _ in range(3):
            with timer.region("forward"), timer.collective("all_gather", 1000, 4, part="gather"):
                sleep(0.01)
        sleep(0.02)
    figures = timer.flush(2).breakdown()
    assert list(figures) == ["whole", *PARTS, "other", "gather"]
    assert figures["data"] == pytest.approx(0.01) and figures["forward"] == pytest.approx(0.03)
    assert figures["gather"] == pytest.approx(figures["forward"]), "inside, so not added"
    assert figures["whole"] == pytest.approx(sum(figures[p] for p in (*PARTS, "other")), abs=1e-5)
    assert figures["other"] == pytest.approx(0.02)
    sleep(0.05)  # evaluation, saving: between two windows, and in neither
    with timer.region("step"):
        sleep(0.001)
    assert timer.flush(1).whole == pytest.approx(0.001)
    assert timer.total.steps == 3 and timer.total.calls[("all_gather", 4)].calls == 6


def test_bandwidths() -> None:
    """The message over time, and what each link sees in a ring: (n-1)/n of a gather, twice that of an all-reduce."""
    window = Window(steps=1)
    timer = Timer(CPU)
    with timer.collective("all_gather", 10, 4, part="gather"):
        pass  # before any step: an evaluation's, which is no part of training
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        timer._settled("gather", (kind, 8_000_000_000, 4), 2.0)
    timer._settled("reduce", ("all_reduce", 500, 2), 1.0)
    timer._settled("reduce", ("all_reduce", 500, 2), 1.0)
    window.add(timer.flush(1))
    log = window.comms()
    assert log["all_gather"]["calls"] == 1
    assert log["all_gather"]["algorithm_gb_per_second"] == 4 and log["all_gather"]["bus_gb_per_second"] == 3
    assert log["reduce_scatter"]["bus_gb_per_second"] == 3 and log["all_to_all"]["bus_gb_per_second"] == 4
    assert log["all_reduce/4"]["bus_gb_per_second"] == 6 and log["all_reduce/2"]["calls"] == 2


def test_a_group_of_one_says_nothing() -> None:
    timer = Timer(CPU)
    with timer.collective("all_gather", 10, 1, part="gather"):
        pass
    assert timer.flush(1).comms() == {"steps": 1}


@pytest.mark.parametrize(
    ("zero", "shard", "ranks"),
    [(3, None, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(0, None, 2), (2, None, 2), (3, 2, 4)])],
)
def test_steps_of_a_model(zero: int, shard: int | None, ranks: int, shared: Path) -> None:
    """Against WireCount, which sees each collective as it is made, and against the clock on the wall."""
    run = tiny_run(shared, parallel__zero=zero, parallel__dp_shard_size=shard, train__batch_size=8, log__comms=True,
                   log__breakdown=True)  # fmt: skip
    for result in run_ranks(zeror.timed_steps, ranks, run):
        log, wire, figures = result["comms"], result["bytes"], result["breakdown"]
        counted = {kind: calls["bytes"] for kind, calls in log.items() if kind != "steps"}
        if "all_reduce" in counted:
            counted["all_reduce"] *= 2  # WireCount's all-reduce is a reduce-scatter and an all-gather
        assert counted == wire
        assert all(calls["seconds"] > 0 and calls["ranks"] > 1 for k, calls in log.items() if k != "steps")
        # Of several windows the quietest: whatever else the machine does comes on top of both.
        unseen, unexplained = result["unseen"], result["unexplained"]
        print(f"of the wall's time {unseen:.2%} is in no window, of a window's {unexplained:.2%} in no part")
        assert unseen < 0.05 and unexplained < 0.1, "next to nothing is left"
        assert figures["reduce"] < figures["forward"] + figures["backward"]
        assert ("gather" in figures) == (zero > 0)


def test_off_by_default_and_free(shared: Path, tmp_path: Path) -> None:
    assert timer_for(CPU, False, False) is OFF and OFF.region("forward") is OFF.region("step")
    run = tiny_run(shared, output=str(tmp_path / "a"))
    assert run_ranks(zeror.is_wrapped, 1, run) == [(False, False)]
    assert run_ranks(zeror.is_wrapped, 1, run | {"log": {"comms": True}}) == [(True, True)]


def test_the_command(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each report's last record has both; the terminal gets a line at reports and tables at the end."""
    run = tiny_run(shared, train__steps=4, train__micro_batch_size=3, ranks=2, parallel__zero=3, recompute="full",
                   offload={"activations": "cpu"}, log={"every": 2, "breakdown": True, "comms": True},
                   output=str(tmp_path / "out"))  # fmt: skip
    monkeypatch.setenv("SHARDWISE_PROGRESS", "plain")
    code, out, err = cli.train(cli.write_run(tmp_path, run))
    assert code == 0, err
    records = [r for r in read_metrics(tmp_path / "out/metrics.jsonl") if r["kind"] == "train"]
    assert [("breakdown" in r, "comms" in r) for r in records] == [(False, False), (True, True)] * 2
    last = records[-1]["breakdown"]
    assert last["offload"] > 0 and last["gather"] > 0 and records[-1]["comms"]["steps"] == 2
    assert breakdown_line(records[1]["breakdown"]) in out
    assert "time per step, mean of 4 steps on this rank" in out and "  all_gather " in out and "bus GB/s" in out


def test_own_loop() -> None:
    config = {"parallel": {"zero": 3}, "breakdown": True}
    for result in run_ranks(zeror.own_loop_breakdown, 2, config):
        assert result["updates"] == 2 and result["comms"]["reduce_scatter"]["calls"] == 4 * 4
        assert result["seconds"]["forward"] > 0 and result["seconds"]["step"] > 0
    with pytest.raises(AssertionError, match="breakdown: True"):  # the rank's UserError
        run_ranks(zeror.own_loop_breakdown, 1, {"parallel": {"zero": 3}})
