"""One cache and one tiny tokenizer for the whole session; the user's own cache is never touched."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LONGEST = (
    "parallel/test_parity.py",
    "survive/test_runs.py",
    "launch/test_local.py",
    "launch/test_torchrun.py",
    "config/test_renamed.py",
    "train/test_epochs.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what tests/slow.txt lists, skips runs that the torch version is refused for; the longest files first."""
    import torch

    from shardwise.config.axes import ZBV_SINCE, torch_version

    here = Path(__file__).parent
    wanted = set((here / "slow.txt").read_text().splitlines())
    # Two workers end together if the longest files (half a minute and more on two cores) do not begin last.
    if (
        torch.version.cuda is None
    ):  # with CUDA, a process that ran a backward cannot be forked: tests that fork come first
        items.sort(key=lambda item: str(item.path.relative_to(here)) not in LONGEST)
    for item in items:
        if f"tests/{item.path.relative_to(here)}::{item.nodeid.partition('::')[2]}" in wanted:
            item.add_marker(pytest.mark.slow)
        if torch_version() < ZBV_SINCE and ("schedule=zbv" in item.nodeid or item.nodeid.endswith("[zbv]")):
            item.add_marker(pytest.mark.skip(reason="zbv is refused for this torch"))


def pytest_configure() -> None:
    """A shell that starts tests in the background has them ignore Ctrl-C, and so would all that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Prepared data go to a folder of the session; the converted embedded model is shared through the real cache."""
    real = Path(os.environ.get("SHARDWISE_CACHE", "~/.cache/shardwise")).expanduser()
    cache = tmp_path_factory.mktemp("cache")
    for shared in ("models", "probes"):
        (real / shared).mkdir(parents=True, exist_ok=True)
        (cache / shared).symlink_to(real / shared)
    os.environ["SHARDWISE_CACHE"] = str(cache)
    os.environ["SHARDWISE_PROGRESS"] = "off"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def group() -> Iterator[Any]:
    """A process group of one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left open is answered the same on every machine that tests: fp32 on a CPU."""
    monkeypatch.setattr("shardwise.config.resolve.gain_of_bf16", lambda: 0.0)


@pytest.fixture(scope="session")
def cpu_precision_env() -> dict[str, str]:
    """What half precision needs on this CPU (some advertise instructions that fault)."""
    from shardwise.core.cpu_probe import cpu_env

    return cpu_env("bf16") | cpu_env("fp16")
