"""Linear layers with adapters, made from the existing modules.

A target keeps its name and its parameters. It is given a subclass of its own class whose forward adds the update to the
base's output, so that weight files, checkpoints and sharding plans fit as before, and a quantised base needs nothing of
its own here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.effective_device import has_fp8_matmul as multiplies
from shardwise.core.errors import UserError
from shardwise.nn.adapters.lora_float8 import lora_float8
from shardwise.nn.adapters.lora_linear import FLOATS, lora_linear
from shardwise.nn.kernels.transposed_round import MULTIPLE

NAMES = ("lora_A", "lora_B", "lora_magnitude", "ia3_l")  # of the parameters that adapters bring


def is_added(name: str) -> bool:
    """Whether a parameter is an adapter's, and so in no file of the base."""
    return name.rpartition(".")[2] in NAMES


class AdapterLayer(nn.Module):
    """Base of all adapted layers; `adapter_off` disables the adapter."""

    adapter_off = False
    tensor_mesh: DeviceMesh | None = None  # over which tensor parallelism has cut it


class LoraLayer(AdapterLayer):
    """W x + scale · B A x; with a magnitude (DoRA) each output is also scaled to it."""

    lora_A: nn.Parameter  # rank × in
    lora_B: nn.Parameter  # out × rank
    lora_magnitude: nn.Parameter | None  # out
    lora_scale: float
    lora_dropout: float
    lora_group: dist.ProcessGroup | None = None  # ranks that have the other columns of the weight, where it is so cut
    lora_form: tuple[bool, int, str, bool] | None  # how the weight is kept, if that is all there is to the base
    base_in_float8 = False  # in training; evaluated is the model that is handed over, in 16 bits
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the base's output plus the update."""
        if self.adapter_off:
            return super().forward(x)  # type: ignore[no-any-return]
        flat = x.reshape(-1, x.shape[-1])
        if self.lora_form and not self.lora_dropout and self.lora_magnitude is None and not self._base_learns():
            parts = self.weight, self.bias, self.lora_A, self.lora_B
            if self.training and self.base_in_float8:
                out = lora_float8(flat, *parts, self.lora_scale, *self.lora_form[1:])
            else:
                out, _ = lora_linear(flat, *parts, self.lora_scale, *self.lora_form)
            return out.view(*x.shape[:-1], out.shape[-1])  # type: ignore[no-any-return]
        out = super().forward(flat)
        dropped = F.dropout(flat, self.lora_dropout, self.training) if self.lora_dropout else flat
        low = F.linear(dropped, self.lora_A)
        if self.lora_magnitude is not None:
            out = self._towards_magnitude(out, low)
        else:
            out = torch.addmm(out, low, self.lora_B.t(), alpha=self.lora_scale)
        return out.view(*x.shape[:-1], out.shape[-1])  # type: ignore[no-any-return]

    def _base_learns(self) -> bool:
        return any(p is not None and p.requires_grad for p in (self.weight, self.bias))

    def _towards_magnitude(self, out: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        bias = self.bias
        out = out if bias is None else out - bias
        out = torch.addmm(out, low, self.lora_B.t(), alpha=self.lora_scale)
        assert self.lora_magnitude is not None
        out = out * (self.lora_magnitude / self.norms().to(out.dtype))
        return out if bias is None else out + bias

    @torch.no_grad()
    def norms(self) -> torch.Tensor:
        """Returns the norm of each row of W + scale · B A, in fp32, without materialising it; constant in backward."""
        weight = dense_weight(self)
        a = self.lora_A
        b = self.lora_B.float()
        scale = self.lora_scale
        square = row_norms(weight).square()
        cross = (F.linear(weight, a).float() * b).sum(1)
        update_square = (b @ (a.float() @ a.float().t()) * b).sum(1)
        total = square + 2 * scale * cross + scale**2 * update_square
        if self.lora_group is not None:
            dist.all_reduce(total, group=self.lora_group)
        return total.clamp_(min=torch.finfo(torch.float32).tiny).sqrt_()


class Ia3Layer(AdapterLayer):
    """The output (or, in a feed-forward part, the input) times a trained factor for each channel."""

    ia3_l: nn.Parameter
    ia3_feedforward: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the base's output, scaled."""
        if self.adapter_off:
            return super().forward(x)  # type: ignore[no-any-return]
        if self.ia3_feedforward:
            return super().forward(x * self.ia3_l)  # type: ignore[no-any-return]
        return super().forward(x) * self.ia3_l  # type: ignore[no-any-return]


def is_transposed(module: nn.Module) -> bool:
    """Whether a layer is GPT-2's Conv1D, whose weight is in × out."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix that its own forward applies (the one inside nn.MultiheadAttention is not)."""
    inert = nn.modules.linear.NonDynamicallyQuantizableLinear
    return is_transposed(module) or (isinstance(module, nn.Linear) and not isinstance(module, inert))


def _form(module: Any) -> tuple[bool, int, str, bool] | None:
    """How lora_linear must read a layer's weight; None for a layer that computes more than a product."""
    from transformers.pytorch_utils import Conv1D

    from shardwise.nn.adapters.quantized import Quantized

    if type(module).forward is Quantized.forward:
        return module.transposed, *astuple(module.packings["weight"].form)
    return (is_transposed(module), *FLOATS) if type(module).forward in (nn.Linear.forward, Conv1D.forward) else None


def features(module: Any) -> tuple[int, int]:
    """Returns the inputs and outputs of a linear layer."""
    return tuple(module.weight.shape) if is_transposed(module) else (module.in_features, module.out_features)


def dense_weight(module: Any) -> torch.Tensor:
    """Returns the weight as out × in, dequantised if needed."""
    weight: torch.Tensor = module.weight
    if hasattr(module, "packings"):
        from shardwise.nn.adapters.quantized import dequantized

        weight = dequantized(module, module.lora_A.dtype)
    return weight.t() if is_transposed(module) else weight


def row_norms(weight: torch.Tensor) -> torch.Tensor:
    """Returns the norm of each row, summed in fp32."""
    norms: torch.Tensor = torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float32)
    return norms


