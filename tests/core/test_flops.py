"""Peaks are vendors' figures or nothing; the FLOP count agrees with torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardwise.core.hardware.flops import flops_per_token, peak_flops


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp32", 66.9),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "torch.bfloat16", 989.4),
        ("NVIDIA H800", "bf16", 989.4),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("A100-PCIE-40GB", "fp16", 312),
        ("NVIDIA A800-SXM4-80GB", "bf16", 312),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A40", "bf16", 149.7),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40", "bf16", 181.05),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA GeForce RTX 3090", "fp16", 71),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("AMD Instinct MI210", "bf16", 181),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("AMD Instinct MI325X OAM", "bf16", 1307.4),
    ],
)
def test_known_devices(name: str, dtype: str, teraflops: float) -> None:
    assert peak_flops(name, dtype) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "AMD EPYC 7763 64-Core Processor",
        "AMD Radeon Graphics",
        "AMD Instinct MI250X/MI250",
        "NVIDIA H100",  # PCIe or SXM
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA A100-40C",  # a virtual GPU
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 9090",
        "Quadro RTX 6000",
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_no_guess_for_other_devices(name: str, dtype: str) -> None:
    assert peak_flops(name, dtype) is None


def test_no_figure_for_formats_that_a_device_lacks() -> None:
    assert peak_flops("Tesla T4", "bf16") is None
    assert peak_flops("Tesla V100-SXM2-16GB", "bf16") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "int4") is None


def test_flops_per_token_by_hand() -> None:
    assert flops_per_token(1000, 200, layers=0, hidden=0, sequence_length=0) == 6 * 800
    assert flops_per_token(0, 0, layers=2, hidden=8, sequence_length=16) == 6 * 2 * 8 * 16


def test_flops_per_token_agrees_with_torch() -> None:
    sequence, hidden, vocabulary = 16, 8, 32
    names = ("q", "k", "v", "o")
    embedding = torch.randn(vocabulary, hidden, requires_grad=True)
    head = torch.randn(hidden, vocabulary, requires_grad=True)
    weights = {name: torch.randn(hidden, hidden, requires_grad=True) for name in names}
    with FlopCounterMode(display=False) as counter:
        x = embedding[torch.arange(sequence)] * 1.0
        q, k, v = (x @ weights[name] for name in names[:3])
        torch.autograd.backward(((q @ k.T).softmax(-1) @ v @ weights["o"] @ head).sum())
    parameters = embedding.numel() + head.numel() + sum(weight.numel() for weight in weights.values())
    counted = flops_per_token(parameters, embedding.numel(), layers=1, hidden=hidden, sequence_length=sequence)
    # Torch computes the full square of attention here: the causal half is added back.
    assert counter.get_total_flops() == sequence * (counted + 6 * hidden * sequence)
