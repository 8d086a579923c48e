"""Bills made up for the tests of what is shown: one that is in order, and parts to break it with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.data.statistics import DataStatistics, PackingStatistics, SourceStatistics, add_lengths, no_lengths

HOSTILE = (
    "</script></title></pre><script>parent.hacked = 1</script><img src=x onerror='parent.hacked = 2'>\" ' "
    "\x1b[2J\x1b]0;title\x07 \u202eesrever\u2066 \x00\x9b31m\r [bold]x[/bold] \u2028 \ud83d " + "W" * 400
)


def source(name: str = "chat.jsonl", rows: int = 1000, length: int = 300, **changes: Any) -> SourceStatistics:
    """Rows of one length, 40% of whose tokens are learned."""
    lengths = no_lengths()
    add_lengths(lengths, [length] * rows)
    tokens = rows * length
    one = SourceStatistics(
        name=name,
        path=f"/data/{name}",
        format="chat",
        reason="every row has messages",
        rows=rows,
        documents=rows,
        tokens=tokens,
        supervised=tokens * 2 // 5,
        lengths=lengths,
        longest=length,
        share=1.0,
        seconds=2.0,
    )
    return replace(one, **changes)


def bill(*train: SourceStatistics, evaluation: tuple[SourceStatistics, ...] = (), **changes: Any) -> DataStatistics:
    """In order, unless its parts are not."""
    sources = list(train or (source(),))
    tokens = sum(s.tokens for s in sources)
    packing = PackingStatistics(True, max(1, tokens // 2000), sum(s.documents for s in sources), tokens, 2048, 65536)
    one = DataStatistics(sources, list(evaluation), packing, "tokenizer", "abc123", "assistant", "drop")
    return replace(one, **changes)
