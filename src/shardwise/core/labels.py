"""What labels say where nothing is trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


IGNORE = -100
