"""DPO, ORPO and KTO against a few lines of plain formula on one conversation at a time, packed and not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.judged import Hand, apart, as_reference, conversation, loss_of, pair, plain_log_prob
from support.packed import tiny

from shardwise.config.objectives import Dpo, Kto, Orpo
from shardwise.data.preference_layout import KtoLayout, PreferenceLayout
from shardwise.objectives.kto import KtoObjective
from shardwise.objectives.preference import DpoObjective, OrpoObjective

LAYOUT = [[0, 1], [2], [3, 4, 5]]
DRAW = np.random.default_rng(0)
PAIR_DOCUMENTS = [pair(*DRAW.integers(2, 24, 3), DRAW) for _ in range(6)]
KTO_DOCUMENTS = [
    np.concatenate([np.array([i % 3 != 0], dtype=np.uint32), conversation(*DRAW.integers(2, 24, 2), DRAW)])
    for i in range(6)
]


@pytest.fixture(scope="module")
def model() -> Any:
    """In double precision: what differs is the method, not the rounding (but for that of the logits to fp32)."""
    return tiny("llama").double()


@pytest.fixture(scope="module")
def frozen(model: Any) -> Any:
    """Near the model: what training would have come from."""
    other = tiny("llama").double()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return other.requires_grad_(False)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def dpo(mine: list[Any], theirs: list[Any], settings: Dpo) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for (c, n), (r, _), (cr, _), (rr, _) in zip(mine[::2], mine[1::2], theirs[::2], theirs[1::2], strict=True):
        p = sigmoid(settings.beta * ((c - cr) - (r - rr)))
        eps = settings.label_smoothing
        total = total - (1 - eps) * torch.log(p) - eps * torch.log(1 - p) - settings.sft * c / n
    return total


def orpo(mine: list[Any], theirs: list[Any], settings: Orpo) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for (c, n), (r, m) in zip(mine[::2], mine[1::2], strict=True):
        chosen, rejected = torch.exp(c / n), torch.exp(r / m)
        ratio = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
        total = total - c / n - settings.beta * torch.log(sigmoid(torch.log(ratio)))
    return total


def kto(mine: list[Any], theirs: list[Any], settings: Kto) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for document, (p, _), (q, _) in zip(KTO_DOCUMENTS, mine, theirs, strict=True):
        reward = settings.beta * (p - q)
        total = total + (
            settings.desirable_weight * (1 - sigmoid(reward))
            if document[0]
            else settings.undesirable_weight * (1 - sigmoid(-reward))
        )
    return total


CASES: dict[str, tuple[Any, Callable[..., torch.Tensor]]] = {
    "dpo": (Dpo(), dpo),
    "dpo-all": (Dpo(beta=0.3, label_smoothing=0.1, sft=0.7), dpo),
    "orpo": (Orpo(beta=0.25), orpo),
    "kto": (Kto(beta=0.2, desirable_weight=1.5, undesirable_weight=0.8), kto),
}


def objective_of(settings: Any, model: Any, frozen: Any) -> Any:
    if isinstance(settings, Orpo):
        return OrpoObjective(model, True, settings)
    made = DpoObjective if isinstance(settings, Dpo) else KtoObjective
    return made(model, True, settings, as_reference(frozen))


def gradients(model: Any, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula(name: str, packing: bool, model: Any, frozen: Any) -> None:
    settings, formula = CASES[name]
    documents = KTO_DOCUMENTS if name == "kto" else PAIR_DOCUMENTS
    reader = Hand(documents, packing)
    layout = KtoLayout(0) if name == "kto" else PreferenceLayout(0)
    sequences = reader.sequences(*(LAYOUT if packing else [[i] for i in range(6)]))
    loss = loss_of(objective_of(settings, model, frozen), model, layout.collate(reader, sequences, 0))
    ours = gradients(model, loss.total)
    conversations = apart(documents, kto=name == "kto")
    with torch.no_grad():
        theirs = [plain_log_prob(frozen, one) for one in conversations]
    expected = formula([plain_log_prob(model, one) for one in conversations], theirs, settings)
    plain = gradients(model, expected)
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (ours - plain).norm() / plain.norm() < 5e-6  # logits up to 20, rounded to fp32
    assert loss.units.tolist() == [6]
    assert set(loss.figures) == set(objective_of(settings, model, frozen).figures)


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_figures(name: str, model: Any, frozen: Any) -> None:
    settings = CASES[name][0]
    documents, layout = (KTO_DOCUMENTS, KtoLayout(0)) if name == "kto" else (PAIR_DOCUMENTS, PreferenceLayout(0))
    reader = Hand(documents, True)
    with torch.no_grad():
        loss = loss_of(
            objective_of(settings, model, frozen), model, layout.collate(reader, reader.sequences(*LAYOUT), 0)
        )
        rewards = [
            settings.beta * (plain_log_prob(model, one)[0] - plain_log_prob(frozen, one)[0]).item()
            for one in apart(documents, kto=name == "kto")
        ]
    if name == "dpo":
        chosen, rejected = rewards[::2], rewards[1::2]
        wanted = {"accuracy": sum(c > r for c, r in zip(chosen, rejected, strict=True)),
                  "margin": sum(chosen) - sum(rejected), "reward_chosen": sum(chosen),
                  "reward_rejected": sum(rejected)}  # fmt: skip
        assert 0 < wanted["accuracy"] < 6
    else:
        signed = [r if d[0] else -r for r, d in zip(rewards, documents, strict=True)]
        wanted = {"accuracy": sum(s > 0 for s in signed), "reward": sum(signed)}
    assert {n: v.item() for n, v in loss.figures.items()} == {n: pytest.approx(v, abs=2e-5) for n, v in wanted.items()}


def test_against_itself_a_pair_costs_ln_2(model: Any) -> None:
    reader = Hand(PAIR_DOCUMENTS, True)
    objective = DpoObjective(model, True, Dpo(), as_reference(model))
    loss = loss_of(objective, model, PreferenceLayout(0).collate(reader, reader.sequences(*LAYOUT), 0))
    assert loss.total.item() / 6 == pytest.approx(np.log(2), abs=1e-7)
    assert loss.figures["margin"].item() == 0 == loss.figures["reward_chosen"].item()


def test_sums_by_source(model: Any, frozen: Any) -> None:
    """Pairs of two sources in one row: each source has its own pairs' losses."""
    reader = Hand(PAIR_DOCUMENTS, True, sources=[0, 1, 0, 1, 1, 1])
    objective = DpoObjective(model, True, Dpo(), as_reference(frozen))
    loss = loss_of(objective, model, PreferenceLayout(0).collate(reader, reader.sequences(*LAYOUT), 0))
    assert loss.units.tolist() == [2, 4]
    alone = Hand([PAIR_DOCUMENTS[0], PAIR_DOCUMENTS[2]], True)
    first = loss_of(objective, model, PreferenceLayout(0).collate(alone, alone.sequences([0], [1]), 0))
    assert loss.by_source[0].item() == pytest.approx(first.total.item(), rel=1e-6)
    assert loss.by_source.sum().item() == pytest.approx(loss.total.item(), rel=1e-6)


def test_an_answer_that_is_certain_has_finite_odds() -> None:
    """A mean log-probability of 0 in fp32 must not make the loss or a gradient no number."""

    class Certain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1000.0))

        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            following = torch.nn.functional.one_hot(input_ids.roll(-1, 1), 515).float()
            return type("Output", (), {"logits": following * self.scale})

    reader, model = Hand(PAIR_DOCUMENTS[:1], True), Certain()
    loss = OrpoObjective(model, True, Orpo())(model, PreferenceLayout(0).collate(reader, reader.sequences([0]), 0))
    loss.total.backward()
    assert torch.isfinite(loss.total) and torch.isfinite(model.scale.grad)
