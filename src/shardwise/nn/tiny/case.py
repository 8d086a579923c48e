"""A tiny model of a class compared with itself in one process, for the zoo (foresight/zoo) and the check before a run.

Parameters are moved away from their initial values, so that no error hides behind a norm of ones, a bias of zeros,
scores too small for a cap or a sink to matter, or a recurrent state that decays within a token. Everything is computed
in double precision: remaining differences are errors, not rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardwise.config.objectives import Task
from shardwise.core.compat.hf_private import set_experts_of
from shardwise.core.labels import IGNORE
from shardwise.data.loader import MicroBatch
from shardwise.nn.attention.varlen import built_with
from shardwise.nn.models.build import without_recording
from shardwise.nn.models.source import ModelSource, quiet
from shardwise.nn.models.tasks import auto_class
from shardwise.nn.objective import Loss
from shardwise.nn.tiny.shrink import shrink


class AddsLosses(Protocol):
    """Adds losses to a forward's own, such as those of routers."""

    def begin(self, batch: MicroBatch) -> None:
        """Called before the forward."""

    def finish(self, loss: Loss, prefix: str) -> Loss:
        """Called after the forward; returns the loss with what was added."""


ROWS, WIDTH, LONGER = 4, 16, 4
LOSS, GRADIENT = 1e-5, 1e-3  # how far apart is still the same: the loss absolutely, a gradient relative to its largest
# Of the largest gradient: less is rounding, and single precision's, for norms and routers compute in it whatever the
# model does (a bias of keys has no gradient but that).
NOISE = 1e-4
FIRST = 3  # ids before it are special
# How far norms and biases, and matrices, are moved: a matrix of width 32 keeps the size of its input.
VECTOR, MATRIX = 0.3, 0.2
DECAY = ("A_log",)  # logarithms of how fast a state-space layer forgets, which it does within a token when fresh
SLOW = 0.05


class CannotParallelize(Exception):
    """A model cannot be parallelised along an axis: which module prevents it, and why."""

    def __init__(self, module: str, why: str) -> None:
        super().__init__(f"{module}: {why}" if module else why)
        self.module = module
        self.why = why


@dataclass(frozen=True)
class TinyCase:
    """A tiny model, by its config, and its inputs."""

    config: Any
    task: Task
    seed: int = 0
    dtype: torch.dtype = torch.float64
    attention: str = ""  # transformers' name for it; empty: its own choice
    router: tuple[float, float] = (0.0, 0.0)  # coefficients of the auxiliary loss and the z-loss, where they are tried

    def model(self, attention: str = "") -> Any:
        """Returns the model in training mode, the same on every rank; `attention` overrides the case's."""
        torch.manual_seed(self.seed)
        with quiet():
            kind = auto_class(self.task)
            name = attention or self.attention or None
            model: Any = built_with(kind, without_recording(self.config), name).to(self.dtype)
        model.config.use_cache = False
        if self.dtype is torch.float64:
            set_experts_of(model.config, "eager")  # grouped matmuls know no double precision
        _move(model, self.seed + 1)
        model.tie_weights()
        return model.train()

    def inputs(self, rows: int = ROWS, width: int = WIDTH) -> dict[str, torch.Tensor]:
        """Returns the inputs of the model's forward, except `use_cache`."""
        random = torch.Generator().manual_seed(self.seed + 2)
        if self.task != "seq2seq":
            return {"input_ids": self._ids(rows, width, random)}
        # Sources of another width than targets: what is meant for the one would not do for the other.
        source = self._ids(rows, width + LONGER, random)
        target = self._ids(rows, width, random)
        return {"input_ids": source, "decoder_input_ids": target}

    def labels(self, rows: int = ROWS, width: int = WIDTH) -> torch.Tensor:
        """Returns one label per position of the logits (already shifted if that is the task); some are ignored."""
        random = torch.Generator().manual_seed(self.seed + 3)
        ids = self._ids(rows, width, random)
        return ids.masked_fill(torch.rand(rows, width, generator=random) < 0.25, IGNORE)

    def _ids(self, rows: int, width: int, random: torch.Generator) -> torch.Tensor:
        vocabulary = self.config.get_text_config(decoder=True).vocab_size
        return torch.randint(FIRST, vocabulary - 1, (rows, width), generator=random)


@torch.no_grad()
def _move(model: nn.Module, seed: int) -> None:
    """Moves parameters to where everything that a model computes affects its loss."""
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64).to(parameter.dtype)
        if name.endswith(DECAY):
            parameter.copy_(math.log(SLOW) + VECTOR * noise)
        elif parameter.ndim < 2:
            parameter.add_(VECTOR * noise)
        else:
            parameter.add_(MATRIX * noise)


