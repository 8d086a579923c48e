"""Bars of bytes as SVG, readable on light and dark pages and on a phone, and the tables beside them."""

from __future__ import annotations

from html import escape
from typing import Any

GIB = 2**30
WIDTH, EDGE, BAR = 440, 16, 18
INNER = WIDTH - 2 * EDGE
SEEN = 1e-3  # of the longest bar: less is named in no legend
LETTER = 6.4  # of a letter of 12 pixels, on average
HELD = {  # in this order: what it is, its colour
    "parameters": ("parameters", "#0072b2"),
    "gathered": ("working copies", "#56b4e9"),
    "gradients": ("gradients", "#d55e00"),
    "optimizer": ("optimizer", "#e69f00"),
    "activations": ("activations", "#009e73"),
    "logits and loss": ("logits and loss", "#cc79a7"),
    "buffers": ("buffers, temporary", "#8a8a8a"),
    "host": ("on the host", "#c9b8e8"),
    "disk": ("on disk", "#7a5230"),
}
SENT = {
    "all_gather": ("all-gather", "#56b4e9"),
    "reduce_scatter": ("reduce-scatter", "#d55e00"),
    "all_reduce": ("all-reduce", "#e69f00"),
    "all_to_all": ("all-to-all", "#009e73"),
    "send": ("send", "#cc79a7"),
}
ACROSS = {"across": ("to other nodes", "#0072b2"), "within": ("within the node", "#a9cbe3")}
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1a1a1a}.h{font-weight:600}.t{font-size:15px;font-weight:600}"
    ".q{fill:#555}.card{fill:#fff;stroke:#ccc}"
    "@media(prefers-color-scheme:dark){text{fill:#eee}.q{fill:#b5b5b5}.card{fill:#17191c;stroke:#444}}"
)

Row = tuple[str, dict[str, float]]


def size(value: float) -> str:
    """Bytes as people read them, with three digits or so."""
    if value >= 10 * GIB:
        return f"{value / GIB:.1f} GiB"
    if value >= GIB / 10:
        return f"{value / GIB:.2f} GiB"
    return f"{value / 2**20:.1f} MiB" if value >= 2**20 / 10 else f"{value / 1024:.0f} KiB"


def held_row(cell: dict[str, Any]) -> dict[str, float]:
    """What a bar of memory is made of."""
    held = cell["held"] | {"host": cell["host"], "disk": cell["disk"]}
    return {kind: float(held[kind]) for kind in HELD if held.get(kind)}


def sent_row(cell: dict[str, Any]) -> dict[str, float]:
    """What a bar of the wire is made of."""
    return {kind: float(value) for kind, value in cell["sent"].items() if kind in SENT and value}


def across_row(cell: dict[str, Any]) -> dict[str, float]:
    """What of the wire leaves the node."""
    return {"across": float(cell["across"]), "within": float(sum(cell["sent"].values()) - cell["across"])}


def picture(title: str, below: str, cells: dict[str, dict[str, Any]], nodes: bool) -> str:
    """A figure: what a rank holds, what it sends, and with several nodes what leaves the node."""
    panels = [
        ("held by a rank at the peak of its step", HELD, [(label, held_row(c)) for label, c in cells.items()]),
        ("sent by a rank in a step", SENT, [(label, sent_row(c)) for label, c in cells.items()]),
    ]
    if nodes:
        panels.append(("where to", ACROSS, [(label, across_row(c)) for label, c in cells.items()]))
    parts = [f'<text x="{EDGE}" y="28" class="t">{escape(title)}</text>']
    y = 46
    for line in _wrapped(below, INNER):
        parts.append(f'<text x="{EDGE}" y="{y}" class="q">{escape(line)}</text>')
        y += 16
    for heading, colours, rows in panels:
        y = _panel(parts, y + 14, heading, colours, rows)
    height = y + 4
    told = escape(f"{title}: " + "; ".join(f"{label} {size(c['peak'])}" for label, c in cells.items()))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    card = f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8" class="card"/>'
    begun = [f'{head} role="img" aria-label="{told}">', f"<style>{STYLE}</style>", card]
    return "\n".join([*begun, *parts, "</svg>", ""])


def _panel(parts: list[str], y: int, heading: str, colours: dict[str, tuple[str, str]], rows: list[Row]) -> int:
    parts.append(f'<text x="{EDGE}" y="{y}" class="h">{heading}</text>')
    y += 8
    most = max(sum(values.values()) for _, values in rows) or 1.0
    for label, values in rows:
        total = sum(values.values())
        y += 15
        parts.append(f'<text x="{EDGE}" y="{y}">{escape(label)}</text>')
        away = values.get("host", 0.0) + values.get("disk", 0.0)
        shown = size(total - away) + (f" + {size(away)} off the device" if away else "") if total else "nothing"
        parts.append(f'<text x="{WIDTH - EDGE}" y="{y}" text-anchor="end">{shown}</text>')
        y += 5
        x = float(EDGE)
        for kind in (kind for kind in colours if kind in values):
            name, colour = colours[kind]
            wide = INNER * values[kind] / most
            told = f"{escape(label)}: {name} {size(values[kind])}"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(wide, 0.5):.1f}" height="{BAR}" fill="{colour}">'
                f"<title>{told}</title></rect>"
            )
            number = size(values[kind]).partition(" ")[0]
            if wide > LETTER * len(number) + 4 and values[kind] >= GIB / 10:
                at = f'x="{x + wide / 2:.1f}" y="{y + 13}" text-anchor="middle" style="fill:{_ink(colour)}"'
                parts.append(f"<text {at}>{number}</text>")
            x += wide
        y += BAR + 4
    y += 14
    x = float(EDGE)
    for kind in (kind for kind in colours if any(values.get(kind, 0) > SEEN * most for _, values in rows)):
        name, colour = colours[kind]
        wide = 14 + LETTER * len(name) + 14
        if x + wide > WIDTH - EDGE + 10:
            x, y = float(EDGE), y + 18
        parts.append(f'<rect x="{x:.1f}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14:.1f}" y="{y}">{name}</text>')
        x += wide
    return y + 14


def _wrapped(text: str, width: float) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if LETTER * len(f"{lines[-1]} {word}") > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _ink(colour: str) -> str:
    """Black or white, whichever is read better on it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000" if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else "#fff"
