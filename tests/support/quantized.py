"""Functions that the tests of quantised bases run on ranks (see ranks.py): a run's real parts, its model quantised and
with the smallest LoRA there is."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

RANK = 4


class _Lora:
    """In front of a linear layer's class: adds x·A·B."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.lora_a.t() @ self.lora_b.t()  # type: ignore[misc, attr-defined]


def quantise_and_adapt(model: nn.Module, bits: str, double: bool) -> None:
    """A model on `meta`: its linear layers quantised, frozen, and an update beside each."""
    from shardwise.nn.adapters.quantized import quantize_linears

    model.requires_grad_(False)
    for name in quantize_linears(model, lambda *_: True, bits, double):  # type: ignore[arg-type]
        module: Any = model.get_submodule(name)
        inputs, outputs = (module.nx, module.nf) if module.transposed else (module.in_features, module.out_features)
        module.lora_a = nn.Parameter(torch.empty(RANK, inputs, device="meta"))
        module.lora_b = nn.Parameter(torch.empty(outputs, RANK, device="meta"))
        module.__class__ = type("Adapted", (_Lora, type(module)), {})


def _patch(bits: str, double: bool) -> None:
    """Puts quantising and adapting where the set-up builds and fills; each rank is a process of its own."""
    from shardwise.nn.models import build, weights
    from shardwise.nn.models.build import fill_random
    from shardwise.nn.models.weights import fill_local, load_weights
    from shardwise.train import setup

    def build_on_meta(source: Any) -> Any:
        model = build.build_on_meta(source)
        quantise_and_adapt(model, bits, double)
        return model

    def fill_model(job: Any, sharded: Any, through: Any) -> None:
        if job.source.weights is not None:
            load_weights(sharded.model, job.source.weights, through)
        else:
            fill_random(sharded.model, job.source, job.run.train.seed, through)
        for name, parameter in sharded.parameters.items():
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                fill_local(parameter, 0.05 * values)

    setup.build_on_meta, setup.fill_model = build_on_meta, fill_model
    weights.match_names = lambda model, stored: {n: n for n, _ in model.named_parameters() if "lora_" not in n}


def train(runs: list[dict[str, Any]], bits: str, double: bool, steps: int = 2) -> list[dict[str, Any]]:
    """For each run: losses, the first step's gradients, bytes of the quantised base on this rank."""
    import torch.distributed as dist

    from shardwise.optim.shards import local_of
    from shardwise.train.loop import accumulate, seed_step
    from support.scenarios import batch_of, parts_of

    results = []
    _patch(bits, double)
    for run in runs:
        parts, losses, gradients = parts_of(run), [], {}
        for step in range(steps):
            seed_step(0, step, parts.world.rank)
            batch = batch_of(parts, step)
            loss = accumulate(parts, batch).sum()
            dist.all_reduce(loss)
            losses.append(loss.item() / batch.supervised)
            if not step and parts.world.device.type == "cpu":  # torch 2.11 crashes in full_tensor() on a GPU over gloo
                gradients = {n: p.grad.full_tensor().clone() for n, p in parts.sharded.parameters.items()}
            parts.update()
        base = [p for n, p in parts.sharded.model.named_parameters() if not p.is_floating_point()]
        results.append({
            "losses": losses, "gradients": gradients, "layers": len(base),
            "bytes": sum(local_of(p).nbytes for p in base),
        })  # fmt: skip
    return results


def loaded(run: dict[str, Any], bits: str, double: bool) -> dict[str, torch.Tensor]:
    """The packed weights right after loading, whole, and what they stand for."""
    from shardwise.nn.adapters.quantized import dequantized
    from support.scenarios import parts_of

    _patch(bits, double)
    model = parts_of(run).sharded.model
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "packings"):
            for key, value in (("packed", module.weight), ("weight", dequantized(module))):
                found[f"{name}.{key}"] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return found


def load_and_watch(run: dict[str, Any], piece: int) -> dict[str, int]:
    """Loads in pieces of so many bytes; private memory of this rank before, at its peak, and what it holds then."""
    from shardwise.nn.models import weights
    from support import scenarios

    _patch("nf4", True)
    weights.PIECE = piece
    return scenarios.load_and_watch(run)
