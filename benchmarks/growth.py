"""How time and memory of a step grow with the length of a sequence and the size of a model.

    python benchmarks/growth.py measure OUT.json [lengths|sizes]     on the machine with the GPU
    python benchmarks/growth.py memory OUT.json                      the same for points that lack it, by two steps each
    python benchmarks/growth.py plot OUT.json OUT.svg                beside what the planner foresees

Lengths: Llama 1B, full, recomputed, one sequence of 1K to 128K tokens. Sizes: 0.1B to 32B, LoRA over a base in fp8, two
sequences of 4,096. Each point has its median step. The formula is arithmetic over one rate for all points
of a row, the median of theirs: 6 FLOP per parameter and token (4 where it is frozen), a forward more where blocks are
recomputed, and 2 × layers × width × length more for a forward's attention.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

COMMON = {"max_position_embeddings": 1 << 20, "num_key_value_heads": 8, "vocab_size": 128256, "model_type": "llama",
          "tie_word_embeddings": True, "head_dim": 128, "architectures": ["LlamaForCausalLM"]}  # fmt: skip
# Name: width, feed-forward width, layers, heads.
SHAPES = {
    "0.1B": (768, 2048, 6, 8), "0.4B": (1024, 4096, 16, 8), "1B": (2048, 8192, 16, 16), "3B": (3072, 8192, 28, 24),
    "8B": (4096, 14336, 32, 32), "14B": (5120, 13824, 48, 40), "32B": (5120, 27648, 64, 40),
}  # fmt: skip
TITLES = {"lengths": "Llama 1B, full, by tokens", "sizes": "LoRA over fp8, 2 × 4,096 tokens, by parameters"}
LENGTHS = [1024 << n for n in range(8)]
RUN: dict[str, Any] = {
    "data": {"train": "none"}, "objective": "causal", "precision": "bf16", "compile": True, "ranks": 1,
    "train": {"max_grad_norm": None, "steps": 10}, "output": "growth",
}  # fmt: skip


def shape_of(name: str) -> dict[str, Any]:
    width, inner, layers, heads = SHAPES[name]
    return COMMON | {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
                     "num_attention_heads": heads}  # fmt: skip


def points(row: str) -> list[tuple[str, int, dict[str, Any]]]:
    """Model, length and settings of each."""
    if row == "lengths":
        more = {"recompute": "full", "train": RUN["train"] | {"batch_size": 1, "micro_batch_size": 1}}
        return [("1B", length, more) for length in LENGTHS]
    more = {"method": {"type": "qlora", "bits": "fp8"}, "recompute": "light",
            "train": RUN["train"] | {"batch_size": 2, "micro_batch_size": 2}}  # fmt: skip
    return [(name, 4096, more) for name in SHAPES]


def resolved(name: str, length: int, more: dict[str, Any]) -> dict[str, Any]:
    """A run with what it would find by itself on one GPU; nothing reads weights here."""
    values = RUN | more | {"model": {"config": shape_of(name), "tokenizer": "none"}}
    own = {"device": "cuda", "backend": "gloo", "parallel": {"zero": 2}}
    return values | own | {"train": values["train"] | {"master_weights": "split"},
                           "data": RUN["data"] | {"sequence_length": length}}  # fmt: skip


def measure(out: Path, rows: list[str], timed: bool = True) -> None:
    """All in one process, each point compiled for itself; not `timed`: memory alone, where that is not known."""
    import torch

    found = json.loads(out.read_text()) if out.exists() else {}
    world: Any = None
    for row in rows:
        for name, length, more in points(row):
            known = found.setdefault(row, {}).get(f"{name} {length}", {})
            if not timed and "memory" in known:
                continue
            begun = time.perf_counter()
            torch._dynamo.reset()
            gc.collect()  # compiled code held the last point's weights
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            world, seconds = steps_of(name, length, more, world, 7 if timed else 2)
            kept = known if not timed else {
                "seconds": seconds, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
                "date": time.strftime("%Y-%m-%d"),
            }  # fmt: skip
            kept["memory"] = torch.cuda.max_memory_allocated()
            found[row][f"{name} {length}"] = kept
            out.write_text(json.dumps(found, indent=1))
            took = time.perf_counter() - begun
            print(row, name, length, kept.get("seconds"), kept["memory"], f"{took:.0f} s", flush=True)


def steps_of(name: str, length: int, more: dict[str, Any], world: Any, steps: int) -> tuple[Any, float]:
    """The median of some steps, after two to warm up (with no more than two: their median)."""
    import torch

    from shardwise.config.schema import Run
    from shardwise.distributed.mesh import init_world
    from shardwise.foresight.bench.train import give_values
    from shardwise.foresight.rehearse.batch import step_batch
    from shardwise.foresight.rehearse.step import set_up, take_step
    from shardwise.nn.models.source import ModelSource, config_from

    run = Run.model_validate(resolved(name, length, more))
    world = world or init_world(run)
    source = ModelSource(name, config_from(shape_of(name)), None, "none", task="causal")
    parts, _ = set_up(source, run, world, None)
    give_values(parts.sharded.model)
    batch, taken = step_batch(run, 1), []
    for micro in batch.micro_batches:
        micro.input_ids.random_(0, 128000)
        micro.labels.random_(0, 128000)
    for number in range(steps):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        take_step(parts, batch)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
        if number > 3 and sum(taken[2:]) > 8:
            break
    return world, statistics.median(taken[2:] or taken)


def arithmetic(name: str, length: int, row: str) -> float:
    """FLOP of a step."""
    width, inner, layers, heads = SHAPES[name]
    block = width * 128 * (2 * heads + 2 * 8) + 3 * width * inner
    tokens, head = length * (1 if row == "lengths" else 2), COMMON["vocab_size"] * width
    passes = 4 if row == "lengths" else 2  # forwards' worth: again and two for backward, or one for inputs alone
    attention = 2 * layers * heads * 128 * length * (4.5 if row == "lengths" else 3.5)
    return tokens * (2 * layers * block * passes + 2 * head * (3 if row == "lengths" else 2) + attention)


def foreseen(name: str, length: int, more: dict[str, Any]) -> tuple[float, float]:
    """Seconds and bytes by the planner."""
    from shardwise.config.schema import Run
    from shardwise.core.hardware.specs import cluster_of
    from shardwise.foresight.plan.estimate import estimate
    from shardwise.nn.models.source import ModelSource, config_from

    source = ModelSource(name, config_from(shape_of(name)), None, "none", task="causal")
    got = estimate(source, Run.model_validate(resolved(name, length, more)), cluster_of("h200", 1, 1))
    return got.time.seconds, got.peak


def plot(file: Path, out: Path) -> None:
    found, panels = json.loads(file.read_text()), []
    for row in found:
        measured = {k: v for k, v in found[row].items() if "seconds" in v}
        work = {k: arithmetic(k.split()[0], int(k.split()[1]), row) for k in measured}
        rate = statistics.median(work[k] / v["seconds"] for k, v in measured.items())
        lines: dict[str, dict[str, list[tuple[float, float]]]] = {"seconds": {}, "GiB": {}}
        for name, length, more in points(row):
            key = f"{name} {length}"
            if key not in measured:
                continue
            x = float(length) if row == "lengths" else float(name[:-1]) * 1e9
            seconds, peak = foreseen(name, length, more)
            held = measured[key].get("memory")
            for panel, kind, y in (
                ("seconds", "measured", measured[key]["seconds"]), ("seconds", "formula", work[key] / rate),
                ("seconds", "foreseen", seconds), ("GiB", "measured", held and held / 2**30),
                ("GiB", "foreseen", peak / 2**30),
            ):  # fmt: skip
                if y is not None:
                    lines[panel].setdefault(kind, []).append((x, y))
            print(f"{row} {key}: {measured[key]['seconds']:.3f} s, formula {work[key] / rate:.3f}, foreseen "
                  f"{seconds:.3f}; {(held or 0) / 2**30:.1f} GiB, foreseen {peak / 2**30:.1f}")  # fmt: skip
        panels += [(f"{TITLES[row]}: {panel}", kinds) for panel, kinds in lines.items()]
    out.write_text(drawing(panels))


def drawing(panels: list[tuple[str, dict[str, list[tuple[float, float]]]]], wide: int = 420, high: int = 300) -> str:
    """Log-log panels, two in a row, as SVG."""
    from math import log10

    colours = {"measured": "#1f6feb", "formula": "#8b949e", "foreseen": "#d29922"}
    parts = []
    for number, (title, kinds) in enumerate(panels):
        left, top = 60 + (number % 2) * (wide + 80), 40 + (number // 2) * (high + 80)
        every = [point for line in kinds.values() for point in line]
        low = [min(p[i] for p in every) for i in (0, 1)]
        most = [max(p[i] for p in every) for i in (0, 1)]
        span = [max(1e-9, log10(b) - log10(a)) for a, b in zip(low, most, strict=True)]

        def at(point: tuple[float, float], left: int = left, top: int = top, low: Any = low, span: Any = span) -> str:
            x, y = ((log10(v) - log10(a)) / s for v, a, s in zip(point, low, span, strict=True))
            return f"{left + x * wide:.1f},{top + (1 - y) * high:.1f}"

        parts.append(f'<text x="{left}" y="{top - 12}" font-weight="bold">{title}</text>')
        parts.append(f'<rect x="{left}" y="{top}" width="{wide}" height="{high}" fill="none" stroke="#8b949e"/>')
        marks = [digit * 10.0**power for power in range(-4, 4) for digit in (1, 2, 3, 5)]
        for mark in (one for one in marks if low[1] <= one <= most[1]):
            y = top + (1 - (log10(mark) - log10(low[1])) / span[1]) * high
            parts.append(f'<text x="{left - 8}" y="{y + 4:.0f}" text-anchor="end">{mark:g}</text>')
        for x in sorted({point[0] for point in every}):
            place, told = at((x, low[1])).split(",")[0], f"{x / 1e9:g}B" if x >= 1e8 else f"{x / 1024:g}K"
            parts.append(f'<text x="{place}" y="{top + high + 18}" text-anchor="middle">{told}</text>')
        for row, (kind, line) in enumerate(kinds.items()):
            path = " ".join(at(point) for point in line)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colours[kind]}" stroke-width="2"/>')
            parts.append(f'<text x="{left + 10}" y="{top + 20 + 16 * row}" fill="{colours[kind]}">{kind}</text>')
    size = f'width="{2 * wide + 180}" height="{(len(panels) + 1) // 2 * (high + 80) + 20}"'
    style = 'font-family="sans-serif" font-size="12" style="background:white"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    what, file, *rest = sys.argv[1:]
    if what in ("measure", "memory"):
        measure(Path(file), rest or ["lengths", "sizes"], what == "measure")
    else:
        plot(Path(file), Path(rest[0]))
