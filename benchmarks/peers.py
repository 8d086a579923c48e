"""Tokens per second and memory on one GPU, ours and others', on the same work in the same call.

    python benchmarks/peers.py OUT.json ROW [ROW…] [--who NAME[,NAME…]] [--rows N] [--kernels FILE]
    python benchmarks/peers.py OUT.json                                prints what is in it

Runs on the machine with the GPU. Rows: 1b-full, 8b-full, 8b-fp8, 8b-lora, 32b-qlora (Qwen2.5's
shapes), moe (12 layers of Qwen3-30B-A3B);
`--rows 4` takes so many sequences a step instead of the row's own. Each contestant has a process of its own, random
weights of the model's shapes and full sequences of 4,096 tokens, and takes a whole step: forward, backward, clipping
off, update. MFU counts 6 FLOP per parameter that a token meets (4 where the base is frozen) against 989 TFLOP/s.
`--kernels` adds to a file what a step's kernels take. The others need liger-kernel, peft, torchao and bitsandbytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LENGTH, PEAK, SECONDS = 4096, 989e12, 6
LLAMA = {"model_type": "llama", "max_position_embeddings": 131072, "vocab_size": 128256, "num_key_value_heads": 8,
         "num_attention_heads": 32}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "1b": LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                   "tie_word_embeddings": True},
    "8b": LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                   "tie_word_embeddings": False},
    "32b": {"model_type": "qwen2", "max_position_embeddings": 131072, "vocab_size": 152064, "num_key_value_heads": 8,
            "num_attention_heads": 40, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
            "tie_word_embeddings": False},
    "moe": {"model_type": "qwen3_moe", "max_position_embeddings": 40960, "vocab_size": 151936, "num_key_value_heads": 4,
            "num_attention_heads": 32, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
            "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
            "num_hidden_layers": 12, "tie_word_embeddings": False},
}  # fmt: skip
ACTIVE = {"1b": 1.236e9, "8b": 8.03e9, "32b": 32.76e9, "moe": 1.306e9}  # parameters that a token meets
# Row: model, sequences a step, FLOP per parameter and token, contestants.
FULL = ("hf-liger", "compiled-liger", "ours", "ours-8bit", "ours-8bit-lean", "ours-8bit-light")
ROWS: dict[str, tuple[str, int, int, tuple[str, ...]]] = {
    "1b-full": ("1b", 8, 6, FULL),
    "8b-full": ("8b", 2, 6, FULL),
    "8b-fp8": ("8b", 2, 6, ("compiled-torchao", "ours-fp8", "ours-8bit-fp8", "ours-8bit-fp8-fast")),
    "8b-lora": (
        "8b",
        2,
        4,
        ("peft-liger", "peft-best", "ours-lora", "ours-lora-fp8", "ours-qlora", "peft-bnb", "ours-qlora-fp8"),
    ),
    "32b-qlora": ("32b", 1, 4, ("peft-bnb", "ours-qlora", "ours-qlora-fp8")),
    "moe": ("moe", 4, 6, ("hf-loop", "hf-liger", "compiled-liger", "ours-plain-experts", "ours", "ours-8bit")),
}

Step = Callable[[], None]


def ours(model: str, rows: int, **settings: Any) -> Step:
    """A step of Shardwise's own loop."""
    import torch

    from shardwise.config.paths import place
    from shardwise.config.schema import Run
    from shardwise.distributed.mesh import init_world
    from shardwise.foresight.bench.train import give_values
    from shardwise.foresight.rehearse.batch import step_batch
    from shardwise.foresight.rehearse.step import set_up, take_step
    from shardwise.nn.models.source import ModelSource, config_from

    values: dict[str, Any] = {
        "model": {"config": dict(MODELS[model]), "tokenizer": "none"},
        "data": {"train": "none", "sequence_length": LENGTH}, "objective": "causal", "precision": "bf16",
        "device": "cuda", "ranks": 1, "backend": "gloo", "compile": True, "parallel": {"zero": 2},
        "train": {"batch_size": rows, "micro_batch_size": rows, "steps": 10, "max_grad_norm": None,
                  "master_weights": "split"},
        "output": "/tmp/peers",
    }  # fmt: skip
    for key, value in settings.items():
        place(values, key.replace("__", "."), value)
    run = Run.model_validate(values)
    source = ModelSource(model, config_from(dict(MODELS[model])), None, "none", task="causal")
    parts, _ = set_up(source, run, init_world(run), None)
    give_values(parts.sharded.model)
    batch = step_batch(run, 1)
    torch.manual_seed(0)
    for micro in batch.micro_batches:
        micro.input_ids.random_(0, 128000)
        micro.labels.random_(0, 128000)
    return lambda: take_step(parts, batch)


