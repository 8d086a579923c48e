"""Tiny models."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiny import GPT2, LLAMA, saved_model


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random Llama."""
    return saved_model(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with other weights."""
    return saved_model(tmp_path_factory.mktemp("other"), LLAMA, seed=1)


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random GPT-2."""
    return saved_model(tmp_path_factory.mktemp("gpt2"), GPT2)


@pytest.fixture(scope="session")
def loaded(llama: str) -> tuple[Any, Any]:
    """The Llama and its tokenizer."""
    from shardwise.export.inference import load_for_inference

    return load_for_inference(llama)
