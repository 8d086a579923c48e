"""What every part of the settings is made of."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Clash(ValueError):
    """Settings that do not go together: the key to blame, what is wrong with it and what to do."""

    def __init__(self, key: str, problem: str, remedy: str) -> None:
        self.key, self.problem, self.remedy = key, problem, remedy
        super().__init__(problem)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, values: Any) -> Any:
        """`restarts: yes` is no number, though Python counts it as one."""
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None and field.annotation in (int, float):
                raise Clash(name, "expected a number, not true or false", f"{name}: {field.description}")
        return values
