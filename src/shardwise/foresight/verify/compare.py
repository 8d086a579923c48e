"""Compares a result with the reference's, parameter by parameter, and defines the tolerances.

A result is a file of gradients and updated parameters by name, and a few figures beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

# A gradient is compared relative to its largest element and this share of the largest of all: what it is made of was
# rounded at that size (the bias of an attention's keys has no gradient but rounding, 2e-8 of the largest of all).
ROUNDED = 1e-3
NOISE = 1e-4  # of the largest gradient of all: less of it and an update is not compared
TELLING = 1e-2  # of its tensor's largest gradient: less of it and Adam's first step, a sign, follows the rounding


@dataclass(frozen=True)
class Bounds:
    """Tolerances; None: not compared, because it would show nothing."""

    loss: float  # absolute
    norm: float  # relative
    gradient: float  # relative to the tensor's largest
    update: float | None  # of parameters, as a share of the learning rate
    after: float  # the loss after one update


# Measured on tiny and on pretrained models: losses 7e-7, norms 2e-7, gradients 1e-6, updates 3e-7, losses after 5e-6
# apart. Planted bugs move the gradients by 0.2 and more.
EXACT = Bounds(loss=1e-5, norm=1e-5, gradient=1e-4, update=1e-2, after=5e-5)
# Against a reference in fp32: 8 bits of mantissa in weights and activations; gradients 1e-2 apart were measured.
HALF = Bounds(loss=1e-2, norm=2e-2, gradient=0.1, update=None, after=2e-2)
# Of ZeRO++, whose rounding is relative to the largest of a block, in which other tensors may lie: gradients 3e-2 and
# 0.3 apart were measured, norms 5e-4 and 8e-3.
INT8 = Bounds(loss=5e-3, norm=1e-2, gradient=0.1, update=None, after=1e-2)
INT4 = Bounds(loss=5e-3, norm=5e-2, gradient=0.5, update=None, after=2e-2)


# What other orders of the same operations may make of half precision's rounding, as a multiple of what it alone does;
# gradients that are further apart than the last would show nothing.
TIMES, MOST = 4.0, 0.5


def rounding(half: Reference, single: Reference) -> Bounds:
    """Returns bounds from the reference in half precision against the same in single precision."""
    half_figures = half.figures
    single_figures = single.figures
    gradient = max(
        gradient_difference(half.gradient(n), single.gradient(n), single_figures["largest"]) for n in single.names
    )
    after = abs(half_figures["after"] - single_figures["after"]) if "after" in single_figures else 0.0
    norm = relative(half_figures["norm"], single_figures["norm"])
    return Bounds(
        TIMES * abs(half_figures["loss"] - single_figures["loss"]),
        TIMES * norm,
        min(TIMES * gradient, MOST),
        None,
        TIMES * after,
    )


def wider(a: Bounds, b: Bounds) -> Bounds:
    """Returns the wider of two bounds, field by field."""
    update = None if a.update is None or b.update is None else max(a.update, b.update)
    return Bounds(
        max(a.loss, b.loss), max(a.norm, b.norm), max(a.gradient, b.gradient), update, max(a.after, b.after)
    )  # fmt: skip


@dataclass(frozen=True)
class ParityDifference:
    """Difference of a claim from the reference; the strings are parameter names."""

    loss: float
    norm: float
    gradient: float | None = None  # None where gradients are gone before they can be looked at
    worst: str = ""
    update: float | None = None
    moved: str = ""  # where the update is furthest off
    after: float | None = None
    first: str = ""  # in the model's order, the first parameter beyond the bound
    missing: str = ""  # no rank has it
    rank: int = 0  # on which it is

    def trouble(self, bounds: Bounds) -> str:
        """Describes what exceeds its bound; empty if nothing does."""
        if self.missing:
            return f"no rank trains {self.missing}"
        if self.gradient is not None and not self.gradient <= bounds.gradient:
            where = f"{self.first} is the first that differs; furthest off: {self.worst}, {self.gradient:.1e}"
            return f"gradients: {where}" + (f" (on rank {self.rank})" if self.rank else "")
        if not self.loss <= bounds.loss:
            return f"the loss is {self.loss:.1e} off"
        if not self.norm <= bounds.norm:
            return f"the gradient norm is {self.norm:.1e} off"
        if bounds.update is not None and self.update is not None and not self.update <= bounds.update:
            return f"the update: {self.moved} is {self.update:.1e} of the learning rate off"
        if self.after is not None and not self.after <= bounds.after:
            return f"the loss after one update is {self.after:.1e} off"
        return ""


class Reference:
    """A reference result, read from its files tensor by tensor."""

    def __init__(self, file: Path) -> None:
        from safetensors import safe_open

        self._tensors = safe_open(file, framework="pt")
        self.figures: dict[str, Any] = json.loads(file.with_suffix(".json").read_text())

    @property
    def names(self) -> list[str]:
        """Trained parameters in the model's order."""
        return list(self.figures["names"])

    def gradient(self, name: str) -> torch.Tensor:
        """Returns a gradient of the first step, before clipping."""
        return torch.as_tensor(self._tensors.get_tensor(f"gradient.{name}"))

    def parameter(self, name: str) -> torch.Tensor:
        """Returns a parameter after the first step."""
        return torch.as_tensor(self._tensors.get_tensor(f"parameter.{name}"))


