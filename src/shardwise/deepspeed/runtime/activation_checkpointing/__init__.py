"""Module path `deepspeed.runtime.activation_checkpointing`."""

from shardwise.deepspeed import checkpointing

__all__ = ["checkpointing"]
