"""Every optimizer over shards: equal to one process, saved by name, taken up on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import optimizers
from support.optimizers import OPTIMIZERS
from support.ranks import run_ranks

NAMES = list(OPTIMIZERS)
# Largest difference after 5 steps of size 1e-2, where sums are added in another order; else none at all.
BOUNDS = {"adafactor": 2e-7, "muon": 1e-6}
ROWS = {"adam-mini": 1e-7}  # too, where rows are divided
LAST_BIT = 2e-8  # fused AdamW on a CPU computes what is left over of 16 columns by other instructions


MESHES = {"2": (2, 1), "3": (3, 1), "4-hybrid": (4, 2), "2-replicas": (2, 2)}


@pytest.fixture(scope="module", params=[*MESHES, "tensor 2", "tensor 4", "expert 2"])
def spread(request: pytest.FixtureRequest) -> tuple[bool, list[dict[str, Any]]]:
    """Whether rows are divided, and every rank's own view: with replicas, that none goes its own way is part of it."""
    if request.param not in MESHES:
        return True, run_ranks(optimizers.on_axes, 4, NAMES, 5, request.param)
    ranks, replicas = MESHES[request.param]
    return False, run_ranks(optimizers.sharded, ranks, NAMES, 5, replicas)


@pytest.mark.parametrize("which", NAMES)
def test_ranks_equal_one_process(which: str, spread: tuple[bool, list[dict[str, Any]]]) -> None:
    """Parameters, and every state, coded ones bit for bit."""
    expected = optimizers.alone(which, 5)
    divided, views = spread
    for results in views:
        found = results[which]
        assert found.keys() == expected.keys()
        worst = 0.0
        for name, value in expected.items():
            assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
            if value.is_floating_point() and not name.endswith(".scales"):
                worst = max(worst, (found[name].float() - value.float()).abs().max().item())
            else:
                torch.testing.assert_close(found[name], value, rtol=1e-6, atol=0, msg=name)
        print(f"\n{which} on {len(views)} ranks: {worst:.1e}")
        assert worst <= (BOUNDS | ROWS if divided else BOUNDS).get(which, LAST_BIT if divided else 0.0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("states")
    return folder, run_ranks(optimizers.save_and_go_on, 2, NAMES, str(folder))[0]


@pytest.mark.parametrize("ranks", [2, 3, 1])
def test_checkpoints_move(ranks: int, saved: tuple[Path, dict[str, Any]]) -> None:
    """What is loaded is what was saved, on any number of ranks; on as many as before the run goes on bit for bit."""
    folder, expected = saved
    found = run_ranks(optimizers.load_and_go_on, ranks, NAMES, str(folder))[0]
    for which in NAMES:
        (before, after), (loaded, later) = expected[which], found[which]
        assert loaded.keys() == before.keys()
        for name, value in before.items():
            assert torch.equal(loaded[name], value), (which, name)
        for name, value in after.items():
            if ranks == 2:
                assert torch.equal(later[name], value), (which, name)
        moved = max((later[n] - before[n]).abs().max().item() for n in optimizers.SHAPES if n in before)
        assert moved > 1e-4, f"{which} does not move"
