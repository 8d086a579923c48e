"""Predicted against published throughput of other systems, on hardware that is not here.

    python benchmarks/published.py

torchtitan's figures (its `benchmarks/llama3_h100_202412_torchtitan.md`) are of H100s with 96 GB of HBM2e at 2.4 TB/s
and a limit of 500 W, whose rate is not published: the share of the peak that their matmuls reach is set by the first
row and kept for the others. What those runs do and Shardwise does not (selective recomputation, 8-bit linear layers,
compiling beside tensor parallelism) is put into the estimate by hand, as each row says.

Megatron's (Narayanan et al. 2021, table 1) are of A100s with 80 GB, in fp16 with everything recomputed, as TFLOP/s and
device by the paper's own count of the arithmetic. Its kernels are fused, but attention is not the flash kernel's.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.config.schema import Model, Run
from shardwise.core.hardware.specs import Attention, Cluster, cluster_of
from shardwise.foresight.plan.estimate import Estimate, estimate
from shardwise.foresight.plan.models import find_config
from shardwise.foresight.plan.sketch import Sketched, sketch

POWER = 0.56  # of the peak, with 500 W: set by the first row


@dataclass(frozen=True)
class Row:
    what: str
    model: str
    nodes: int
    batch: int
    micro: int
    published: float  # tokens/s and device
    length: int = 8192
    recompute: float = 0.0  # share of the forward that is done again
    fp8: bool = False
    compiled: bool = False
    hidden_tensor: float = 0.0  # share of tensor parallel's communication that is hidden (AsyncTP)
    parallel: dict[str, Any] = field(default_factory=lambda: {"zero": 3})
    gpu: str = "titan"
    config: dict[str, Any] | None = None  # instead of a name
    passes: int = 0  # over the attention scores, forward, again and backward, where no flash kernel is used


ROWS = [
    Row("torchtitan 8B, FSDP, selective", "llama-3.1-8b", 1, 16, 2, 5762, recompute=0.5),
    Row("  + compile", "llama-3.1-8b", 1, 16, 2, 6667, recompute=0.5, compiled=True),
    Row("  + fp8", "llama-3.1-8b", 1, 16, 2, 8532, recompute=0.5, compiled=True, fp8=True),
    Row("torchtitan 8B on 128", "llama-3.1-8b", 16, 256, 2, 5605, recompute=0.5),
    Row("  + compile", "llama-3.1-8b", 16, 256, 2, 6514, recompute=0.5, compiled=True),
    Row("  + fp8", "llama-3.1-8b", 16, 256, 2, 8380, recompute=0.5, compiled=True, fp8=True),
    Row("torchtitan 70B on 256, TP 8, fp8, full", "llama-3.1-70b", 32, 512, 16, 829, recompute=1, compiled=True,
        fp8=True, parallel={"zero": 3, "tensor": 8}),
    Row("  + AsyncTP", "llama-3.1-70b", 32, 512, 16, 876, recompute=1, compiled=True, fp8=True,
        parallel={"zero": 3, "tensor": 8}, hidden_tensor=0.2),
    Row("torchtitan 405B on 512, TP 8 × PP 8, fp8, 1F1B", "llama-3.1-405b", 64, 256, 4, 100, recompute=1, compiled=True,
        fp8=True, parallel={"zero": 2, "tensor": 8, "pipeline": 8}, hidden_tensor=0.2),
    Row("  interleaved", "llama-3.1-405b", 64, 256, 4, 128, recompute=1, compiled=True, fp8=True,
        parallel={"zero": 2, "tensor": 8, "pipeline": 8, "pipeline_schedule": "interleaved"}, hidden_tensor=0.2),
]  # fmt: skip


def gpt(
    billions: float, hidden: int, layers: int, heads: int, tensor: int, pipeline: int, ranks: int, batch: int,
    micro: int, published: float,
) -> Row:  # fmt: skip
    """A row of Megatron's table."""
    config = {"model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 2048,
              "vocab_size": 51200}  # fmt: skip
    parallel = {"zero": 1, "tensor": tensor, "pipeline": pipeline}
    if pipeline > 2:
        parallel["schedule"] = "interleaved"  # type: ignore[assignment]
    return Row(
        f"Megatron {billions}B on {ranks}, TP {tensor} × PP {pipeline}", f"gpt-{billions}b", ranks // 8, batch, micro,
        published, 2048, recompute=1, compiled=True, parallel=parallel, gpu="a100", config=config, passes=22,
    )  # fmt: skip


