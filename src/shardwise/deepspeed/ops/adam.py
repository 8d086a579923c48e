"""Module path `deepspeed.ops.adam`."""

from shardwise.deepspeed.optimizers import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
