"""Tokens per second of full fine-tuning with the optimizer off the device: the real set-up, random weights.

    python benchmarks/offload.py 3b offload.optimizer=cpu train.max_grad_norm=null compile=true
    python benchmarks/offload.py 32b offload.optimizer=cpu offload.ratio=auto train.optimizer=adamw8bit \\
        train.max_grad_norm=null

Arguments after the size are settings of a run, as for `shardwise train`. Prints one line of JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch

SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, tied
    "tiny": (256, 512, 4, 4, 2, True),
    "1b": (2048, 8192, 16, 32, 8, True),
    "3b": (3072, 8192, 28, 24, 8, True),
    "8b": (4096, 14336, 32, 32, 8, False),
    "14b": (5120, 17408, 40, 40, 8, False),
    "32b": (5120, 25600, 64, 64, 8, False),
}
VOCABULARY = 128256


def config_of(size: str) -> dict[str, object]:
    """A Llama of this shape."""
    hidden, inner, layers, heads, kv_heads, tied = SHAPES[size]
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128 if hidden > 2048 else 64,
        "vocab_size": VOCABULARY, "max_position_embeddings": 8192, "tie_word_embeddings": tied,
    }  # fmt: skip


def tokenizer(folder: Path) -> str:
    """A tokenizer of single bytes: the benchmark needs ids, not words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<eos>"])}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>").save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def fill(parts_sharded: object) -> None:
    """Random weights made on the device: filling 32 billion on the host would take longer than the benchmark."""
    from shardwise.nn.models.weights import packing_of

    model = parts_sharded.model  # type: ignore[attr-defined]
    for name, parameter in model.named_parameters():
        data = getattr(parameter, "_local_tensor", parameter.data)  # stage 0 leaves some as they are
        if packing := packing_of(model, name):
            data.copy_(packing.pack(torch.empty(packing.shape, device=data.device).normal_(std=0.02)))
        elif name.endswith("lora_B"):
            data.zero_()
        else:
            data.fill_(1.0) if "norm" in name else data.normal_(std=0.02)


def main(size: str, settings: list[str]) -> None:
    """Times some steps after a warm-up."""
    import shardwise.config.resolve as resolve
    import shardwise.train.setup as setup
    from shardwise.config.load import load_run
    from shardwise.distributed.mesh import init_world
    from shardwise.foresight import prepare as jobs
    from shardwise.train.loop import accumulate
    from shardwise.train.status import Status

    tmp = Path(tempfile.mkdtemp())
    (tmp / "data.txt").write_text("".join(chr(97 + i * 7 % 26) for i in range(1_000_000)))
    run = {
        "model": {"config": config_of(size), "tokenizer": tokenizer(tmp / "tokenizer")},
        "data": {"train": str(tmp / "data.txt"), "sequence_length": 4096},
        "train": {"steps": 100, "batch_size": 4, "micro_batch_size": 4, "warmup": 0, "learning_rate": 1e-5},
        "parallel": {"zero": 3},
        "output": str(tmp / "out"),
        "resume": "never",
    }
    started = time.perf_counter()
    jobs.check_room = lambda *args: None  # nothing is saved
    resolve._check_method = lambda *args: None  # adapters of random weights are refused
    job = jobs.prepare_run(load_run(run, settings))
    world = init_world(job.run)
    setup.fill_model = lambda job, sharded, masters: fill(sharded)  # type: ignore[assignment]
    setup.check_model = lambda *args: None  # type: ignore[assignment]
    parts = setup.build_state(job, world, Status(None))
    train = job.run.train
    built = time.perf_counter() - started
    times, losses, host = [], [], []
    cuda = world.device.type == "cuda"
    warm, measured = (2, 3) if job.parameters > 10e9 else (3, 8)
    for step in range(warm + measured):
        if step == warm and cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        batch = parts.loader.step(step * train.batch_size, train.batch_size, int(train.micro_batch_size), 0, 1)
        losses.append(accumulate(parts, batch) / batch.supervised)
        middle = time.perf_counter()
        parts.update()
        host.append((middle - begin, time.perf_counter() - middle))
        times.append(begin)
        if step == warm - 1 and cuda:
            torch.cuda.synchronize()
    if cuda:
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - times[warm]
    tokens = measured * train.batch_size * job.run.data.sequence_length / elapsed
    gib = 2**30
    optimizer = parts.optimizer
    states = sum(r.buffer.numel() for p in getattr(optimizer, "pieces", []) for r in p.page.regions
               if r.buffer is not None and r.buffer.device.type == "cpu")  # fmt: skip
    print(json.dumps({
        "size": size, "settings": settings, "parameters": job.parameters, "tokens_per_second": round(tokens),
        "seconds_per_step": round(elapsed / measured, 3),
        "mfu": round(tokens * parts.meter._flops_per_token / 989e12, 4) if cuda else None,
        "device_peak_gib": round(torch.cuda.max_memory_allocated() / gib, 1) if cuda else None,
        "device_reserved_gib": round(torch.cuda.max_memory_reserved() / gib, 1) if cuda else None,
        "host_state_gib": round(states / gib, 1), "host_bytes_per_parameter": round(states / job.parameters, 2),
        "host_seconds": [round(sum(h[i] for h in host[warm:]) / measured, 3) for i in (0, 1)],
        "host_peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
        "losses": [round(float(x), 3) for x in losses[::5]], "build_seconds": round(built, 1),
    }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
