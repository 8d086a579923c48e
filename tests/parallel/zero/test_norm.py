"""The norm of gradients that lie in parts on several ranks, as it is computed on a CPU and as on a GPU."""

from __future__ import annotations

import pytest
from support import norms
from support.ranks import run_ranks


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_it_is_that_of_the_whole(kind: str, ranks: int) -> None:
    """Uneven rows and a rank with none of them; where ranks wait for each other the timer hears of it, once."""
    for measured, expected, meetings in run_ranks(norms.measured, ranks, kind):
        assert measured == pytest.approx(expected, rel=1e-6)
        assert meetings == (ranks > 1)
