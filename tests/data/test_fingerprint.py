"""The fingerprint is the same after saving and loading, and tells a change of template from one of the tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from support.chat import chat_tokenizer
from support.templates import CHATML
from support.tiny import GPT2, saved_model

from shardwise.checkpoint.hf import _check_tokenizer
from shardwise.checkpoint.store import MODEL
from shardwise.core.errors import UserError
from shardwise.data.fingerprint import FILE, check_fingerprint, template_fingerprint, write_fingerprint


def changed(what: str) -> Any:
    tokenizer = chat_tokenizer(CHATML, bos="<s>")
    match what:
        case "chat template":
            tokenizer.chat_template += "\n"
        case "a word":
            tokenizer.add_tokens(["newword"])
        case "a special token":
            tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
        case "eos":
            tokenizer.eos_token = "</s>"
        case "bos added":
            tokenizer = chat_tokenizer(CHATML, bos="<s>", adds_bos=True)
        case "normaliser":
            from tokenizers import normalizers

            tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
        case "padding":  # which is not about tokens
            tokenizer.backend_tokenizer.enable_padding(length=8)
            tokenizer.backend_tokenizer.enable_truncation(8)
    return tokenizer


@pytest.mark.parametrize("kind", ["bytes", "trimmed", "eating", "pieces"])
def test_same_after_saving_and_loading(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = chat_tokenizer(CHATML, kind=kind)
    tokenizer.save_pretrained(tmp_path)
    assert template_fingerprint(AutoTokenizer.from_pretrained(tmp_path)) == template_fingerprint(tokenizer)


@pytest.mark.parametrize("what", ["chat template", "a word", "a special token", "eos", "bos added", "normaliser"])
def test_a_change_is_told(tmp_path: Path, what: str) -> None:
    write_fingerprint(tmp_path, chat_tokenizer(CHATML, bos="<s>"))
    with pytest.raises(UserError) as caught:
        check_fingerprint(tmp_path, changed(what))
    assert f"its {'chat template' if what == 'chat template' else 'tokenizer'} changed" in caught.value.problem
    assert "--changed-tokenizer" in caught.value.remedy


def test_what_does_not_matter_for_tokens_is_no_change(tmp_path: Path) -> None:
    write_fingerprint(tmp_path, chat_tokenizer(CHATML, bos="<s>"))
    check_fingerprint(tmp_path, changed("padding"))
    check_fingerprint(tmp_path, copy.deepcopy(changed("nothing")))
    check_fingerprint(tmp_path / "a model of somebody else", changed("eos"))
    (tmp_path / FILE).write_text("[]")
    with pytest.raises(UserError, match="cannot be read"):
        check_fingerprint(tmp_path, changed("nothing"))


def test_chat_and_export_refuse_a_changed_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from shardwise.export.inference import load_for_inference

    folder = tmp_path / MODEL
    saved_model(folder, GPT2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    write_fingerprint(folder, tokenizer)
    load_for_inference(str(folder))
    _check_tokenizer(tmp_path, False)
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "helper")
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="chat template changed"):
        load_for_inference(str(folder))
    with pytest.raises(UserError, match="chat template changed"):
        _check_tokenizer(tmp_path, False)
    assert load_for_inference(str(folder), changed_tokenizer=True)[1].chat_template == tokenizer.chat_template
