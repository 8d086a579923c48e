"""Packed rows through the variable-length kernel against the plain path, and without a wait for the device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import packed
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder
from torch import nn

from shardwise.data.documents import Documents
from shardwise.nn.attention import varlen as attention
from shardwise.nn.attention.document_mask import DocumentMask, RowsMask
from shardwise.nn.attention.varlen import fast_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")
# Heads, heads of keys, head size, head size of values, window
SHAPES = [
    (8, 8, 64, 64, None),
    (9, 3, 64, 64, None),
    (8, 2, 128, 128, 100),
    (4, 1, 256, 256, None),
    (4, 4, 12, 12, 5),  # padded to 16
    (4, 4, 192, 128, None),  # values of smaller heads
    (4, 2, 80, 80, 1),
]
LAYOUT = [[300, 1, 7, 128, 129, 63], [500], [2, 400, 200], [1, 1, 1]]


def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return attention.attend_documents(sdpa_attention_forward, *args, **kwargs)[0]


@contextmanager
def kernel_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Building a mask is an error."""

    def refuse(self: Any) -> torch.Tensor:
        raise AssertionError("a mask was built")

    with monkeypatch.context() as patch:
        patch.setattr(DocumentMask, "real", property(refuse))
        yield


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_is_as_near_to_the_truth_as_the_plain_path(
    shape: tuple[int, int, int, int, int | None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, keys, size, value_size, window = shape
    documents = Documents.of_lengths(LAYOUT).to(CUDA)
    mask = DocumentMask(documents, window, attention.largest_head(CUDA))
    made = torch.Generator(CUDA).manual_seed(0)
    tensors = [
        torch.randn(documents.rows, documents.width, h, d, generator=made, device=CUDA).transpose(1, 2)
        for h, d in ((heads, size), (keys, size), (keys, value_size))
    ]
    weight = torch.randn(documents.rows, documents.width, heads, value_size, generator=made, device=CUDA)
    seen = DocumentMask(documents, window).real

    def results(kind: torch.dtype, ours: bool) -> list[torch.Tensor]:
        query, key, value = (t.to(kind).detach().requires_grad_() for t in tensors)
        if ours:
            with kernel_only(monkeypatch):
                output = attend(nn.Module(), query, key, value, mask)
        else:
            group = heads // keys
            wide = (key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))
            output = F.scaled_dot_product_attention(query, *wide, attn_mask=seen).transpose(1, 2)
        return [output, *torch.autograd.grad((output.float() * weight).sum(), (query, key, value))]

    # The truth is of the rounded inputs: rounding them is not the kernel's fault.
    tensors = [t.to(dtype) for t in tensors]
    truth = results(torch.float64, False)
    for name, ours, plain, true in zip(
        ("output", "query", "key", "value"), results(dtype, True), results(dtype, False), truth, strict=True
    ):
        scale = true.abs().max()
        error, usual = ((x.double() - true).abs().max() / scale for x in (ours, plain))
        print(f"\n{shape} {dtype} {name}: {error:.1e}, plain {usual:.1e}")
        assert error <= 2 * usual + 4 * torch.finfo(dtype).eps


def test_fp32_takes_the_mask() -> None:
    documents = Documents.of_lengths(LAYOUT).to(CUDA)
    mask = DocumentMask(documents, None, attention.largest_head(CUDA))
    x = torch.randn(documents.rows, 2, documents.width, 64, device=CUDA)
    plain = F.scaled_dot_product_attention(x, x, x, attn_mask=mask.real).transpose(1, 2)
    assert torch.equal(attend(nn.Module(), x, x, x, mask), plain)


def test_random_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        layout = [[rng.randint(1, 300) for _ in range(rng.randint(1, 8))] for _ in range(rng.randint(1, 4))]
        documents = Documents.of_lengths([*layout, [2, 3]]).to(CUDA)
        window = rng.choice([None, 1, 17, 64, 500])
        mask = DocumentMask(documents, window, attention.largest_head(CUDA))
        x = torch.randn(documents.rows, 4, documents.width, 32, device=CUDA, dtype=torch.bfloat16)
        with kernel_only(monkeypatch):
            ours = attend(nn.Module(), x, x, x, mask)
        plain = F.scaled_dot_product_attention(x, x, x, attn_mask=DocumentMask(documents, window).real).transpose(1, 2)
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2)


