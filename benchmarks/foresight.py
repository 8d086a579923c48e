"""Predicted against measured: peak memory and step time of runs that differ, each on one device.

    python benchmarks/foresight.py measure OUT.json [NUMBER…]     on the machine with the GPU
    python benchmarks/foresight.py predict OUT.json [NUMBER…]     anywhere; foresight_h200.json is what an H200 said
    python benchmarks/foresight.py compare OUT.json [NUMBER…]     what `plan` and the gate would say, beside it

Each run takes real steps of the real loop on random weights. Runs with odd numbers are for tuning the predictor, even
ones for judging it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

LLAMA = {"model_type": "llama", "max_position_embeddings": 131072, "vocab_size": 128256, "tie_word_embeddings": False}
QWEN = {"model_type": "qwen3", "max_position_embeddings": 131072, "vocab_size": 151936, "head_dim": 128}


def llama(hidden: int, inner: int, layers: int, heads: int, groups: int, **more: Any) -> dict[str, Any]:
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return LLAMA | shape | {"num_attention_heads": heads, "num_key_value_heads": groups} | more


MODELS: dict[str, dict[str, Any]] = {
    "135m": llama(576, 1536, 30, 9, 3, vocab_size=49152, tie_word_embeddings=True),
    "gpt2": {"model_type": "gpt2", "n_positions": 8192},
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 4096},
    "qwen-0.6b": QWEN | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                         "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "1b": llama(2048, 8192, 16, 32, 8, tie_word_embeddings=True),
    "3b": llama(3072, 8192, 28, 24, 8, tie_word_embeddings=True),
    "8b": llama(4096, 14336, 32, 32, 8),
    "14b": QWEN | {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40,
                   "num_attention_heads": 40, "num_key_value_heads": 8, "tie_word_embeddings": False},
    "bert": {"model_type": "bert", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
             "num_attention_heads": 16, "max_position_embeddings": 2048},
    "t5": {"model_type": "t5", "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128,
           "decoder_start_token_id": 0},
    "moe": {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 1024, "moe_intermediate_size": 768,
            "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
            "num_experts": 32, "num_experts_per_tok": 4, "max_position_embeddings": 32768,
            "tie_word_embeddings": False},
}  # fmt: skip

# model, sequence, micro-batch, accumulation, settings
RUNS: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    "01": ("135m", 512, 8, 1, {}),
    "02": ("135m", 2048, 16, 2, {}),
    "03": ("135m", 8192, 4, 1, {"recompute": "full"}),
    "04": ("gpt2", 1024, 16, 1, {}),
    "05": ("gpt2-xl", 1024, 8, 1, {}),
    "06": ("gpt2-xl", 1024, 16, 2, {"recompute": "full"}),
    "07": ("qwen-0.6b", 4096, 4, 1, {}),
    "08": ("qwen-0.6b", 2048, 8, 2, {"recompute": "full"}),
    "09": ("1b", 4096, 2, 1, {}),
    "10": ("1b", 4096, 4, 2, {}),
    "11": ("1b", 512, 4, 1, {}),
    "12": ("1b", 16384, 1, 1, {}),
    "13": ("1b", 131072, 1, 1, {"recompute": "full"}),
    "14": ("1b", 65536, 1, 1, {"recompute": "full"}),
    "15": ("1b", 4096, 4, 1, {"method": "lora"}),
    "16": ("1b", 8192, 2, 2, {"method": "lora", "recompute": "full"}),
    "17": ("3b", 4096, 2, 1, {}),
    "18": ("3b", 4096, 4, 1, {"recompute": "full"}),
    "19": ("3b", 2048, 4, 2, {"train__optimizer": "adamw8bit"}),
    "20": ("3b", 4096, 2, 1, {"method": "lora"}),
    "21": ("8b", 4096, 1, 1, {"method": "lora"}),
    "22": ("8b", 4096, 2, 1, {"method": "lora"}),
    "23": ("8b", 2048, 4, 1, {"method": "qlora"}),
    "24": ("8b", 4096, 4, 1, {"method": "qlora", "recompute": "full"}),
    "25": ("8b", 32768, 1, 1, {"method": "qlora", "recompute": "full"}),
    "26": ("14b", 4096, 1, 1, {"method": "lora", "recompute": "full"}),
    "27": ("14b", 2048, 2, 1, {"method": "qlora"}),
    "28": ("8b", 2048, 1, 1, {"recompute": "full", "train__optimizer": "adafactor"}),
    "29": ("1b", 4096, 4, 1, {"compile": True}),
    "30": ("3b", 4096, 2, 1, {"compile": True}),
    "31": ("bert", 512, 16, 1, {"objective": "masked"}),
    "32": ("t5", 512, 16, 1, {"objective": "seq2seq"}),
    "33": ("moe", 2048, 4, 1, {"experts": "plain"}),
    "34": ("moe", 4096, 2, 1, {"recompute": "full", "experts": "plain"}),
    "35": ("1b", 4096, 4, 1, {"documents": 8}),
    "36": ("3b", 4096, 4, 1, {"documents": 4, "recompute": "full", "parallel__zero": 3}),
    "37": ("1b", 4096, 4, 1, {"precision": "fp16"}),
    "38": ("1b", 2048, 4, 1, {"precision": "fp32"}),
    "39": ("3b", 4096, 4, 1, {"offload__optimizer": "cpu"}),
    "40": ("8b", 2048, 2, 1, {"offload__optimizer": "cpu", "recompute": "full"}),
    "41": ("1b", 8192, 2, 1, {"recompute": "full", "offload__activations": "cpu"}),
    "42": ("3b", 4096, 2, 1, {"recompute": "full", "offload__activations": "cpu"}),
    "43": ("1b", 4096, 4, 1, {"loss": "plain"}),
    "44": (
        "3b",
        4096,
        1,
        4,
        {"train__optimizer_in_backward": True, "train__max_grad_norm": None, "train__optimizer": "adamw4bit"},
    ),
    "45": ("1b", 4096, 4, 1, {"precision": "fp8", "compile": True}),
    "46": ("3b", 4096, 2, 1, {"precision": "fp8", "compile": True}),
    "47": ("1b", 4096, 4, 1, {"precision": "fp8"}),
    "48": ("3b", 4096, 4, 1, {"fp8": "rowwise", "precision": "bf16", "recompute": "full", "compile": True}),
}


def run_of(name: str, device: str = "cuda") -> tuple[Any, Any, int, int]:
    """The run, its model, documents per row and micro-batches."""
    from shardwise.config.paths import place
    from shardwise.config.schema import Run
    from shardwise.nn.models.source import ModelSource, config_from

    model, length, micro, accumulation, settings = RUNS[name]
    settings = dict(settings)
    documents = settings.pop("documents", 1)
    values: dict[str, Any] = {
        "model": {"config": dict(MODELS[model]), "tokenizer": "none"},
        "data": {"train": "none", "sequence_length": length},
        "objective": "causal", "precision": "bf16", "device": device, "ranks": 1, "backend": "gloo",
        "train": {"batch_size": micro * accumulation, "micro_batch_size": micro, "steps": 10},
        "parallel": {"zero": 2}, "output": f"/tmp/foresight/{name}",
    }  # fmt: skip
    for key, value in settings.items():
        place(values, key.replace("__", "."), value)
    if values["objective"] != "causal":
        values["data"]["packing"] = False
    run = Run.model_validate(values)
    task = {"causal": "causal", "masked": "masked", "seq2seq": "seq2seq"}[values["objective"]]
    return run, ModelSource(model, config_from(dict(MODELS[model])), None, "none", task=task), documents, accumulation


def measure(name: str) -> dict[str, Any]:
    """One run on this machine's GPU."""
    import torch

    from shardwise.distributed.mesh import init_world
    from shardwise.foresight.rehearse.batch import step_batch
    from shardwise.foresight.rehearse.step import set_up, take_step

    run, source, documents, accumulation = run_of(name)
    world = init_world(run)
    parts, _ = set_up(source, run, world, None)
    for parameter in parts.sharded.parameters.values():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local.is_floating_point():
            local.detach().normal_(0, 0.02)
    for parameter in parts.sharded.model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if not parameter.requires_grad:
            local.detach().zero_() if not local.is_floating_point() else local.detach().normal_(0, 0.02)
    batch = step_batch(run, accumulation, documents)
    held = torch.cuda.memory_allocated()
    for _ in range(2):
        take_step(parts, batch)
    torch.cuda.synchronize()
    between = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    while len(times) < 3 or (len(times) < 9 and sum(times) < 1.5):
        begun = time.perf_counter()
        take_step(parts, batch)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return {
        "peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(), "held": held,
        "between": between, "seconds": sorted(times)[len(times) // 2], "times": times,
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
    }  # fmt: skip


def predict(name: str) -> dict[str, Any]:
    """The same, foreseen."""
    from shardwise.foresight.rehearse.ledger import replayed
    from shardwise.foresight.rehearse.step import rehearse

    run, source, documents, accumulation = run_of(name)
    found = rehearse(source, run, 0, 1, micro_batches=accumulation, documents=documents)
    work = [[*astuple(one), count] for one, count in found.tracker.work.items()]
    return {"peak": found.tracker.peak, "seconds_to_predict": found.seconds, "held": found.held, "work": work,
            "calls": dict(found.tracker.calls), "reserved": replayed(found.tracker).most_reserved,
            "handed": replayed(found.tracker).most_allocated}  # fmt: skip


def compare(file: Path, names: list[str]) -> None:
    """Prints what is foreseen from a few layers beside what was measured, and how far apart they are."""
    from functools import partial
    from statistics import median

    from shardwise.core.hardware.specs import cluster_of
    from shardwise.foresight.plan.estimate import estimate
    from shardwise.foresight.plan.sketch import sketch

    measured = {n: found["measured"] for n, found in json.loads(file.read_text()).items() if "measured" in found}
    errors: dict[str, tuple[float, float]] = {}
    for name in names or sorted(measured):
        run, source, documents, _ = run_of(name)
        found = estimate(source, run, cluster_of("h200", 1, 1), partial(sketch, documents=documents))
        real = measured[name]
        errors[name] = found.peak / real["peak"] - 1, found.time.seconds / real["seconds"] - 1
        print(f"{name} {RUNS[name]!s:100.100} {real['peak'] / 2**30:7.2f} GiB {errors[name][0]:+7.2%} "
              f"{1e3 * real['seconds']:7.0f} ms {errors[name][1]:+6.1%}", flush=True)  # fmt: skip
    for kind, chosen in (("odd", 1), ("even", 0)):
        for number, what in enumerate(("memory", "time")):
            sizes = sorted(abs(e[number]) for name, e in errors.items() if int(name) % 2 == chosen)
            if sizes:
                print(f"{kind} {what}: median {median(sizes):.2%}, worst {sizes[-1]:.2%}")


def main() -> None:
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asked otherwise, CUDA does not outlive a fork
    what, file, *rest = sys.argv[1:]
    if what == "compare":
        return compare(Path(file), rest)
    kept = Path(file)
    results: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    names = [n for n in rest if not n.startswith("-")] or list(RUNS)
    key = "measured" if what == "measure" else "predicted"

    import shardwise.foresight.rehearse.step  # noqa: F401  imported once: each run is forked, and has the machine to itself

    for name in names:
        found = _forked(predict if what == "predict" else measure, name)
        results.setdefault(name, {})[key] = found
        kept.write_text(json.dumps(dict(sorted(results.items())), indent=1))
        told = {k: v for k, v in found.items() if k in ("peak", "reserved", "seconds", "times", "error")}
        print(name, RUNS[name], told, flush=True)


def _forked(function: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def call() -> None:
        try:
            theirs.send(function(name))
        except Exception as error:
            theirs.send({"error": repr(error)})

    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    theirs.close()
    try:
        return ours.recv()  # type: ignore[no-any-return]
    except EOFError:
        return {"error": "it ended without a word"}
    finally:
        process.join()


if __name__ == "__main__":
    main()
