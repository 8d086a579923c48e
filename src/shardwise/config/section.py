"""Base class of all settings sections."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Clash(ValueError):
    """Settings that do not combine: the key at fault, the problem and the remedy."""

    def __init__(self, key: str, problem: str, remedy: str) -> None:
        self.key = key
        self.problem = problem
        self.remedy = remedy
        super().__init__(problem)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _reject_booleans(cls, values: Any) -> Any:
        """Rejects booleans for numbers (`restarts: yes`), which Python would accept."""
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None and field.annotation in (int, float):
                raise Clash(name, "expected a number, not true or false", f"{name}: {field.description}")
        return values
