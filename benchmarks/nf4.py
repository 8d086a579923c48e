"""Weights in few bits: GB/s of packing and unpacking against a copy, and what a layer and a model pay for it.

    python benchmarks/nf4.py [--device cpu] [--tokens 8192] [--layers 4]

GB/s counts the bytes that must be read and written (for a copy: twice its size). On a GPU times are the device's own;
on a CPU they are processor seconds of one thread, which other programs do not change much.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.nn.adapters.quantized import quantize_linears
from shardwise.nn.kernels.nf4 import Bits, RowFormat, dequantize, quantize

FORMS: list[tuple[Bits, bool]] = [("nf4", True), ("nf4", False), ("int8", False)]
# The linear layers and sizes of SmolLM2-135M (for a CPU) and Llama-3.1-8B (for a GPU).
CPU = dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3)
GPU = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)


def seconds(work: Callable[[], object], device: str, repeats: int = 11) -> float:
    """The median."""
    times = []
    for attempt in range(repeats + 2):
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            took = start.elapsed_time(end) / 1e3
        else:
            before = time.process_time()
            work()
            took = time.process_time() - before
        if attempt >= 2:
            times.append(took)
    return sorted(times)[len(times) // 2]


def rates(sizes: dict[str, int], device: str, dtype: torch.dtype) -> None:
    """Packing and unpacking of the widest layer, several times over so that no cache holds it."""
    columns, rows = sizes["hidden_size"], sizes["intermediate_size"] * (16 if device == "cuda" else 4)
    x = (0.02 * torch.randn(rows, columns, device=device)).to(dtype)
    target = torch.empty_like(x)
    copy = seconds(lambda: target.copy_(x), device)
    print(f"{rows} × {columns} in {dtype}: copy {2 * x.nbytes / copy / 1e9:.1f} GB/s")
    for bits, double in FORMS:
        form = RowFormat(columns, bits, double)
        packed = quantize(x, form)
        error = ((dequantize(packed, form, torch.float32) - x.float()).norm() / x.float().norm()).item()
        name = f"{bits}{', double' if double else ''} ({8 * form.row_bytes / columns:.2f} bits, error {error:.4f})"
        jobs: dict[str, Callable[[], object]] = {
            "quantise": lambda form=form: quantize(x, form),
            "dequantise": lambda form=form, packed=packed: dequantize(packed, form, dtype),
        }
        for what, work in jobs.items():
            took = seconds(work, device)
            rate = (x.nbytes + packed.nbytes) / took / 1e9
            share = rate / (2 * x.nbytes / copy / 1e9)
            print(f"  {what:10} {name:42} {rate:7.1f} GB/s  {share:4.0%} of the copy  {took / x.numel() * 1e9:.4f} ns")


def step_of(model: Any, x: torch.Tensor) -> Callable[[], object]:
    """Forward and backward to the input, as a frozen base does it."""
    return lambda: torch.autograd.grad(model(x).float().sum(), x)


def one_layer(sizes: dict[str, int], device: str, dtype: torch.dtype, tokens: int) -> None:
    inputs, outputs = sizes["hidden_size"], sizes["intermediate_size"]
    x = torch.randn(tokens, inputs, device=device, dtype=dtype, requires_grad=True)
    plain = nn.Sequential(nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)).requires_grad_(False)
    before = seconds(step_of(plain, x), device)
    print(f"linear {inputs} → {outputs}, {tokens} tokens, forward + backward: {dtype} {before * 1e3:.2f} ms")
    for bits, double in FORMS:
        model = nn.Sequential(nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)).requires_grad_(False)
        quantize_linears(model, lambda *_: True, bits, double)
        took = seconds(step_of(model, x), device)
        print(f"  {bits}{', double' if double else '':10} {took * 1e3:.2f} ms, {took / before:.2f} ×")


def whole_model(sizes: dict[str, int], device: str, dtype: torch.dtype, tokens: int, layers: int) -> None:
    from transformers import LlamaConfig, LlamaModel

    length = min(tokens, 2048)
    config = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=512, max_position_embeddings=length)  # type: ignore[arg-type]
    config._attn_implementation = "sdpa"
    x = torch.randn(tokens // length, length, sizes["hidden_size"], device=device, dtype=dtype, requires_grad=True)
    print(f"{layers} blocks, {tokens} tokens, forward + backward to the input:")
    before = 0.0
    for form in [None, *FORMS]:
        model = LlamaModel(config).to(device, dtype).requires_grad_(False)
        if form is not None:
            quantize_linears(model, lambda *_: True, *form)
        held = sum(p.nbytes for layer in model.layers for p in layer.parameters())

        def step(model: Any = model) -> object:
            hidden = model(inputs_embeds=x, use_cache=False).last_hidden_state
            return torch.autograd.grad(hidden.float().sum(), x)

        took = seconds(step, device, 5)
        before = before or took
        name = str(dtype) if form is None else f"{form[0]}{', double' if form[1] else ''}"
        print(f"  {name:16} {took * 1e3:9.1f} ms, {took / before:.2f} ×, blocks {held / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, help="of a step; default 8192 on a GPU, 512 on a CPU")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
    print(torch.cuda.get_device_name() if on_gpu else "one thread of the CPU")
    sizes, dtype = (GPU, torch.bfloat16) if on_gpu else (CPU, torch.float32)
    tokens = args.tokens or (8192 if on_gpu else 512)
    rates(sizes, args.device, dtype)
    one_layer(sizes, args.device, dtype, tokens)
    whole_model(sizes, args.device, dtype, tokens, args.layers)


if __name__ == "__main__":
    main()
