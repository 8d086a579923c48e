"""Rehearsals in processes of their own: forked here, or by a helper that sees no GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from shardwise.core.errors import RunFailed, UserError
from shardwise.foresight.rehearse import subprocess as apart


def told(word: str) -> tuple[str, int, str | None]:
    if word == "mistake":
        raise UserError("a", word, "is wrong", "mend it")
    if word == "failure":
        raise ValueError(word)
    if word == "dies":
        os._exit(3)
    return word, os.getppid(), os.environ.get("CUDA_VISIBLE_DEVICES")


def learned(_: Any) -> float:
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()  # a parent that has done this cannot fork one that does
    return float(x.grad.sum())  # type: ignore[union-attr]


@pytest.mark.parametrize("gpu", [False, True])
def test_results_mistakes_and_failures(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "beside_gpu", lambda: gpu)
    try:
        words = ["one", "mistake", "failure", "dies", "two"]
        one, mistake, failure, dead, two = apart.run_all_isolated(told, [(word,) for word in words], 2)
        assert one[0] == "one" and two[0] == "two"  # type: ignore[index]
        assert (one[1] == os.getpid()) is not gpu  # type: ignore[index]
        assert (one[2] == "") is gpu  # type: ignore[index]
        assert isinstance(mistake, UserError) and mistake.problem == "is wrong"
        assert isinstance(failure, RunFailed) and "ValueError" in str(failure)
        assert isinstance(dead, RunFailed) and "exit code 3" in str(dead)
        with pytest.raises(UserError):
            apart.run_isolated(told, "mistake")
        if gpu:
            torch.ones(3, requires_grad=True).sum().backward()
            assert apart.run_isolated(learned, 0) == 6.0
    finally:
        apart.end_helper()


def test_a_helper_that_dies_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "beside_gpu", lambda: True)
    try:
        first = apart.ready_helper()
        assert first is not None and first is apart.ready_helper()
        first.process.kill()
        first.process.wait()
        assert apart.run_isolated(told, "one")[0] == "one" and apart.ready_helper() is not first
        last = apart.ready_helper()
        apart.end_helper()
        assert last is not None and last.process.poll() is not None
    finally:
        apart.end_helper()
