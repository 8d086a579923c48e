"""Module path `deepspeed.runtime.engine`."""

from shardwise.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