def write_reference(
    file: Path, gradients: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], figures: dict[str, Any]
) -> None:
    """Writes a result for others to be compared with."""
    from safetensors.torch import save_file

    largest = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    tensors = {f"gradient.{n}": g.detach().float().cpu().contiguous() for n, g in gradients.items()}
    tensors |= {f"parameter.{n}": p.detach().float().cpu().contiguous() for n, p in parameters.items()}
    save_file(tensors, file)
    figures = {"names": list(gradients), "largest": largest, **figures}
    file.with_suffix(".json").write_text(json.dumps(figures))


def gradient_difference(actual: torch.Tensor | None, expected: torch.Tensor, largest: float) -> float:
    """Returns the relative difference of a gradient; inf if it is missing, misshapen or not finite."""
    if actual is None:
        return 0.0 if not expected.any() else float("inf")
    if actual.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    difference = float(
        (actual.float().cpu() - expected).abs().max() / (expected.abs().max() + ROUNDED * largest + 1e-30)
    )
    return difference if difference == difference else float("inf")


def update_difference(
    actual: torch.Tensor, expected: torch.Tensor, gradient: torch.Tensor, rate: float, largest: float
) -> float:
    """Returns the difference of updated parameters as a share of the learning rate, where gradients exceed rounding."""
    if actual.shape != expected.shape:
        return float("inf")
    size = gradient.abs()
    telling = size > max(TELLING * float(size.max()) if size.numel() else 0.0, NOISE * largest)
    if not telling.any():
        return 0.0
    rounding = 2 * torch.finfo(torch.float32).eps * expected.abs()  # of adding a small update to a large weight
    excess = ((actual.float().cpu() - expected).abs() - rounding).clamp(min=0)[telling]
    difference = float(excess.max()) / rate
    return difference if difference == difference else float("inf")


def relative(actual: float, expected: float) -> float:
    """Returns the difference as a share of the reference's value."""
    return abs(actual - expected) / max(abs(expected), 1e-12)


def worst_difference(results: Iterable[dict[str, Any]], names: list[str]) -> ParityDifference:
    """Returns the worst difference over all ranks; a parameter that no rank compared is missing."""
    reports = list(results)
    compared = {name for report in reports for name in report["names"]}
    worst = max(reports, key=lambda report: report["difference"]["gradient"] or 0.0)
    result = ParityDifference(**{**worst["difference"], "rank": reports.index(worst)})
    order = {name: index for index, name in enumerate(names)}
    firsts = [report["difference"]["first"] for report in reports if report["difference"]["first"]]
    furthest = max(reports, key=lambda report: report["difference"]["update"] or 0.0)["difference"]
    return replace(
        result,
        loss=max(report["difference"]["loss"] for report in reports),
        norm=max(report["difference"]["norm"] for report in reports),
        update=furthest["update"],
        moved=furthest["moved"],
        after=max(
            (report["difference"]["after"] for report in reports if report["difference"]["after"] is not None),
            default=None,
        ),
        first=min(firsts, key=lambda name: order.get(name, len(order)), default=""),
        missing=next((name for name in names if name not in compared), ""),
    )


def as_json(difference: ParityDifference) -> dict[str, Any]:
    """Returns the difference for a JSON file; values that are not finite are spelled out."""
    return {k: v if v == v and v not in (float("inf"),) else "not finite" for k, v in asdict(difference).items()}
