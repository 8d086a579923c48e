"""ZeRO-R, buckets and the breakdown on a GPU; several ranks share the card through gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import cli, scenarios, zeror
from support.ranks import run_ranks
from support.tiny import LLAMA, tiny_run, tokenizer_folder

from shardwise.observe.breakdown import PARTS
from shardwise.observe.metrics import read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zeror")
    tokenizer_folder(folder / "tokenizer")
    return folder


@pytest.mark.parametrize(("kind", "ranks"), [("host", 1), ("sliced", 2), ("sliced+host", 2)])
def test_block_inputs(kind: str, ranks: int) -> None:
    """Equal to the last bit; only the last block's input, which backward wants first, may still be on the device."""
    plain, kept = (run_ranks(zeror.block_gradients, ranks, LLAMA, k, 1, 33, "cuda") for k in ("plain", kind))
    for reference, result in zip(plain, kept, strict=True):
        assert result["loss"] == reference["loss"]
        assert all(torch.equal(a, b) for a, b in zip(result["grads"], reference["grads"], strict=True))
        assert all(reference["alive"][0]) and not any(result["alive"][0][:-1])
        where, share = ("host" if "host" in kind else "device"), (ranks if "sliced" in kind else 1)
        assert result["held"][0][where] == pytest.approx(result["full"] / share, rel=0.001)


def test_the_host_costs_little_time_and_saves_the_memory() -> None:
    """1 GiB of inputs: gone from the peak but for the few in flight; the copies hide behind computing."""
    result = run_ranks(zeror.host_inputs_cost, 1)[0]
    device, host, inputs = result["device"], result["host"], result["inputs"]
    saved, slower = device["peak"] - host["peak"], host["seconds"] / device["seconds"] - 1
    print(
        f"\ninputs {inputs / 2**30:.2f} GiB: peak {device['peak'] / 2**30:.2f} → {host['peak'] / 2**30:.2f} GiB, "
        f"step {1e3 * device['seconds']:.1f} → {1e3 * host['seconds']:.1f} ms ({slower:+.1%})"
    )
    assert saved >= 0.7 * inputs
    assert slower <= 0.08


def test_no_host_sync_with_inputs_on_the_host(shared: Path, tmp_path: Path) -> None:
    run = tiny_run(shared, train__steps=3, precision="bf16", device="cuda", backend="gloo", recompute="full",
                   offload={"activations": "cpu"}, log__breakdown=True, output=str(tmp_path))  # fmt: skip
    assert run_ranks(scenarios.step_without_sync, 1, run)[0]


def test_buckets(shared: Path, tmp_path: Path) -> None:
    """Divided and joined units in half precision, under recomputation, train as blocks do."""
    losses = {}
    for name, bucket in {"none": None, "tiny": 20_000, "joined": 300_000}.items():
        run = tiny_run(shared, train__steps=6, parallel__zero=3, parallel__bucket=bucket, precision="bf16",
                       recompute="full", device="cuda", backend="gloo", output=str(tmp_path / name))  # fmt: skip
        losses[name] = run_ranks(scenarios.train, 2, run)[0][0]
    for name in ("tiny", "joined"):
        drift = max(abs(a - b) for a, b in zip(losses[name], losses["none"], strict=True))
        print(f"\n{name}: {drift:.1e}")
        assert drift <= 5e-3
    assert losses["none"][-1] < losses["none"][0]


def test_breakdown(shared: Path) -> None:
    """Events on the device add up to the clock on the wall; gathers and reductions were seen on their streams."""
    run = tiny_run(shared, parallel__zero=3, train__micro_batch_size=3, device="cuda", backend="gloo",
                   log={"breakdown": True, "comms": True})  # fmt: skip
    for result in run_ranks(zeror.timed_steps, 2, run):
        figures = result["breakdown"]
        print(figures)
        assert sum(figures[p] for p in PARTS) == pytest.approx(figures["whole"], rel=0.15)
        assert 4 * figures["whole"] == pytest.approx(result["wall"], rel=0.1)
        assert figures["gather"] > 0 and figures["reduce"] > 0
        assert result["comms"]["all_gather"]["bytes"] == 2 * result["comms"]["reduce_scatter"]["bytes"]


def test_records_tell_of_memory(shared: Path, tmp_path: Path) -> None:
    run = tiny_run(shared, train__steps=2, device="auto", output=str(tmp_path / "out"))
    code, _, err = cli.train(cli.write_run(tmp_path, run))
    assert code == 0, err
    last = [r for r in read_metrics(tmp_path / "out/metrics.jsonl") if r["kind"] == "train"][-1]
    assert last["reserved_peak_bytes"] >= last["allocated_peak_bytes"] >= last["allocated_bytes"] > 0
    assert last["alloc_retries"] == 0
