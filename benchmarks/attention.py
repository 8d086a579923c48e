"""Tokens per second and memory of a training step (forward and backward) on documents of several lengths, three ways.

    python benchmarks/attention.py [--rows 2] [--width 8192] [--models 135m,1b] [--repeats 10]

varlen: packed rows, told where documents begin (attention: auto). mask: packed rows, kept apart by transformers' mask
of the whole row (attention: plain). padded: the same documents one per row, sorted by length so that as little as
possible is padding, in batches of as many tokens. Tokens are the documents' own, never padding. One line of JSON per
case; the losses of the three agree up to rounding, and `apart` says by how much.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.data.documents import Documents
from shardwise.nn.attention.document_mask import RowsMask
from shardwise.nn.attention.varlen import fast_attention, install

MODELS = {
    "tiny": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=512),
    "135m": dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                 num_key_value_heads=3, vocab_size=49152),
    "1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
               num_key_value_heads=8, vocab_size=32768),
}  # fmt: skip
# Length of a document as a share of the row, by a uniform number; real mixes are skewed like the second.
MIXES: dict[str, Callable[[random.Random], float]] = {
    "short (1/64 of a row)": lambda rng: rng.uniform(0.5, 1.5) / 64,
    "skewed (median 1/32)": lambda rng: min(1.0, rng.lognormvariate(0, 1.0) / 32),
    "half rows": lambda rng: rng.uniform(0.25, 0.75),
    "whole rows": lambda rng: 1.0,
}
WAYS = ("varlen", "mask", "padded")


@dataclass
class Batch:
    """One forward: what the model is given, and what it should predict."""

    inputs: dict[str, Any]
    labels: torch.Tensor


def layout(mix: str, rows: int, width: int) -> list[list[int]]:
    """Lengths of documents that fill each row exactly."""
    rng = random.Random(0)
    filled = []
    for _ in range(rows):
        lengths: list[int] = []
        while (room := width - sum(lengths)) > 0:
            lengths.append(min(room, max(2, round(MIXES[mix](rng) * width))))
        filled.append(lengths)
    return filled


def labels_of(documents: list[torch.Tensor], width: int) -> list[torch.Tensor]:
    """What each token of a document predicts, filled up to a width."""
    return [F.pad(d[1:], (0, width - len(d) + 1), value=-100) for d in documents]


def batches(way: str, lengths: list[list[int]], words: int, device: torch.device) -> list[Batch]:
    """The documents as one way of training lays them out."""
    layout_ = Documents.of_lengths(lengths)
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(0, words, (layout_.rows, layout_.width), generator=made)
    pieces = list(ids.flatten().split(layout_.lengths))
    if way != "padded":
        labels = torch.cat([F.pad(d[1:], (0, 1), value=-100) for d in pieces]).view_as(ids)
        inputs: dict[str, Any] = {"input_ids": ids.to(device), "position_ids": layout_.positions.to(device)}
        if way == "varlen":
            inputs["attention_mask"] = RowsMask(layout_.to(device))
        return [Batch(inputs, labels.to(device))]
    pieces.sort(key=len, reverse=True)
    found = []
    while pieces:
        width = len(pieces[0])
        some, pieces = pieces[: ids.numel() // width], pieces[ids.numel() // width :]
        rows = torch.stack([F.pad(d, (0, width - len(d))) for d in some])
        real = torch.stack([F.pad(torch.ones_like(d), (0, width - len(d))) for d in some])
        labels = torch.stack(labels_of(some, width))
        found.append(Batch({"input_ids": rows.to(device), "attention_mask": real.to(device)}, labels.to(device)))
    return found


def step(model: Any, work: list[Batch], device: torch.device) -> torch.Tensor:
    """Summed loss, with the gradients computed and thrown away."""
    total = torch.zeros((), device=device)
    for batch in work:
        with fast_attention(device):
            logits = model(**batch.inputs, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten(), reduction="sum")
            loss.backward()
        total += loss.detach()
    model.zero_grad()
    return total


def measure(model: Any, work: list[Batch], device: torch.device, repeats: int) -> tuple[float, float, float | None]:
    """Loss, median seconds of a step, and the most GiB on the device (none on a CPU)."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    loss = float(step(model, work, device))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        step(model, work, device)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    return loss, sorted(times)[len(times) // 2], peak


def cases(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name in args.models.split(","):
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", **MODELS[name], max_position_embeddings=args.width)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
        assert install(model)
        for mix in MIXES:
            lengths = layout(mix, args.rows, args.width)
            count = sum(map(len, lengths))
            losses: dict[str, float] = {}
            for way in WAYS:
                case = {"model": name, "mix": mix, "way": way, "rows": args.rows, "width": args.width}
                case |= {"documents": count, "tokens": args.rows * args.width}
                try:
                    work = batches(way, lengths, config.vocab_size, device)
                    losses[way], seconds, peak = measure(model, work, device, args.repeats)
                except torch.OutOfMemoryError:
                    model.zero_grad()
                    yield case | {"error": "out of memory"}
                    continue
                case |= {"ms": round(seconds * 1e3, 2), "tokens_per_s": round(args.rows * args.width / seconds)}
                case |= {"peak_gib": peak and round(peak, 2), "loss": losses[way] / args.rows / args.width}
                yield case | {"apart": abs(losses[way] - losses.get("varlen", losses[way])) / losses[way]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2, help="rows of a batch")
    parser.add_argument("--width", type=int, default=8192, help="tokens of a row")
    parser.add_argument("--models", default="135m,1b", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps per case")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    for case in cases(args, device):
        print(json.dumps({"device": name, "torch": torch.__version__} | case), flush=True)


if __name__ == "__main__":
    main()