def attach_lora(
    module: nn.Module, shape: tuple[int, int], rank: int, scale: float, dropout: float = 0.0, dora: bool = False
) -> None:
    """Gives a layer of (in, out) features a low-rank update, on the device of its weights."""
    in_features, out_features = shape
    device = next(module.parameters()).device
    form = _form(module)
    layer: Any = _become(module, LoraLayer)
    layer.lora_A = nn.Parameter(torch.empty(rank, in_features, device=device))
    layer.lora_B = nn.Parameter(torch.empty(out_features, rank, device=device))
    layer.register_parameter("lora_magnitude", nn.Parameter(torch.empty(out_features, device=device)) if dora else None)
    layer.lora_scale = scale
    layer.lora_dropout = dropout
    layer.lora_form = form


def multiply_bases_in_float8(model: nn.Module, device: torch.device, mode: str = "auto") -> int:
    """Makes LoRA layers over a quantised base multiply in fp8, if requested and supported; returns how many do.

    `mode`: auto = an fp8 base, unconverted; fp8 = an nf4 base too, converted to fp8 on the fly; plain = none.
    """
    kinds = {"auto": ("fp8",), "fp8": ("fp8", "nf4"), "plain": ()}[mode]
    for _, layer in adapter_layers(model):
        transposed, columns, bits, _ = getattr(layer, "lora_form", None) or (False, *FLOATS)
        fits = bits in kinds and not transposed and not columns % MULTIPLE and not len(layer.weight) % MULTIPLE
        layer.base_in_float8 = fits and multiplies(device)
    count = sum(bool(layer.base_in_float8) for _, layer in adapter_layers(model))
    if mode == "fp8" and not count:
        problem = f"no adapted layer is a product of sizes that are multiples of {MULTIPLE}"
        raise UserError("method.multiply", mode, problem, "leave it out")
    return count


def attach_ia3(module: nn.Module, shape: tuple[int, int], feedforward: bool) -> None:
    """Gives a layer of (in, out) features its IA3 factors."""
    device = next(module.parameters()).device
    layer: Any = _become(module, Ia3Layer)
    layer.ia3_l = nn.Parameter(torch.empty(shape[0 if feedforward else 1], device=device))
    layer.ia3_feedforward = feedforward


def detach(module: Any) -> None:
    """Restores an adapted layer to its base class."""
    for name in NAMES:
        module._parameters.pop(name, None)
    module.__class__ = type(module).base_class


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the adapted layers by name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, AdapterLayer))


@torch.no_grad()
def merged_parameters_by_probing(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters as a merged model should have them, by probing each adapted layer with unit inputs."""
    layers = dict(adapter_layers(model))
    for name, parameter in model.named_parameters():
        owner, _, end = name.rpartition(".")
        if owner not in layers:
            yield name, parameter
        elif not is_added(name):
            layer = layers[owner]
            unit = torch.eye(features(layer)[0], device=parameter.device, dtype=parameter.dtype)
            offset = layer(unit[:1] * 0)
            weight = layer(unit) - offset  # in × out
            if end == "bias":
                yield name, offset[0]
            else:
                yield name, weight if is_transposed(layer) else weight.t()


def _become(module: nn.Module, kind: type[AdapterLayer]) -> nn.Module:
    make_class: Any = _adapted_class
    module.__class__ = make_class(kind, type(module))
    return module


@functools.cache
def _adapted_class(kind: Any, base: Any) -> Any:
    return type(f"{kind.__name__.removesuffix('Layer')}{base.__name__}", (kind, base), {"base_class": base})


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """Disables the adapters inside the block: the reference of DPO, at no cost in memory.

    For forwards without gradients. At stages 1 and 2 such a forward leaves parameters gathered until the next backward:
    it belongs before the backward of its micro-batch.
    """
    layers = [layer for _, layer in adapter_layers(model)]
    adapter_parameters = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
    if not layers:
        raise UserError("method", "full", "there is no adapter whose base could be asked", "use method: lora")
    trained_base = next(
        (n for n, p in model.named_parameters() if p.requires_grad and id(p) not in adapter_parameters), None
    )
    if trained_base is not None:
        problem = f"{trained_base} is trained whole, so the base is no longer there to be asked"
        raise UserError("method.modules_to_save", trained_base, problem, "leave it out where the base is the reference")
    for layer in layers:
        layer.adapter_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.adapter_off = False
