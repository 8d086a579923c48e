"""A real model of 135 million parameters out and back in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise.export.check import load_folder, sample_ids
from shardwise.export.command import export_gguf
from shardwise.nn.models.source import EMBEDDED, find_model


@pytest.mark.slow
@pytest.mark.parametrize("kind, most", [("f16", 0.002), ("q8_0", 0.05)])
def test_smollm2(tmp_path: Path, kind: str, most: float) -> None:
    """The share of the logits' spread that each type costs; measured 0.08% and 3.0%."""
    from transformers import AutoModelForCausalLM

    from shardwise.config.schema import Model

    done = export_gguf(EMBEDDED, tmp_path / "model.gguf", kind)
    print(f"\n{kind}: {done.path.stat().st_size / 2**20:.0f} MiB, {done.checked}")
    source = find_model(Model(name=EMBEDDED))
    assert source.weights is not None
    assert done.checked is not None and done.checked.count(": yes, ") == 2, "llama.cpp and transformers"
    reference = load_folder(source.weights)
    back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    for ids in sample_ids(source.load_tokenizer(), source.config.vocab_size):
        with torch.no_grad():
            wanted, got = reference(input_ids=ids).logits, back(input_ids=ids).logits
        assert (wanted - got).pow(2).mean().sqrt() <= most * wanted.std()
        assert (wanted.argmax(-1) == got.argmax(-1)).float().mean() >= 0.9
