"""Attention a few heads of keys at a time: the same output and gradients as all heads at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import packed

from shardwise.core.effective_device import acting
from shardwise.foresight.rehearse.flops import flops_of, workspace_of
from shardwise.nn.attention import long_context as module
from shardwise.nn.attention import varlen as attention
from shardwise.nn.attention.long_context import attend_long, heads_at_a_time


def some(heads: int, keys: int, rows: int = 2, width: int = 37) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = (heads, keys, keys)
    return [torch.randn(rows, width, n, 16).transpose(1, 2).detach().requires_grad_() for n in sizes]


def by_torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize(("heads", "keys", "at_a_time"), [(8, 2, 1), (8, 8, 3), (6, 3, 2), (4, 1, 1)])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_the_same_as_all_heads_at_once(
    heads: int, keys: int, at_a_time: int, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, again = some(heads, keys), some(heads, keys)
    monkeypatch.setattr(module, "AT_A_TIME", given[0].nbytes // keys * at_a_time)
    assert heads_at_a_time(given[0], given[1]) == at_a_time
    ours, theirs = attend_long(*given, scale), by_torch(*again, scale)
    assert ours.is_contiguous(), "the next product reads it as it lies"
    gradient = torch.randn_like(theirs)
    ours.backward(gradient)
    theirs.backward(gradient)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for a, b in zip(given, again, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_the_operator_keeps_torchs_rules() -> None:
    query, key, value = some(4, 2, rows=1, width=9)
    torch.library.opcheck(module.long_attention, (query, key, value, 0.25, True))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_a_model_that_takes_it_computes_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = packed.tiny(kind), packed.rows([[38]])
    before = packed.packed(packed.recomputed(model), *batch)
    calls: list[Any] = []
    monkeypatch.setattr(attention, "_in_long_kernel", lambda *given: calls.append(given) or True)
    assert max(packed.distance(packed.packed(model, *batch), before)) <= 1e-6
    assert calls, "the seam was not passed"


@pytest.mark.parametrize(
    ("tokens", "kind", "dropout", "long"),
    [(524288, torch.bfloat16, 0.0, True), (65536, torch.bfloat16, 0.0, False), (524288, torch.float32, 0.0, False),
     (524288, torch.bfloat16, 0.1, False)],
)  # fmt: skip
def test_only_what_is_long_and_what_kernels_take(tokens: int, kind: torch.dtype, dropout: float, long: bool) -> None:
    query, key = (torch.empty(1, heads, tokens, 128, dtype=kind, device="meta") for heads in (32, 8))
    mask: Any = SimpleNamespace(largest_head=192, documents=SimpleNamespace(longest=tokens))
    with acting("cuda"):
        assert attention._in_long_kernel(torch.nn.Module(), query, key, key, mask, dropout) is long
    assert not attention._in_long_kernel(torch.nn.Module(), query, key, key, mask, dropout), "a CPU has room"


def test_a_rehearsal_counts_its_arithmetic_and_room() -> None:
    query, key = (torch.empty(1, heads, 4096, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    operator = torch.ops.shardwise.long_attention.default
    assert flops_of(operator, (query, key, key, 0.1, True), {}, None) == 4 * 4096**2 // 2 * 32 * 128
    assert workspace_of(operator, (query, key, key, 0.1, True)) == 3 * query.nbytes
