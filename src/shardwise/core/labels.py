"""Label of positions that are not trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


IGNORE = -100
