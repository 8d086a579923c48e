"""Runs one training script on DeepSpeed and on shardwise, on two CPU ranks, and shows how far apart they are.

    python benchmarks/deepspeed_parity.py --deepspeed-python VENV/bin/python [--record FILE]

The script is examples/deepspeed/train.py; on DeepSpeed its import line reads `import deepspeed`, and nothing else
differs. VENV needs `pip install torch deepspeed`; no compiled operator is used (torch_adam). Compared for each of 30
updates in fp32: the mean loss over the ranks, the learning rate, the gradient norm. Each half is also resumed from its
own checkpoint half way. `--record` keeps DeepSpeed's numbers, with their origin, for a test that runs without it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples/deepspeed"
OURS, THEIRS = "import shardwise.deepspeed as deepspeed", "import deepspeed"
BOUND = 1e-4

CYCLE = {
    "type": "OneCycle",
    "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 3e-3, "cycle_first_step_size": 8, "decay_step_size": 4,
               "decay_lr_rate": 0.5, "cycle_min_mom": 0.8, "cycle_max_mom": 0.95},
}  # fmt: skip
L2 = {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1, "adam_w_mode": False, "torch_adam": True}}

# name: (ZeRO stage, changes to ds_config.json, arguments of the script)
CASES: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "stage 1": (1, {}, []),
    "stage 2": (2, {}, []),
    "stage 3": (3, {}, []),
    "stage 2, scheduler of the script": (2, {"scheduler": None}, ["--client_scheduler"]),
    "stage 3, OneCycle, Adam with L2": (3, {"scheduler": CYCLE, "optimizer": L2}, []),
}


def config_of(case: str) -> dict[str, Any]:
    """The config of a case."""
    stage, changes, _ = CASES[case]
    values = json.loads((EXAMPLE / "ds_config.json").read_text()) | changes | {"zero_optimization": {"stage": stage}}
    return {key: value for key, value in values.items() if value is not None}


def train(python: str, script: Path, case: str, folder: Path, *more: str) -> list[dict[str, float]]:
    """What the script reports of each update, on two ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    config, losses = folder / "ds_config.json", folder / "losses.json"
    config.write_text(json.dumps(config_of(case)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        env = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        line = [python, str(script), "--deepspeed_config", str(config), "--losses", str(losses), *CASES[case][2], *more]
        log = (folder / f"rank-{rank}.log").open("w")
        ranks.append(subprocess.Popen(line, env=env, stdout=log, stderr=subprocess.STDOUT))
    codes = [process.wait() for process in ranks]
    if any(codes):
        sys.exit(f"{case}: exit codes {codes}\n{(folder / f'rank-{codes.index(max(codes))}.log').read_text()[-3000:]}")
    return list(json.loads(losses.read_text()))


def both_halves(python: str, script: Path, case: str, folder: Path) -> dict[str, list[dict[str, float]]]:
    """A whole run that saves half way, and the second half again from there."""
    whole = train(python, script, case, folder / "whole", "--save", str(folder / "checkpoint"))
    rest = train(python, script, case, folder / "rest", "--load", str(folder / "checkpoint"))
    return {"whole": whole, "resumed": rest}


def apart(one: list[dict[str, float]], other: list[dict[str, float]]) -> dict[str, float]:
    """The largest difference of each figure."""
    return {key: max(abs(a[key] - b[key]) for a, b in zip(one, other, strict=True)) for key in one[0]}


def provenance(python: str) -> dict[str, str]:
    """Where recorded numbers come from."""
    asked = "import deepspeed, torch, json; print(json.dumps([deepspeed.__version__, torch.__version__]))"
    env = os.environ | {"DS_ACCELERATOR": "cpu"}
    told = subprocess.run([python, "-c", asked], env=env, capture_output=True, text=True, check=True).stdout
    deepspeed, torch = json.loads(told.splitlines()[-1])
    return {
        "made by": "benchmarks/deepspeed_parity.py --record",
        "deepspeed": deepspeed,
        "torch": torch,
        "ranks": "2, CPU, gloo",
        "script": digest(),
    }


def digest() -> str:
    """Of the script that was run, its import line aside."""
    return hashlib.sha256((EXAMPLE / "train.py").read_text().replace(OURS, THEIRS).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--deepspeed-python", required=True, help="a Python that has DeepSpeed")
    parser.add_argument("--record", type=Path, help="file for DeepSpeed's numbers")
    args = parser.parse_args()
    text = (EXAMPLE / "train.py").read_text()
    assert text.count(OURS) == 1
    worst, recorded = 0.0, {}
    print(
        f"{'case':34} {'first loss':>10} {'last loss':>10} {'Δ loss':>9} {'Δ rate':>9} {'Δ norm':>9} {'Δ resumed':>9}"
    )
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(text.replace(OURS, THEIRS))
        for case in CASES:
            theirs = both_halves(args.deepspeed_python, script, case, Path(folder) / case / "deepspeed")
            ours = both_halves(sys.executable, EXAMPLE / "train.py", case, Path(folder) / case / "shardwise")
            whole, rest = (apart(theirs[part], ours[part]) for part in ("whole", "resumed"))
            ends = theirs["whole"][0]["loss"], theirs["whole"][-1]["loss"]
            print(f"{case:34} {ends[0]:10.5f} {ends[1]:10.5f} {whole['loss']:9.1e} {whole['lr']:9.1e} "
                  f"{whole['norm']:9.1e} {rest['loss']:9.1e}", flush=True)  # fmt: skip
            worst, recorded[case] = max(worst, whole["loss"], rest["loss"]), theirs
        if args.record is not None:
            args.record.parent.mkdir(parents=True, exist_ok=True)
            args.record.write_text(json.dumps({"from": provenance(args.deepspeed_python), "cases": recorded}))
    print(f"largest difference of a loss: {worst:.1e} (bound {BOUND:.0e})")
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    main()