def others(model: str, rows: int, *, liger: bool = False, compiled: bool = False, float8: bool = False,
           adapters: str = "", experts: str = "grouped_mm", packed: bool = False) -> Step:  # fmt: skip
    """A plain loop over transformers' model, as the others' guides write it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(MODELS[model])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    if liger:
        from liger_kernel import transformers as kernels_of

        swap = getattr(kernels_of, f"apply_liger_kernel_to_{config.model_type}")
        swap(rms_norm=not compiled, swiglu=not compiled and config.model_type in ("llama", "qwen2"), rope=not compiled)
    with torch.device("cuda"):
        net: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    net.train()
    if model == "moe":
        net.set_experts_implementation(experts)
    if float8:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(net, module_filter_fn=lambda module, name: "lm_head" not in name)
    if packed:
        from adapters import in_bitsandbytes

        net = in_bitsandbytes(net)
    inner = net
    if adapters:
        from peft import LoraConfig, get_peft_model

        wanted = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        inner = get_peft_model(net, wanted, autocast_adapter_dtype=adapters == "usual")
    if compiled:
        for layer in net.model.layers:
            layer.compile()
    trained = [p for p in inner.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    ids = torch.randint(0, 128000, (rows, LENGTH), device="cuda")
    kinds = [torch.nn.attention.SDPBackend.CUDNN_ATTENTION, torch.nn.attention.SDPBackend.FLASH_ATTENTION]

    def step() -> None:
        with torch.nn.attention.sdpa_kernel(kinds, set_priority=True):
            inner(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


CONTESTANTS: dict[str, Callable[[str, int], Step]] = {
    "hf-liger": lambda m, n: others(m, n, liger=True),
    "hf-loop": lambda m, n: others(m, n, liger=True, experts="eager"),
    "compiled-liger": lambda m, n: others(m, n, liger=True, compiled=True),
    "compiled-torchao": lambda m, n: others(m, n, liger=True, compiled=True, float8=True),
    "peft-liger": lambda m, n: others(m, n, liger=True, adapters="usual"),
    "peft-best": lambda m, n: others(m, n, liger=True, compiled=True, adapters="bf16"),
    "peft-bnb": lambda m, n: others(m, n, liger=True, adapters="bf16", packed=True),
    "ours": lambda m, n: ours(m, n),
    "ours-plain-experts": lambda m, n: ours(m, n, experts="plain"),
    "ours-8bit": lambda m, n: ours(m, n, train__optimizer="adamw8bit"),
    "ours-8bit-lean": lambda m, n: ours(m, n, train__optimizer="adamw8bit", train__optimizer_in_backward=True),
    "ours-8bit-light": lambda m, n: ours(
        m, n, train__optimizer="adamw8bit", train__optimizer_in_backward=True, recompute="light"
    ),
    "ours-fp8": lambda m, n: ours(m, n, precision="fp8"),
    "ours-8bit-fp8": lambda m, n: ours(m, n, precision="fp8", train__optimizer="adamw8bit"),
    "ours-8bit-fp8-fast": lambda m, n: ours(
        m, n, precision="fp8", fp8__use_fast_accum=True, train__optimizer="adamw8bit"
    ),
    "ours-lora": lambda m, n: ours(m, n, method="lora"),
    "ours-lora-fp8": lambda m, n: ours(m, n, method={"type": "qlora", "bits": "fp8"}),
    "ours-qlora": lambda m, n: ours(m, n, method="qlora"),
    "ours-qlora-fp8": lambda m, n: ours(m, n, method={"type": "qlora", "multiply": "fp8"}, recompute="light"),
}


def measure(row: str, who: str) -> dict[str, Any]:
    """Mean over some seconds, as in training: nobody waits for a step to end before the next is issued."""
    import torch

    model, rows, flop, _ = ROWS[row]
    rows = int(os.environ.get("SHARDWISE_ROWS", rows))
    step = CONTESTANTS[who](model, rows)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    steps, begun = 0, time.perf_counter()
    while steps < 5 or time.perf_counter() - begun < SECONDS:
        step()
        steps += 1
        if steps % 5 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / steps
    if file := os.environ.get("SHARDWISE_KERNELS"):
        with Path(file).open("a") as out:
            out.write(f"{row} {who}, {seconds * 1e3:.1f} ms a step\n{kernels(step)}\n")
    speed = rows * LENGTH / seconds
    return {
        "tokens_per_second": speed, "mfu": speed * flop * ACTIVE[model] / PEAK,
        "gib": torch.cuda.max_memory_allocated() / 2**30, "steps": steps, "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def kernels(step: Step, shown: int = 40) -> str:
    """A step's kernels by the time they take together."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    sums: dict[str, list[float]] = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            sums.setdefault(event.name[:120], []).append(event.time_range.elapsed_us() / 1e3)
    lines = sorted(((sum(times), len(times), name) for name, times in sums.items()), reverse=True)
    total = f"  {sum(line[0] for line in lines):8.2f} ms in kernels"
    return "\n".join([total, *(f"  {ms:8.2f} ms {n:5d} {name}" for ms, n, name in lines[:shown])])


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print("RESULT " + json.dumps(measure(*sys.argv[2:4])), flush=True)
        os._exit(0)
    file, *rest = sys.argv[1:]
    only = rest.pop(rest.index("--who") + 1).split(",") if "--who" in rest else None
    if "--rows" in rest:
        os.environ["SHARDWISE_ROWS"] = rest.pop(rest.index("--rows") + 1)
    if "--kernels" in rest:
        os.environ["SHARDWISE_KERNELS"] = rest.pop(rest.index("--kernels") + 1)
    kept = Path(file)
    results: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    for row in (r for r in rest if not r.startswith("--")):
        for who in ROWS[row][3]:
            if only is not None and who not in only:
                continue
            environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | os.environ
            command = [sys.executable, __file__, "--one", row, who]
            job = subprocess.run(command, capture_output=True, text=True, env=environment)
            line = next((x for x in job.stdout.splitlines() if x.startswith("RESULT ")), None)
            found = json.loads(line[7:]) if line else {"error": job.stderr.strip().splitlines()[-1:]}
            name = f"{row} of {os.environ['SHARDWISE_ROWS']}" if "SHARDWISE_ROWS" in os.environ else row
            results.setdefault(name, {})[who] = found
            kept.write_text(json.dumps(results, indent=1))
            print(row, who, {k: v for k, v in found.items() if k in ("tokens_per_second", "error")}, flush=True)
    for row, found in results.items():
        speeds = {w: f["tokens_per_second"] for w, f in found.items() if "tokens_per_second" in f}
        best = max((s for w, s in speeds.items() if not w.startswith("ours")), default=None)
        for who, speed in speeds.items():
            beside = f"{speed / best:5.2f} × the best other" if best else ""
            print(
                f"{row:10} {who:18} {speed:9,.0f} tok/s {found[who]['mfu']:6.1%} {found[who]['gib']:6.1f} GiB {beside}"
            )


if __name__ == "__main__":
    main()
