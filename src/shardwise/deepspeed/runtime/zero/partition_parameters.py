"""Module path `deepspeed.runtime.zero.partition_parameters`."""

from shardwise.deepspeed.partition import GatheredParameters, Init, ZeroParamStatus

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus"]
