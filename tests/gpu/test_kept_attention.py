"""Attention that is kept of recomputed blocks, on a GPU: by cuDNN's or flash's kernels, compiled, copied in streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.groups import gradients
from support.ranks import run_ranks
from support.tiny import LLAMA

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SENT = {"offload": {"activations": "cpu", "activation_blocks": 3}}
BASE: dict[str, Any] = {
    "data": {"train": "none", "sequence_length": 16384}, "objective": "causal", "precision": "bf16", "device": "cuda",
    "ranks": 1, "backend": "gloo", "recompute": "full", "parallel": {"zero": 2}, "recompute_attention": False,
    "train": {"batch_size": 2, "micro_batch_size": 1, "steps": 2}, "tiled_mlp": 4096,
    "model": {"config": LLAMA | {"num_hidden_layers": 5, "hidden_size": 512, "intermediate_size": 1024,
                                 "max_position_embeddings": 16384}, "tokenizer": "none"},
}  # fmt: skip


def with_and_without(runs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Each run, and once more with nothing kept, so that the same operator computes attention again."""
    from shardwise.parallel.activations import saved_attention as module

    keep, found = module._Recording.keep, []
    for run in runs:
        module._Recording.keep = keep  # type: ignore[method-assign]
        first = gradients([run])[0]
        module._Recording.keep = lambda *_: None  # type: ignore[method-assign, assignment, misc]
        found.append([first, gradients([run])[0]])
    return found


def test_the_same_gradients() -> None:
    """Not to the bit: cuDNN adds up the gradients of queries in no fixed order."""
    runs = [BASE, BASE | SENT | {"recompute_group": 2}, BASE | SENT | {"compile": True}]
    for kept, again in run_ranks(with_and_without, 1, runs)[0]:
        assert kept.keys() == again.keys() and len(kept) > 5
        for key in kept:
            assert (kept[key] - again[key]).float().norm() <= 5e-3 * again[key].float().norm()
