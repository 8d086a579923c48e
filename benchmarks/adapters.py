"""Tokens per second of LoRA and QLoRA: ours beside PEFT (with Liger's kernels, and bitsandbytes for the base).

    python benchmarks/adapters.py 8b lora qlora [--peers] [--set compile=true]

Llama shapes, random weights, all linear layers, rank 16, sequences of 4096, batch of 2, nothing recomputed. Each is a
process of its own, one after another. PEFT as its users have it: a bf16 base, adapters in fp32 under autocast, fused
AdamW; with `cudnn` its attention by cuDNN, as we choose it, which transformers leaves to torch's default.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch

BATCH, LENGTH, RANK = 2, 4096, 16


def ours(size: str, method: str, settings: list[str]) -> None:
    """The real set-up."""
    from offload import main as measure

    measure(size, [f"method={method}", f"method.rank={RANK}", f"train.batch_size={BATCH}",
                   f"train.micro_batch_size={BATCH}", f"data.sequence_length={LENGTH}", "parallel.zero=0",
                   "train.max_grad_norm=1.0", *settings])  # fmt: skip


def peft(size: str, method: str, settings: list[str]) -> None:
    """The same work with PEFT."""
    from offload import config_of
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardwise.nn.attention.varlen import fast_attention

    config = config_of(size)
    config.pop("model_type")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="sdpa"))
    torch.set_default_dtype(torch.float32)
    if "liger" in settings:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    if method == "qlora":
        model = in_bitsandbytes(model)
    model.config.use_cache = False
    model = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", lora_dropout=0.0)
    )
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    ids = torch.randint(0, 257, (BATCH, LENGTH), device="cuda")
    attention: Any = partial(fast_attention, torch.device("cuda")) if "cudnn" in settings else contextlib.nullcontext
    warm, measured, begin, losses = 3, 8, 0.0, []
    for step in range(warm + measured):
        if step == warm:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
        with attention(), torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - begin
    print(json.dumps({
        "tokens_per_second": round(measured * BATCH * LENGTH / elapsed),
        "seconds_per_step": round(elapsed / measured, 3),
        "device_peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "trained_types": sorted({str(p.dtype) for p in trained}), "losses": [round(float(x), 3) for x in losses[::5]],
    }), flush=True)  # fmt: skip


def in_bitsandbytes(model: Any) -> Any:
    """Its linear layers but the head as bitsandbytes keeps them, NF4 with double quantisation."""
    import bitsandbytes as bnb

    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            packed = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=module.bias is not None, quant_type="nf4",
                compute_dtype=torch.bfloat16, compress_statistics=True, device="meta",
            )  # fmt: skip
            packed.bias = module.bias
            packed.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4",
                                              compress_statistics=True)  # fmt: skip
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, packed.to("cuda"))
            assert packed.weight.dtype == torch.uint8
            module.weight = None
    model.is_loaded_in_4bit = True
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def main() -> None:
    """Runs each in a process of its own and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size")
    parser.add_argument("methods", nargs="+", choices=("lora", "qlora"))
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--set", action="append", default=[], help="a setting of ours, e.g. compile=true")
    parser.add_argument("--one", choices=("ours", "peft"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        {"ours": ours, "peft": peft}[arguments.one](arguments.size, arguments.methods[0], arguments.set)
        return
    for method in arguments.methods:
        jobs: list[tuple[str, list[str]]] = [("ours", arguments.set)]
        if arguments.peers:
            jobs += [("peft", ["liger"]), ("peft", ["liger", "cudnn"])]
        found: list[float] = []
        for who, settings in jobs:
            command = [sys.executable, __file__, arguments.size, method, "--one", who]
            done = subprocess.run(command + [f"--set={s}" for s in settings], capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if done.returncode or not lines:
                print(f"{method} {who} {settings} failed: {done.stderr[-1500:]}", flush=True)
                continue
            record = json.loads(lines[-1])
            found.append(record["tokens_per_second"])
            kept = ("tokens_per_second", "seconds_per_step", "device_peak_gib", "losses")
            told = " ".join(f"{k} {record[k]}" for k in kept)
            print(f"{method} {who} {' '.join(settings)}: {told}, ours/this {found[0] / found[-1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
