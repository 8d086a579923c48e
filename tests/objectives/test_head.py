"""Head and loss as one: the same losses and gradients as from whole logits, at any stage, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.scenarios import batch_of, full_parameters, parts_of
from support.tiny import GPT2, LLAMA, TIED, saved_model, tiny_run

import shardwise.objectives.head as heads
from shardwise.nn.kernels.cross_entropy import cross_entropy_reference_

PHI = dict(model_type="phi", hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
           vocab_size=515, max_position_embeddings=512, embd_pdrop=0.0, resid_pdrop=0.0)  # fmt: skip
SMALL = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=12, vocab_size=515, max_position_embeddings=512)  # fmt: skip
CHANGED = {  # what these do to the logits after the head
    "granite": SMALL | {"model_type": "granite", "logits_scaling": 4.0},
    "gemma2": SMALL | {"model_type": "gemma2", "final_logit_softcapping": 5.0},
    "cohere": SMALL | {"model_type": "cohere", "logit_scale": 0.5},
}


def trained(runs: list[dict[str, Any]]) -> list[tuple[bool, float, dict[str, torch.Tensor]]]:
    """For each run whether head and loss are one, the loss, and the parameters after a step."""
    heads.PIECE["cpu"] = 515 * 7  # several pieces, the last one shorter
    found = []
    for run in runs:
        parts = parts_of(run)
        batch = batch_of(parts, 0)
        total = 0.0
        for index, micro in enumerate(batch.micro_batches):
            parts.sharded.prepare_micro_batch(last=index == len(batch.micro_batches) - 1)
            loss = parts.objective(parts.sharded.model, micro)
            (loss.total * parts.sharded.data_parallel_size / batch.supervised).backward()
            total += loss.total.item()
        parts.update()
        joined: Any = parts.objective
        found.append((joined._head is not None, total / batch.supervised, full_parameters(parts)))
    return found


@pytest.mark.parametrize(
    ("name", "config", "ranks", "zero", "method"),
    [
        ("llama", LLAMA, 1, 0, "full"),
        ("tied", TIED, 2, 3, "full"),
        ("gpt2", GPT2, 1, 2, "full"),
        ("phi", PHI, 1, 1, "full"),
        ("llama", LLAMA, 2, 3, "lora"),
    ],
)
def test_equals_the_plain_loss(tmp_path: Path, name: str, config: Any, ranks: int, zero: int, method: str) -> None:
    model = saved_model(tmp_path / name, config)
    settings = dict(
        train__optimizer="sgd", train__learning_rate=1.0, train__max_grad_norm=None, parallel__zero=zero, ranks=ranks
    )
    runs = [tiny_run(tmp_path, model, **settings, loss=loss, output=str(tmp_path / loss)) for loss in ("plain", "auto")]
    for (one, plain, wanted), (other, loss, found) in run_ranks(trained, ranks, runs):
        assert (one, other) == (False, True)
        assert loss == pytest.approx(plain, rel=1e-6)
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, atol=2e-6, rtol=1e-5, msg=key)


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_a_model_that_changes_its_logits_keeps_the_plain_loss(tmp_path: Path, name: str) -> None:
    model = saved_model(tmp_path / name, CHANGED[name])
    assert not run_ranks(trained, 1, [tiny_run(tmp_path, model)])[0][0][0]


def test_a_batch_with_nothing_to_learn() -> None:
    hidden = torch.randn(0, 8, requires_grad=True)
    losses: Any = heads._HeadLoss.apply(hidden, torch.randn(9, 8, requires_grad=True), None, torch.zeros(0).long())
    losses.sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, 8)


def test_the_gradient_of_a_row_adds_up_to_nothing() -> None:
    logits = torch.randn(5, 11)
    labels = torch.tensor([0, 10, -100, 3, 4])
    cross_entropy_reference_(logits, labels, -100, gradient=True)
    assert (
        logits.sum(1).abs().max() < 1e-6
        and not logits[2].any()
        and (logits.gather(1, labels.clamp(0)[:, None]) <= 0).all()
    )
