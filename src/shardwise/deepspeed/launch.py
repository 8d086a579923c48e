"""Starts a script the way `deepspeed` does: one process per device, on this host or, by ssh, on those of a hostfile.

    shardwise deepspeed --num_gpus 2 train.py --deepspeed_config ds_config.json
    shardwise deepspeed --hostfile hosts --include worker-0@worker-1:0,2 train.py …
    python -m shardwise.deepspeed.launch …                                  # the same

Each process gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and `--local_rank` as the
script's first argument unless --no_local_rank is given. When one dies, the others are ended and its exit code is ours.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shardwise.core.errors import RunFailed, UserError
from shardwise.core.redact import SECRET_VARIABLE
from shardwise.deepspeed.hosts import Slots, as_filter, choose, parse_filter, read_hostfile
from shardwise.deepspeed.refused import refuse

POLL, GRACE = 0.05, 10.0  # seconds between looks at the ranks; between SIGTERM and SIGKILL
EXPORTED = ("NCCL", "GLOO", "PYTHON", "UCX", "OMP_NUM_THREADS", "HF_", "CUDA_HOME", "SHARDWISE_")
ENV_FILE = ".deepspeed_env"
HERE = ("localhost", "127.0.0.1")
DEFAULT_HOSTFILE = Path("/job/hostfile")


def main(argv: list[str] | None = None) -> int:
    """Entry point: returns the script's exit code, or 2 after an error message."""
    try:
        return run(argv)
    except (UserError, RunFailed) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def run(argv: list[str] | None = None) -> int:
    """Starts the ranks and waits for them; returns the exit code."""
    args = _parser().parse_args(argv)
    for name in ("autotuning", "bind_cores_to_rank", "elastic_training", "save_pid", "venv_script"):
        if getattr(args, name):
            raise refuse(f"launcher (--{name})", "leave it out")
    if args.launcher not in ("pdsh", "ssh"):
        raise refuse(
            f"launcher (--launcher {args.launcher})", "leave it out (ssh is used), or start with torchrun or srun"
        )
    if args.slots:
        return _start_here(args, _parse_slots(args.slots), args.node_rank, args.master_addr)
    hosts = _hosts(args)
    names = list(hosts)
    alone = names == ["localhost"] or (len(names) == 1 and not args.force_multi and _is_here(names[0]))
    address = args.master_addr or ("127.0.0.1" if alone else names[0])
    if args.no_ssh:
        if not 0 <= args.node_rank < len(names):
            raise UserError("--node_rank", args.node_rank, "is needed with --no_ssh", f"give 0 … {len(names) - 1}")
        return _start_here(args, hosts, args.node_rank, address)
    if alone:
        return _start_here(args, hosts, 0, address)
    commands = [_remote(args, hosts, number, address) for number in range(len(names))]
    if args.dry_run:
        print("\n".join(shlex.join(command) for command in commands))
        return 0
    return _watch([subprocess.Popen(command) for command in commands], names)


def _hosts(args: argparse.Namespace) -> Slots:
    has_hostfile = args.hostfile is not None
    file = Path(args.hostfile) if has_hostfile else DEFAULT_HOSTFILE
    if has_hostfile or file.is_file():
        return choose(read_hostfile(file), args.include, args.exclude, args.num_nodes, args.num_gpus)
    if args.num_nodes > 1:
        raise UserError("--num_nodes", args.num_nodes, "other hosts are known from a hostfile alone", "give --hostfile")
    from shardwise.core.cpu_probe import usable_cores

    available = _gpus() or (args.num_gpus if args.num_gpus > 0 else 1)
    if not _gpus() and args.num_gpus > 16 * usable_cores():
        raise UserError("--num_gpus", args.num_gpus, f"this host has {usable_cores()} cores and no GPU", "lower it")
    if "CUDA_VISIBLE_DEVICES" in os.environ and _gpus() and not (args.include or args.exclude):
        names = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        if all(name.isdigit() for name in names):
            count = args.num_gpus if args.num_gpus > 0 else len(names)
            if count > len(names):
                raise UserError("--num_gpus", count, f"CUDA_VISIBLE_DEVICES has {len(names)}", "lower it")
            return {"localhost": [int(name) for name in names[:count]]}
    return choose({"localhost": list(range(available))}, args.include, args.exclude, args.num_nodes, args.num_gpus)


