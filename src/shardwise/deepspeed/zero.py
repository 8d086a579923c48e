"""Module path `deepspeed.zero`."""

from __future__ import annotations

from typing import Any

from shardwise.deepspeed.partition import GatheredParameters, Init, ZeroParamStatus
from shardwise.deepspeed.refused import missing

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus"]


def __getattr__(name: str) -> Any:
    return missing(__name__, name)
