"""Module path `deepspeed.runtime.dataloader`."""

from shardwise.deepspeed.data import DeepSpeedDataLoader, RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
