"""DiLoCo beside synchronous training: held-out loss and bytes, at equal tokens.

    python benchmarks/diloco.py data WORK                 # the text, cut for the workers, and a tokenizer of bytes
    python benchmarks/diloco.py synchronous WORK --learning-rate 8e-3 [1.4e-2, 2.4e-2, each with a --name]
    python benchmarks/diloco.py diloco WORK --learning-rate 2.4e-2 [1.4e-2, likewise]
    python benchmarks/diloco.py table WORK [--json FILE]

Both sides are tried at the same rates, and the table sets each DiLoCo run beside the best synchronous one: a comparison
at one rate for both would favour whichever it suits. The older runs, from 100 synchronous steps that all share:

    OLD="--size large --optimizer adamw --learning-rate 2e-3 --warmup 20"
    python benchmarks/diloco.py warm WORK $OLD
    python benchmarks/diloco.py synchronous WORK $OLD --begin warm --steps 600
    python benchmarks/diloco.py diloco WORK $OLD --begin warm --steps 600 --every 50 --dtype int8 --outer-rate 0.7 \\
        --outer-momentum 0.9

Text: the Python sources of the standard library, every 25th file held out; each worker has a quarter of the rest. The
model is a llama of 0.12 million parameters (large: 0.84). Bytes of both are counted by the same means: each run has a
network namespace of its own (`unshare -rn`, Linux), and what its loopback device has carried in the end is all that
its processes said to each other, headers and handshakes included.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

WORKERS, EACH, STEPS, WARM, RATE = 4, 4, 1000, 100, 1.4e-2
LENGTHS = {"small": 128, "large": 256}
SIZES = {
    "small": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2},  # 117,312 parameters
    "large": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4},  # 837,248
}


def config_of(size: str) -> dict[str, Any]:
    """A llama over bytes."""
    return SIZES[size] | {
        "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 260,
        "max_position_embeddings": LENGTHS[size], "tie_word_embeddings": True,
    }  # fmt: skip


def make_data(work: Path) -> None:
    """Files into quarters and a held-out part, and a tokenizer whose words are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rows: dict[str, list[str]] = {name: [] for name in ("held", "all", *map(str, range(WORKERS)))}
    kept = 0
    for index, file in enumerate(files):
        text = file.read_text(errors="replace")
        if index % 25 == 0:
            rows["held"].append(text[:20_000])
            continue
        rows["all"].append(text)
        rows[str(kept % WORKERS)].append(text)
        kept += 1
    work.mkdir(parents=True, exist_ok=True)
    for name, texts in rows.items():
        (work / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    words = {"<end>": 256, "<pad>": 257} | {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=words, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<pad>").save_pretrained(work / "bytes")


def run_of(asked: Any, name: str, data: str, batch: int, **more: Any) -> Path:
    """A RUN.yaml (JSON is YAML)."""
    work = asked.work
    run: dict[str, Any] = {
        "model": model_of(asked), "data": {"train": str(work / f"{data}.jsonl"), "eval": str(work / "held.jsonl"),
                                           "sequence_length": LENGTHS[asked.size]},
        "train": {"steps": asked.steps, "batch_size": batch, "micro_batch_size": asked.each, "seed": asked.seed,
                  "optimizer": asked.optimizer, "learning_rate": asked.learning_rate, "warmup": asked.warmup,
                  "schedule": "cosine", "min_lr_ratio": 0.1, "weight_decay": 0.1},
        "precision": "fp32", "device": "cpu", "parallel": {"zero": 0}, "checkpoint": {"every": None},
        "export": {"check": False}, "log": {"every": 10}, "output": str(work / name), "resume": "never", **more,
    }  # fmt: skip
    file = work / f"{name}.yaml"
    file.write_text(json.dumps(run, indent=1))
    return file


def start(file: Path) -> subprocess.Popen[bytes]:
    """A run in the background, quietly."""
    env = os.environ | {"SHARDWISE_PROGRESS": "off", "OMP_NUM_THREADS": "1"}
    with file.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "shardwise", "train", str(file), "--quiet", "--force"], env=env, stdout=log,
            stderr=log,
        )  # fmt: skip


def wait(*processes: subprocess.Popen[bytes]) -> None:
    """All must end well."""
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit(f"runs ended with {codes}: see the logs in the work folder")


def alone(arguments: list[str]) -> int:
    """Runs this script again in a network namespace of its own; returns the bytes that its loopback has carried."""
    inner = f"ip link set lo up 2>/dev/null || {sys.executable} {__file__} up; exec {sys.executable} {__file__} "
    inner += " ".join(arguments) + " --inside"
    shown = subprocess.run(["unshare", "-rn", "sh", "-c", inner], stdout=subprocess.PIPE, check=True, text=True)
    return int(shown.stdout.split()[-1])


def loopback_up() -> None:
    """What `ip link set lo up` does, where there is no `ip`."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        name, flags = b"lo", 0x1 | 0x8 | 0x40  # up, loopback, running
        fcntl.ioctl(one, 0x8914, struct.pack("16sH14s", name, flags, b""))


def carried() -> int:
    """Bytes over this namespace's loopback so far."""
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def held_out(output: Path) -> float:
    """The last evaluation's loss."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return float([r["loss"] for r in records if r["kind"] == "eval"][-1])


def note(work: Path, name: str, values: dict[str, Any]) -> None:
    """Keeps a result for the table."""
    values["name"] = name
    (work / f"result-{name}.json").write_text(json.dumps(values))
    print(json.dumps(values))


def model_of(asked: Any) -> Any:
    """What training starts from: an earlier run's model, or nothing."""
    if asked.begin == "scratch":
        return {"config": config_of(asked.size), "tokenizer": str(asked.work / "bytes")}
    return str(asked.work / asked.begin / "model")


