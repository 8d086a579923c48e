"""Settings of router load balancing in mixture-of-experts models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from shardwise.config.section import Section
from shardwise.config.units import parse_number

Balance = Literal["document", "micro_batch"]
Coefficient = Literal["auto"] | Annotated[float, Field(ge=0), BeforeValidator(parse_number)]


class Router(Section):
    """Router load balancing in a mixture-of-experts model; see docs/routers.md."""

    aux_loss: Coefficient = Field(
        default="auto",
        description="coefficient of the auxiliary (load-balancing) loss, e.g. 0.01; 0 = off; auto = as the model's "
        "config says (output_router_logits and its coefficient)",
    )
    z_loss: Coefficient = Field(
        default="auto",
        description="coefficient of the router z-loss (mean squared logsumexp of the router logits), e.g. 0.001; "
        "0 = off; auto = as the model's own loss has it",
    )
    bias_update: Coefficient = Field(
        default="auto",
        description="rate by which the bias of auxiliary-loss-free balancing moves after each step, e.g. 0.001; "
        "0 = off; auto = 0.001 where the model has such a bias and its routers are trained",
    )
    balance: Balance = Field(
        default="document",
        description="tokens over which the auxiliary loss is taken: each document, or all of a micro-batch "
        "(which depends on how the batch is split)",
    )
