"""Head and loss beside Liger's fused linear cross-entropy: distance from fp64, memory, where each runs.

    pip install liger-kernel triton
    TRITON_INTERPRET=1 PYTHONPATH=src python benchmarks/decisions/head_loss.py OUT.json

Liger's kernels are Triton's: on a CPU they run in Triton's interpreter, which shows their numbers and not their speed.
Memory and CPU time are therefore of ours and of plain PyTorch (all logits at once), each in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

TOKENS, HIDDEN, VOCABULARY = 512, 64, 2048
LARGE = 1024, 576, 49152  # SmolLM2's head


def tensors(tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Hidden states, weight and labels, a tenth of which are ignored."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    weight = (torch.randn(vocabulary, hidden, generator=generator) * 0.1).to(dtype)
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.1] = -100
    return x.requires_grad_(), weight.requires_grad_(), labels


def ours(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from shardwise.objectives.head import _HeadLoss

    return _HeadLoss.apply(x, weight, None, labels, None).sum() / (labels != -100).sum()


def plain(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, weight)
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), labels)


def liger(accumulate: torch.dtype | None) -> Any:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return lambda x, weight, labels: liger_fused_linear_cross_entropy(x, weight, labels, accum_dtype=accumulate)


def exactness() -> dict[str, Any]:
    """Relative distance of loss and gradients from fp64 on the same inputs."""
    contestants = {"ours": ours, "plain": plain}
    try:
        contestants |= {"Liger": liger(None), "Liger, accum_dtype=fp32": liger(torch.float32)}
    except Exception as error:
        print("Liger does not import here:", error)
    results: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, labels = tensors(TOKENS, HIDDEN, VOCABULARY, dtype)
        exact = [t.detach().double().requires_grad_() for t in (x, weight)]
        loss = plain(*exact, labels)
        loss.backward()
        for name, compute in contestants.items():
            x.grad = weight.grad = None
            try:
                value = compute(x, weight, labels)
                value.backward()
            except Exception as error:
                results[f"{name}, {dtype}"] = f"{type(error).__name__}: {error}"[:300]
                continue
            results[f"{name}, {dtype}"] = {
                "loss": abs(value.item() - loss.item()) / loss.item(),
                "d hidden": far(x.grad, exact[0].grad),
                "d weight": far(weight.grad, exact[1].grad),
            }
    return results


def far(value: Any, exact: Any) -> float:
    return ((value.double() - exact).norm() / exact.norm()).item()


def cost(name: str) -> None:
    """CPU seconds and growth of the peak memory of one forward and backward."""
    import resource

    torch.set_num_threads(1)
    compute = {"ours": ours, "plain": plain}[name]
    small = tensors(8, 64, 512, torch.float32)
    compute(*small).backward()
    given = tensors(*LARGE, torch.float32)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    compute(*given).backward()
    seconds, after = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"cpu_s": round(seconds, 2), "more_MiB": (after - before) // 1024}))


def main() -> None:
    """Prints and writes all figures."""
    figures: dict[str, Any] = {"exactness": exactness()}
    print(json.dumps(figures, indent=1), flush=True)
    figures["cost"] = {name: [] for name in ("ours", "plain")}
    for _ in range(2):
        for name, rows in figures["cost"].items():
            command = [sys.executable, __file__, "--cost", name]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(json.dumps(figures["cost"]))
    Path(sys.argv[1]).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    if sys.argv[1] == "--cost":
        cost(sys.argv[2])
    else:
        main()
