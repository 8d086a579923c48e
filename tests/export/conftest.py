"""Models and a finished run that the tests of exports share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import scenarios
from support.ranks import run_ranks
from support.tiny import tiny_run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="session")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run of two steps."""
    tmp = tmp_path_factory.mktemp("run")
    run_ranks(scenarios.train, 1, tiny_run(tmp, train__steps=2, train__micro_batch_size=6, data__eval=0.1))
    return tmp / "out"
