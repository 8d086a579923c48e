"""fp8 linear layers beside torchao's: distance from fp64 of output and gradients, and what each costs in code.

    pip install torchao
    PYTHONPATH=src python benchmarks/decisions/float8.py OUT.json

On a CPU torchao emulates its products (`emulate=True`) and ours multiplies the rounded numbers in fp32: the numbers of
both are those of a GPU but for the order of sums. Speed is measured on a GPU by benchmarks/peers.py (row 8b-fp8).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

TOKENS, INPUTS, OUTPUTS = 256, 256, 512


def layer(kind: str, recipe: str) -> nn.Module:
    """A linear layer in bf16 whose products are in 8 bits."""
    torch.manual_seed(0)
    plain = nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.bfloat16)
    if kind == "bf16":
        return plain
    if kind == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        object.__setattr__(config, "emulate", True)
        return convert_to_float8_training(nn.Sequential(plain), config=config)
    from shardwise.config.schema import Fp8
    from shardwise.nn.float8_linear import use_float8

    model = nn.ModuleDict({"block": nn.Sequential(plain)})
    use_float8(model, [("block", model["block"])], Fp8(recipe=recipe, least=16))
    return plain.train()


def far(value: Any, exact: torch.Tensor) -> float:
    return ((value.double() - exact).norm() / exact.norm()).item()


def main() -> None:
    """Prints and writes all figures; outliers: one input feature in 64 is 30 times as large."""
    results: dict[str, Any] = {}
    for inputs in ("normal", "outliers"):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(TOKENS, INPUTS, generator=generator)
        x[:, ::64] *= 30 if inputs == "outliers" else 1
        x = x.bfloat16()
        gradient = (torch.randn(TOKENS, OUTPUTS, generator=generator) * 1e-3).bfloat16()
        weight = layer("bf16", "").weight.detach().double()
        wide, slope = x.double(), gradient.double()
        exact = wide @ weight.t(), slope @ weight, slope.t() @ wide
        for recipe in ("tensorwise", "rowwise"):
            for kind in ("bf16", "ours", "torchao"):
                made = layer(kind, recipe)
                given = x.clone().requires_grad_()
                out = made(given)
                out.backward(gradient)
                (parameter,) = made.parameters()
                row = [far(a, b) for a, b in zip((out, given.grad, parameter.grad), exact, strict=True)]
                results[f"{inputs}, {recipe}, {kind}"] = dict(zip(("output", "d input", "d weight"), row, strict=True))
                print(f"{inputs}, {recipe}, {kind}", [round(v, 5) for v in row], flush=True)
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
