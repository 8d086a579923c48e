r"""ZeRO++ over a thin link: two hosts of two ranks, bytes read from the interface between them, step times and losses.

The hosts are network namespaces joined by a cable whose rate `tc` holds down; each rank is the real command
(`shardwise train`) under the environment that torchrun would give it. Bytes are those of the cable's own counters, both
directions, headers included, between the end of the first counted step and the end of the last. Needs root.

    python benchmarks/zeropp_hosts.py --rate 400mbit --steps 6                      # bytes and step times
    python benchmarks/zeropp_hosts.py --rate none --steps 200 --variants zero3,all  # losses
    python benchmarks/zeropp_hosts.py --rate here --device cuda --steps 200         # losses, no namespaces: no root
    python benchmarks/zeropp_hosts.py --rate here --device cuda --steps 200 --length 512 --eval-every 50 \
        --train '/usr/lib/python3.12/[a-r]*.py' --heldout '/usr/lib/python3.12/[s-z]*.py'   # on text seen once

`zero3` is stage 3 in bf16 as Shardwise runs it: gradients are reduced in fp32. `zero3-bf16` reduces them in bf16 too,
which is the baseline that ZeRO++ is usually compared with.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

HOSTS, LOCAL = 2, 2
ADDRESSES = ("10.213.78.1", "10.213.78.2")
PORT = 29417
DEMO = Path(__file__).parents[1] / "src/shardwise/demo"
HPZ, QWZ, QGZ = {"hpz_size": LOCAL}, {"quantize_weights": True}, {"quantize_gradients": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "zero3": {}, "zero3-bf16": {"reduce_dtype": "bf16"}, "hpz": HPZ, "qwz": QWZ, "qgz": QGZ, "all": HPZ | QWZ | QGZ,
}  # fmt: skip


@dataclass(frozen=True)
class Host:
    """A network namespace and its end of the cable."""

    name: str
    cable: str
    address: str

    @property
    def enter(self) -> list[str]:
        """The words before a command that make it run there."""
        return ["ip", "netns", "exec", self.name] if self.name else []

    def crossed(self) -> int:
        """Bytes in and out so far; none where both hosts are this one."""
        total = 0
        if not self.name:
            return total
        for direction in ("rx", "tx"):
            file = f"/sys/class/net/{self.cable}/statistics/{direction}_bytes"
            out = subprocess.run([*self.enter, "cat", file], check=True, capture_output=True, text=True)
            total += int(out.stdout)
        return total


@contextmanager
def two_hosts(rate: str | None, burst: str = "1mb") -> Iterator[list[Host]]:
    """Two namespaces and the cable; raises CalledProcessError where that is not permitted. Or twice this machine.

    `burst`: what passes at once after a rest.
    """
    if rate == "here":
        yield [Host("", "lo", "127.0.0.1")] * HOSTS
        return
    tag = str(os.getpid() % 10**8)
    hosts = [Host(f"zeropp-{tag}-{i}", f"zp{tag}v{i}", ADDRESSES[i]) for i in range(HOSTS)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the namespaces go then too
    try:
        for host in hosts:
            ip("netns", "add", host.name)
        ends = [("name", hosts[0].cable, "netns", hosts[0].name), ("name", hosts[1].cable, "netns", hosts[1].name)]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host in hosts:
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.cable)
            ip("-n", host.name, "link", "set", host.cable, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
            if rate is not None:
                shape = f"tc qdisc add dev {host.cable} root tbf rate {rate} burst {burst} latency 100ms"
                done = subprocess.run([*host.enter, *shape.split()], capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"tc takes no rate of {rate!r}: {done.stderr.strip().splitlines()[0]}")
        yield hosts
    finally:
        signal.signal(signal.SIGTERM, before)
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


def start_ranks(hosts: list[Host], port: int, file: Path, variant: str, logs: Path) -> list[subprocess.Popen[bytes]]:
    """The four ranks, as torchrun would start them."""
    children = []
    for rank in range(HOSTS * LOCAL):
        host = hosts[rank // LOCAL]
        env = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(HOSTS * LOCAL), "LOCAL_RANK": str(rank % LOCAL),
            "LOCAL_WORLD_SIZE": str(LOCAL), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": host.cable, "OMP_NUM_THREADS": "1", "SHARDWISE_PROGRESS": "off",
            "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        command = [sys.executable, "-m", "shardwise", "train", str(file)]
        with (logs / f"{variant}-rank-{rank}.log").open("wb") as log:
            children.append(
                subprocess.Popen(
                    [*host.enter, *command],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )
    return children


def measure(hosts: list[Host], variant: str, run: dict[str, Any], work: Path, first: int) -> dict[str, Any]:
    """Trains one variant; bytes and seconds per step after step `first`, and the losses."""
    output = work / variant
    shutil.rmtree(output, ignore_errors=True)
    file = work / f"{variant}.yaml"
    parallel = {"zero": 3} | VARIANTS[variant]
    file.write_text(yaml.safe_dump(run | {"parallel": parallel, "output": str(output)}))
    children = start_ranks(hosts, PORT + list(VARIANTS).index(variant), file, variant, work)
    marks: list[tuple[int, float, int]] = []
    try:
        while any(child.poll() is None for child in children):
            if any(child.poll() not in (None, 0) for child in children):
                raise SystemExit(f"{variant}: a rank died, see {work}/{variant}-rank-*.log")
            done = len(_records(output))
            if done and (not marks or done > marks[-1][0]):
                marks.append((done, time.monotonic(), hosts[0].crossed()))
            if done == run["train"]["steps"] and ("eval" not in run["data"] or _evaluated(output, done)):
                break  # what follows, saving and exporting, is not measured
            time.sleep(0.05)
    finally:
        for child in children:
            child.kill()
            child.wait()
    counted = [mark for mark in marks if mark[0] >= first]
    steps = counted[-1][0] - counted[0][0]
    times = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(counted)]
    return {
        "variant": variant,
        "bytes": (counted[-1][2] - counted[0][2]) / max(1, steps),
        "seconds": statistics.median(times) if times else None,
        "losses": [r["loss"] for r in _records(output)],
        "eval": [(r["step"], r["loss"]) for r in _records(output, "eval")],
    }


def _evaluated(output: Path, step: int) -> bool:
    return any(record["step"] == step for record in _records(output, "eval"))


def _records(output: Path, kind: str = "train") -> list[dict[str, Any]]:
    try:
        lines = (output / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [r for r in records if r["kind"] == kind]


def heldout(folder: Path) -> str:
    """The demo's held-out questions in the chat format."""
    rows = [json.loads(line) for line in (DEMO / "heldout.jsonl").read_text().splitlines()]
    roles = ("user", "question"), ("assistant", "answer")
    chats = [{"messages": [{"role": role, "content": row[key]} for role, key in roles]} for row in rows]
    file = folder / "heldout.jsonl"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return str(file)


