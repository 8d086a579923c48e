"""Objectives that compare (with a reference, with a teacher) along every axis: the same as one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import judged
from support.judged import Hand, judged_run, start
from support.tiny import LLAMA, QWEN3_MOE, saved_model, tiny_run

from shardwise.config.load import load_run
from shardwise.core.errors import UserError
from shardwise.data.distillation_batch import DistillationLayout
from shardwise.data.preference_layout import PreferenceLayout
from shardwise.foresight.prepare import prepare_run
from shardwise.parallel.context.split import split_batch

pytestmark = pytest.mark.timeout(judged.PATIENCE)
DEEP = LLAMA | {"num_hidden_layers": 4}
LARGER = DEEP | {"hidden_size": 64, "num_hidden_layers": 5}
DENSE, EXPERTS = "dense", "experts"
AXES: dict[str, dict[str, Any]] = {
    "tensor": {"parallel__tensor": 2},
    "ring": {"parallel__context": 2},
    "ulysses": {"parallel__context": 2, "parallel__context_kind": "ulysses"},
    "expert": {"parallel__expert": 2},
    "1f1b": {"parallel__pipeline": 2},
    "zbv": {"parallel__pipeline": 2, "parallel__pipeline_schedule": "zbv"},
    "interleaved": {
        "parallel__pipeline": 2,
        "parallel__pipeline_schedule": "interleaved",
        "parallel__virtual_stages": 2,
    },
}
# Objective, axes, ZeRO stage, method, packed rows, model.
Case = tuple[str, str, int, str, bool, str]
TWO: list[Case] = [
    ("dpo", "tensor", 3, "full", True, DENSE),
    ("dpo", "1f1b", 2, "lora", True, EXPERTS),
    ("kto", "ring", 2, "full", True, DENSE),
    ("distill", "1f1b", 3, "full", True, DENSE),
    ("stored", "ring", 2, "full", True, DENSE),
]
MORE: list[Case] = [
    ("orpo", "ulysses", 1, "full", False, DENSE),
    ("distill", "ring", 0, "full", False, DENSE),
    ("orpo", "tensor", 0, "full", True, DENSE),
    ("kto", "tensor", 2, "lora", False, DENSE),
    ("distill", "tensor", 2, "full", True, DENSE),
    ("dpo", "expert", 3, "lora", True, EXPERTS),
    ("distill", "expert", 2, "full", True, EXPERTS),
    ("dpo", "ring", 2, "lora", True, DENSE),
    ("dpo", "ulysses", 3, "full", False, DENSE),
    ("distill", "ulysses", 1, "full", True, DENSE),
    ("kto", "interleaved", 0, "full", True, DENSE),
    ("stored", "interleaved", 2, "full", True, DENSE),
    ("dpo", "zbv", 2, "full", True, DENSE),
    ("orpo", "1f1b", 0, "full", True, DENSE),
]
FOUR: list[Case] = [
    ("dpo", "tensor+ring", 1, "full", False, DENSE),
    ("kto", "tensor+1f1b", 2, "full", True, DENSE),
    ("distill", "ring+1f1b", 3, "full", True, DENSE),
    ("dpo", "ulysses+interleaved", 1, "lora", True, DENSE),
    ("distill", "expert+1f1b", 1, "full", True, EXPERTS),
    ("kto", "expert+1f1b", 2, "lora", True, EXPERTS),
    ("dpo", "tensor+expert", 2, "full", True, EXPERTS),
    ("orpo", "ring+expert", 0, "full", True, EXPERTS),
    ("stored", "tensor", 2, "full", True, DENSE),
    ("kto", "1f1b", 3, "lora", True, DENSE),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("axes")
    saved_model(folder / DENSE, DEEP)
    saved_model(folder / EXPERTS, QWEN3_MOE | {"num_hidden_layers": 4})
    saved_model(folder / "teacher", LARGER, seed=1)
    return folder


def the_run(folder: Path, case: Case, name: str, **changes: Any) -> dict[str, Any]:
    """A run of four steps with the objective, method and rows of a case."""
    kind, _, _, method, packed, model = case
    settings: dict[str, Any] = {
        "model": str(folder / model),
        "output": str(folder / name),
        "data__packing": packed,
        "train__batch_size": 8 if kind == "kto" else 4,
        "train__micro_batch_size": 2 if kind == "kto" else 1,
        "train__steps": 4,
        "train__learning_rate": 1e-3,
    }
    if model == EXPERTS:
        settings["router__aux_loss"] = 0.5
    if method == "lora":
        settings |= {"method": {"type": "lora", "rank": 4}, "train__learning_rate": 1e-2}
    if kind not in ("distill", "stored"):
        objective: Any = {"dpo": {"type": "dpo", "sft": 0.3}, "orpo": {"type": "orpo", "beta": 0.2}}.get(kind, kind)
        return judged_run(folder, objective, **settings | changes)
    objective = {"type": "distill", "teacher": str(folder / "teacher"), "weight": 0.6, "temperature": 2.0}
    if kind == "stored":
        objective |= {"top_k": 16, "cache": True}
    return tiny_run(folder, objective=objective, **settings | changes)


def check(folder: Path, cases: list[Case], ranks: int) -> None:
    """Losses, gradient norms and figures of every case on these ranks are those of one."""
    name = f"{len(cases)} on {ranks}"
    alone: dict[Any, Any] = {}
    divided: dict[Any, Any] = {}
    for case in cases:
        kind, axes, zero, method, packed, model = case
        plain = (kind, method, packed, model)
        alone.setdefault(plain, the_run(folder, case, f"{name}/alone-{len(alone)}"))
        changes: dict[str, Any] = {"parallel__zero": zero}
        for axis in axes.split("+"):
            changes |= AXES[axis]
        divided[case] = the_run(folder, case, f"{name}/{len(divided)}", **changes)
    one = start(judged.records_of, 1, alone)[0]
    several = start(judged.records_of, ranks, divided)[0]
    for case in cases:
        kind, _, _, method, packed, model = case
        records = one[kind, method, packed, model]
        here = several[case]
        assert len({record["loss"] for record in records}) == 4, "nothing is learned"
        assert [r["loss"] for r in here] == [pytest.approx(r["loss"], abs=1e-5) for r in records], case
        assert [r["grad_norm"] for r in here] == [pytest.approx(r["grad_norm"], rel=1e-4) for r in records], case
        for figure in {"margin", "reward", "loss_teacher", "loss_plain"} & records[0].keys():
            assert [r[figure] for r in here] == [pytest.approx(r[figure], abs=2e-5) for r in records], (case, figure)


def test_two_ranks(folder: Path) -> None:
    check(folder, TWO, 2)


@pytest.mark.slow
def test_more_of_two_ranks(folder: Path) -> None:
    check(folder, MORE, 2)


@pytest.mark.slow
def test_two_axes_on_four_ranks(folder: Path) -> None:
    check(folder, FOUR, 4)


@pytest.mark.parametrize("zigzag", [True, False], ids=["ring", "ulysses"])
def test_parts_of_rows_have_all_places_once(zigzag: bool) -> None:
    """Every conversation's positions, and every loss token with its stored answer, lie on one rank."""
    draw = np.random.default_rng(3)
    pairs = [judged.pair(*draw.integers(2, 24, 3), draw) for _ in range(3)]
    reader = Hand(pairs, True)
    batch = PreferenceLayout(0).collate(reader, reader.sequences([0, 1], [2]), 0)
    parts = [split_batch(batch, 2, rank, zigzag)[0] for rank in range(2)]
    counts = sum(torch.bincount(part.conversations.flatten(), minlength=batch.count + 1) for part in parts)
    whole = torch.bincount(batch.conversations.flatten(), minlength=batch.count + 1)
    assert torch.equal(counts[:-1], whole[:-1])

    documents = [judged.conversation(*draw.integers(2, 24, 2), draw) for _ in range(3)]
    reader = Hand(documents, True)
    rows = DistillationLayout(0).collate(reader, reader.sequences([0, 1], [2]), 0)
    # A stored answer that names its token shows whether it went where the token did.
    named = rows.labels.flatten()[rows.places][:, None]
    rows = replace(rows, likeliest=named, log_probs=named.float())
    parts = [split_batch(rows, 2, rank, zigzag)[0] for rank in range(2)]
    assert sum(len(part.places) for part in parts) == len(rows.places)
    for part in parts:
        here = part.labels.flatten()[part.places][:, None]
        assert torch.equal(part.likeliest, here) and torch.equal(part.log_probs, here.float())


def test_axes_that_do_not_divide_a_teacher(folder: Path) -> None:
    """Told before the start; a teacher that is asked once in advance is not divided."""
    teacher = saved_model(
        folder / "odd", LARGER | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}
    )
    case: Case = ("distill", "tensor", 3, "full", True, DENSE)
    run = the_run(folder, case, "odd-run", ranks=2, parallel__tensor=2)
    run["objective"]["teacher"] = teacher
    with pytest.raises(UserError) as caught:
        prepare_run(load_run(run))
    assert caught.value.field == "parallel.tensor"
    assert "3 attention heads (the teacher's)" in caught.value.problem and "cache: true" in caught.value.remedy
    run["objective"] |= {"top_k": 8, "cache": True}
    prepare_run(load_run(run))
