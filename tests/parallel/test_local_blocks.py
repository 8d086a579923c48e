"""Tensor-parallel blocks on plain tensors: which may run so, and that they compute what one process does."""

from __future__ import annotations

import pytest
from support import tensor
from support.ranks import run_ranks

LOCAL = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "granite", "gpt_neox", "phi", "stablelm"]


FUSED = ["gpt2", "phi3", "glm"]  # queries, keys and values of one product, or gate and up
MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"]
OTHERS = ["olmo2", "opt", "gptj"]  # norms over all heads; tokens as rows of a matrix; blocks that return more


def test_common_families_run_locally_and_others_say_why_not() -> None:
    (kinds,) = run_ranks(tensor.local_kinds, 1, [*FUSED, *MIXTURES, *OTHERS, *LOCAL, "falcon"])
    *local, falcon = kinds
    assert {refusal for _, refusal in local} == {""}
    assert local[-1][0] == {"self_attn": ("num_heads", "num_key_value_heads")}
    assert "invalid for input" in falcon[1]  # all heads read one key


@pytest.mark.parametrize("broken", ["attention", "norm"])
def test_a_block_that_computes_otherwise_on_parts_is_refused(broken: str) -> None:
    """What an architecture's own code may do between its layers: look at all features, or at all of the sequence."""
    ((_, refusal),) = run_ranks(tensor.local_kinds, 1, ["llama"], broken)[0]
    assert "would differ" in refusal


@pytest.mark.parametrize(
    ("kinds", "width", "locally"),
    [
        (["llama", "stablelm", "phi3", "olmo2", "mixtral", "gpt_oss"], 16, True),
        (["llama", "phi3", "mixtral"], 15, False),  # of 15 tokens two ranks have no equal parts
        pytest.param([*LOCAL, *FUSED, *MIXTURES, *OTHERS, "deepseek_v3"], 16, True, marks=pytest.mark.slow),
    ],
    ids=["local", "uneven", "every kind"],
)
def test_local_blocks_compute_what_one_process_does(kinds: list[str], width: int, locally: bool) -> None:
    for results in run_ranks(tensor.local_blocks, 2, kinds, width):
        for name, (loss, gradient, blocks, ran) in results.items():
            assert loss < 1e-6 and gradient < 1e-5, name
            assert blocks > 0 and ran == blocks * locally, name
