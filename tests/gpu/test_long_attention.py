"""Attention a few heads of keys at a time on a GPU's own kernels, against all heads at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwise.nn.attention import long_context as module
from shardwise.nn.attention.long_context import attend_long
from shardwise.nn.attention.varlen import fast_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
@pytest.mark.parametrize(("heads", "keys", "at_a_time"), [(32, 8, 1), (8, 8, 3), (8, 4, 2)])
def test_the_same_as_all_heads_at_once(
    kernel: str, heads: int, keys: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "cudnn" and torch.cuda.get_device_capability() < module.CUDNN:
        pytest.skip("cuDNN's kernels come later here")
    torch.manual_seed(0)
    given = [
        torch.randn(2, 1000, n, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for n in (heads, keys, keys)
    ]
    monkeypatch.setattr(module, "AT_A_TIME", given[0].nbytes // keys * at_a_time)
    monkeypatch.setattr(module, "_kernel", lambda _: kernel)
    ours = attend_long(*given, None)
    gradient = torch.randn_like(ours)
    found = torch.autograd.grad(ours, given, gradient)
    exact = [x.detach().float().requires_grad_() for x in given]
    with fast_attention(torch.device("cuda")):
        theirs = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True).transpose(1, 2)
    wanted = torch.autograd.grad(theirs, exact, gradient.float())
    for a, b in zip((ours, *found), (theirs, *wanted), strict=True):
        assert (a.float() - b).norm() <= 6e-3 * b.norm()
