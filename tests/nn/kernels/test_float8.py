"""Products in 8 bits against the same in 32, and the layers that make them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.config.schema import Fp8
from shardwise.core.errors import UserError
from shardwise.nn.float8_linear import use_float8
from shardwise.nn.kernels import float8
from shardwise.nn.kernels.float8 import BACKWARD, FORWARD, Recipe, cast, float8_linear, scale_of

RECIPES: tuple[Recipe, ...] = ("tensorwise", "rowwise")


def both(recipe: Recipe, x: torch.Tensor, weight: torch.Tensor, seed: int = 1) -> list[float]:
    """Relative differences of output and gradients from those in fp32."""
    found = []
    for way in (lambda *a: float8_linear(*a, recipe), F.linear):
        kind = torch.bfloat16 if not found else torch.float32
        parts = [t.detach().to(kind).requires_grad_() for t in (x, weight, weight[:, 0])]
        out = way(*parts)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(kind))
        found.append([out.detach().float(), *(p.grad.float() for p in parts)])  # type: ignore[union-attr]
    return [float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("tokens", [(2, 32), (3, 17)], ids=["even", "odd"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_close_to_fp32(recipe: Recipe, tokens: tuple[int, int]) -> None:
    torch.manual_seed(0)
    differences = both(recipe, torch.randn(*tokens, 128).bfloat16(), (0.05 * torch.randn(96, 128)).bfloat16())
    assert max(differences[:1]) < 0.04 and max(differences) < 0.08  # 2 or 3 bits of mantissa
    assert min(differences[:3]) > 1e-3  # something was rounded


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fast", [False, True])
def test_which_products_may_be_added_up_with_fewer_bits(
    recipe: Recipe, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward's always, backward's two where that is asked for."""
    said: list[bool] = []
    plain = float8.multiply

    def multiply(*given: Any, fast: bool = False) -> torch.Tensor:
        said.append(given[5] if len(given) > 5 else fast)
        return plain(*given[:5])

    monkeypatch.setattr(float8, "multiply", multiply)
    x, weight = (torch.randn(32, 32).bfloat16().requires_grad_() for _ in range(2))
    float8_linear(x, weight, None, recipe, fast).sum().backward()
    assert said == [True, fast, fast]


def test_an_outlier_costs_its_own_row_alone_by_rows() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 128).bfloat16()
    x[3] *= 3e5
    weight = (0.05 * torch.randn(96, 128)).bfloat16()
    exact = F.linear(x.float(), weight.float())
    errors = {}
    for recipe in RECIPES:
        rows = (float8_linear(x, weight, None, recipe).float() - exact).norm(dim=1) / exact.norm(dim=1)
        errors[recipe] = float(rows[torch.arange(64) != 3].max())
    assert errors["rowwise"] < 0.06 < 0.3 < errors["tensorwise"]


@pytest.mark.parametrize("kind", [FORWARD, BACKWARD])
def test_scales_and_zeros(kind: torch.dtype) -> None:
    x = torch.tensor([[0.0, -7.0], [3.5, 1.0]])
    scale = scale_of(x, kind)
    assert float(cast(x, scale, kind).float().min()) == -torch.finfo(kind).max
    zeros = torch.zeros(16, 16)
    assert torch.equal(cast(zeros, scale_of(zeros, kind), kind).float(), zeros)
    assert scale_of(x, kind, rows=True).shape == (2, 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(64, 128), "odd": nn.Linear(64, 24), "turned": Conv1D(64, 128)})
            for _ in range(2)
        )
        self.head = nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer["turned"](layer["up"](x))  # type: ignore[index]
        return self.head(x)  # type: ignore[no-any-return]


def test_layers_of_blocks_are_chosen() -> None:
    model = Model().bfloat16()
    blocks = [(f"layers.{n}", layer) for n, layer in enumerate(model.layers)]
    names = set(model.state_dict())
    chosen = use_float8(
        model, blocks, Fp8(recipe="tensorwise", min_features=32, modules_to_not_convert=("layers.1.up",))
    )
    assert chosen == ["layers.0.up", "layers.0.turned", "layers.1.turned"] and set(model.state_dict()) == names
    assert isinstance(model.layers[0]["up"], nn.Linear) and isinstance(model.layers[0]["turned"], Conv1D)  # type: ignore[index]
    assert "fp8 tensorwise" in repr(model)
    x = torch.randn(32, 64).bfloat16()
    trained = model(x)
    evaluated = model.eval()(x)
    plain = Model().bfloat16()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(evaluated, plain(x)) and not torch.equal(trained, evaluated)
    torch.testing.assert_close(trained.float(), evaluated.float(), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"min_features": 4096}, "no linear layer"),
        ({"min_features": 16, "modules_to_not_convert": ("nowhere",)}, "nowhere"),
    ],
)
def test_nothing_to_round_is_a_mistake(changes: dict[str, Any], said: str) -> None:
    model = Model()
    blocks = [(f"layers.{n}", layer) for n, layer in enumerate(model.layers)]
    with pytest.raises(UserError, match=said):
        use_float8(model, blocks, Fp8.model_validate({"recipe": "rowwise"} | changes))
