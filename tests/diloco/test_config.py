"""The apart section of RUN.yaml: short and long, and its mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.config.diloco import DiLoCo, split_address
from shardwise.config.load import load_run
from shardwise.core.errors import UserError
from shardwise.diloco.worker import name_of, token_of


def run_with(diloco: Any, **advanced: Any) -> Any:
    run = {"model": "m", "data": {"train": "x"}, "diloco": diloco, "advanced": {"diloco": advanced}}
    return load_run(run).run


def test_short_and_long() -> None:
    assert run_with("10.0.0.1:29400").diloco == DiLoCo(server="10.0.0.1:29400")
    settings = run_with({"server": "[::1]:9", "sync_every": "20"}, connect_timeout="5min").diloco
    assert (settings.sync_every, settings.connect_timeout, split_address(settings.server)) == (20, 300.0, ("::1", 9))
    assert load_run({"model": "m", "data": {"train": "x"}}).run.diloco is None


@pytest.mark.parametrize("address", ["10.0.0.1", ":29400", "http://10.0.0.1:29400", "host:0", "host:70000", "host:x"])
def test_no_address(address: str) -> None:
    with pytest.raises(UserError, match=r"diloco.server.*is no HOST:PORT"):
        run_with(address)


@pytest.mark.parametrize("wrong", [{"sync_every": 0}, {"name": ""}, {"outer": "sgd"}])
def test_mistakes_name_their_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError) as told:
        run_with({"server": "a:1"} | wrong)
    assert told.value.field.startswith(f"diloco.{next(iter(wrong))}")
    with pytest.raises(UserError, match=r"advanced\.diloco\.connect_timeout = 0: expected a number that is above 0"):
        run_with("a:1", connect_timeout=0)


def test_names_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_of(DiLoCo(server="a:1", name="clinic"), Path("out")) == "clinic"
    assert name_of(DiLoCo(server="a:1"), Path("out/a")) != name_of(DiLoCo(server="a:1"), Path("out/b"))
    monkeypatch.setenv("OUR_TOKEN", " t ")
    assert token_of(DiLoCo(server="a:1", token_env="OUR_TOKEN")) == "t" and token_of(DiLoCo(server="a:1")) is None
    with pytest.raises(UserError, match="holds no token"):
        token_of(DiLoCo(server="a:1", token_env="NOT_SET_ANYWHERE"))
