"""Real commands on NCCL: every axis, schedule and ZeRO stage, alone and together, each equal to one rank.

    PYTHONPATH=src:tests python -m gpu.matrix OUT.json [--rows PATTERN] [--rounds 1] [--limit 500]

NCCL 2.30 and newer lets several ranks share one card when NCCL_MULTI_RANK_GPU_ENABLE=1 is set: this shows what is right
and what hangs, as on a cluster, but nothing of speed. Rows run side by side, largest first; a row that does not end in
time counts as hanging. The exit code is the number of rows that are not right.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.cli import losses, write_run
from support.families import config_of
from support.tiny import tiny_run, tokenizer_folder

BOUNDS = {"bf16": 5e-4, "fp32": 1e-5, "fp8": 1e-2}
ROW_SECONDS = 200.0  # a row takes 40 to 90 s beside others, nearly all of it imports


@dataclass(frozen=True)
class Row:
    """A run beside the same run on one rank; `both` are settings of both."""

    name: str
    family: str
    ranks: int
    settings: dict[str, Any]
    precision: str = "bf16"
    both: dict[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """The name of the run on one rank."""
        words = [self.family, self.precision, *(f"{key}-{value}" for key, value in self.both.items())]
        return re.sub(r"[^\w-]+", "_", "one-" + "-".join(words))


def row(name: str, family: str, ranks: int, settings: str = "", both: str = "", precision: str = "bf16") -> Row:
    return Row(name, family, ranks, _read(settings), precision, _read(both))


def _read(words: str) -> dict[str, Any]:
    """`parallel.zero=3 compile=true` as values."""
    values = {}
    for word in words.split():
        key, _, value = word.partition("=")
        values[key.replace(".", "__")] = json.loads(value) if re.match(r"[\d{\[]|true|false|null", value) else value
    return values


def _axes(**sizes: Any) -> str:
    return " ".join(f"parallel.{name}={size}" for name, size in sizes.items())


LORA = "method.type=lora method.rank=8"
QLORA = "method.type=qlora method.rank=8"
ROWS = [
    *(row(f"zero {stage}", "llama", 2, _axes(zero=stage)) for stage in (0, 1, 2, 3)),
    row("zero 3 on 4, fp32", "llama", 4, _axes(zero=3), precision="fp32"),
    row("hybrid", "llama", 4, _axes(zero=3, dp_shard_size=2)),
    row("hpZ", "llama", 4, _axes(zero=3, hpz_size=2)),
    row("zero++", "llama", 4, _axes(zero=3, hpz_size=2, quantize_weights="true", quantize_gradients="true")),
    row("zero 3, optimizer on the host", "llama", 2, _axes(zero=3) + " offload.optimizer=cpu"),
    row("zero 3, all on the host", "llama", 2, _axes(zero=3) + " offload.optimizer=cpu offload.parameters=cpu"),
    row("zero 3, compiled", "llama", 2, _axes(zero=3) + " compile=true"),
    row("zero 3, recomputed", "qwen3", 2, _axes(zero=3) + " recompute=full"),
    row("zero 3, LoRA", "llama", 2, _axes(zero=3), both=LORA),
    row("zero 3, QLoRA", "llama", 2, _axes(zero=3), both=QLORA),
    row("zero 3, fp8", "llama", 2, _axes(zero=3), both="precision=fp8 fp8.min_features=16", precision="fp8"),
    row("tensor", "llama", 2, _axes(tensor=2)),
    row("tensor, fp32", "llama", 2, _axes(tensor=2), precision="fp32"),
    row("tensor 4", "llama", 4, _axes(tensor=4)),
    row("tensor, GPT-2", "gpt2", 2, _axes(tensor=2)),
    row("tensor, Mixtral", "mixtral", 2, _axes(tensor=2)),
    row("tensor, Qwen3", "qwen3", 2, _axes(tensor=2)),
    row("tensor, Gemma 2", "gemma2", 2, _axes(tensor=2)),
    row("tensor, Phi-3", "phi3", 2, _axes(tensor=2)),
    row("tensor, recomputed", "llama", 2, _axes(tensor=2) + " recompute=full"),
    row("tensor, compiled", "llama", 2, _axes(tensor=2) + " compile=true"),
    row("tensor, LoRA", "llama", 2, _axes(tensor=2), both=LORA),
    row("tensor x zero 3", "qwen3", 4, _axes(tensor=2, zero=3)),
    row("tensor x zero 1, compiled", "llama", 4, _axes(tensor=2, zero=1) + " compile=true"),
    row("ring", "llama", 2, _axes(context=2)),
    row("ring, fp32", "llama", 2, _axes(context=2), precision="fp32"),
    row("ring x zero 3", "qwen3", 4, _axes(context=2, zero=3)),
    row("ulysses", "llama", 2, _axes(context=2, context_kind="ulysses")),
    row("ulysses, compiled", "llama", 2, _axes(context=2, context_kind="ulysses") + " compile=true"),
    row("ring x tensor", "llama", 4, _axes(context=2, tensor=2)),
    row("gpipe", "llama", 2, _axes(pipeline=2, pipeline_schedule="gpipe")),
    row("1f1b", "llama", 2, _axes(pipeline=2)),
    row("1f1b, fp32", "llama", 2, _axes(pipeline=2), precision="fp32"),
    row("1f1b on 4", "llama", 4, _axes(pipeline=4)),
    row("1f1b, GPT-2, tied", "gpt2", 2, _axes(pipeline=2)),
    row("1f1b, compiled", "llama", 2, _axes(pipeline=2) + " compile=true"),
    row("1f1b, recomputed", "llama", 2, _axes(pipeline=2) + " recompute=full"),
    row("1f1b, LoRA", "llama", 2, _axes(pipeline=2), both=LORA),
    row("interleaved", "llama", 2, _axes(pipeline=2, pipeline_schedule="interleaved")),
    row("1f1b x zero 2", "llama", 4, _axes(pipeline=2, zero=2)),
    row("1f1b x zero 3", "llama", 4, _axes(pipeline=2, zero=3)),
    row("1f1b x tensor", "gpt2", 4, _axes(pipeline=2, tensor=2)),
    row("1f1b x ring", "llama", 4, _axes(pipeline=2, context=2)),
    row("expert", "mixtral", 2, _axes(expert=2)),
    row("expert, Qwen3-MoE, zero 3", "qwen3_moe", 4, _axes(expert=2, zero=3)),
    row("expert x tensor", "mixtral", 4, _axes(expert=2, tensor=2)),
    row("expert x 1f1b", "mixtral", 4, _axes(expert=2, pipeline=2)),
    row("all five", "mixtral", 8, _axes(tensor=2, context=2, pipeline=2, expert=2, zero=1)),
]


class Running:
    """One command under way."""

    def __init__(self, name: str, ranks: int, file: Path) -> None:
        self.name = name
        self.ranks = ranks
        self.output = file.parent
        self.log = (file.parent / "terminal.txt").open("w")
        command = [sys.executable, "-m", "shardwise", "train", str(file)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True)
        self.begin = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def ended(self) -> bool:
        if self.process.poll() is None and self.seconds > ROW_SECONDS:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        return self.process.poll() is not None

    def result(self) -> dict[str, Any]:
        """Its losses, or what went wrong."""
        self.log.close()
        text = (self.output / "terminal.txt").read_text(errors="replace")
        if self.process.returncode == 0:
            return {"losses": list(losses(self.output / "out").values()), "seconds": self.seconds}
        problem = "hangs" if self.seconds > ROW_SECONDS else f"exit {self.process.returncode}"
        return {"problem": problem, "seconds": self.seconds, "text": text[-3000:]}


def prepare(folder: Path, name: str, family: str, ranks: int, precision: str, settings: dict[str, Any]) -> Path:
    """RUN.yaml of a run: 8 steps of 8 rows of 160 tokens."""
    own = folder / re.sub(r"[^\w-]+", "_", name)
    layers = {"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}
    model = {"config": config_of(family) | layers, "tokenizer": tokenizer_folder(folder / "tokenizer")}
    run = tiny_run(
        own, model, device="cuda", backend="nccl", ranks=ranks, precision="bf16" if precision == "fp8" else precision,
        train__steps=8, train__batch_size=8, train__learning_rate=1e-3, data__sequence_length=160,
        data__over_length="drop", timeout="60s", **settings,
    )  # fmt: skip
    return write_run(own, run)


def run_all(rows: list[Row], folder: Path, processes: int, until: float) -> dict[str, dict[str, Any]]:
    """Results by name, of the rows and of the runs on one rank that they are compared with."""
    wanted: dict[str, tuple[str, int, str, dict[str, Any]]] = {}
    for r in rows:
        wanted[r.base] = (r.family, 1, r.precision, r.both)
        wanted[r.name] = (r.family, r.ranks, r.precision, {**r.both, **r.settings})
    waiting = sorted(wanted, key=lambda name: -wanted[name][1])
    running: list[Running] = []
    results: dict[str, dict[str, Any]] = {}
    while waiting or running:
        for command in [c for c in running if c.ended()]:
            running.remove(command)
            results[command.name] = command.result()
            print(f"{command.seconds:5.0f} s  {command.name}", flush=True)
        room = processes - sum(1 + command.ranks for command in running)
        name = next((n for n in waiting if 1 + wanted[n][1] <= room), None)
        if name is not None and time.monotonic() < until:
            waiting.remove(name)
            family, ranks, precision, settings = wanted[name]
            file = prepare(folder, name, family, ranks, precision, settings)
            running.append(Running(name, ranks, file))
        elif waiting and time.monotonic() >= until:
            waiting.clear()
        else:
            time.sleep(0.3)
    return results


def judge(rows: list[Row], results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A line of the table for each row."""
    table = []
    for r in rows:
        own = results.get(r.name, {"problem": "not run"})
        base = results.get(r.base, {"problem": "not run"})
        line: dict[str, Any] = {"row": r.name, "family": r.family, "ranks": r.ranks, "precision": r.precision}
        if "problem" in own or "problem" in base:
            bad = own if "problem" in own else base
            line |= {"verdict": bad["problem"], "text": bad.get("text", "")}
        else:
            apart = max(abs(a - b) for a, b in zip(own["losses"], base["losses"], strict=True))
            right = apart <= BOUNDS[r.precision]
            line |= {"verdict": "right" if right else "WRONG", "apart": apart, "seconds": own["seconds"]}
        table.append(line)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", default="", help="only rows whose name matches")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limit", type=float, default=500.0, help="seconds after which nothing more is started")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="ranks and launchers at a time")
    options = parser.parse_args()
    rows = [r for r in ROWS if re.search(options.rows, r.name)]
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("NCCL_MAX_CTAS", "2")  # dozens of communicators share the card
    os.environ.setdefault("NCCL_BUFFSIZE", str(1 << 20))
    until = time.monotonic() + options.limit
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(judge(rows, run_all(rows, Path(folder), options.processes, until)))
        options.out.write_text(json.dumps(rounds, indent=1))
    for lines in zip(*rounds, strict=True):
        cells = [f"{x['apart']:.1e}" if "apart" in x else x["verdict"] for x in lines]
        print(f"{lines[0]['row']:34} {lines[0]['family']:10} {lines[0]['ranks']}  {'  '.join(cells)}")
        for line in lines:
            if "apart" not in line and line["text"]:
                print("    " + line["text"][-500:].strip().replace("\n", "\n    "))
    return sum(any(x["verdict"] != "right" for x in lines) for lines in zip(*rounds, strict=True))


if __name__ == "__main__":
    sys.exit(min(100, main()))
