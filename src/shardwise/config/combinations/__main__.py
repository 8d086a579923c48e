"""Prints docs/combinations.md from the table: `python -m shardwise.config.combinations > docs/combinations.md`."""

from __future__ import annotations

from shardwise.config.combinations.page import page

if __name__ == "__main__":
    print(page(), end="")
