"""A DeepSpeed script gives DeepSpeed's own losses; those were recorded by benchmarks/deepspeed_parity.py."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from support import deepspeed_scenarios as scenarios
from support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
BOUND = 1e-5  # measured: 5e-7


def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("parity", ROOT / "benchmarks/deepspeed_parity.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PARITY = benchmark()
RECORDED = json.loads((Path(__file__).parent / "reference.json").read_text())


def test_the_record_is_of_this_script() -> None:
    assert RECORDED["from"]["script"] == PARITY.digest(), "record anew: benchmarks/deepspeed_parity.py --record"
    assert RECORDED["cases"].keys() == PARITY.CASES.keys()


QUICK = ("stage 1", "stage 2", "stage 3")  # the others check parts that tests of schedules and optimizers check too


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PARITY.CASES]
)
def test_same_losses_as_deepspeed(case: str, tmp_path: Path) -> None:
    """Accumulation, clipping, decay, a schedule, and at stage 3 zero.Init; loss, rate and norm of 30 updates."""
    expected = RECORDED["cases"][case]["whole"]
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps(PARITY.config_of(case)))
    arguments = ["--deepspeed_config", str(config), *PARITY.CASES[case][2]]
    found = run_ranks(scenarios.script, 2, arguments, str(tmp_path))[0]
    apart = PARITY.apart(expected, found)
    assert apart["loss"] <= BOUND and apart["norm"] <= BOUND and apart["lr"] <= 1e-12, apart
    assert expected[-1]["loss"] < expected[0]["loss"] - 0.1
