"""The documentation site builds without a warning and without a network, and has what is written from the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from shardwise.config.advanced import written
from shardwise.config.schema import Run

ROOT = Path(__file__).parents[1]


def test_it_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(ROOT / "docs/site"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    config = (tmp_path / "pages/config.html").read_text()
    assert all(f">{written(name)}<" in config for name in Run.model_fields), "every key of RUN.yaml"
    commands = re.sub("<[^>]+>", "", (tmp_path / "pages/options.html").read_text())  # colours of the code
    assert "shardwise train run.yaml" in commands and "Start it even if it is not foreseen to fit." in commands
    for page in tmp_path.rglob("*.html"):
        assert not re.search(r"<(script|link)[^>]+(src|href)=.https?://", page.read_text()), "nothing from the network"


def test_every_page_is_in_the_site() -> None:
    index = (ROOT / "docs/site/index.md").read_text()
    assert [page.stem for page in (ROOT / "docs").glob("*.md") if f"pages/{page.stem}\n" not in index] == []
