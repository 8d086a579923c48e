"""Every hostile input that is tried, in the order of the table in docs/security.md."""

from __future__ import annotations

from security import bombs, doors, hosts, pages, settings, shells
from security.ground import ATTEMPTS, Attempt

__all__ = ["ATTEMPTS", "Attempt", "bombs", "doors", "hosts", "pages", "settings", "shells"]
