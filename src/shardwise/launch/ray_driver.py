"""Driver of a Ray job: one agent on each node, more when nodes join, until the run ends.

Agents are placed node by node (node affinity), not by a placement group: its bundles are fixed when it is created, so a
node that joins later could not be used. Each agent reserves its node's resources by itself, and waits for the others at
the rendezvous, which replaces gang scheduling.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

POLL = 1.0
AWAY = 20.0  # seconds for agents to end that have lost the place where they met
HEAD = "node:__internal_head__"  # a resource that Ray gives the head alone
LOST = -1  # the node where the agents meet is gone: all begin anew elsewhere


class Host:
    """Ray actor that runs the agent process of a node."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._process: subprocess.Popen[str] | None = None

    def place(self) -> tuple[str, int]:
        """An address and a free port for the rendezvous."""
        import ray

        from shardwise.launch.rendezvous_link import free_port

        return str(ray.util.get_node_ip_address()), free_port()

    def start(self, command: str, token: str) -> None:
        """Starts the agent; its input stays open as long as this actor lives."""
        from shardwise.launch.token import VARIABLE

        self._process = subprocess.Popen(
            ["/bin/sh", "-c", command], env=os.environ | {VARIABLE: token}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        self._lines.extend(self._process.stdout)

    def poll(self) -> tuple[int | None, list[str]]:
        """The exit code, and the output since the last call."""
        assert self._process is not None
        code = self._process.poll()
        count = len(self._lines)
        lines, self._lines[:count] = self._lines[:count], []
        return code, lines

    def stop(self) -> None:
        """Asks the agent to stop: ranks save."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write("stop\n")
        self._process.stdin.flush()


def main(spec: dict[str, Any]) -> int:
    """Runs agents until the run ends; returns the exit code."""
    import ray

    ray.init(address="auto", log_to_driver=False)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    from shardwise.launch.token import make_token

    # made here: what is submitted with a job, Ray keeps and shows
    token = make_token()
    code = LOST
    while code == LOST and not stopping.is_set():
        code = _gather(spec, token, stopping)
    return code if code != LOST else 143


def _gather(spec: dict[str, Any], token: str, stopping: threading.Event) -> int:
    import ray

    hosts: dict[str, Any] = {}  # node → its Host
    codes: dict[str, int] = {}
    meet = ""
    first = ""
    stop_sent = False
    while True:
        free = [node for node in _nodes(spec) if node not in hosts and node not in codes]
        for node in free[: spec["most"] - len(hosts)] if not stopping.is_set() else ():
            started = _start(spec, token, node, meet, len(codes) + len(hosts))
            if started is not None:
                hosts[node], meet = started
                first = first or node
        for node, host in list(hosts.items()):
            try:
                code, lines = ray.get(host.poll.remote(), timeout=30)
                print("".join(lines), end="", flush=True)
                if stopping.is_set() and not stop_sent:
                    ray.get(host.stop.remote(), timeout=30)
            except (ray.exceptions.RayError, TimeoutError):
                print(f"node {node[:8]} is lost", flush=True)
                del hosts[node]
                if node == first:
                    for other in hosts.values():
                        ray.kill(other)  # its agent loses its input, and withdraws
                    time.sleep(AWAY)
                    return LOST
                continue
            if code is not None:
                codes[node] = code
                del hosts[node]
                ray.kill(host)
        stop_sent = stop_sent or stopping.is_set()
        if codes and not hosts:
            return codes.get(first, max(codes.values()))
        if stopping.is_set() and not hosts:
            return 143
        time.sleep(POLL)


def _nodes(spec: dict[str, Any]) -> list[str]:
    import ray

    def fits(node: dict[str, Any]) -> bool:
        has = node["Resources"]
        return bool(node["Alive"]) and has.get("CPU", 0) >= spec["cpus"] and has.get("GPU", 0) >= spec["gpus"]

    # The cluster's head first, where it can take part: without it there is no cluster, so they may as well meet there.
    nodes = sorted(ray.nodes(), key=lambda node: HEAD not in node["Resources"])
    return [node["NodeID"] for node in nodes if fits(node)]


def _start(spec: dict[str, Any], token: str, node: str, meet: str, number: int) -> tuple[Any, str] | None:
    """Starts an agent on a node; returns it with the rendezvous address, None if the node has no room."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    actor = ray.remote(Host).options(
        num_cpus=spec["cpus"], num_gpus=spec["gpus"], scheduling_strategy=strategy, max_concurrency=2
    )
    host = actor.remote()
    try:
        address, port = ray.get(host.place.remote(), timeout=60)
        meet = meet or f"{address}:{spec['port'] or port}"
        command = f"{spec['node']} --name node-{number}-{node[:6]} --rendezvous {meet}"
        ray.get(host.start.remote(command, token), timeout=60)
        return host, meet
    except (ray.exceptions.RayError, TimeoutError) as error:
        print(f"node {node[:8]} has no room: {type(error).__name__}", flush=True)
        ray.kill(host)
        return None


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
