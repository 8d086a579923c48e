"""The page's own files, which travel with the package; what each is for a browser."""

from __future__ import annotations

from importlib.resources import files

STATIC = {
    "watch.css": "text/css",
    "watch.js": "text/javascript",
    "charts.js": "text/javascript",
    "panels.js": "text/javascript",
    "uplot/uPlot.iife.min.js": "text/javascript",
    "uplot/uPlot.min.css": "text/css",
}


def page_file(name: str) -> str:
    """One of them, as text."""
    return files("shardwise.watch").joinpath("page", *name.split("/")).read_text(encoding="utf-8")
