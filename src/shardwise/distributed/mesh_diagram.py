"""A small diagram of where each rank sits, and the purpose of each axis."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.distributed.mesh import MeshLayout

PURPOSE = {
    "pipeline": "stages of blocks, one after the other",
    "data": "different sequences",
    "context": "parts of each sequence",
    "tensor": "parts of each weight",
    "expert": "different experts of each layer",
}
MOST = 64  # ranks that a picture shows; of more, the first


def axis_lines(layout: MeshLayout) -> Iterator[str]:
    """Yields each axis longer than one, outermost first, with its meaning."""
    sizes = {"pipeline": layout.pipeline, "data": layout.data, "context": layout.context, "tensor": layout.tensor}
    for name, size in (sizes | {"expert": layout.expert}).items():
        if size > 1:
            yield f"{name} {size}: {PURPOSE[name]}"


def picture(layout: MeshLayout, per_node: int | None = None) -> str:
    """Diagram with a row for each pipeline stage and data rank, a column for each context and tensor rank."""
    if layout.ranks > MOST:
        return _lines(layout, MOST, per_node) + f"\n… and {layout.ranks - MOST} more ranks in the same way"
    return _lines(layout, layout.ranks, per_node)


def _lines(layout: MeshLayout, limit: int, per_node: int | None) -> str:
    across = layout.context * layout.tensor
    width = len(str(layout.ranks - 1))
    lines = []
    if across > 1:
        names = []
        for place in map(layout.place, range(across)):
            context = [f"c{place.context}"] if layout.context > 1 else []
            tensor = [f"t{place.tensor}"] if layout.tensor > 1 else []
            names.append(" ".join(context + tensor))
        column = max(width, *map(len, names))
        lines.append(" " * len(_title(layout, 0)) + "  " + "  ".join(f"{n:>{column}}" for n in names))
    else:
        column = width
    for first in range(0, min(layout.ranks, limit), across):
        cells = "  ".join(f"{rank:>{column}}" for rank in range(first, first + across))
        node = f"   node {first // per_node}" if per_node and per_node < layout.ranks else ""
        lines.append(f"{_title(layout, first)}  {cells}{node}")
    return "\n".join(lines)


def _title(layout: MeshLayout, rank: int) -> str:
    place = layout.place(rank)
    stages, parts = len(str(layout.pipeline - 1)), len(str(layout.data - 1))
    stage = f"stage {place.pipeline:>{stages}} " if layout.pipeline > 1 else ""
    return f"{stage}data {place.data:>{parts}}"
