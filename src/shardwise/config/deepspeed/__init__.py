"""Translates DeepSpeed's JSON config: one table of all keys, and an account of how each was handled."""

from shardwise.config.deepspeed.merge import as_yaml, merge
from shardwise.config.deepspeed.plan import KeyAccount
from shardwise.config.deepspeed.table import TABLE, Key
from shardwise.config.deepspeed.translate import Translation, line, read_config, translate

__all__ = ["TABLE", "Key", "KeyAccount", "Translation", "as_yaml", "line", "merge", "read_config", "translate"]
