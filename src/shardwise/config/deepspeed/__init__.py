"""DeepSpeed's JSON config in our terms: one table of every key, and an account of what was done with each."""

from shardwise.config.deepspeed.merge import as_yaml, merge
from shardwise.config.deepspeed.plan import KeyAccount
from shardwise.config.deepspeed.table import TABLE, Key
from shardwise.config.deepspeed.translate import Translation, line, read_config, translate

__all__ = ["TABLE", "Key", "KeyAccount", "Translation", "as_yaml", "line", "merge", "read_config", "translate"]
