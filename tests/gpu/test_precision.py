"""fp8 layers and split masters on a GPU: products near those of fp32, runs that learn as in bf16 with fp32 masters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.tiny import LLAMA, tiny_run, tokenizer_folder

from shardwise.launch.trainer import Trainer
from shardwise.nn.kernels.float8 import Recipe, float8_linear

HERE = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="no CUDA device")]
EIGHT = HERE and torch.cuda.get_device_capability() >= (8, 9)
WIDE = LLAMA | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.skipif(not EIGHT, reason="no fp8 on this GPU")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("tokens", [256, 250])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_products(recipe: Recipe, tokens: int, compiled: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, 512, device="cuda"), 0.05 * torch.randn(768, 512, device="cuda")
    slope = torch.randn(tokens, 768, device="cuda")
    call = torch.compile(float8_linear) if compiled else float8_linear
    found = []
    for kind in (torch.bfloat16, torch.float32):
        a, b = x.to(kind).requires_grad_(), weight.to(kind).requires_grad_()
        out = call(a, b, None, recipe) if kind is torch.bfloat16 else F.linear(a, b)
        out.backward(slope.to(kind))
        found.append([t.float() for t in (out.detach(), a.grad, b.grad)])
    apart = [float((p - q).norm() / q.norm()) for p, q in zip(*found, strict=True)]
    print(recipe, tokens, [f"{d:.4f}" for d in apart])
    assert max(apart) < 0.08


def losses(tmp: Path, name: str, **changes: Any) -> list[float]:
    model = {"config": WIDE, "tokenizer": tokenizer_folder(tmp / "tokenizer")}
    usual = {"device": "cuda", "backend": "gloo", "precision": "bf16", "train__steps": 12, "train__batch_size": 8,
             "train__micro_batch_size": 8, "train__schedule": "constant"}  # fmt: skip
    rows = Trainer(tiny_run(tmp / name, model, **(usual | changes))).fit().metrics
    return [row["loss"] for row in rows if row["kind"] == "train"]


@pytest.mark.skipif(not EIGHT, reason="no fp8 on this GPU")
@pytest.mark.parametrize("more", [{}, {"compile": True}, {"parallel__zero": 3, "recompute": "full"}], ids=str)
def test_fp8_learns_as_bf16(more: dict[str, Any], tmp_path: Path) -> None:
    plain = losses(tmp_path, "bf16", **more)
    found = losses(tmp_path, "fp8", fp8={"recipe": "tensorwise", "min_features": 16}, **more)
    assert found != plain and found == pytest.approx(plain, rel=0.02)


CASES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "accumulated": {"train__micro_batch_size": 2},
    "8 bits": {"train__optimizer": "adamw8bit"},
    "in backward": {"train__optimizer_in_backward": True, "train__max_grad_norm": None},
    "compiled, recomputed": {"compile": True, "recompute": "full"},
    "two ranks": {"ranks": 2, "train__micro_batch_size": 4},
}


@pytest.mark.parametrize("name", CASES)
def test_split_masters_are_fp32_masters(name: str, tmp_path: Path) -> None:
    found = losses(tmp_path, "split", train__master_weights="split", **CASES[name])
    plain = losses(tmp_path, "fp32", train__master_weights="fp32", **CASES[name])
    print(name, [f"{a - b:+.1e}" for a, b in zip(found, plain, strict=True)])
    assert found == pytest.approx(plain, rel=2e-3) and found[-1] < found[0]
