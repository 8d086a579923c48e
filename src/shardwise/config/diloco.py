"""Settings of a DiLoCo worker: a run that trains locally and synchronises with others every N steps (docs/diloco.md).

The outer optimizer, the workers' weights and the wire dtype are options of the sync server: `shardwise diloco-server`.
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

    server: str = Field(description="HOST:PORT of the sync server, which `shardwise diloco-server` runs")
    sync_every: Count = Field(
        default=50, description="local steps between two synchronisations; the last step is always one"
    )
    name: str | None = Field(
        default=None, min_length=1, max_length=200, description="this worker's name; default: host and output folder"
    )
    token_env: str | None = Field(
        default=None, min_length=1, description="environment variable that holds the sync server's token"
    )
    connect_timeout: Duration = Field(
        default=600.0, gt=0, description="how long to try to reach a sync server that does not answer, e.g. 10min"
    )

    @model_validator(mode="after")
    def _check_address(self) -> DiLoCo:
        try:
            split_address(self.server)
        except ValueError:
            raise Clash("server", "is no HOST:PORT", "write e.g. server: 10.0.0.1:29400") from None
        return self


def _diloco(value: Any) -> Any:
    return {"server": value} if isinstance(value, str) else value


OptionalDiLoCo = Annotated[DiLoCo | None, BeforeValidator(_diloco, json_schema_input_type=str | DiLoCo | None)]
