"""Static files of the page, shipped with the package, and their content types."""

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
    """Reads one of the page's files as text."""
    return files("shardwise.watch").joinpath("page", *name.split("/")).read_text(encoding="utf-8")
