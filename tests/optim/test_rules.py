"""Each update rule against its definition, or against torch's own optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.optimizers import Bag, alone, make, snapshot, steps
from torch import Tensor

from shardwise.optim.adafactor import Adafactor
from shardwise.optim.adam_mini import AdamMini
from shardwise.optim.elementwise import Elementwise
from shardwise.optim.muon import Muon, inner_matrices, orthogonal
from shardwise.optim.rules import RULES


def run(build: Any, count: int = 6) -> dict[str, Tensor]:
    """Parameters after some steps of the optimizer that `build` makes of them."""
    model = Bag()
    optimizer = build(list(model.parameters()))
    steps(model, optimizer, 0, count)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def largest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_adamw_is_torch_s_to_the_bit() -> None:
    ours = run(lambda p: Elementwise(p, RULES["adamw"], lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1))
    torchs = run(lambda p: torch.optim.AdamW(p, 1e-2, (0.8, 0.9), 1e-6, 0.1, fused=True))
    assert largest(ours, torchs) == 0


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.95)])
def test_sgd_is_torch_s(betas: tuple[float, float]) -> None:
    """Without decay to the bit; decay is decoupled here and added to the gradient there."""
    ours = run(lambda p: Elementwise(p, RULES["sgd"], lr=1e-2, betas=betas))
    assert largest(ours, run(lambda p: torch.optim.SGD(p, 1e-2, betas[0]))) == 0
    model = Bag()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    Elementwise(model.parameters(), RULES["sgd"], lr=0.1, weight_decay=0.5).step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * 0.95)


def test_lion_by_its_definition() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p -= 1e-2 * ((0.9 * m + 0.1 * p.grad).sign() + 0.1 * p)
                m.copy_(0.98 * m + 0.02 * p.grad)

    ours = run(lambda p: Elementwise(p, RULES["lion"], lr=1e-2, betas=(0.9, 0.98), weight_decay=0.1))
    assert largest(ours, run(Plain)) <= 1e-6


def test_adam_mini_by_its_definition() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})
            self.count = 0

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            self.count += 1
            for p in self.param_groups[0]["params"]:
                s = self.state[p]
                energy = p.grad.square() if p.ndim == 1 else p.grad.square().mean(-1, keepdim=True)
                s["m"] = 0.9 * s.get("m", 0) + 0.1 * p.grad
                s["v"] = 0.95 * s.get("v", 0) + 0.05 * energy
                m, v = s["m"] / (1 - 0.9**self.count), s["v"] / (1 - 0.95**self.count)
                p.copy_(p * (1 - 1e-3) - 1e-2 * m / (v.sqrt() + 1e-8))

    ours = run(lambda p: AdamMini(p, lr=1e-2, weight_decay=0.1))
    assert largest(ours, run(Plain)) <= 1e-6


def test_adafactor_is_torch_s() -> None:
    """torch multiplies the rate by the parameter's size, but at least by eps[1]: with 1 there, small ones by 1."""

    ours = run(lambda p: Adafactor(p, lr=1e-2, eps=1e-16, weight_decay=0.1))
    torchs = run(lambda p: torch.optim.Adafactor(p, lr=1e-2, eps=(1e-16, 1.0), weight_decay=0.1))
    assert largest(ours, torchs) <= 1e-6


def test_muon_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """On matrices, and in fp32, which torch never uses but for this."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    model = Bag()
    names = ("wide", "tall", "odd")
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = Muon([{"params": [getattr(model, n) for n in names], "matrix": True}], lr=1e-2, weight_decay=0.1)
    steps(model, optimizer, 0, 4)
    other = Bag()
    torchs = torch.optim.Muon(
        [getattr(other, n) for n in names], 1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    steps(other, torchs, 0, 4)
    for name in names:
        assert (getattr(other, name) - start[name]).abs().max() > 1e-2
        assert (getattr(model, name) - getattr(other, name)).abs().max() <= 1e-5


def test_a_stack_is_so_many_matrices() -> None:
    stack = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(orthogonal(stack), torch.stack([orthogonal(m) for m in stack]), rtol=1e-4, atol=1e-5)
    for matrix in orthogonal(stack):
        assert ((torch.linalg.svdvals(matrix) - 1).abs() < 0.35).all()


def test_muon_leaves_embeddings_heads_and_vectors_to_adamw() -> None:
    from support.tiny import GPT2, LLAMA
    from transformers import AutoConfig, AutoModelForCausalLM

    for config in (LLAMA, GPT2):
        values = dict(config)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
        parameters = dict(model.named_parameters())
        inner = inner_matrices(model, parameters)
        outside = ("embed", "wte", "wpe", "lm_head", "norm", "ln_", ".bias")
        assert inner == {name for name in parameters if not any(part in name for part in outside)}


def test_muon_s_adamw_is_adamw() -> None:
    muon, adamw = alone("muon", 4), alone("adamw", 4)
    for name in ("token.weight", "norm", "bias", "thin"):
        assert torch.equal(muon[name], adamw[name])
    assert not torch.equal(muon["wide"], adamw["wide"])


def test_pieces_change_nothing() -> None:
    """Also where a row is longer than a piece.

    Each piece is a multiple of 16 numbers: torch's fused AdamW treats the rest of a last vector differently.
    """
    model = Bag()
    optimizer: Any = make("adamw4bit", model)
    steps(model, optimizer, 0, 2)
    for piece in (7 * 128, 7 * 704):
        other = Bag()
        pieced: Any = make("adamw4bit", other)
        pieced.piece = piece
        steps(other, pieced, 0, 2)
        expected, found = snapshot(model, optimizer), snapshot(other, pieced)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_state_dicts_come_back() -> None:
    """By torch's own state_dict and load_state_dict, with the types of the codes."""
    for which in ("adamw8bit", "adamw4bit", "adamw-bf16"):
        model = Bag()
        optimizer = make(which, model)
        steps(model, optimizer, 0, 2)
        other = Bag()
        other.load_state_dict(model.state_dict())
        again = make(which, other)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps(model, optimizer, 2, 3)
        steps(other, again, 2, 3)
        expected, found = snapshot(model, optimizer), snapshot(other, again)
        for name, value in expected.items():
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), (which, name)
