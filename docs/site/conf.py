"""The documentation site: `make docs`. Pages are the files of docs/, references are written from the code."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import reference  # noqa: E402

project, author, copyright = "Shardwise", "The Shardwise authors", "The Shardwise authors, Apache-2.0"
extensions = ["myst_parser"]
html_theme, html_title = "furo", "Shardwise"
myst_heading_anchors = 4
exclude_patterns = ["_build"]
html_show_sphinx = False
suppress_warnings = ["myst.xref_missing"]  # links to code and benchmarks, which are no pages


def setup(app: object) -> None:
    """Gathers the pages beside this file before they are read; they are made anew each time and not kept."""
    pages = HERE / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir()
    for page in (*HERE.parent.glob("*.md"), *HERE.parent.glob("*.svg")):
        shutil.copy(page, pages)
    shutil.copytree(HERE.parent / "pictures", pages / "pictures")
    (pages / "config.md").write_text(reference.config_page())
    (pages / "options.md").write_text(reference.commands_page())
