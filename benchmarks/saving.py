"""What checkpoints in the background cost: two runs side by side, one of which saves.

    python benchmarks/saving.py OUT.json [--steps 80] [--every 20] [--tokens 4096] [--width 320]

Both are `shardwise train` of the same llama from scratch on this repository's texts, each bound to a core of its own,
and then once more with the cores changed, so that whatever else the machine does falls on both. The run's own threads
are bound to that core too: the writing and hashing of a checkpoint take their time from the training, as on a machine
whose cores are all busy; beside a GPU they would have cores to themselves. Times are those at which a step's line
appears in metrics.jsonl, from the first save on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LENGTH = 256


def run_of(folder: Path, asked: argparse.Namespace, every: int | None) -> Path:
    """A RUN.yaml (JSON is YAML)."""
    config = {"model_type": "llama", "hidden_size": asked.width, "intermediate_size": asked.width * 11 // 4,
              "num_hidden_layers": 6, "num_attention_heads": 5, "num_key_value_heads": 5,
              "vocab_size": 4096, "max_position_embeddings": LENGTH, "tie_word_embeddings": True}  # fmt: skip
    batch = asked.tokens // LENGTH
    run: dict[str, Any] = {
        "model": {"config": config, "tokenizer": str(folder.parent / "tokenizer")},
        "data": {"train": str(folder.parent / "text.jsonl"), "sequence_length": LENGTH},
        "train": {"steps": asked.steps, "batch_size": batch, "micro_batch_size": min(batch, 4), "learning_rate": 1e-3},
        "precision": "fp32", "device": "cpu", "ranks": 1, "checkpoint": {"every": every},
        "advanced": {"export": {"check": False}}, "output": str(folder / "out"), "resume": "never",
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(json.dumps(run))
    return folder / "run.yaml"


def texts(folder: Path) -> None:
    """Our own sources and pages as rows, and a tokenizer learnt from them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    files = sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/*.md")])
    rows = [file.read_text() for file in files]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<end>", "<pad>"]
    raw.train_from_iterator(rows, trainers.BpeTrainer(vocab_size=4096, special_tokens=special, show_progress=False))
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<pad>")
    made.save_pretrained(folder / "tokenizer")


class Running:
    """One run on one core, and when each of its steps was done."""

    def __init__(self, file: Path, core: int) -> None:
        env = os.environ | {"SHARDWISE_PROGRESS": "off", "OMP_NUM_THREADS": "1"}
        words = ["taskset", "-c", str(core), sys.executable, "-m", "shardwise", "train", str(file), "--quiet"]
        self.metrics, self.times, self._read = file.parent / "out/metrics.jsonl", list[float](), 0
        self.process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL)

    def look(self) -> None:
        if self.metrics.exists() and (size := self.metrics.stat().st_size) > self._read:
            self._read, now = size, time.monotonic()
            steps = sum('"kind": "train"' in line for line in self.metrics.read_text().splitlines())
            self.times += [now] * (steps - len(self.times))

    def seconds(self, first: int) -> float:
        """From the end of a step to the end of the last."""
        return self.times[-1] - self.times[first - 1]


def beside(folder: Path, asked: argparse.Namespace, cores: tuple[int, int]) -> dict[str, Any]:
    """One arrangement: the run that saves on the first core, the other on the second."""
    saving = Running(run_of(folder / f"saving-{cores[0]}", asked, asked.every), cores[0])
    plain = Running(run_of(folder / f"plain-{cores[1]}", asked, None), cores[1])
    while saving.process.poll() is None or plain.process.poll() is None:
        saving.look()
        plain.look()
        time.sleep(0.005)
    if saving.process.returncode or plain.process.returncode:
        sys.exit("a run failed")
    with_, without = saving.seconds(asked.every), plain.seconds(asked.every)
    state = next((folder / f"saving-{cores[0]}/out/checkpoints").glob("step-*/state"))
    size = sum(file.stat().st_size for file in state.iterdir())
    saves = (asked.steps - 1) // asked.every  # the one of the last step comes after the time that is measured
    return {"seconds": with_, "without": without, "saves": saves, "checkpoint_bytes": size, "cost": with_ / without - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=320)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.out.absolute().parent) as name:
        folder = Path(name)
        texts(folder)
        found = [beside(folder, asked, cores) for cores in ((0, 1), (1, 0))]
    cost = statistics.mean(one["cost"] for one in found)
    told = {"steps": asked.steps, "every": asked.every, "tokens": asked.tokens, "arrangements": found, "cost": cost}
    asked.out.write_text(json.dumps(told, indent=1) + "\n")
    for one in found:
        print(f"{one['seconds']:.1f} s with {one['saves']} saves of {one['checkpoint_bytes'] / 1e6:.0f} MB, "
              f"{one['without']:.1f} s without: {one['cost']:+.2%}")  # fmt: skip
    print(f"saving every {asked.every} steps costs {cost:.2%}")


if __name__ == "__main__":
    main()
