"""Core parity: every ZeRO stage, precision and axis on four ranks against one process, in one launch of ranks.

One process is held to plain PyTorch, every variant to one process of the same precision: the loss and gradient norm of
each of five steps of four accumulated micro-batches, clipped, and the exported parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import mutations, parity
from support.parity import Trained, the_run
from support.ranks import run_ranks
from support.tiny import tokenizer_folder


class Bounds(NamedTuple):
    """Largest differences: of losses, of norms (relative), of parameters."""

    loss: float
    norm: float
    parameter: float


# Three to ten times what was measured. Half precision rounds each rank's partial sums on its own, and Adam turns the
# sign of a tiny gradient into a full step.
BOUNDS = {"fp32": Bounds(1e-5, 2e-6, 2e-5), "bf16": Bounds(2e-3, 5e-3, 2e-2), "fp16": Bounds(2e-4, 1e-3, 1e-2)}

STAGES = {f"zero-{stage}": {"parallel__zero": stage} for stage in range(4)}
HYBRID = {f"hybrid-{stage}": {"parallel__zero": stage, "parallel__dp_shard_size": 2} for stage in (1, 2, 3)}
TENSOR, PIPELINE, CONTEXT, EXPERT = ({f"parallel__{a}": 2} for a in ("tensor", "pipeline", "context", "expert"))
ULYSSES = CONTEXT | {"parallel__context_kind": "ulysses"}
SGD = {"train__optimizer": "sgd", "train__learning_rate": 0.3, "train__weight_decay": 0.0}
MOE, DEEP = {"family": "mixtral"}, {"family": "deep"}

VARIANTS: dict[str, dict[str, Any]] = {
    **{
        f"{layout} {precision}": settings | {"precision": precision}
        for layout, settings in (STAGES | HYBRID).items()
        for precision in BOUNDS
    },
    "hpZ": STAGES["zero-3"] | {"parallel__hpz_size": 2},
    "rows by twos": STAGES["zero-3"] | {"train__micro_batch_size": 2},
    "recomputed": STAGES["zero-3"] | {"recompute": "full"},
    "sgd zero-2": STAGES["zero-2"] | SGD,
    "sgd hybrid-3": HYBRID["hybrid-3"] | SGD,
    "tensor": TENSOR | STAGES["zero-3"],
    "pipeline": PIPELINE | STAGES["zero-2"],
    "pipeline bf16": PIPELINE | STAGES["zero-1"] | {"precision": "bf16"},
    "interleaved": DEEP | PIPELINE | STAGES["zero-1"] | {"parallel__pipeline_schedule": "interleaved"},
    "ring": CONTEXT | STAGES["zero-3"],
    "ring bf16": CONTEXT | STAGES["zero-2"] | {"precision": "bf16"},
    "ring hybrid": CONTEXT | HYBRID["hybrid-2"],
    "ulysses": ULYSSES | STAGES["zero-2"],
    "expert": MOE | EXPERT | STAGES["zero-2"],
    "expert zero-3": MOE | EXPERT | STAGES["zero-3"],
    "expert bf16": MOE | EXPERT | STAGES["zero-1"] | {"precision": "bf16"},
    "tensor pipeline bf16": TENSOR | PIPELINE | {"precision": "bf16"},
    "pipeline ring": PIPELINE | CONTEXT,
    "expert tensor": MOE | EXPERT | TENSOR,
    "expert pipeline": MOE | EXPERT | PIPELINE,
}


def reference_of(settings: dict[str, Any]) -> str:
    """Which training on one process a variant must equal."""
    kind = [settings.get("family", "llama"), settings.get("precision", "fp32")]
    return "-".join([*kind, "sgd"] if "train__optimizer" in settings else kind)


# What one process trains: the settings that change the numbers, and no others.
ALONE = {
    reference_of(settings): {k: v for k, v in settings.items() if k in ("family", "precision", *SGD)}
    for settings in VARIANTS.values()
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    tokenizer_folder(folder / "tokenizer")
    parity.write_rows(folder / "rows.jsonl")
    parity.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def references(shared: Path, cpu_precision_env: dict[str, str]) -> tuple[dict[str, Trained], dict[str, Trained]]:
    """By one process, and by plain PyTorch in fp32."""
    runs = {name: the_run(shared, name, **settings) for name, settings in ALONE.items()}
    plain = {name: run for name, run in runs.items() if run["precision"] == "fp32"}
    return run_ranks(parity.references, 1, runs, plain, env=cpu_precision_env)[0]


@pytest.fixture(scope="module")
def variants(shared: Path, cpu_precision_env: dict[str, str]) -> dict[str, Trained]:
    runs = {name: the_run(shared, name, **settings) for name, settings in VARIANTS.items()}
    return run_ranks(parity.train_each, 4, runs, env=cpu_precision_env, timeout=900)[0]


def differences(ours: Trained, theirs: Trained) -> Bounds:
    assert len(ours[0]) == len(theirs[0]) == parity.STEPS and ours[2].keys() == theirs[2].keys()
    return Bounds(
        max(abs(a - b) for a, b in zip(ours[0], theirs[0], strict=True)),
        max(abs(a - b) / b for a, b in zip(ours[1], theirs[1], strict=True)),
        max((ours[2][name] - theirs[2][name]).abs().max().item() for name in theirs[2]),
    )


def within(difference: Bounds, bounds: Bounds) -> bool:
    return all(value <= bound for value, bound in zip(difference, bounds, strict=True))


@pytest.mark.parametrize("name", ALONE)
def test_one_process_equals_plain_pytorch(name: str, references: tuple[dict[str, Trained], dict[str, Trained]]) -> None:
    """Half precision against fp32: near enough that a wrong loss scale, rate or sum of micro-batches shows."""
    ours = references[0][name]
    precision = ALONE[name].get("precision", "fp32")
    difference = differences(ours, references[1][name.replace(precision, "fp32")])
    print(f"\n{name}: {difference}")
    assert within(difference, BOUNDS[precision])
    assert min(ours[1]) > parity.CLIP, "every step must be clipped"
    assert ours[0][-1] < ours[0][0] - 0.1, "the run must learn, or equality means little"


@pytest.mark.parametrize("name", VARIANTS)
def test_four_ranks_equal_one(
    name: str, variants: dict[str, Trained], references: tuple[dict[str, Trained], dict[str, Trained]]
) -> None:
    settings = VARIANTS[name]
    difference = differences(variants[name], references[0][reference_of(settings)])
    print(f"\n{name}: {difference}")
    assert within(difference, BOUNDS[settings.get("precision", "fp32")])


def test_hpz_changes_no_bit(variants: dict[str, Trained]) -> None:
    plain, ours = variants["zero-3 fp32"], variants["hpZ"]
    assert ours[:2] == plain[:2]
    assert all(torch.equal(ours[2][name], plain[2][name]) for name in plain[2])


@pytest.fixture(scope="module")
def mutants(shared: Path, cpu_precision_env: dict[str, str]) -> dict[str, dict[str, Trained]]:
    runs = {
        mutation.__name__: {name: the_run(shared, f"{mutation.__name__} {name}", **VARIANTS[name]) for name in names}
        for mutation, names in mutations.MUTATIONS.items()
    }
    return run_ranks(mutations.train_mutated, 4, runs, env=cpu_precision_env, timeout=900)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutation", "name"), [(m.__name__, name) for m, names in mutations.MUTATIONS.items() for name in names]
)
def test_a_broken_core_line_is_noticed(
    mutation: str,
    name: str,
    mutants: dict[str, dict[str, Trained]],
    references: tuple[dict[str, Trained], dict[str, Trained]],
) -> None:
    """Against plain PyTorch, by twice the bounds: one of the two tests above fails with such a line in the source."""
    settings = VARIANTS[name]
    precision = settings.get("precision", "fp32")
    difference = differences(mutants[mutation][name], references[1][reference_of(settings).replace(precision, "fp32")])
    print(f"\n{mutation} in {name}: {difference}")
    assert not within(difference, Bounds(*(2 * bound for bound in BOUNDS[precision])))
