"""Trains a model whose states are several times the memory it may use: parameters, gradients and moments on disk.

    python benchmarks/disk_memory.py                 # 386 M parameters (5.7 GiB of states) in 1.3 GiB: some minutes
    python benchmarks/disk_memory.py --layers 4 --cap 1.1 --steps 2

The same run first in memory and without a limit, then with everything on disk in a memory cgroup (v1 or v2, nested in
this process's own; needs root), which the kernel enforces: Python, PyTorch, activations, buffers, page cache count.
The first ends after its last step: it serves for its losses, which must be equal to the bit. Prints a line of JSON for
each run and one that compares them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GIB = 1 << 30
STATES = 16  # bytes per parameter in fp32: itself, its gradient, two moments
DISK = {"offload": {"optimizer": "disk", "parameters": "disk"}}


def tokenizer(folder: Path) -> str:
    """A tokenizer of single bytes: a small vocabulary, so that the blocks are the model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<eos>"])}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>").save_pretrained(folder)
    return str(folder)


def run_of(tmp: Path, layers: int, hidden: int, steps: int, name: str, **more: Any) -> dict[str, Any]:
    """A Llama of this many blocks, some steps of two short sequences, one checkpoint and the export at the end."""
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64,
        "vocab_size": 257, "max_position_embeddings": 512, "tie_word_embeddings": True,
    }  # fmt: skip
    return {
        "model": {"config": config, "tokenizer": str(tmp / "tokenizer")},
        "data": {"train": str(tmp / "data.txt"), "sequence_length": 64},
        "train": {"steps": steps, "batch_size": 2, "micro_batch_size": 2, "warmup": 0, "learning_rate": 1e-4},
        "precision": "fp32", "device": "cpu", "parallel": {"zero": 3}, "recompute": "full",
        "log": {"every": 1}, "export": {"shard_size": "128MiB"}, "output": str(tmp / name), "resume": "never",
    } | more  # fmt: skip


@contextlib.contextmanager
def capped(limit: int) -> Iterator[Path]:
    """A memory cgroup with this limit inside our own one; removed at the end."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {kinds: path.lstrip("/") for _, kinds, path in lines}
    legacy = "memory" in own and Path("/sys/fs/cgroup/memory").is_dir()
    root = Path("/sys/fs/cgroup/memory") / own["memory"] if legacy else Path("/sys/fs/cgroup") / own[""]
    group = root / f"shardwise-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if legacy else "memory.max")).write_text(str(limit))
        yield group
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def peak_of(group: Path) -> int:
    """The most the group ever held, page cache included."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (group / name).exists():
            return int((group / name).read_text())
    return 0


def losses_in(output: Path) -> list[float]:
    """What metrics.jsonl holds so far."""
    with contextlib.suppress(OSError, ValueError):
        records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        return [r["loss"] for r in records if r["kind"] == "train"]
    return []


def train(file: Path, output: Path, group: Path | None = None, until: int | None = None) -> dict[str, Any]:
    """The real command as one rank without a supervisor; the most of its own memory it held, and its losses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    command = [sys.executable, "-m", "shardwise", "train", str(file)]
    if group is not None:  # the shell joins the group before Python starts, so nothing is left out
        command = ["sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh", *command]
    started = time.perf_counter()
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak = [0]

    def watch() -> None:
        while process.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                own = [int(x.split()[1]) for x in lines if x.startswith(("RssAnon", "RssShmem"))]
                peak[0] = max(peak[0], 1024 * sum(own))
            if until is not None and len(losses_in(output)) == until:
                process.kill()  # its copy for a checkpoint in the background would be as large as its states
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()
    out, _ = process.communicate()
    if process.returncode and until is None:
        raise SystemExit(f"exit code {process.returncode}:\n{out[-3000:]}")
    result = {"seconds": round(time.perf_counter() - started, 1), "own_peak_gib": round(peak[0] / GIB, 3)}
    return (
        result | ({"cgroup_peak_gib": round(peak_of(group) / GIB, 3)} if group else {}) | {"losses": losses_in(output)}
    )


def compare(tmp: Path, layers: int, hidden: int, steps: int, cap: int) -> dict[str, Any]:
    """Both runs; what they held and whether they agree."""
    import yaml

    tokenizer(tmp / "tokenizer")
    (tmp / "data.txt").write_text("".join(chr(97 + i * i % 23) for i in range(20_000)))
    results = {}
    for name, more in (("memory", {}), ("disk", DISK)):
        file = tmp / f"{name}.yaml"
        file.write_text(yaml.safe_dump(run_of(tmp, layers, hidden, steps, name, **more)))
        with capped(cap) if name == "disk" else contextlib.nullcontext() as group:
            results[name] = train(file, tmp / name, group, steps if group is None else None)
        print(json.dumps({"run": name} | results[name]), flush=True)
    parameters = parameters_of(tmp / "disk" / "model")
    return {
        "parameters": parameters, "states_gib": round(STATES * parameters / GIB, 3), "cap_gib": round(cap / GIB, 3),
        "states_over_cap": round(STATES * parameters / cap, 2),
        "equal": results["memory"]["losses"] == results["disk"]["losses"],
        "own_peak_gib": {name: r["own_peak_gib"] for name, r in results.items()},
    }  # fmt: skip


def parameters_of(folder: Path) -> int:
    """Counted in the exported model."""
    from safetensors import safe_open

    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dict)
                size = 1
                for length in tensors.get_slice(name).get_shape():
                    size *= length
                count += size
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cap", type=float, default=1.3, help="GiB")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = compare(Path(folder), given.layers, given.hidden, given.steps, int(given.cap * GIB))
    print(json.dumps(found))
    raise SystemExit(0 if found["equal"] else 1)
