"""Module path `deepspeed.ops`."""

from shardwise.deepspeed.ops import adam

__all__ = ["adam"]
