"""Every learned token counts the same, however the batch is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import scenarios
from support.ranks import run_ranks
from support.tiny import tiny_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve conversations whose answers have between 1 and 120 words."""
    folder = tmp_path_factory.mktemp("unequal")
    rows = []
    for index, words in enumerate([1, 120, 2, 90, 1, 60, 3, 1, 100, 1, 2, 40]):
        answer = " ".join(["memory", "shard", "rank", "step"][i % 4] for i in range(words))
        rows.append({"messages": [{"role": "user", "content": f"q{index}?"}, {"role": "assistant", "content": answer}]})
    (folder / "unequal.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def the_run(folder: Path, packing: bool, micro: int) -> dict[str, Any]:
    return tiny_run(
        folder,
        data__train=str(folder / "unequal.jsonl"),
        data__sequence_length=512,
        data__packing=packing,
        train__batch_size=12,
        train__micro_batch_size=micro,
    )


@pytest.fixture(scope="module")
def big_batch(folder: Path) -> dict[bool, Any]:
    """Loss and gradients of all twelve in one forward."""
    return {p: run_ranks(scenarios.gradients, 1, the_run(folder, p, 12), 12)[0] for p in (False, True)}


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 3), (2, 1), (2, 3), (4, 1)])
def test_micro_batches_equal_the_big_batch(
    big_batch: dict[bool, Any], packing: bool, ranks: int, micro: int, folder: Path
) -> None:
    loss, grads = big_batch[packing]
    cut_loss, cut_grads = run_ranks(scenarios.gradients, ranks, the_run(folder, packing, micro), micro)[0]
    worst = max((grads[n] - cut_grads[n]).abs().max().item() for n in grads)
    print(f"\n{ranks} ranks, micro {micro}, packing {packing}: loss {abs(loss - cut_loss):.1e}, gradients {worst:.1e}")
    assert abs(loss - cut_loss) <= 1e-6
    # Packing changes the shapes of the attention, hence its rounding; cutting alone does not.
    assert worst <= (2e-6 if packing else 1e-6)


def test_mean_of_means_would_be_wrong(folder: Path) -> None:
    """The trap this guards against is real here: averaging micro-batch means gives another loss."""
    loss, means = run_ranks(scenarios.loss_two_ways, 1, the_run(folder, False, 1))[0]
    assert abs(loss - means) > 1e-3
