"""Every part of `shardwise bench` on a CPU, its options, what it keeps, and what Ctrl-C leaves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.cli.main import main
from shardwise.core.errors import Interrupted, RunFailed, UserError
from shardwise.core.hardware.measured import MeasuredDevice, measured_file, read_measured, write_measured
from shardwise.core.hardware.specs import LinkSpec, cluster_of, this_machine
from shardwise.distributed.link_bench import fit, measure_locally
from shardwise.foresight.bench import command as bench_command
from shardwise.foresight.bench import device as steps
from shardwise.foresight.plan.network import seconds

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these look at a machine without a GPU")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache and settings of the test's own, and no ranks around it."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SHARDWISE_CONFIG", str(tmp_path / "config"))
    for name in ("WORLD_SIZE", "LOCAL_RANK", "RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield


def shardwise(*words: str) -> int:
    """The command, in this process; its exit code."""
    with pytest.raises(SystemExit) as left:
        main(list(words))
    return int(left.value.code or 0)


def test_each_figure_on_a_cpu(tmp_path: Path) -> None:
    speed = steps.matmul("fp32", 128, CPU, 0.01)
    assert speed is not None and 1e7 < speed < 1e14
    assert all(1e7 < one < 1e13 for one in steps.stream(2**20, CPU, 0.01).values())
    (forward, backward), *_ = steps.attention((1, 2, 64, 32), CPU, 0.01).values()
    assert 1e6 < forward < 1e14 and 1e6 < backward < 1e14
    assert 1e-8 < steps.launch(CPU, calls=50) < 1e-2
    assert 1e4 < steps.host_adam(2**14, 0.01) < 1e12
    disk = steps.disk(tmp_path, 2 * steps.CHUNK)
    assert set(disk) == {"read", "write"} and all(1e5 < one < 1e12 for one in disk.values())
    assert not list(tmp_path.iterdir()), "the file is gone"


def test_a_precision_that_torch_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("only on compute capability 8.9 and above")

    monkeypatch.setattr(steps, "scaled_mm", refuse)
    before = torch.get_float32_matmul_precision()
    assert steps.matmul("fp8", 16, CPU, 0.01) is None
    assert torch.get_float32_matmul_precision() == before


def test_the_fit_finds_what_the_formulas_were_made_from() -> None:
    cluster = cluster_of("h100", per_node=8)
    sizes = (2**14, 2**18, 2**22, 2**26)
    ring = {  # without the tree, which wins for small tensors
        kind: {
            size: times * (7 * cluster.within.latency + 7 / 8 * size / cluster.within.bandwidth) + cluster.device.launch
            for size in sizes
        }
        for kind, times in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2))
    }
    found = fit(8, ring, cluster.device.launch)
    assert found.bandwidth == pytest.approx(cluster.within.bandwidth, rel=1e-6)
    assert found.latency == pytest.approx(cluster.within.latency, rel=1e-6)
    assert ring["all_gather"][2**26] == pytest.approx(seconds("all_gather", 2**26, 8, 8, cluster))


@pytest.mark.parametrize("times", [{4: 1e-3, 4000: 1e-3}, {4: 1e-9, 2**20: 1e-3, 2**21: 3e-3}])
def test_noise_gives_no_nonsense(times: dict[int, float]) -> None:
    """Times that do not grow, or grow faster than the sizes: the figures stay above 0."""
    found = fit(2, {kind: times for kind in ("all_gather", "reduce_scatter", "all_reduce")})
    assert 0 < found.bandwidth < float("inf") and 0 < found.latency < 1


def test_the_command_measures_shows_and_keeps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = this_machine()
    assert shardwise("bench", "--quick", "--folder", str(tmp_path), "--only", "launch,disk", "--only", "adam") == 0
    shown = capfd.readouterr().out
    assert "kernel launch" in shown and "disk write" in shown and str(tmp_path / "cache") in shown.replace("\n", "")
    kept = read_measured("cpu")
    assert kept is not None and kept.launch and kept.disk_read and kept.host_adam and kept.stream is None
    after = this_machine()
    assert after.device.launch == kept.launch != before.device.launch and after.disk_write == kept.disk_write
    assert after.device.peak == before.device.peak and this_machine(measured=False) == before
    assert shardwise("bench", "--quick", "--only", "stream", "--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert told["stream"] > 0 and set(told["details"]["stream"]) == {"copy", "add"}
    assert told["launch"] == kept.launch, "what was not measured again stays"
    assert Path(told["file"]) == measured_file("cpu")


def test_matmul_and_attention_by_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert shardwise("bench", "--quick", "--only", "matmul,attention", "--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert told["details"]["matmul"]["fp32"].keys() == {"256", "512"}
    assert this_machine().device.flops("fp32") == pytest.approx(told["matmul"]["fp32"])
    assert this_machine().device.attention_flops().backward == pytest.approx(told["attention_backward"])


def test_the_network_between_local_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert shardwise("bench", "--quick", "--only", "network", "--ranks", "2", "--json") == 0
    told = json.loads(capfd.readouterr().out)
    within = told["details"]["network"]["within"]
    assert within["ranks"] == 2 and set(within["seconds"]) == {
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "all_to_all",
    }
    assert this_machine().within == LinkSpec(told["within_bandwidth"], told["within_latency"])
    assert told["across_bandwidth"] is None


def test_under_torchrun_with_two_nodes(tmp_path: Path) -> None:
    """Two processes that take themselves for nodes of one rank each: only the network across them is there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}  # fmt: skip
    words = [sys.executable, "-m", "shardwise", "bench", "--quick", "--only", "network", "--json"]
    ranks = [
        subprocess.Popen(
            words, text=True, stdout=subprocess.PIPE,
            env={**common, "RANK": str(rank), "SHARDWISE_CACHE": str(tmp_path / f"node{rank}")},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    told = json.loads(said[0])
    assert not said[1], "one rank speaks"
    assert told["across_bandwidth"] > 0 and told["within_bandwidth"] is None
    kept = [json.loads(next((tmp_path / f"node{n}" / "bench").glob("*.json")).read_text()) for n in range(2)]
    assert kept[0]["measured"]["across_latency"] == kept[1]["measured"]["across_latency"] == told["across_latency"]


def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(RunFailed, match=r"rank \d of the network part"):
        measure_locally(2, ("not a size",), 0.0, 0.01)  # type: ignore[arg-type]


def test_ctrl_c_leaves_the_earlier_result(monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_measured(MeasuredDevice("cpu", socket.gethostname(), "", "", launch=1.0))
    before = file.read_bytes()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(bench_command.STEPS, "stream", interrupt)
    with pytest.raises(Interrupted) as caught:
        bench_command.bench(Path(), None, ["launch", "stream"], True, False)
    assert caught.value.exit_code == 130
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"--only = 'gpu'.*\n.*matmul, stream"):
        bench_command.bench(tmp_path, None, ["gpu"], True, False)
    with pytest.raises(UserError, match="no such folder"):
        bench_command.bench(tmp_path / "none", None, ["disk"], True, False)
    with pytest.raises(UserError, match="no room"):
        steps.check_folder(tmp_path, 2**60)
    with pytest.raises(UserError, match="without the network"):
        bench_command.bench(tmp_path, 2, ["disk"], True, False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UserError, match="torchrun"):
        bench_command.bench(tmp_path, 2, [], True, False)


def test_help_has_examples(capfd: pytest.CaptureFixture[str]) -> None:
    assert shardwise("bench", "--help") == 0
    shown = capfd.readouterr().out
    for word in ("--quick", "--only", "--folder", "--ranks", "--json", "torchrun"):
        assert word in shown
