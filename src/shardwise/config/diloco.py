"""Settings of a DiLoCo worker, which trains locally and syncs with the others every N steps (docs/apart.md).

The outer optimizer, weighting and data types are configured once, on the sync server: `shardwise meet`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from shardwise.config.section import Clash, Section
from shardwise.config.units import Count, Duration


def split_address(address: str) -> tuple[str, int]:
    """Splits `HOST:PORT`; raises ValueError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError("expected HOST:PORT, e.g. 10.0.0.1:29400")
    return host, int(port)


class DiLoCo(Section):
    """The sync server of a DiLoCo worker, and how often it syncs."""

    meet: str = Field(description="HOST:PORT of the meeting point, which `shardwise meet` runs")
    every: Count = Field(default=50, description="steps between two meetings; the last step is always one")
    name: str | None = Field(
        default=None, min_length=1, max_length=200, description="this worker's name; default: host and output folder"
    )
    token_env: str | None = Field(
        default=None, min_length=1, description="environment variable that holds the meeting point's token"
    )
    patience: Duration = Field(
        default=600.0, gt=0, description="how long to try to reach a meeting point that does not answer, e.g. 10min"
    )

    @model_validator(mode="after")
    def _check_address(self) -> DiLoCo:
        try:
            split_address(self.meet)
        except ValueError:
            raise Clash("meet", "is no HOST:PORT", "write e.g. meet: 10.0.0.1:29400") from None
        return self


def _apart(value: Any) -> Any:
    return {"meet": value} if isinstance(value, str) else value


ApartOrNot = Annotated[DiLoCo | None, BeforeValidator(_apart, json_schema_input_type=str | DiLoCo | None)]
