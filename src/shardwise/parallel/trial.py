"""A tiny model of a class against itself in one process: what the zoo (zoo.py) and the check before a run share.

Parameters are moved away from where their authors start them, so that no error hides behind a norm of ones or a bias of
zeros, and everything is computed in double precision: what is left apart is wrong, not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.config.objectives import Task
from shardwise.data.layout import IGNORE
from shardwise.data.loader import MicroBatch
from shardwise.models.build import without_recording
from shardwise.models.shrink import shrink
from shardwise.models.source import ModelSource, quiet
from shardwise.models.tasks import auto_class
from shardwise.objectives.base import Loss

if TYPE_CHECKING:
    from shardwise.routers.watch import RouterLosses

ROWS, WIDTH, LONGER = 4, 16, 4
LOSS, GRADIENT = 1e-5, 1e-3  # how far apart is still the same: the loss absolutely, a gradient relative to its largest
NOISE = {torch.float64: 1e-9}  # of the largest gradient: less is rounding (a bias of keys has none but that)
FIRST = 3  # ids before it are special


class Refused(Exception):
    """A model cannot be divided along an axis: which module is in the way, and why."""

    def __init__(self, module: str, why: str) -> None:
        super().__init__(f"{module}: {why}" if module else why)
        self.module, self.why = module, why


@dataclass(frozen=True)
class Case:
    """A model small enough to run here, by its config, and what it is given."""

    config: Any
    task: Task
    seed: int = 0
    dtype: torch.dtype = torch.float64
    router: tuple[float, float] = (0.0, 0.0)  # coefficients of the auxiliary loss and the z-loss, where they are tried

    def model(self) -> Any:
        """The same on every rank; ready to train."""
        torch.manual_seed(self.seed)
        with quiet():
            model: Any = auto_class(self.task).from_config(without_recording(self.config)).to(self.dtype)
        model.config.use_cache = False
        if self.dtype is torch.float64:
            model.config._experts_implementation = "eager"  # grouped matmuls know no double precision
        random = torch.Generator().manual_seed(self.seed + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
                    parameter.add_(0.05 * noise.to(parameter.dtype))
        model.tie_weights()
        return model.train()

    def inputs(self, rows: int = ROWS, width: int = WIDTH) -> dict[str, torch.Tensor]:
        """What the model's forward takes, `use_cache` apart."""
        random = torch.Generator().manual_seed(self.seed + 2)
        if not self.config.is_encoder_decoder:
            return {"input_ids": self._ids(rows, width, random)}
        # Sources of another width than targets: what is meant for the one would not do for the other.
        source, target = self._ids(rows, width + LONGER, random), self._ids(rows, width, random)
        return {"input_ids": source, "decoder_input_ids": target}

    def labels(self, rows: int = ROWS, width: int = WIDTH) -> torch.Tensor:
        """One per position of the logits (already shifted where that is the task); some are ignored."""
        random = torch.Generator().manual_seed(self.seed + 3)
        ids = self._ids(rows, width, random)
        return ids.masked_fill(torch.rand(rows, width, generator=random) < 0.25, IGNORE)

    def _ids(self, rows: int, width: int, random: torch.Generator) -> torch.Tensor:
        vocabulary = self.config.get_text_config(decoder=True).vocab_size
        return torch.randint(FIRST, vocabulary - 1, (rows, width), generator=random)


def tiny_case(source: ModelSource) -> Case:
    """Of a model that someone wants to train."""
    return Case(shrink(source.config), source.task)


@dataclass(frozen=True)
class Answer:
    """The mean loss over the labels and the gradient of every parameter, whole, by name."""

    loss: float
    gradients: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Verdict:
    """How far an answer is from that of one process; `module` is the parameter that is furthest off."""

    loss: float
    gradient: float
    module: str

    @property
    def right(self) -> bool:
        return self.loss <= LOSS and self.gradient <= GRADIENT  # not so for NaN


def mean_loss(logits: torch.Tensor, labels: torch.Tensor, units: int) -> torch.Tensor:
    """Cross-entropy summed over the labels of a part, over the `units` of the whole."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum") / units


def units_of(labels: torch.Tensor) -> int:
    """How many labels are learned."""
    return int((labels != IGNORE).sum())


def alone(case: Case) -> Answer:
    """What one process computes."""
    model, labels = case.model(), case.labels()
    routers = _routers(model, case, labels)
    loss = mean_loss(model(**case.inputs(), use_cache=False).logits, labels, units_of(labels))
    if routers is not None:
        loss = routers.finish(Loss(loss * units_of(labels), loss[None], loss[None]), "").total / units_of(labels)
    loss.backward()
    return Answer(loss.item(), gradients_of(model))


def _routers(model: Any, case: Case, labels: torch.Tensor) -> RouterLosses | None:
    """What watches the routers of a forward over all rows, where their losses are tried."""
    from shardwise.routers.install import routers_in

    found = routers_in(model, case.config, case.task, *case.router)
    if found is not None:
        found.begin(MicroBatch(case.inputs()["input_ids"], labels, None, None))
    return found


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name; collective where parameters are divided."""
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: (g.full_tensor() if isinstance(g, DTensor) else g).detach() for n, g in found.items()}


def judge(answer: Answer, wanted: Answer) -> Verdict:
    """Compares; a gradient that is missing, or there without being wanted, is as wrong as can be."""
    worst, module = 0.0, ""
    largest = max((float(g.abs().max()) for g in wanted.gradients.values() if g.numel()), default=0.0)
    for name in {*wanted.gradients, *answer.gradients}:
        ours, theirs = answer.gradients.get(name), wanted.gradients.get(name)
        apart = _apart(ours, theirs, largest)
        if not apart <= worst:
            worst, module = apart, name
    return Verdict(abs(answer.loss - wanted.loss), worst, module)


def _apart(ours: torch.Tensor | None, theirs: torch.Tensor | None, largest: float) -> float:
    if ours is None or theirs is None:
        other = ours if ours is not None else theirs
        assert other is not None
        return float("inf") if other.any() else 0.0
    if ours.shape != theirs.shape:
        return float("inf")
    if not theirs.numel():
        return 0.0
    return float((ours - theirs).abs().max() / (theirs.abs().max() + NOISE.get(theirs.dtype, 1e-3) * largest + 1e-12))
