"""Every learned token counts the same, however the batch is cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import scenarios
from support.ranks import run_ranks
from support.tiny import tiny_run


@pytest.fixture
def unequal(tmp_path: Path) -> str:
    """Twelve conversations whose answers have between 1 and 120 words."""
    rows = []
    for index, words in enumerate([1, 120, 2, 90, 1, 60, 3, 1, 100, 1, 2, 40]):
        answer = " ".join(["memory", "shard", "rank", "step"][i % 4] for i in range(words))
        rows.append({"messages": [{"role": "user", "content": f"q{index}?"}, {"role": "assistant", "content": answer}]})
    file = tmp_path / "unequal.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(file)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 3), (2, 1), (2, 3), (4, 1)])
def test_micro_batches_equal_the_big_batch(unequal: str, packing: bool, ranks: int, micro: int, tmp_path: Path) -> None:
    run = tiny_run(
        tmp_path, data__train=unequal, data__sequence_length=512, data__packing=packing, train__batch_size=12
    )
    loss, grads = run_ranks(scenarios.gradients, 1, run | {"train": run["train"] | {"micro_batch_size": 12}}, 12)[0]
    cut_loss, cut_grads = run_ranks(scenarios.gradients, ranks, run, micro)[0]
    worst = max((grads[n] - cut_grads[n]).abs().max().item() for n in grads)
    print(f"\n{ranks} ranks, micro {micro}, packing {packing}: loss {abs(loss - cut_loss):.1e}, gradients {worst:.1e}")
    assert abs(loss - cut_loss) <= 1e-6
    # Packing changes the shapes of the attention, hence its rounding; cutting alone does not.
    assert worst <= (2e-6 if packing else 1e-6)


def test_mean_of_means_would_be_wrong(unequal: str, tmp_path: Path) -> None:
    """The trap this guards against is real here: averaging micro-batch means gives another loss."""
    run = tiny_run(tmp_path, data__train=unequal, data__sequence_length=512, data__packing=False, train__batch_size=12)
    loss, means = run_ranks(scenarios.loss_two_ways, 1, run)[0]
    assert abs(loss - means) > 1e-3