def _gpus() -> int:
    if not any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
        return 0  # without waiting for torch
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _is_here(host: str) -> bool:
    return host in (*HERE, socket.gethostname(), socket.getfqdn())


def _parse_slots(text: str) -> Slots:
    names = [part.partition(":")[0] for part in text.split("@")]
    return parse_filter("--slots", text, {name: list(range(4096)) for name in names})


def _remote(args: argparse.Namespace, hosts: Slots, number: int, address: str) -> list[str]:
    """The ssh command that runs this launcher on another host."""
    host = list(hosts)[number]
    # A command line is for all users of both hosts to read: tokens and keys have no place there.
    env = {k: v for k, v in sorted(os.environ.items()) if k.startswith(EXPORTED) and not SECRET_VARIABLE.search(k)}
    env |= _env_file()
    exports = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    inner = [sys.executable, "-u", "-m", "shardwise.deepspeed.launch", "--slots", as_filter(hosts),
             "--node_rank", str(number), "--master_addr", address, "--master_port", str(args.master_port)]  # fmt: skip
    inner += [f"--{flag}" for flag in ("module", "no_python", "no_local_rank") if getattr(args, flag)]
    if args.enable_each_rank_log not in (None, "None"):
        inner += ["--enable_each_rank_log", args.enable_each_rank_log]
    inner += [args.user_script, *args.user_args]
    command = f"cd {shlex.quote(os.getcwd())} && " + " ".join(["exec", "env", *exports, shlex.join(inner)])
    port = ["-p", str(args.ssh_port)] if args.ssh_port else []
    # A terminal (-tt) makes the remote ranks end with the connection.
    return ["ssh", "-tt", "-o", "BatchMode=yes", *port, *shlex.split(args.launcher_args), host, command]


def _env_file() -> dict[str, str]:
    """Variables for the remote ranks, from NAME=VALUE lines in the user's or this folder's .deepspeed_env."""
    variables = {}
    for folder in (Path.home(), Path.cwd()):
        with contextlib.suppress(OSError):
            for line in (folder / ENV_FILE).read_text().splitlines():
                name, equals, value = line.strip().partition("=")
                if equals and not name.startswith("#"):
                    variables[name.strip()] = value.strip()
    return variables


