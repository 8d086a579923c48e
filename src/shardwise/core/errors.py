"""The two kinds of failure a user meets: user errors, and failed runs.

Both print as one message and no traceback. Anything else that escapes is our bug and keeps its traceback.
"""

from __future__ import annotations

from typing import Any

from shardwise.core.redact import HIDDEN, SECRET_SETTING, redact


class UserError(Exception):
    """An error the user can fix: the field, its value, the problem and the remedy."""

    exit_code = 2

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy
        suffix = "" if value is None else f" = {_shown(field, value)}"
        super().__init__(redact(f"{field}{suffix}: {problem}\n  → {remedy}"))

    def __reduce__(self) -> tuple[type[UserError], tuple[str, object, str, str]]:
        """Makes it picklable, for worker processes."""
        return type(self), (self.field, self.value, self.problem, self.remedy)


class UserErrors(UserError):
    """Several independent user errors, reported at once; field and remedy are the first one's."""

    def __init__(self, errors: list[UserError]) -> None:
        first = errors[0]
        super().__init__(first.field, first.value, first.problem, first.remedy)
        self.errors = errors
        self.args = ("\n".join(str(error) for error in errors),)

    def __reduce__(self) -> Any:
        """Makes it picklable, for worker processes."""
        return type(self), (self.errors,)


def together(errors: list[UserError]) -> UserError:
    """Combines user errors into one; a single one is returned unchanged."""
    return errors[0] if len(errors) == 1 else UserErrors(errors)


def apart(error: UserError) -> list[UserError]:
    """The individual errors of a user error."""
    return error.errors if isinstance(error, UserErrors) else [error]


class RunFailed(Exception):
    """A run that started and failed: the message names rank, step, reason and log file."""

    exit_code = 1
    kind = "run"  # as a rank's last note tells it to the supervisor


class OutOfMemory(RunFailed):
    """A device ran out of memory."""


class Interrupted(Exception):
    """The run was asked to stop (Ctrl-C or SIGTERM), saved its state and exited."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def _shown(field: str, value: object) -> str:
    return HIDDEN if SECRET_SETTING.search(field) and isinstance(value, str) else _short(redact(repr(value)))


def _short(text: str, limit: int = 120) -> str:
    if len(text) <= limit:
        return text
    # Both ends are kept: a path ends with the file's name and line, which is what the reader needs.
    half = (limit - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


class WordedUserError(UserError):
    """A user error found by a rank, whose message is already complete."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)
