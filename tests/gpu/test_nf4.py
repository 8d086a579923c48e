"""Rows of few bits on a GPU: Triton kernels against the plain reference on the same card, and layers made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import quantized as scenarios
from support.ranks import run_ranks
from support.tiny import LLAMA, tiny_run, tokenizer_folder
from torch import nn

from shardwise.nn.adapters.quantized import dequantized, quantize_linears
from shardwise.nn.kernels import nf4 as dispatch
from shardwise.nn.kernels import nf4_reference as reference
from shardwise.nn.kernels.nf4 import Bits, RowFormat

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

FORMS: list[tuple[Bits, bool]] = [("nf4", True), ("nf4", False), ("int8", False), ("fp8", False)]
SHAPES = [(1, 1), (37, 48), (3, 64), (37, 65), (576, 576), (5, 2050), (70_000, 64), (1024, 14336)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weights(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator("cuda").manual_seed(0)
    x = 0.02 * torch.randn(rows, columns, generator=made, device="cuda")
    x[rows // 2, : columns // 2] = 0
    return x.to(dtype)


@pytest.mark.parametrize(("bits", "double"), FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_equal_the_reference(bits: Bits, double: bool, dtype: torch.dtype) -> None:
    for rows, columns in SHAPES:
        form, x = RowFormat(columns, bits, double), weights(rows, columns, dtype)
        packed, plain = dispatch.quantize(x, form), torch.zeros(rows, form.row_bytes, dtype=torch.int8, device="cuda")
        reference.quantize_into(plain, x, form)
        other = (packed != plain).sum().item()
        # An inverse that is a bit off may send a weight on the edge between two levels the other way.
        assert other <= 1 + 1e-5 * packed.numel(), (rows, columns, other)
        ours, theirs = dispatch.dequantize(plain, form, dtype), torch.empty(rows, columns, dtype=dtype, device="cuda")
        reference.dequantize_into(theirs, plain, form)
        if double and bits == "nf4":  # 2^x of two libraries: the last bit of fp32 may differ
            bound = 3e-7 if dtype == torch.float32 else torch.finfo(dtype).eps
            assert torch.allclose(ours.float(), theirs.float(), rtol=bound, atol=0), (rows, columns)
            assert (ours != theirs).float().mean() < (1.0 if dtype == torch.float32 else 1e-3), (rows, columns)
        else:
            assert torch.equal(ours, theirs), (rows, columns)


@pytest.mark.parametrize(("bits", "double"), FORMS)
def test_card_and_host_agree(bits: Bits, double: bool) -> None:
    form, x = RowFormat(576, bits, double), weights(64, 576, torch.float32)
    packed = dispatch.quantize(x.cpu(), form)
    assert (dispatch.quantize(x, form).cpu() != packed).float().mean() < (3e-3 if bits == "fp8" else 1e-3)
    on_card = dispatch.dequantize(packed.cuda(), form, torch.float32).cpu()
    assert torch.allclose(on_card, dispatch.dequantize(packed, form, torch.float32), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize(("bits", "double"), FORMS)
def test_what_is_not_finite_stays_so(bad: float, bits: Bits, double: bool) -> None:
    x, form = weights(3, 256, torch.float32), RowFormat(256, bits, double)
    x[1, 133] = bad
    out = dispatch.dequantize(dispatch.quantize(x, form), form, torch.float32)
    assert not out[1, 133].isfinite() and out[0].isfinite().all() and out[2].isfinite().all()


def layers(count: int, width: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, device="cuda", dtype=torch.bfloat16) for _ in range(count)))
    return model.requires_grad_(False)


@pytest.mark.parametrize(("bits", "double"), FORMS)
def test_a_layer_equals_a_plain_one(bits: Bits, double: bool) -> None:
    model, plain = layers(1, 512), layers(1, 512)
    quantize_linears(model, lambda *_: True, bits, double)
    plain[0].weight.copy_(dequantized(model[0], torch.bfloat16))
    inputs = [torch.ones(64, 512, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
    outputs = [plain(inputs[0]), model(inputs[1])]
    for output in outputs:
        output.float().square().sum().backward()
    assert torch.allclose(outputs[0], outputs[1], rtol=1e-2, atol=1e-2)  # the bias is added in bf16, not in the product
    assert torch.allclose(inputs[0].grad, inputs[1].grad, rtol=2e-2, atol=2e-2 * inputs[0].grad.abs().max().item())


@pytest.mark.parametrize("compiled", [False, True])
def test_no_full_weight_outlives_its_product(compiled: bool) -> None:
    """Eight layers of 32 MB in bf16: between forward and backward there are activations and nothing else."""
    model = layers(8, 4096)
    quantize_linears(model, lambda *_: True)
    call = torch.compile(model) if compiled else model
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.grad(call(x).float().sum(), x)
    before = torch.cuda.memory_allocated()
    loss = call(x).float().sum()
    held = torch.cuda.memory_allocated() - before
    (gradient,) = torch.autograd.grad(loss, x)
    assert held < 8 << 20, held
    (eager,) = torch.autograd.grad(model(x).float().sum(), x)
    assert torch.allclose(gradient, eager, rtol=2e-2, atol=2e-2 * eager.abs().max().item())


def test_stages_equal_one_rank(tmp_path: Path) -> None:
    """Two ranks on one card over gloo, in bf16: the base gathered as bytes, never cast."""
    model = {"config": LLAMA, "tokenizer": tokenizer_folder(tmp_path / "tokenizer")}
    runs = [
        tiny_run(tmp_path, model, device="cuda", backend="gloo", precision="bf16", parallel={"zero": zero},
                 train__batch_size=4, train__steps=2, output=str(tmp_path / str(zero)))
        for zero in (0, 2, 3)
    ]  # fmt: skip
    one = run_ranks(scenarios.train, 1, runs[:1], "nf4", True)[0][0]
    for result in run_ranks(scenarios.train, 2, runs, "nf4", True):
        for outcome in result:
            assert max(abs(a - b) for a, b in zip(outcome["losses"], one["losses"], strict=True)) <= 2e-2


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("shape", [(96, 256), (33, 200), (4096, 4096)])
def test_nf4_as_fp8(shape: tuple[int, int], double: bool) -> None:
    """The kernel's numbers are the reference's but for values that rounding puts on the other side of an edge."""
    form, x = RowFormat(shape[1], "nf4", double), torch.randn(shape, device="cuda")
    packed = dispatch.quantize(x * torch.rand(shape[0], 1, device="cuda").exp(), form)
    (found, scales), (wanted, right) = dispatch.as_float8(packed, form), reference.as_float8(packed.cpu(), form)
    assert torch.allclose(scales.cpu(), right, rtol=1e-5)
    assert torch.equal(scales, dispatch.float8_scales(packed, form))
    off = found.cpu().float() != wanted.float()
    assert off.float().mean() < 1e-3
    assert (found.cpu().float() - wanted.float()).abs().max() <= 32
