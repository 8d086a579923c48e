r"""What communication costs a step and what of it computing hides: two hosts, a rank on each, by traces of real steps.

The hosts are network namespaces joined by a cable whose rate `tc` sets; see zeropp_hosts.py. Each rank runs
what `shardwise bench train` runs, and leaves a trace of one step (torch's profiler, JSON; in --work, a file a rank and
variant). Seconds of communication are those in which a thread of gloo works on a collective, by its own marks in the
trace; what lies beside an operator of the threads that compute is hidden, the rest exposed. Needs root.

    python benchmarks/overlap.py --rate 500mbit --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from zeropp_hosts import Host, two_hosts

PORT = 29517
BURST = "256kb"  # less than a tenth of a block: what passes at once would hide what a gather takes
NONE: dict[str, Any] = {"prefetch": 0, "bucket": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "none": NONE, "one": NONE | {"prefetch": 1}, "three": NONE | {"prefetch": 3}, "auto": {},
    "none-bf16": NONE | {"reduce_dtype": "bf16"},
}  # fmt: skip


def describe_run(args: argparse.Namespace, variant: str, work: Path) -> dict[str, Any]:
    """The run of a variant."""
    heads = max(1, args.hidden // 64)
    config = {
        "model_type": "llama", "hidden_size": args.hidden, "intermediate_size": args.hidden * 11 // 4,
        "num_hidden_layers": args.layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "vocab_size": 4096, "tie_word_embeddings": True,
    }  # fmt: skip
    return {
        "model": {"config": config, "tokenizer": "none"}, "data": {"train": "none", "sequence_length": args.length},
        "train": {"steps": 1, "batch_size": 2, "micro_batch_size": 1, "learning_rate": 1e-4}, "objective": "causal",
        "device": "cpu", "backend": "gloo", "precision": "fp32", "ranks": 1, "recompute": "none", "attention": "plain",
        "parallel": {"zero": args.zero} | VARIANTS[variant], "output": str(work / variant), "timeout": "10min",
    }  # fmt: skip


def measure(hosts: list[Host], args: argparse.Namespace, variant: str, work: Path) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = work / variant
    folder.mkdir(parents=True, exist_ok=True)
    asked = {"run": describe_run(args, variant, work), "steps": args.steps, "documents": 1,
             "progress": str(folder / "progress"), "trace": str(folder)}  # fmt: skip
    (folder / "work.json").write_text(json.dumps(asked))
    children = []
    try:
        for rank, host in enumerate(hosts):
            env = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT + list(VARIANTS).index(variant)),
                "GLOO_SOCKET_IFNAME": host.cable, "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            command = [*host.enter, sys.executable, __file__, "--part", str(folder)]
            with (folder / f"rank-{rank}.log").open("wb") as log:
                children.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        if any([child.wait(timeout=900) for child in children]):
            raise SystemExit(f"{variant}: a rank failed, see {folder}/rank-*.log")
    finally:
        for child in children:
            child.kill()
            child.wait()
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(len(hosts))]


def take_part(folder: Path) -> None:
    """One rank."""
    import torch

    from shardwise.foresight.bench.train import bench_rank

    torch.set_num_threads(1)
    found = bench_rank(json.loads((folder / "work.json").read_text()))
    (folder / f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))


def tell(variant: str, found: list[dict[str, Any]]) -> None:
    """A row of the table: the slower rank's step, its trace in seconds."""
    slow = max(found, key=lambda one: one["seconds"])
    traced, sent = slow["profile"], slow["profile"]["sent"]
    spent, bare = sent["all"]
    hidden = max(0.0, spent - bare)
    print(
        f"{variant:10} {slow['seconds']:6.2f} s a step; traced {traced['whole']:.2f} s: communication {spent:.2f}, "
        f"hidden {hidden:.2f} ({hidden / spent:.0%}), exposed {bare:.2f} (gathers {sent['gathers'][1]:.2f} "
        f"of {sent['gathers'][0]:.2f}, reductions {sent['reductions'][1]:.2f} of {sent['reductions'][0]:.2f})"
    )
    for line in slow["told"]:
        print(f"{'':10} {line}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="500mbit", help="of the cable, as tc has it")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=512, help="tokens of a rank's step")
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed without the profiler")
    parser.add_argument("--rounds", type=int, default=1, help="of all variants in turn; the fastest of each is told")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--work", type=Path, default=Path("out/overlap"))
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return take_part(args.part)
    names = args.variants.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"--variants: {', '.join(unknown)} is none of {', '.join(VARIANTS)}")
    rounds: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
    with two_hosts(args.rate, BURST) as hosts:
        for _ in range(args.rounds):
            for name in names:
                rounds[name].append(measure(hosts, args, name, args.work.absolute()))
                tell(name, rounds[name][-1])
    if args.rounds > 1:
        print(f"\nthe best of {args.rounds} rounds")
        for name, found in rounds.items():
            tell(name, min(found, key=lambda ranks: max(one["seconds"] for one in ranks)))
    return None


if __name__ == "__main__":
    main()
