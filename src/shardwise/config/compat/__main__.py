"""Prints docs/combinations.md from the table: `python -m shardwise.config.compat > docs/combinations.md`."""

from __future__ import annotations

from shardwise.config.compat.page import page

if __name__ == "__main__":
    print(page(), end="")