KINDS = ["llama", "gpt2", "qwen3", "mistral", "gemma2", "mixtral", "falcon", "gpt_oss", "bloom"]


@pytest.mark.parametrize("kind", KINDS)
def test_models_packed_equal_one_document_at_a_time_fp32(kind: str) -> None:
    model = packed.tiny(kind).to(CUDA)
    ids, labels, documents = packed.rows(packed.LAYOUT)
    batch = ids.to(CUDA), labels.to(CUDA), documents.to(CUDA)
    loss, gradients = packed.distance(packed.packed(model, *batch), packed.alone(model, *batch))
    print(f"\n{kind} fp32: loss {loss:.1e}, gradients {gradients:.1e}")
    assert loss <= 1e-5 and gradients <= 1e-5


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision(kind: str, dtype: torch.dtype) -> None:
    """As near to the fp32 gradients, one document at a time, as the plain path is (within a factor of two)."""
    ids, labels, documents = packed.rows(packed.LAYOUT)
    batch = ids.to(CUDA), labels.to(CUDA), documents.to(CUDA)
    truth = packed.alone(packed.tiny(kind).to(CUDA), *batch)
    model = packed.tiny(kind).to(CUDA, dtype)
    with fast_attention(CUDA):
        found = {plain: packed.distance(packed.packed(model, *batch, plain=plain), truth) for plain in (False, True)}
    print(f"\n{kind} {dtype}: ours {found[False]}, plain {found[True]}")
    assert found[False][0] <= 2 * found[True][0] + 5e-3 and found[False][1] <= 2 * found[True][1] + 1e-3


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("recompute", [False, True])
def test_forward_and_backward_do_not_wait(kind: str, recompute: bool) -> None:
    """Gemma-2's softcap takes the mask, which is built on the device without a look at it."""
    model = packed.tiny(kind).to(CUDA, torch.bfloat16)
    model = packed.recomputed(model) if recompute else model
    ids, labels, documents = packed.rows(packed.LAYOUT)
    for mode in ("default", "error"):
        batch = ids.to(CUDA), labels.to(CUDA), documents.to(CUDA)
        positions = batch[2].positions
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode(mode)
            with fast_attention(CUDA):
                logits = model(
                    input_ids=batch[0], position_ids=positions, attention_mask=RowsMask(batch[2]), use_cache=False
                ).logits
                packed._loss(logits, batch[1]).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_compiled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed.tiny("llama").to(CUDA, torch.bfloat16)
    batches = []
    for seed in range(4):
        rng = random.Random(seed)
        ids, labels, documents = packed.rows([[rng.randint(2, 60) for _ in range(4)] for _ in range(2)], seed)
        batches.append((ids.to(CUDA), labels.to(CUDA), documents.to(CUDA)))
    plain = [packed.packed(model, *batch) for batch in batches]
    for _, block in packed.find_blocks(model):
        block.forward = torch.compile(block.forward)
    with kernel_only(monkeypatch):
        for batch, reference in zip(batches, plain, strict=True):
            loss, gradients = packed.distance(packed.packed(model, *batch), reference)
            print(f"\ncompiled: loss {loss:.1e}, gradients {gradients:.1e}")
            assert loss <= 5e-3 and gradients <= 5e-2


def test_two_ranks_recomputed_without_a_mask(tmp_path: Path) -> None:
    """The real set-up at stage 3 in bf16; losses stay with the plain path's."""
    tokenizer_folder(tmp_path / "tokenizer")
    more = dict(precision="bf16", device="cuda", backend="gloo")
    run = tiny_run(tmp_path, parallel__zero=3, recompute="full", **more)
    for ours, plain in run_ranks(packed.train_twice, 2, run):
        assert max(abs(a - b) / b for a, b in zip(ours, plain, strict=True)) <= 5e-3