def synchronous(work: Path, asked: Any) -> None:
    """Four ranks, one batch."""
    wait(start(run_of(asked, asked.name, "all", asked.each * WORKERS, ranks=WORKERS)))
    tell(asked, {})


def diloco(work: Path, asked: Any) -> None:
    """Four workers of one rank, a sync server, a quarter of the batch and of the data each."""
    state = work / f"{asked.name}-meet"
    words = [sys.executable, "-m", "shardwise", "diloco-server", "--port", "0", "--state", str(state),
             "--dtype", asked.dtype,
             "--outer-lr", str(asked.outer_rate), "--outer-momentum", str(asked.outer_momentum),
             "--min-workers", str(WORKERS), "--wait", "10min"]  # fmt: skip
    point = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert point.stdout is not None
    found = re.search(r":(\d+) \(", point.stdout.readline())
    assert found is not None
    runs = []
    for worker in range(WORKERS):
        sync = {"server": f"127.0.0.1:{found[1]}", "sync_every": asked.every, "name": f"worker-{worker}"}
        runs.append(start(run_of(asked, f"{asked.name}-{worker}", str(worker), asked.each, diloco=sync)))
    wait(*runs)
    point.send_signal(signal.SIGINT)
    point.communicate()
    rounds = [json.loads(line) for line in (state / "rounds.jsonl").read_text().splitlines()]
    tell(asked, {
        "every": asked.every, "dtype": asked.dtype, "rounds": len(rounds), "outer_rate": asked.outer_rate,
        "outer_momentum": asked.outer_momentum,
    })  # fmt: skip


def tell(asked: Any, more: dict[str, Any]) -> None:
    """The last word on standard output is the number of bytes."""
    Path(asked.work, f"more-{asked.name}.json").write_text(json.dumps(more))
    print(carried())


def measured(work: Path, asked: Any) -> None:
    """One run, its bytes and its loss."""
    began = time.monotonic()
    moved = alone([word for word in sys.argv[1:] if word != "--inside"])
    output = work / (asked.name if asked.what == "synchronous" else f"{asked.name}-0")
    more = json.loads((work / f"more-{asked.name}.json").read_text())
    more |= {"bytes": moved, "loss": held_out(output), "steps": asked.steps, "from": asked.begin}
    more |= {"tokens": asked.steps * WORKERS * asked.each * LENGTHS[asked.size]}
    same = ("size", "each", "optimizer", "learning_rate", "warmup", "seed")
    more |= {name: getattr(asked, name) for name in same}
    note(work, asked.name, more | {"seconds": round(time.monotonic() - began)})


def _task(one: dict[str, Any]) -> tuple[Any, ...]:
    """What two runs must have in common to be compared; their rates are each one's own best."""
    return tuple(one.get(name) for name in ("size", "from", "steps", "each", "seed"))


def table(work: Path, target: Path | None) -> None:
    """Every result beside the synchronous one with the same beginning."""
    found = [json.loads(file.read_text()) for file in sorted(work.glob("result-*.json"))]
    plain: dict[Any, dict[str, Any]] = {}
    for one in sorted((one for one in found if "every" not in one), key=lambda o: -o["loss"]):
        plain[_task(one)] = one  # the best one stays
    lines = [
        "| run | from | rate | meetings | on the wire | bytes | times fewer | held-out loss | against synchronous |"
    ]
    lines.append("|" + " --- |" * 9)
    for one in sorted(found, key=lambda o: (str(_task(o)), "every" in o, o.get("every", 0), o["name"])):
        beside = plain[_task(one)]
        meets = f"{one['rounds']}, every {one['every']} steps" if "every" in one else "every step"
        lines.append(
            f"| {one['name']} | {one['from']} | {one.get('learning_rate', '')} | {meets} | "
            f"{one.get('dtype', 'fp32')} | {one['bytes'] / 1e6:,.1f} MB | "
            f"{beside['bytes'] / one['bytes']:.0f} | {one['loss']:.4f} | {one['loss'] / beside['loss'] - 1:+.2%} |"
        )
    print("\n".join(lines))
    if target is not None:
        target.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["data", "warm", "synchronous", "diloco", "table", "up"])
    parser.add_argument("work", nargs="?", type=Path, default=Path("out/diloco-benchmark"))
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--dtype", default="int2")
    parser.add_argument("--name")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--outer-rate", type=float, default=0.9)
    parser.add_argument("--outer-momentum", type=float, default=0.3)
    parser.add_argument("--begin", default="scratch", help="the run whose model is the start, or scratch")
    parser.add_argument("--each", type=int, default=EACH, help="sequences of a worker's step")
    parser.add_argument("--learning-rate", type=float, default=RATE)
    parser.add_argument("--optimizer", default="muon", help="the inner one, and the synchronous run's")
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    asked.work = asked.work.absolute()
    asked.name = asked.name or ("synchronous" if asked.what == "synchronous" else f"{asked.dtype}-{asked.every}")
    match asked.what:
        case "data":
            make_data(asked.work)
        case "warm":
            asked.steps, asked.begin = WARM, "scratch"
            wait(start(run_of(asked, "warm", "all", asked.each * WORKERS, ranks=2)))
        case "up":
            loopback_up()
        case "table":
            table(asked.work, asked.json)
        case _ if asked.inside:
            {"synchronous": synchronous, "diloco": diloco}[asked.what](asked.work, asked)
        case _:
            measured(asked.work, asked)


if __name__ == "__main__":
    main()
