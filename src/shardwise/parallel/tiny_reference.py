"""Single-process loss and gradients of a tiny model: the reference of trials and of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.nn.tiny.case import DoubleSoftmax, LossAndGradients, TinyCase, summed, units_of
from shardwise.parallel.routers.install import routers_in


def alone(case: TinyCase, prepare: Callable[[Any], None] = lambda _: None) -> LossAndGradients:
    """Loss and gradients by the model's definition (path_selection.py): eager, row by row.

    `prepare` changes the model first: adds adapters, for example.
    """
    inputs = case.inputs()
    labels = case.labels()
    rows = []
    for row in range(len(labels)):
        rows.append({name: table[row : row + 1] for name, table in inputs.items()})
    model = case.model(attention="eager")
    prepare(model)
    routers = routers_in(model, case.config, case.task, *case.router)
    with DoubleSoftmax():
        return summed(model, zip(rows, labels.split(1), strict=True), units_of(labels), routers)
