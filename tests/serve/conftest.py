"""A model small enough to train inside the test session, so that answers, stop tokens and turns mean something."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The last answer holds characters that the tokenizer never saw: two to four tokens each.
PAIRS = {
    "What colour is the sky?": "The sky is blue.",
    "Hi": "Hello there, how are you today?",
    "Which animal says meow, and where does it like to sleep?": "A cat.",
    "Draw": "né 日本 🙂 done",
}


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: for a model of this size more of them only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="session")
def trained() -> tuple[Any, Any]:
    """A tiny Llama that has learned PAIRS by heart, and its tokenizer, which adds BOS when left to itself."""
    tokenizer = _tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    llama: Any = LlamaForCausalLM  # an untyped class
    model = llama(config)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}, {"role": "assistant", "content": a}], tokenize=False
        )
        for q, a in PAIRS.items()
    ]
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with one_thread():
        for _ in range(120):
            loss = model(**batch, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval(), tokenizer


@pytest.fixture
def pairs() -> dict[str, str]:
    """The questions that the tiny model has learned, with their answers."""
    return dict(PAIRS)


@pytest.fixture
def model(trained: tuple[Any, Any]) -> Any:
    """The trained model; tests that change it change a copy."""
    return copy.deepcopy(trained[0])


@pytest.fixture
def tokenizer(trained: tuple[Any, Any]) -> Any:
    """The trained model's tokenizer, as a copy."""
    return copy.deepcopy(trained[1])


def _tokenizer() -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator([*list(PAIRS), *list(PAIRS.values())[:3]], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    wrapped: Any = PreTrainedTokenizerFast
    return wrapped(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>", chat_template=CHATML
    )
