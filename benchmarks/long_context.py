"""One step over a very long sequence on one GPU: LoRA over Llama 8B in fp8, its inputs on the host.

    python benchmarks/long_context.py OUT.json TOKENS [LAYERS] [GROUP] [ON_HOST] [--keep-attention]

The inputs of the first ON_HOST blocks are sent to the host, all of them unless told; with --keep-attention so is what
their attention made, which is not computed again then (needs all LAYERS).
With fewer LAYERS than the model's 32, memory is taken for what the others would hold, on the device (their weights,
and of a group of GROUP recomputed blocks as many inputs as LAYERS lack) and on the host (the inputs that are kept), so
that what fits is what would fit whole. Prints seconds, peaks, and bytes per token; the parts of the step as they pass.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

LAYERS, WIDTH, BLOCK = 32, 4096, 218_112_000  # bytes of a block in fp8
LLAMA = {"model_type": "llama", "max_position_embeddings": 1 << 21, "vocab_size": 128256, "num_key_value_heads": 8,
         "num_attention_heads": 32, "hidden_size": WIDTH, "intermediate_size": 14336,
         "tie_word_embeddings": False}  # fmt: skip


def settings(tokens: int, layers: int, group: int, on_host: int, keep: bool) -> dict[str, Any]:
    more: dict[str, Any] = {} if group == 1 else {"recompute_group": group}
    return more | {
        "recompute_attention": not keep,
        "model": {"config": LLAMA | {"num_hidden_layers": layers}, "tokenizer": "none"},
        "data": {"train": "none", "sequence_length": tokens}, "objective": "causal", "precision": "bf16",
        "device": "cuda", "ranks": 1, "backend": "gloo", "compile": True, "tiled_mlp": 16384, "recompute": "full",
        "method": {"type": "qlora", "bits": "fp8"}, "parallel": {"zero": 2},
        "offload": {"activations": "cpu"} | ({"activation_blocks": on_host} if on_host < layers else {}),
        "train": {"batch_size": 1, "micro_batch_size": 1, "steps": 2, "max_grad_norm": None, "master_weights": "split"},
        "output": "long-context",
    }  # fmt: skip


def main() -> None:
    keep = "--keep-attention" in sys.argv
    words = [word for word in sys.argv[2:] if word != "--keep-attention"]
    if not 1 <= len(words) <= 4 or not all(word.isdigit() for word in words):
        raise SystemExit(__doc__)
    given = [int(word) for word in words]
    out, (tokens, layers, group, on_host) = sys.argv[1], [*given, *(0, LAYERS, 1, LAYERS)[len(given) :]]
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device")

    from shardwise.config.schema import Run
    from shardwise.distributed.mesh import init_world
    from shardwise.foresight.bench.train import give_values
    from shardwise.foresight.rehearse.batch import step_batch
    from shardwise.foresight.rehearse.step import set_up, take_step
    from shardwise.nn.models.build import find_blocks
    from shardwise.nn.models.source import ModelSource, config_from

    begun = time.perf_counter()

    def say(text: str) -> None:
        gib = torch.cuda.max_memory_allocated() / 2**30
        print(f"{time.perf_counter() - begun:7.1f} s {text}, {gib:.1f} GiB at most", flush=True)

    one, groups = tokens * WIDTH * 2, -(-LAYERS // group)
    beside: list[Any] = []
    if layers < LAYERS and not keep:
        missing = (LAYERS - layers) * BLOCK + max(0, group - layers) * one
        beside.append(torch.empty(missing, dtype=torch.uint8, device="cuda"))
        kept = groups * one - -(-layers // group) * one
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if kept + one > 0.9 * free:
            raise SystemExit(f"the host has {free / 2**30:.0f} GiB free, of which inputs would take {kept / 2**30:.0f}")
        beside.append(torch.ones(kept, dtype=torch.uint8))
        say(f"{missing / 2**30:.1f} GiB taken on the device and {kept / 2**30:.1f} on the host for other layers")
    run = Run.model_validate(settings(tokens, layers, group, on_host, keep))
    config = dict(run.model.config or {})
    source = ModelSource("llama", config_from(config), None, "none", task="causal")
    parts, _ = set_up(source, run, init_world(run), None)
    give_values(parts.sharded.model)
    for number, (_, block) in enumerate(find_blocks(parts.sharded.model)):
        block.register_forward_hook(lambda *_, number=number: (torch.cuda.synchronize(), say(f"block {number}"))[0])
    batch = step_batch(run, 1)
    torch.manual_seed(0)
    for micro in batch.micro_batches:
        micro.input_ids.random_(0, 128000)
        micro.labels.random_(0, 128000)
    say("set up")
    torch.cuda.synchronize()
    start = time.perf_counter()
    take_step(parts, batch)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    finite = all(bool(p.isfinite().all()) for p in parts.sharded.model.parameters() if p.requires_grad)
    peak = torch.cuda.max_memory_allocated()
    told = {
        "tokens": tokens, "layers": layers, "group": group, "on_host": on_host, "kept_attention": keep,
        "seconds": seconds, "finite": finite, "gib": peak / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "bytes_per_token": peak / tokens,
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    say(f"step of {seconds:.1f} s")
    print("RESULT " + json.dumps(told), flush=True)
    file = Path(out)
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(found | {f"{tokens} × {layers}{', attention kept' * keep}": told}, indent=1))


if __name__ == "__main__":
    main()
