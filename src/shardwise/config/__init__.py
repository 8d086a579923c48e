"""The description of a run: schema, loading with origins, and the answers to `auto`."""

from shardwise.config.load import LoadedRun, load_run
from shardwise.config.schema import Run

__all__ = ["LoadedRun", "Run", "load_run"]
