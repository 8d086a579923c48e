"""LoRA on a base in few bits, as runs have it: every stage, DoRA, and weights that are off the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import adapters
from support.ranks import run_ranks
from support.tiny import GPT2, LLAMA, saved_model, tiny_run

from shardwise.checkpoint.hf import ExportOptions, export_checkpoint, find_checkpoint
from shardwise.export.inference import load_for_inference

VARIANTS: dict[str, dict[str, Any]] = {
    "0": {"parallel__zero": 0},
    "2": {"parallel__zero": 2},
    "3": {"parallel__zero": 3},
    "off": {"parallel__zero": 3, "offload__optimizer": "cpu", "offload__parameters": "cpu"},
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "nf4": ("llama", {"type": "qlora", "rank": 4}),
    "dora": ("gpt2", {"type": "qlora", "rank": 4, "dora": True, "bits": "int8"}),
}


@pytest.mark.slow
def test_every_stage_trains_alike(tmp_path: Path) -> None:
    """Two ranks; the base takes a byte or less for each of its weights, and a share of that at stage 3."""
    saved_model(tmp_path / "llama", LLAMA)
    saved_model(tmp_path / "gpt2", GPT2)
    runs = {
        (name, kind): tiny_run(tmp_path, str(tmp_path / model), method=method, train__steps=3, ranks=2,
                               train__micro_batch_size=3, output=str(tmp_path / f"{name}-{kind}"), **changes)
        for name, (model, method) in METHODS.items() for kind, changes in VARIANTS.items()
    }  # fmt: skip
    results = run_ranks(adapters.train_each, 2, runs)
    for (name, kind), (losses, facts) in results[0].items():
        assert losses == pytest.approx(results[0][name, "0"][0], abs=1e-5), (name, kind)
        assert losses[-1] < losses[0] and torch.int8 in facts["frozen_types"]
        assert all("lora_" in n for n in facts["stored"])
        if kind == "3":
            mine = sum(result[name, kind][1]["held"]["frozen"] for result in results)
            assert mine == pytest.approx(results[0][name, "0"][1]["held"]["frozen"], rel=0.02)
    worn = load_for_inference(str(tmp_path / "nf4-3"))[0]
    target = export_checkpoint(find_checkpoint(tmp_path / "nf4-3"), tmp_path / "merged", ExportOptions(merged=True))
    whole = load_for_inference(str(target))[0]
    with torch.no_grad():
        difference = worn(input_ids=adapters.IDS).logits - whole(input_ids=adapters.IDS).logits
    assert difference.abs().max() <= 1e-5
