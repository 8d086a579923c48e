"""What checkpoints in the background cost: the same run with and without them, in turns, in one process.

    python benchmarks/saving_turns.py OUT.json [--masters split|fp32] [--pairs 3] [--every 20] [--rows 16]

A llama from scratch (436M parameters, 5.2 GB of state) takes steps of Shardwise's own code on random tokens. Pairs of
blocks of `--every` steps alternate, one of each begins with a save. As in the loop, the device has done all it was
asked for when the save begins. Besides: how long the save call held the training thread, how long the same copy takes
when it is waited for, and whether the files were written within the block (else the next save would wait for them).
Needs torch, transformers and this package, no data and no network. About 80 s on an H200, and twice 5.2 GB of disk.

On a CPU, with all threads on one core, the processor's time is what counts, and other work on the machine does not
change it much (11M parameters, 134 MB; the figure to look at is that of a save alone):

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/saving_turns.py OUT.json --device cpu --width 320 --layers 6 \\
        --vocabulary 4096 --rows 1 --length 64 --pairs 1 --every 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.store import CheckpointStore
from shardwise.config.schema import Run
from shardwise.distributed.mesh import init_world
from shardwise.foresight.bench.train import give_values
from shardwise.foresight.rehearse.batch import step_batch
from shardwise.foresight.rehearse.step import set_up, take_step
from shardwise.nn.models.source import ModelSource, config_from
from shardwise.train.state import tensors_of


class Training:
    """A run without data, and its checkpoints."""

    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        width, gpu = asked.width, asked.device == "cuda"
        config = {"model_type": "llama", "hidden_size": width, "intermediate_size": 4 * width,
                  "num_hidden_layers": asked.layers, "num_attention_heads": width // 64,
                  "num_key_value_heads": width // 64, "vocab_size": asked.vocabulary,
                  "max_position_embeddings": asked.length, "tie_word_embeddings": True}  # fmt: skip
        micro = min(asked.rows, 8)
        run = Run.model_validate({
            "model": {"config": dict(config), "tokenizer": "none"},
            "data": {"train": "none", "sequence_length": asked.length}, "objective": "causal",
            "precision": "bf16" if gpu else "fp32", "device": asked.device, "ranks": 1, "backend": "gloo",
            "parallel": {"zero": 2}, "output": str(folder),
            "train": {"batch_size": asked.rows, "micro_batch_size": micro, "steps": 10,
                      "master_weights": asked.masters if gpu else "fp32"},
        })  # fmt: skip
        source = ModelSource("llama", config_from(dict(config)), None, "none", task="causal")
        self._parts, self._optimizer = set_up(source, run, init_world(run), None)
        give_values(self._parts.sharded.model)
        self._batch = step_batch(run, asked.rows // micro)
        for one in self._batch.micro_batches:
            one.input_ids.random_(0, asked.vocabulary)
            one.labels.random_(0, asked.vocabulary)
        self._gpu, self._step = gpu, 0
        group: Any = self._parts.world.checkpoint
        self.store = CheckpointStore(folder / "checkpoints", keep=1, background=True, group=group)
        self._parts.update.settle = self.store.settle

    def wait(self) -> None:
        """For the device."""
        if self._gpu:
            torch.cuda.synchronize()

    def save(self) -> float:
        """Seconds for which it held this thread."""
        begun = time.perf_counter()
        self._step += 1
        tensors = tensors_of(self._parts.sharded, self._optimizer)
        self.store.save(self._step, tensors, {"step": self._step}, "{}", lambda _: None, None)
        return time.perf_counter() - begun

    def alone(self) -> tuple[float, float]:
        """Of a save with nothing beside it: seconds until it is copied, the processor's until it is written."""
        self.wait()
        begun, cpu = time.perf_counter(), time.process_time()
        self.save()
        self.wait()
        copied = time.perf_counter() - begun
        self.store.wait()
        return copied, time.process_time() - cpu

    def block(self, steps: int, saving: bool) -> dict[str, float]:
        """Seconds of some steps, and of the save before them."""
        self.wait()
        begun, cpu = time.perf_counter(), time.process_time()
        held = self.save() if saving else 0.0
        for _ in range(steps):
            take_step(self._parts, self._batch)
        self.wait()
        seconds = time.perf_counter() - begun
        self.store.wait()
        written = time.perf_counter() - begun if saving else 0.0
        return {"seconds": seconds, "cpu": time.process_time() - cpu, "held": held, "until_written": written}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--masters", choices=["split", "fp32"], default="split")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    sizes = {"rows": 16, "length": 4096, "layers": 24, "width": 1024, "vocabulary": 32000}
    for name, value in ({"pairs": 3, "every": 20} | sizes).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541"}  # fmt: skip
    with tempfile.TemporaryDirectory(dir=asked.out.absolute().parent) as name:
        training = Training(asked, Path(name))
        training.block(3, saving=False)
        first = training.block(3, saving=True)  # takes the memory
        alone = [training.alone() for _ in range(3)]
        copied, each = (statistics.median(one[part] for one in alone) for part in (0, 1))
        turns = [("with", "without"), ("without", "with")]
        pairs = [
            {way: training.block(asked.every, way == "with") for way in turns[number % 2]}
            for number in range(asked.pairs)
        ]
        state = next(Path(name).glob("checkpoints/step-*/state"))
        size = sum(file.stat().st_size for file in state.iterdir())
    cost, cpu = (
        sum(p["with"][of] for p in pairs) / sum(p["without"][of] for p in pairs) - 1 for of in ("seconds", "cpu")
    )
    held = statistics.median(p["with"]["held"] for p in pairs)
    told = {"every": asked.every, "masters": asked.masters, "checkpoint_bytes": size, "first_save_held": first["held"],
            "copy_waited_for": copied, "cpu_each": each, "held": held, "cost": cost, "cpu_cost": cpu,
            "pairs": pairs}  # fmt: skip
    asked.out.write_text(json.dumps(told, indent=1) + "\n")
    for pair in pairs:
        with_, without = pair["with"], pair["without"]
        print(f"{asked.every} steps: {with_['seconds']:.3f} s with a save of {size / 1e9:.2f} GB "
              f"({with_['held'] * 1e3:.1f} ms held, written after {with_['until_written']:.1f} s), "
              f"{without['seconds']:.3f} s without")  # fmt: skip
    print(f"the first save held training for {first['held']:.2f} s (it takes the memory), the others "
          f"{held * 1e3:.1f} ms; with the copy waited for {copied * 1e3:.0f} ms; "
          f"{each * 1e3:.0f} ms of the processor's time each")  # fmt: skip
    print(f"saving every {asked.every} steps costs {cost:.2%}; of the processor's time {cpu:.2%}")


if __name__ == "__main__":
    main()