ROWS += [
    gpt(1.7, 2304, 24, 24, 1, 1, 32, 512, 8, 137),
    gpt(7.5, 4096, 36, 32, 4, 1, 128, 512, 8, 142),
    gpt(18.4, 6144, 40, 48, 8, 1, 256, 1024, 8, 135),
    gpt(39.1, 8192, 48, 64, 8, 2, 512, 1536, 4, 138),
    gpt(76.1, 10240, 60, 80, 8, 4, 1024, 1792, 2, 140),
    gpt(145.6, 12288, 80, 96, 8, 8, 1536, 2304, 2, 148),
    gpt(310.1, 16384, 96, 128, 8, 16, 1920, 2160, 1, 155),
]


def megatron_flops(row: Row) -> float:
    """A step's, as the paper counts them: with the second forward."""
    assert row.config is not None
    hidden, layers, vocabulary = row.config["n_embd"], row.config["n_layer"], row.config["vocab_size"]
    ends = 1 + row.length / (6 * hidden) + vocabulary / (16 * layers * hidden)
    return float(96 * row.batch * row.length * layers * hidden**2 * ends)


_KEPT: dict[str, Sketched] = {}


def predicted(row: Row) -> tuple[float, Estimate]:
    """Tokens/s and device, and what they come from."""
    ranks = row.nodes * 8
    values: dict[str, Any] = {
        "model": {"name": row.model}, "data": {"train": "none", "sequence_length": row.length}, "objective": "causal",
        "precision": "bf16", "device": "cuda", "ranks": ranks, "backend": "nccl", "parallel": row.parallel,
        "train": {"batch_size": row.batch, "micro_batch_size": row.micro, "steps": 1},
        "recompute": "full" if row.recompute == 1 else "none",
    }  # fmt: skip
    if row.config is not None:
        values["model"] = {"config": row.config, "tokenizer": "none"}
        values["precision"] = "bf16"  # fp16 beside tensor parallelism is not there; the rates are the same
    source = find_config(Model.model_validate(values["model"]))

    def kept(source: Any, run: Run, ranks: int) -> Sketched:
        key = f"{row.model} {ranks} {row.recompute == 1} {row.micro} {run.parallel.zero}"
        if key not in _KEPT:
            _KEPT[key] = sketch(source, run.model_copy(update={"compile": False}), ranks)
        return _KEPT[key]

    run = Run.model_validate(values).model_copy(update={"compile": row.compiled})
    found = estimate(source, run, cluster_for(row), kept, row.fp8)
    seconds = found.time.seconds - row.hidden_tensor * found.time.model_axes
    if row.passes and row.config is not None:
        parallel, heads = found.run.parallel, row.config["n_head"]
        scores = 2 * heads // parallel.tensor * row.length**2 * row.micro  # bytes of one layer and micro-batch
        layers = row.config["n_layer"] / parallel.pipeline
        each = row.passes * scores / (found.cluster.device.bandwidth * found.cluster.device.stream) * layers
        seconds += each * (
            found.micro_batches + found.time.bubble / (found.time.seconds - found.time.bubble) * found.micro_batches
        )
    if 0 < row.recompute < 1:
        seconds += row.recompute * found.time.forward
    return found.tokens / seconds / ranks, found


def cluster_for(row: Row) -> Cluster:
    """The published machine."""
    if row.gpu != "titan":
        return cluster_of(row.gpu, row.nodes, 8)
    cluster = cluster_of("h100", row.nodes, 8)
    share = POWER / cluster.device.matmul
    attention = Attention(*(share * one for one in cluster.device.attention))
    return replace(cluster, device=replace(cluster.device, bandwidth=2.4e12, matmul=POWER, attention=attention))


def main() -> None:
    for row in ROWS:
        if len(sys.argv) > 1 and not any(word in row.what for word in sys.argv[1:]):
            continue
        rate, found = predicted(row)
        parts = ", ".join(f"{name} {spent:.2f}" for name, spent in found.time.parts().items() if spent > 0.005)
        if row.config is not None:
            rate *= megatron_flops(row) / found.tokens / 1e12
        off = 100 * (rate / row.published - 1)
        print(f"{row.what:48} {row.published:6.0f} → {rate:6.0f}  {off:+5.1f}%   {parts} s", flush=True)


if __name__ == "__main__":
    main()
