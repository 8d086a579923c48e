"""Tensor-parallel blocks on plain tensors: which may run so, and that they compute what one process does."""

from __future__ import annotations

import pytest
import torch
from support import tensor
from support.ranks import run_ranks
from torch import nn

from shardwise.nn.models.build import find_blocks
from shardwise.nn.tiny.case import TinyCase
from shardwise.parallel.tensor.local_trial import LocalKind, try_locally
from shardwise.parallel.tensor.roles import find_roles

LOCAL = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "granite", "gpt_neox", "phi", "stablelm"]


def kinds_of(case: TinyCase) -> list[LocalKind]:
    return list(try_locally(case, find_roles(case.model())).values())


def test_common_families_run_locally_and_others_say_why_not() -> None:
    for name in LOCAL:
        (kind,) = kinds_of(tensor.case_of(name))
        assert not kind.refusal, (name, kind.refusal)
    (kind,) = kinds_of(tensor.case_of("stablelm"))
    assert kind.shares == {"self_attn": ("num_heads", "num_key_value_heads")}
    (kind,) = kinds_of(tensor.case_of("gpt2"))  # one product for queries, keys and values
    assert kind.refusal == "the output would differ"
    (kind,) = kinds_of(tensor.case_of("mixtral"))
    assert kind.refusal == "mlp.gate is not cut into columns or rows"


@pytest.mark.parametrize("broken", ["attention", "norm"])
def test_a_block_that_computes_otherwise_on_parts_is_refused(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an architecture's own code may do between its layers: look at all heads, or at all of the sequence."""
    case = tensor.case_of("llama")
    _, block = find_blocks(case.model())[0]
    module = {"attention": block.self_attn.o_proj, "norm": block.input_layernorm}[broken]
    plain = type(module).forward

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        over = -1 if broken == "attention" else 1
        return plain(self, x - x.mean(over, keepdim=True))

    monkeypatch.setattr(type(module), "forward", forward)
    (kind,) = kinds_of(case)
    assert kind.refusal


@pytest.mark.parametrize(("width", "locally"), [(16, True), (15, False)])  # of 15 tokens two ranks have no equal parts
def test_local_blocks_compute_what_one_process_does(width: int, locally: bool) -> None:
    for results in run_ranks(tensor.local_blocks, 2, LOCAL, width):
        for name, (loss, gradient, blocks, ran) in results.items():
            assert loss < 1e-6 and gradient < 1e-5, name
            assert blocks > 0 and ran == blocks * locally, name
