"""Losses, gradients, loads and biases of routers under every axis and stage, against their definition.

The definition (support/routed.py) is transformers' own loss of each document alone, averaged as the cross-entropy is,
and DeepSeek-V3's rule for biases; packed, accumulated and clipped here, three steps.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from support import routed
from support.ranks import run_ranks

EXACT = {"loss": 5e-6, "gradient": 2e-5, "parameter": 2e-4, "bias": 0.0, "figure": 5e-6, "load": 0.0}
# Of Mixtral what its config asks for; of DeepSeek-V3, whose code has no loss for routers, what a number asks for.
NUMBERS = {"router__aux_loss": 0.5, "router__z_loss": 0.02}

TP, PP, CP, EP = ({f"parallel__{axis}": 2} for axis in ("tensor", "pipeline", "context", "expert"))
ULYSSES, ROWS, AGAIN = CP | {"parallel__context_kind": "ulysses"}, {"data__packing": False}, {"recompute": "full"}


ORDERS = ("zbv", "interleaved")


def zero(stage: int) -> dict[str, Any]:
    return {"parallel__zero": stage}


Case = tuple[str, int, dict[str, Any]]
QUICK: list[Case] = [
    ("mixtral", 2, zero(3) | AGAIN),
    ("mixtral", 2, PP),
    ("deepseek_v3", 2, EP),
    ("deepseek_v3", 2, CP),
    ("deepseek_v3", 2, TP),
]
SLOW: list[Case] = [
    *((family, 1, {}) for family in routed.CONFIGS),
    *((family, 2, zero(stage)) for family in routed.CONFIGS for stage in range(4)),
    *((family, 2, axis) for family in routed.CONFIGS for axis in (TP, PP, CP, EP, ULYSSES)),
    *((family, 4, axes) for family in routed.CONFIGS for axes in (PP | CP, TP | EP, PP | AGAIN | zero(1))),
    *((family, 4, TP | PP | AGAIN) for family in routed.CONFIGS),
    *((family, 2, PP | zero(0) | {"parallel__pipeline_schedule": order})
      for family in routed.CONFIGS for order in ORDERS),
    *((family, ranks, ROWS | more) for family in routed.CONFIGS for ranks, more in ((1, {}), (2, zero(3)), (2, CP))),
]  # fmt: skip


def named(case: Case) -> str:
    family, ranks, settings = case
    return "-".join([family, str(ranks), *(f"{k.rpartition('_')[2]}={v}" for k, v in settings.items())])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routed")


@functools.cache
def defined(shared: Path, family: str, packing: bool) -> dict[str, Any]:
    run = the_run(shared, family, 1, {"data__packing": packing})
    numbers = (0.5, 0.02) if family == "deepseek_v3" else (None, 0.0)
    return run_ranks(routed.definition, 1, run, 1e-3, *numbers)[0]  # type: ignore[no-any-return]


def the_run(shared: Path, family: str, ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    model = routed.model_folder(shared / family, family)
    numbers = NUMBERS if family == "deepseek_v3" else {}
    return routed.routed_run(shared / "run", model, ranks=ranks, resume="never", **numbers, **settings)


@pytest.mark.parametrize(
    "case", [*(pytest.param(c, id=named(c)) for c in QUICK),
             *(pytest.param(c, id=named(c), marks=pytest.mark.slow) for c in SLOW if c not in QUICK)],
)  # fmt: skip
def test_as_defined(shared: Path, case: Case) -> None:
    family, ranks, settings = case
    wanted = defined(shared, family, settings.get("data__packing", True))
    found = routed.apart(run_ranks(routed.trained, ranks, the_run(shared, *case)), wanted)
    print(named(case), found)
    assert all(found[key] <= bound for key, bound in EXACT.items()), found


PLANTED: list[tuple[str, Case, str]] = [
    ("router_losses_dropped", ("mixtral", 1, {}), "loss"),
    ("router_sums_of_one_rank", ("deepseek_v3", 2, CP), "gradient"),
    ("router_sums_of_one_stage", ("mixtral", 2, PP), "gradient"),
    ("loads_counted_again", ("deepseek_v3", 1, AGAIN), "load"),
    ("padding_is_routed", ("deepseek_v3", 1, {}), "load"),
    ("bias_of_one_rank", ("deepseek_v3", 2, zero(2)), "bias"),
    ("bias_never_moves", ("deepseek_v3", 1, {}), "bias"),
]


@pytest.mark.parametrize(("bug", "case", "shows"), PLANTED, ids=[bug for bug, *_ in PLANTED])
def test_a_planted_bug_is_caught(shared: Path, bug: str, case: Case, shows: str) -> None:
    """Ten times beyond the bound, where that is not 0."""
    found = routed.apart(
        run_ranks(routed.trained, case[1], the_run(shared, *case), bug), defined(shared, case[0], True)
    )
    print(bug, found)
    assert found[shows] > max(10 * EXACT[shows], 1e-4), found
