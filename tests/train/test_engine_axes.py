"""`shardwise.initialize` with parallel axes: a loop of one's own over real ranks, against one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import scenarios
from support.ranks import run_ranks
from support.routed import MIXTRAL
from support.tiny import LLAMA, TIED

MOE = MIXTRAL | {"output_router_logits": False}
BOUND = 1e-5
STEPS = 8  # micro-batches, two an update; a held-out loss comes after them
CONFIG: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}

quick = pytest.param
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses of one rank, by model and optimizer; the model is called as it is."""
    folder = tmp_path_factory.mktemp("one")
    losses = {}
    for name, family, kind in (("dense", None, "instance"), ("experts", MOE, "default")):
        losses[name] = run_ranks(
            scenarios.own_axes_loop, 1, CONFIG, str(folder / name), STEPS + 2, False, kind, family
        )[0]
    return losses


@pytest.mark.parametrize(
    ("ranks", "parallel", "model"),
    [
        quick(2, {"tensor": 2, "zero": 2}, "dense", id="tensor"),
        quick(4, {"tensor": 2, "zero": 3}, "dense", id="tensor, ZeRO-3", marks=slow),
        quick(2, {"context": 2, "zero": 2}, "dense", id="ring"),
        quick(4, {"context": 2, "context_kind": "ulysses", "zero": 3}, "dense", id="Ulysses, ZeRO-3", marks=slow),
        quick(2, {"expert": 2, "zero": 1}, "experts", id="expert"),
        quick(4, {"expert": 2, "zero": 3}, "experts", id="expert, ZeRO-3", marks=slow),
        quick(4, {"tensor": 2, "expert": 2, "zero": 2}, "experts", id="tensor, expert", marks=slow),
        quick(4, {"context": 2, "tensor": 2, "expert": 4, "zero": 1}, "experts", id="all three", marks=slow),
    ],
)
def test_own_loop_over_axes(
    ranks: int, parallel: dict[str, Any], model: str, expected: dict[str, list[float]], tmp_path: Path
) -> None:
    """Accumulation, clipping, evaluation; the checkpoint resumes on one rank."""
    family, kind = (None, "instance") if model == "dense" else (MOE, "default")
    config = CONFIG | {"parallel": parallel}
    losses = run_ranks(scenarios.own_axes_loop, ranks, config, str(tmp_path), STEPS, False, kind, family)[0]
    rest = run_ranks(scenarios.own_axes_loop, 1, CONFIG, str(tmp_path), 2, True, kind, family)[0]
    found = losses[:-1] + rest  # without the held-out loss before the checkpoint
    assert max(abs(a - b) for a, b in zip(found, expected[model], strict=True)) <= BOUND
    assert rest[-1] < losses[-1]


@pytest.mark.parametrize(
    ("ranks", "parallel", "model"),
    [
        quick(2, {"pipeline": 2, "zero": 1}, "tied", id="pipeline"),
        quick(4, {"pipeline": 2, "tensor": 2, "zero": 1}, "tied", id="pipeline, tensor", marks=slow),
        quick(4, {"pipeline": 2, "context": 2, "zero": 2}, "tied", id="pipeline, ring", marks=slow),
        quick(4, {"pipeline": 2, "expert": 2, "zero": 2}, "experts", id="pipeline, expert", marks=slow),
        quick(4, {"pipeline": 2, "zero": 3, "pipeline_schedule": "gpipe"}, "tied", id="GPipe, ZeRO-3", marks=slow),
        quick(4, {"tensor": 2, "zero": 2}, "tied", id="tensor alone", marks=slow),
    ],
)
def test_train_batch(ranks: int, parallel: dict[str, Any], model: str, tmp_path: Path) -> None:
    """`train_batch` and `eval_batch` equal those of one rank, which resumes from the checkpoint."""
    family, kind = (TIED, "instance") if model == "tied" else (MOE, "default")
    plain = CONFIG | {"gradient_accumulation_steps": 4}
    rest = (kind, family)
    expected = run_ranks(scenarios.own_train_batch, 1, plain, str(tmp_path / "one"), 5, False, *rest)[0]
    config = plain | {"parallel": parallel}
    losses = run_ranks(scenarios.own_train_batch, ranks, config, str(tmp_path / "axes"), 4, False, *rest)[0]
    on_one = run_ranks(scenarios.own_train_batch, 1, plain, str(tmp_path / "axes"), 1, True, *rest)[0]
    found = losses[:-1] + on_one
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= BOUND


def test_own_loss_of_full_logits() -> None:
    """Without labels a tensor group's logits are full, and a user's own loss of them trains alike."""
    one = run_ranks(scenarios.own_loss_of_logits, 1, {}, 0.0)[0][0]
    two = run_ranks(scenarios.own_loss_of_logits, 2, {"parallel": {"tensor": 2}}, 0.0)[0][0]
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) <= BOUND


def test_tensor_ranks_drop_out_the_same() -> None:
    """Whatever the seeds of the script: parameters that ranks have in common stay the same."""
    (_, first), (_, second) = run_ranks(scenarios.own_loss_of_logits, 2, {"parallel": {"tensor": 2}}, 0.3)
    assert first == second


@pytest.mark.parametrize(
    ("parallel", "changes", "message"),
    [
        ({"tensor": 3}, {}, r"parallel\.tensor = 3: does not divide the 2 ranks"),
        ({"expert": 2}, {}, r"parallel\.expert = 2: llama is a dense model"),
        ({"tensor": 2}, {"num_attention_heads": 3, "num_key_value_heads": 3}, "does not divide the model's 3"),
    ],
)
def test_misfits_are_user_errors(parallel: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=f"UserError: .*{message}"):
        family = LLAMA | changes
        run_ranks(scenarios.own_axes_loop, 2, {"parallel": parallel}, "", 1, False, "instance", family)


def test_bad_batches_are_user_errors() -> None:
    """Before any rank waits for another."""
    answers = run_ranks(scenarios.own_mistakes, 2, {"parallel": {"context": 2}})[0]
    expected = ("pass labels= to the engine", "batch: token_type_ids", "padding is not at the end", "batch: input_ids")
    for answer, part in zip(answers, expected, strict=True):
        assert part in answer
