"""Bytes across a real interface: two network namespaces, two ranks in each, the command itself; see the benchmark."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.tiny import LLAMA, tiny_run, tokenizer_folder

# Large enough (4.5M parameters) for what is not training to be lost in it.
MODEL = LLAMA | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}


def benchmark() -> ModuleType:
    file = Path(__file__).parents[3] / "benchmarks/zeropp_hosts.py"
    spec = importlib.util.spec_from_file_location("zeropp_hosts", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_zeropp_sends_four_times_less_between_hosts(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    hosts_of = benchmark()
    model = {"config": MODEL, "tokenizer": tokenizer_folder(tmp_path / "tokenizer")}
    run = tiny_run(tmp_path, model, train__steps=5, train__batch_size=4, precision="bf16")
    del run["parallel"]
    try:
        with hosts_of.two_hosts(None) as hosts:
            results = {name: hosts_of.measure(hosts, name, run, tmp_path, 2) for name in ("zero3-bf16", "all")}
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not to be had here: {error.stderr}")
    megabytes = {name: result["bytes"] / 1e6 for name, result in results.items()}
    print(f"\n{megabytes} MB a step")
    # Gloo reduce-scatters by an all-reduce; a ring that does not would send three quarters of what it sends in all.
    assert 0.75 * megabytes["zero3-bf16"] > 4 * megabytes["all"]
    assert abs(results["all"]["losses"][-1] - results["zero3-bf16"]["losses"][-1]) < 0.1
