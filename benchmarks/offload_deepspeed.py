"""The peer of benchmarks/offload.py: DeepSpeed's ZeRO-2 with the optimizer on the CPU, 3B, batches of 4 × 4096 tokens.

python benchmarks/offload_deepspeed.py     # in an environment with deepspeed, liger-kernel and a C++ compiler
"""

from __future__ import annotations

import json
import os
import resource
import time
from typing import Any

import torch
from offload import config_of

BATCH, LENGTH, WARM, MEASURED = 4, 4096, 2, 4


def main() -> None:
    """Times some steps after a warm-up."""
    import deepspeed
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers import AutoConfig, AutoModelForCausalLM

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    apply_liger_kernel_to_llama()
    values: dict[str, Any] = dict(config_of("3b"))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(values.pop("model_type"), **values), dtype=torch.bfloat16
        )
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ids = torch.randint(0, values["vocab_size"], (BATCH, LENGTH), device="cuda")
    start = 0.0
    for step in range(WARM + MEASURED):
        if step == WARM:
            torch.cuda.synchronize()
            start = time.perf_counter()
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / MEASURED
    print(json.dumps({
        "deepspeed": deepspeed.__version__, "tokens_per_second": round(BATCH * LENGTH / seconds),
        "seconds_per_step": round(seconds, 3),
        "host_peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
        "device_peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
