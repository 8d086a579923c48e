"""Commands and options that were renamed: until the next release the old name is accepted, with a note."""

from __future__ import annotations

import sys

from typer import Context
from typer.core import TyperCommand

# By command: old option → new option.
RENAMED_OPTIONS: dict[str, dict[str, str]] = {
    "node": {"--meet": "--rendezvous"},
    "diloco-server": {
        "--outer": "--outer-optimizer",
        "--rate": "--outer-lr",
        "--momentum": "--outer-momentum",
        "--least": "--min-workers",
    },
}
RENAMED_COMMANDS = {"meet": "diloco-server"}


class RenamedCommand(TyperCommand):
    """A command that accepts old names of its options, which its help does not show."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Replaces old options by new ones; old and new together are refused."""
        name = RENAMED_COMMANDS.get(self.name or "", self.name or "")
        if name != self.name:
            _note(f"shardwise {self.name}", f"shardwise {name}")
            if not any(word.partition("=")[0] == "--state" for word in args):
                args = [*args, "--state", "out/meet"]  # its default under the old name
        return super().parse_args(ctx, _with_new_names(args, RENAMED_OPTIONS[name]))


def _with_new_names(args: list[str], table: dict[str, str]) -> list[str]:
    from shardwise.core.errors import UserError

    found = list(args)
    for place, word in enumerate(args):
        if word == "--":
            break
        old, sign, value = word.partition("=")
        if (new := table.get(old)) is None:
            continue
        if any(other.partition("=")[0] == new for other in args):
            raise UserError(old, None, f"is the old name of {new}, which is given too", f"remove {old}")
        found[place] = f"{new}{sign}{value}"
        _note(old, new)
    return found


def _note(old: str, new: str) -> None:
    print(f"note: {old} is now {new}; the old name works until the next release", file=sys.stderr, flush=True)
