"""Ready-made runs: each a RUN.yaml whose first line says what it is for, to be copied and pointed at one's own data."""

from __future__ import annotations

import difflib
from pathlib import Path

from shardwise.core.errors import UserError

FOLDER = Path(__file__).parent


def recipes() -> dict[str, str]:
    """Returns what each recipe is for, by name, sorted."""
    files = sorted(FOLDER.glob("*.yaml"))
    return {file.stem: file.read_text().partition("\n")[0].removeprefix("# ").rstrip(".") for file in files}


def recipe(name: str) -> str:
    """Returns the text of a recipe."""
    descriptions = recipes()
    if name not in descriptions:
        close_matches = (
            difflib.get_close_matches(name, descriptions, 3, 0.3) or [n for n in descriptions if name.lower() in n][:3]
        )
        remedy = f"did you mean {', '.join(close_matches)}?" if close_matches else "`shardwise recipes` lists them"
        raise UserError("recipe", name, "there is none of this name", remedy)
    return (FOLDER / f"{name}.yaml").read_text()


def copy_recipe(name: str, target: Path) -> Path:
    """Writes a recipe to a file that does not exist yet, or into a folder."""
    text = recipe(name)
    target = target / f"{name}.yaml" if target.is_dir() else target
    try:
        with target.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise UserError("target", str(target), "exists", "choose another name; nothing was written") from None
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise UserError("target", str(target), problem, "choose a folder you may write to") from None
    return target
