"""The apart section of RUN.yaml: short and long, and its mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.config.diloco import DiLoCo, split_address
from shardwise.config.load import load_run
from shardwise.core.errors import UserError
from shardwise.diloco.worker import name_of, token_of


def run_with(apart: Any) -> Any:
    return load_run({"model": "m", "data": {"train": "x"}, "apart": apart}).run


def test_short_and_long() -> None:
    assert run_with("10.0.0.1:29400").apart == DiLoCo(meet="10.0.0.1:29400")
    settings = run_with({"meet": "[::1]:9", "every": "20", "patience": "5min"}).apart
    assert (settings.every, settings.patience, split_address(settings.meet)) == (20, 300.0, ("::1", 9))
    assert load_run({"model": "m", "data": {"train": "x"}}).run.apart is None


@pytest.mark.parametrize("address", ["10.0.0.1", ":29400", "http://10.0.0.1:29400", "host:0", "host:70000", "host:x"])
def test_no_address(address: str) -> None:
    with pytest.raises(UserError, match=r"apart.meet.*is no HOST:PORT"):
        run_with(address)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"patience": 0}, {"name": ""}, {"outer": "sgd"}])
def test_mistakes_name_their_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError) as told:
        run_with({"meet": "a:1"} | wrong)
    assert told.value.field.startswith(f"apart.{next(iter(wrong))}")


def test_names_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_of(DiLoCo(meet="a:1", name="clinic"), Path("out")) == "clinic"
    assert name_of(DiLoCo(meet="a:1"), Path("out/a")) != name_of(DiLoCo(meet="a:1"), Path("out/b"))
    monkeypatch.setenv("OUR_TOKEN", " t ")
    assert token_of(DiLoCo(meet="a:1", token_env="OUR_TOKEN")) == "t" and token_of(DiLoCo(meet="a:1")) is None
    with pytest.raises(UserError, match="holds no token"):
        token_of(DiLoCo(meet="a:1", token_env="NOT_SET_ANYWHERE"))