def _start_here(args: argparse.Namespace, hosts: Slots, number: int, address: str) -> int:
    """Runs this host's ranks; returns the exit code."""
    slots = list(hosts.values())[number]
    first = sum(len(s) for s in list(hosts.values())[:number])
    ranks = sum(len(s) for s in hosts.values())
    port = args.master_port
    store = None
    if port is None and len(hosts) == 1:
        import torch.distributed as dist

        # The launcher hosts the meeting point on a port of the system's choice, so there is no race for one.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        address, port = "127.0.0.1", store.port
    command = _command(args)
    children, names = [], []
    logs = None if args.enable_each_rank_log in (None, "None") else Path(args.enable_each_rank_log)
    for local in range(len(slots)):
        env = {
            "RANK": str(first + local), "LOCAL_RANK": str(local), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(len(slots)), "LOCAL_SIZE": str(len(slots)), "MASTER_ADDR": address,
            "MASTER_PORT": str(port or 29500), "CROSS_RANK": str(number), "CROSS_SIZE": str(len(hosts)),
        }  # fmt: skip
        if store is not None:
            env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        if _gpus() or len(hosts) > 1:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
        else:
            env.setdefault("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
        if "OMP_NUM_THREADS" not in os.environ:
            from shardwise.core.cpu_probe import usable_cores

            env["OMP_NUM_THREADS"] = str(max(1, usable_cores() // len(slots)))
        line = [*command[0], *([] if args.no_local_rank else [f"--local_rank={local}"]), *command[1]]
        if args.dry_run:
            print(" ".join([*(f"{k}={shlex.quote(v)}" for k, v in env.items()), shlex.join(line)]))
            continue
        children.append(_child(line, os.environ | env, logs, first + local))
        names.append(f"rank {first + local}")
    return _watch(children, names) if children else 0


def _command(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The command of a rank up to the script, and the script's arguments."""
    if args.no_python and args.module:
        raise UserError("--module", None, "does not go with --no_python", "give one of them")
    if args.no_python:
        return [args.user_script], args.user_args
    if not args.module and not Path(args.user_script).is_file():
        raise UserError("script", args.user_script, "there is no such file", "check the path, or use --module")
    return [sys.executable, "-u", *(["-m"] if args.module else []), args.user_script], args.user_args


def _child(line: list[str], env: dict[str, str], logs: Path | None, rank: int) -> subprocess.Popen[bytes]:
    if logs is None:
        return subprocess.Popen(line, env=env)
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"rank-{rank}.log").open("wb") as file:
        return subprocess.Popen(line, env=env, stdout=file, stderr=subprocess.STDOUT)


def _watch(children: list[subprocess.Popen[bytes]], names: list[str]) -> int:
    """Waits for all; when one fails the others are ended, and the first failure's exit code is returned."""

    def pass_on(number: int, frame: Any) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while True:
            codes = [child.poll() for child in children]
            failed = [(name, code) for name, code in zip(names, codes, strict=True) if code not in (0, None)]
            if failed:
                name, code = failed[0]
                assert code is not None
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                print(f"error: {name} {how}; the others are ended too", file=sys.stderr, flush=True)
                return 128 - code if code < 0 else code
            if None not in codes:
                return 0
            time.sleep(POLL)
    finally:
        _end(children)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.terminate()
    deadline = time.monotonic() + GRACE
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardwise deepspeed",
        description="Starts a script on every device, with the options of DeepSpeed's launcher.",
    )
    add = parser.add_argument
    add("-H", "--hostfile", default=None, help="file of lines `host slots=8`; default /job/hostfile, else this host")
    add("-i", "--include", default="", help="hosts and devices to use: worker-0@worker-1:0,2")
    add("-e", "--exclude", default="", help="hosts and devices not to use: worker-1:0")
    add("--num_nodes", type=int, default=-1, help="use the first hosts only")
    add("--num_gpus", "--num_accelerators", type=int, default=-1, help="use the first devices of each host only")
    add("--master_addr", default="", help="address of the first host; default: its name in the hostfile")
    add("--master_port", type=int, default=None, help="port there; default 29500, on one host a free one")
    add("--node_rank", type=int, default=-1, help="with --no_ssh: which of the hosts this one is")
    add("--no_ssh", action="store_true", help="start this host's ranks only; run the same on every host")
    add("--launcher", default="pdsh", help="how hosts are reached: always ssh, which pdsh uses too")
    add("--launcher_args", default="", help="options for ssh")
    add("--ssh_port", type=int, default=None, help="port of ssh")
    add("--force_multi", action="store_true", help="use ssh even for one host")
    add("--module", action="store_true", help="the script is a module (python -m)")
    add("--no_python", action="store_true", help="the script is a program of its own")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    add("--enable_each_rank_log", default=None, help="folder for one log file per rank")
    add("--dry-run", "--dry_run", action="store_true", help="print the command lines and start nothing")
    add("--slots", default="", help=argparse.SUPPRESS)
    for name in ("--autotuning", "--save_pid", "--venv_script"):
        add(name, default=None, help=argparse.SUPPRESS, **({"action": "store_true"} if name == "--save_pid" else {}))  # type: ignore[arg-type]
    for name in ("--bind_cores_to_rank", "--elastic_training"):
        add(name, action="store_true", help=argparse.SUPPRESS)
    for name in ("--no_ssh_check", "-q", "--quiet"):
        add(name, action="store_true", help=argparse.SUPPRESS)
    add("--log_level", default=None, help=argparse.SUPPRESS)
    add("user_script", help="the script")
    add("user_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