def describe_run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The run that all variants share."""
    run: dict[str, Any] = {
        "model": args.model,
        "data": {"train": args.train, "sequence_length": args.length},
        "train": {"steps": args.steps, "batch_size": args.batch, "micro_batch_size": 1, "learning_rate": 1e-4},
        "precision": args.precision, "device": args.device, "advanced": {"backend": "gloo"}, "timeout": "30min",
        "checkpoint": {"every": None}, "resume": "never",
    }  # fmt: skip
    if args.eval_every:
        run["data"]["eval"] = args.heldout or heldout(work)
        run["train"]["eval_every"] = args.eval_every
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--first", type=int, default=2, help="count from the end of this step")
    parser.add_argument("--train", default=str(DEMO / "pairs.jsonl"), help="a file, folder or glob to train on")
    parser.add_argument("--heldout", help="the same to evaluate on; the demo's questions unless told")
    parser.add_argument("--length", type=int, default=96, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--eval-every", type=int, default=0)
    parser.add_argument("--rate", default="400mbit",
                        help="of the link, as tc has it; none = as fast as it goes, here = no namespaces")  # fmt: skip
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--work", type=Path, default=Path("out/zeropp"))
    args = parser.parse_args()
    work = args.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    with two_hosts(None if args.rate == "none" else args.rate) as hosts:
        for variant in args.variants.split(","):
            results.append(measure(hosts, variant, describe_run(args, work), work, args.first))
            (work / "results.json").write_text(json.dumps(results, indent=1))
            _print(results[-1], results[0], args.rate)


def _print(result: dict[str, Any], base: dict[str, Any], rate: str) -> None:
    last = statistics.mean(result["losses"][-10:])
    seconds = result["seconds"] or float("nan")
    line = (
        f"{result['variant']:12} {result['bytes'] / 1e6:9.1f} MB/step across the link ({rate}), {seconds:7.2f} s/step"
    )
    line += f", loss of the last ten steps {last:.4f}"
    if result is not base:
        faster = (base["seconds"] or float("nan")) / seconds
        fewer = f"{base['bytes'] / result['bytes']:.2f}x fewer bytes, " if result["bytes"] else ""
        line += f"; {fewer}{faster:.2f}x faster than {base['variant']}"
    for step, loss in result["eval"]:
        line += f"; held out at {step}: {loss:.4f}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