def tiny_case(source: ModelSource) -> TinyCase:
    """Returns the tiny case of a model to be trained."""
    return case_of(shrink(source.config), source.task, source.attention)


_SINGLE: dict[tuple[Any, ...], bool] = {}


def case_of(config: Any, task: Task, attention: str = "") -> TinyCase:
    """Returns a case in double precision, or in single if the model's own code wants that."""
    case = TinyCase(config, task, attention=attention)
    key = type(config), config.to_json_string(), task
    if key not in _SINGLE:
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                model = case.model()
                logits = model(**case.inputs(rows=1), use_cache=False).logits
            # Its code may convert parameters in place (routers of Switch Transformers), or mask by
            # a number that overflows (ProphetNet).
            is_mixed = any(parameter.dtype is torch.float32 for parameter in model.parameters())
            _SINGLE[key] = is_mixed or bool(logits.isnan().any())
        except RuntimeError as error:
            _SINGLE[key] = any(word in str(error) for word in ("dtype", "overflow"))
        except Exception:
            _SINGLE[key] = False  # whatever it is, it is said where the case is tried
    return replace(case, dtype=torch.float32) if _SINGLE[key] else case


@dataclass(frozen=True)
class LossAndGradients:
    """The mean loss over the labels and the full gradient of every parameter, by name."""

    loss: float
    gradients: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Deviation:
    """Difference from the result of one process; `module` is the parameter with the largest difference."""

    loss: float
    gradient: float
    module: str

    @property
    def right(self) -> bool:
        """Whether the difference is within tolerance."""
        return self.loss <= LOSS and self.gradient <= GRADIENT  # not so for NaN


def mean_loss(logits: torch.Tensor, labels: torch.Tensor, units: int) -> torch.Tensor:
    """Returns the cross-entropy summed over the labels of a part, divided by the `units` of the full batch."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum") / units


def units_of(labels: torch.Tensor) -> int:
    """Returns the number of loss tokens."""
    return int((labels != IGNORE).sum())


class DoubleSoftmax(TorchFunctionMode):
    """Keeps softmax in double precision where eager attention requests single."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        single = kwargs.get("dtype") is torch.float32 and func in (F.softmax, torch.softmax, torch.Tensor.softmax)
        if single and args[0].dtype is torch.float64:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def summed(
    model: Any,
    documents: Iterable[tuple[dict[str, torch.Tensor], torch.Tensor]],
    units: int,
    routers: AddsLosses | None = None,
) -> LossAndGradients:
    """Returns the mean loss over documents that are processed one at a time, and its gradients."""
    losses = []
    for inputs, labels in documents:
        ones = torch.ones_like(inputs["input_ids"])
        if routers is not None:
            routers.begin(MicroBatch(inputs["input_ids"], labels, None, None))
        loss = mean_loss(model(**inputs, attention_mask=ones, use_cache=False).logits, labels, units)
        if routers is not None:
            loss = routers.finish(Loss(loss * units, loss[None], loss[None]), "").total / units
        losses.append(loss)
    loss = torch.stack(losses).sum()
    loss.backward()
    return LossAndGradients(loss.item(), gradients_of(model))


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns full gradients by name; collective if parameters are sharded."""
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: (g.full_tensor() if isinstance(g, DTensor) else g).detach() for n, g in gradients.items()}


def judge(answer: LossAndGradients, expected: LossAndGradients) -> Deviation:
    """Compares two results; a missing or unexpected gradient is an infinite difference."""
    worst = 0.0
    module = ""
    largest = max((float(g.abs().max()) for g in expected.gradients.values() if g.numel()), default=0.0)
    for name in {*expected.gradients, *answer.gradients}:
        actual = answer.gradients.get(name)
        reference = expected.gradients.get(name)
        difference = _difference(actual, reference, largest)
        if not difference <= worst:
            worst = difference
            module = name
    return Deviation(abs(answer.loss - expected.loss), worst, module)


def _difference(actual: torch.Tensor | None, reference: torch.Tensor | None, largest: float) -> float:
    if actual is None or reference is None:
        other = actual if actual is not None else reference
        assert other is not None
        return float("inf") if other.any() else 0.0
    if actual.shape != reference.shape:
        return float("inf")
    if not reference.numel():
        return 0.0
    return float((actual - reference).abs().max() / (reference.abs().max() + NOISE * largest + 1e-12))
