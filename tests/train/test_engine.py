"""`shardwise.initialize`: a loop of one's own, on any stage and number of ranks, saved and taken up again."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import scenarios
from support.ranks import run_ranks

from shardwise.core.errors import UserError
from shardwise.train.engine import _check


@pytest.mark.parametrize(
    ("kind", "zero"),
    [("function", 1), ("instance", 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("instance", 0), ("instance", 1), ("instance", 2), ("function", 3),
    ])],
)  # fmt: skip
def test_own_loop(kind: str, zero: int, tmp_path: Path) -> None:
    """Accumulation 2, clipping; two ranks equal one; then go on from the checkpoint on one rank at another stage."""
    config = {"parallel": {"zero": zero}, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    one = run_ranks(scenarios.own_loop, 1, config | {"parallel": {"zero": 2}}, str(tmp_path / "one"), kind, 12, False)[
        0
    ]
    two = run_ranks(scenarios.own_loop, 2, config, str(tmp_path / "two"), kind, 8, False)[0]
    rest = run_ranks(scenarios.own_loop, 1, config | {"parallel": {"zero": 1}}, str(tmp_path / "two"), kind, 4, True)[0]
    assert max(abs(a - b) for a, b in zip(one, two + rest, strict=True)) <= 1e-5
    assert one[-1] < one[0]


@pytest.mark.parametrize(
    ("places", "precision"),
    [(("disk", "disk"), "fp32"), *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        (("cpu", "none"), "fp32"), (("cpu", "none"), "bf16"), (("disk", "disk"), "bf16"),
    ])],
)  # fmt: skip
def test_own_loop_offloaded(
    places: tuple[str, str], precision: str, tmp_path: Path, cpu_precision_env: dict[str, str]
) -> None:
    """The optimizer one brings, with its states elsewhere: the same losses, also from a checkpoint of the plain run."""
    config = {"parallel": {"zero": 3}, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "precision": precision}
    disk = {"disk": str(tmp_path / "files")} if "disk" in places else {}
    away = config | {"offload": {"optimizer": places[0], "parameters": places[1], **disk}}

    def run(settings: dict[str, object], name: str, steps: int, resume: bool) -> list[float]:
        return list(
            run_ranks(
                scenarios.own_loop, 2, settings, str(tmp_path / name), "instance", steps, resume, env=cpu_precision_env
            )[0]
        )

    plain = run(config, "plain", 6, False)
    offloaded = run(away, "away", 6, False)
    # torch's AdamW and ours round one weight in a thousand to neighbouring numbers, whatever the gradient: no more. In
    # bf16 that is another weight now and then, by the width of the CPU's vectors. One update moves the loss by 0.3.
    bound = 1e-6 if precision == "fp32" else 4e-3
    assert max(abs(a - b) for a, b in zip(plain, offloaded, strict=True)) <= bound
    on = run(config, "away", 2, True), run(away, "plain", 2, True)  # each goes on from the other's checkpoint
    assert max(abs(a - b) for a, b in zip(*on, strict=True)) <= bound


def test_only_adamw_is_offloaded(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="only AdamW can be offloaded"):
        run_ranks(scenarios.own_loop, 1, {"offload": {"optimizer": "cpu"}}, str(tmp_path), "sgd", 1, False)


def test_default_optimizer_trains(tmp_path: Path) -> None:
    losses = run_ranks(scenarios.own_loop, 2, {"learning_rate": 1e-2}, str(tmp_path), "default", 4, False)[0]
    assert losses[-1] < losses[0]


def test_mistakes_name_the_field() -> None:
    with pytest.raises(UserError, match="did you mean gradient_accumulation_steps"):
        _check({"gradient_acumulation_steps": 2})
    with pytest.raises(UserError, match=r"config\.parallel\.zero"):
        _check({"parallel": {"zero": 7}})
