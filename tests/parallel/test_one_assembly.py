"""One assembly: a bug planted in it is noticed by the trial, the zoo, rehearsals, and verify (test_planted.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import planted
from support.families import config_of
from support.tiny import tiny_run, tokenizer_folder

from shardwise.config.load import load_run
from shardwise.foresight.rehearse.step import rehearse
from shardwise.foresight.rehearse.target import aim
from shardwise.foresight.zoo.run import one_trial
from shardwise.nn.models.build import build_on_meta, find_blocks
from shardwise.nn.models.source import ModelSource, find_model
from shardwise.parallel import parallelize
from shardwise.train.trial import check
from shardwise.train.trial.ranks import run_ranks
from shardwise.train.trial.step import reference_of, try_on_rank

RANKS = 2


@pytest.fixture(params=[False, True], ids=["sound", "planted"])
def bug(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a bug is planted in the assembly, in this process and those that are forked from it."""
    monkeypatch.setattr(parallelize, "STEPS", parallelize.STEPS)  # put back afterwards
    if request.param:
        planted.a_block_left_unsharded()
    return bool(request.param)


def the_run(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    tokenizer_folder(tmp_path / "tokenizer")
    model = {"config": config_of("llama"), "tokenizer": str(tmp_path / "tokenizer")}
    return tiny_run(tmp_path, model, ranks=RANKS, train__batch_size=4, train__micro_batch_size=1, **settings)


def source_of(run: Any) -> ModelSource:
    return find_model(run.model)


def test_the_trial(bug: bool, tmp_path: Path) -> None:
    """Ranks along `context` hold the same block and different tokens: gradients that are not summed are off."""
    run = load_run(the_run(tmp_path, parallel__context=2, precision="fp32")).run
    small, ranks = check.small_run(run)
    case = check._case_of(source_of(run), small)
    layout = check.layout_of(small.parallel, ranks)

    def work(rank: int, folder: Path) -> dict[str, Any]:
        return try_on_rank(rank, folder, case, small, layout, lambda: reference_of(case, small), 120.0)

    outcomes = run_ranks(work, ranks, 120.0)
    assert {outcome and outcome["outcome"] for outcome in outcomes} == {"wrong" if bug else "pass"}, outcomes


def test_the_zoo(bug: bool) -> None:
    result = one_trial("llama", "causal", "context")
    assert result.outcome == ("wrong" if bug else "pass"), result


def test_rehearsals(bug: bool, tmp_path: Path) -> None:
    """Stage 3 holds half of the parameters on each of two ranks; of a block that is left out, all."""
    target = aim(load_run(the_run(tmp_path, parallel__zero=3, precision="fp32", device="cpu")), 1, RANKS)
    model = build_on_meta(target.source)
    whole = sum(parameter.numel() * 4 for parameter in model.parameters())
    block = sum(parameter.numel() * 4 for parameter in find_blocks(model)[0][1].parameters())

    def work(rank: int, folder: Path) -> dict[str, Any]:
        return rehearse(target.source, target.run, 0, RANKS).held

    (held,) = run_ranks(work, 1, 120.0)
    assert held is not None
    missing = held["parameters"] - whole / RANKS  # shards are padded: some 3% of these few parameters
    assert (missing > 0.4 * block) is bug and abs(missing) < 0.6 * block
