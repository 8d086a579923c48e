"""Module path `deepspeed.runtime.zero`."""

from shardwise.deepspeed.zero import GatheredParameters, Init, ZeroParamStatus, __getattr__

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "__getattr__"]
