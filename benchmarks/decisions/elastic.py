"""torchrun's elastic agent when a host is cut off, comes back, and when the rendezvous host dies.

    PYTHONPATH=src:tests python benchmarks/decisions/elastic.py OUT.json        # needs root and iproute2

Three network namespaces on a bridge, one agent and one rank each, `--nnodes 2:3 --rdzv-backend c10d`; ranks all-reduce
in a loop over gloo with a timeout of --collective seconds and save (for --saving seconds) when they get SIGTERM. The
same with `shardwise node`: pytest -m slow -s tests/launch/test_three_hosts.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any


def worker(folder: Path, host: str, collective: float, saving: float) -> None:
    """One rank: a line per event in a file of its own."""
    import torch
    import torch.distributed as dist

    began, restarts = time.time(), os.environ["TORCHELASTIC_RESTART_COUNT"]

    def note(what: str) -> None:
        with (folder / f"{host}.txt").open("a") as file:
            file.write(f"{time.time():.2f} {what} restarts={restarts}\n")

    def stop(*_: Any) -> None:
        note("SIGTERM")
        time.sleep(saving)
        note("saved")
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    note("started")
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=collective))
        note(f"world {dist.get_world_size()}")
        for step in range(100_000):
            dist.all_reduce(torch.ones(8))
            if step % 5 == 0:
                (folder / f"{host}.step").write_text(f"{time.time():.2f} {dist.get_world_size()} {began:.2f}")
            time.sleep(0.1)
    except Exception as error:
        note(f"failed {type(error).__name__}")
        raise


def agent(host: Any, number: int, first: Any, options: Any, folder: Path) -> subprocess.Popen[str]:
    """torchrun on a host."""
    command = [
        *host.inside, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:3", "--nproc-per-node", "1",
        "--max-restarts", "10", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:29400",
        "--rdzv-id", "run", "--local-addr", host.address,
        "--rdzv-conf", f"last_call_timeout=15,is_host={int(not number)}",
        __file__, "--worker", str(folder), f"host{number}", str(options.collective), str(options.saving),
    ]  # fmt: skip
    env = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    log = (folder / f"agent{number}.log").open("w")
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, text=True)


def lines(folder: Path, number: int) -> list[tuple[float, str]]:
    file = folder / f"host{number}.txt"
    rows = [line.split(" ", 1) for line in file.read_text().splitlines()] if file.exists() else []
    return [(float(at), what) for at, what in rows]


def wait(what: str, folder: Path, number: int, after: float, limit: float = 300) -> float | None:
    """When a host's rank noted something; None if it does not within the limit."""
    deadline = time.time() + limit
    while time.time() < deadline:
        for at, said in lines(folder, number):
            if at >= after and said.startswith(what):
                return at
        time.sleep(0.2)
    return None


def main() -> None:
    """Plays the three faults and prints seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output")
    parser.add_argument("--collective", type=float, default=40.0)
    parser.add_argument("--saving", type=float, default=45.0)
    options = parser.parse_args()
    from support.hosts import some_hosts

    results: dict[str, Any] = {"collective timeout": options.collective, "a save takes": options.saving}
    with tempfile.TemporaryDirectory() as name, some_hosts(3) as hosts:
        folder = Path(name)
        agents = [agent(host, n, hosts[0], options, folder) for n, host in enumerate(hosts)]
        try:
            if not wait("world 3", folder, 0, 0, 500):
                sys.exit("did not start:\n" + "\n".join(f.read_text()[-1500:] for f in folder.glob("agent*.log")))
            time.sleep(5)
            hosts[2].cut()
            cut = time.time()
            results["noticed"] = (wait("failed", folder, 0, cut) or 0) - cut
            results["two ranks run"] = (wait("world 2", folder, 0, cut) or 0) - cut
            print(json.dumps(results), flush=True)
            time.sleep(20)
            hosts[2].mend()
            back = time.time()
            told = wait("SIGTERM", folder, 0, back, 60)
            results["agent of the host that was cut off, after 60 s"] = (
                "joined" if told else f"exit code {agents[2].poll()}" if agents[2].poll() is not None else "hangs"
            )
            if not told:  # as a scheduler would
                agents[2].kill()
                agents[2].wait()
                agents[2] = agent(hosts[2], 2, hosts[0], options, folder)
                back = time.time()
                told = wait("SIGTERM", folder, 0, back, 120)
            results["asked to stop after it came back"] = told and told - back
            saved = told and wait("saved", folder, 0, told, options.saving + 20)
            results["saved"] = saved and saved - told
            again = told and wait("world 3", folder, 0, told, 120)
            results["three ranks run"] = again and again - told
            print(json.dumps(results), flush=True)
            agents[0].kill()  # the host of the rendezvous
            killed = time.time()
            left = [n for n in (1, 2) if agents[n].poll() is None]
            codes: dict[int, Any] = {}
            while time.time() < killed + 150 and len(codes) < len(left):
                codes |= {n: (agents[n].poll(), round(time.time() - killed, 1)) for n in left
                          if n not in codes and agents[n].poll() is not None}  # fmt: skip
                time.sleep(0.2)
            results["rendezvous host killed: exit code and seconds of the others"] = {
                str(n): codes.get(n) for n in left
            }
        finally:
            for one in agents:
                below = subprocess.run(
                    ["pgrep", "-P", str(one.pid)], capture_output=True, text=True, check=False
                ).stdout.split()
                for pid in (*map(int, below), one.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                one.wait()
            texts = {n: (folder / f"agent{n}.log").read_text()[-2500:] for n in range(3)}
            events = {n: lines(folder, n) for n in range(3)}
    print(json.dumps(results, indent=1), flush=True)
    Path(options.output).write_text(json.dumps(results | {"events": events, "agents": texts}, indent=1))


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker(Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]), float(sys.argv[5]))
    else:
        main()
