"""What every part of the settings is made of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Clash(ValueError):
    """Settings that do not go together: the key to blame, what is wrong with it and what to do."""

    def __init__(self, key: str, problem: str, remedy: str) -> None:
        self.key, self.problem, self.remedy = key, problem, remedy
        super().__init__(problem)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
