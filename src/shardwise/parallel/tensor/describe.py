"""Reports the roles of a model's modules, as a table or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.config.schema import Model
from shardwise.core.errors import UserError
from shardwise.nn.models.source import find_model, quiet
from shardwise.nn.models.tasks import auto_class
from shardwise.nn.tiny.shrink import shrink
from shardwise.parallel.tensor.roles import Roles, find_roles

MEANING = {
    "column": "cut by its outputs",
    "row": "cut by its inputs",
    "vocabulary": "cut by the vocabulary",
    "experts": "spread by experts",
    "whole": "whole on every rank",
}


def roles_of(name: str) -> Roles:
    """Returns the roles of a model by name, from its config alone: no weights are read."""
    source = find_model(Model(name=name))
    try:
        with quiet():
            model: Any = auto_class(source.task).from_config(shrink(source.config))
            return find_roles(model)
    except UserError:
        raise
    except Exception as error:  # whatever a model's own code may raise
        cause = f"{type(error).__name__}: {_first_line(error)}"
        problem = f"a tiny model of its class does not run here ({cause})"
        raise UserError("model", name, problem, "divide it by data parallelism alone") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def show_roles(name: str, as_json: bool) -> None:
    """Prints the roles of a model by name."""
    roles = roles_of(name)
    if as_json:
        parts = [asdict(part) for part in roles.parts]
        print(json.dumps({"parts": parts, "differs": list(roles.differs)}, indent=1))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("part", "what it is", "tensor parallel", "why not"):
        table.add_column(title, overflow="fold")
    for part in roles.parts:
        if part.kind != "block":
            table.add_row(part.name, part.kind, MEANING[part.cut], part.why)
    console = Console(highlight=False)
    console.print(table)
    blocks = [part.name for part in roles.parts if part.kind == "block"]
    places = " and ".join(blocks) or "no blocks that could be found"
    console.print(f"\npipeline: cut between {places}")
    for line in roles.differs:
        console.print(f"differs: {line}")
