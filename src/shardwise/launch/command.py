"""`shardwise launch`: checks the run, writes the script or manifest, hands it over and follows it."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.core.errors import UserError
from shardwise.core.redact import HIDDEN, SECRET_VARIABLE, redact
from shardwise.launch.hosts import check_sizes, names_of, parse_hosts
from shardwise.launch.submission import Backend, Submission, parse_env, parse_minutes

if TYPE_CHECKING:
    from shardwise.config.schema import Run

WAYS = ("slurm", "ray", "k8s", "sky")
# The ways that can do something with an option; those that all can are not named.
BELONGS = {
    "gpu": ("slurm", "k8s", "sky"), "cpus": ("slurm", "ray", "k8s", "sky"), "memory": ("slurm", "k8s", "sky"),
    "time": ("slurm", "k8s"), "partition": ("slurm", "k8s"), "account": ("slurm", "k8s"), "volume": ("k8s",),
    "image": ("slurm", "k8s", "sky"), "name": ("slurm", "ray", "k8s", "sky"), "address": ("ray", "ssh"),
}  # fmt: skip


@dataclass(frozen=True)
class Ways:
    """Which way was asked for."""

    slurm: bool = False
    ray: bool = False
    k8s: bool = False
    sky: bool = False
    ssh: str | None = None

    def chosen(self) -> str:
        given = [way for way in WAYS if getattr(self, way)] + ["ssh"] * (self.ssh is not None)
        if len(given) != 1:
            problem = "is needed" if not given else f"only one of --{' and --'.join(given)} can be used"
            raise UserError("--slurm | --ray | --k8s | --ssh | --sky", None, problem, "choose one of them")
        return given[0]


def backend(way: str, address: str | None = None) -> Backend:
    """By its name in options and identities; `address` is of Ray's dashboard."""
    if way == "slurm":
        from shardwise.launch.slurm import Slurm

        return Slurm()
    if way == "ray":
        from shardwise.launch.ray_jobs import RayJobs

        return RayJobs(address)
    if way == "k8s":
        from shardwise.launch.kubernetes import Kubernetes

        return Kubernetes()
    assert way == "sky", way
    from shardwise.launch.sky import Sky

    return Sky()


def status(identity: str, address: str | None = None) -> str:
    """How a launched run stands."""
    through, name = find(identity, "--status", address)
    return through.status(name)


def cancel(identity: str, address: str | None = None) -> str:
    """Ends a launched run."""
    through, name = find(identity, "--cancel", address)
    through.cancel(name)
    return f"{identity} is ending: its ranks save first"


def find(identity: str, option: str, address: str | None = None) -> tuple[Backend, str]:
    """`slurm:123` as it was printed when it was submitted."""
    way, colon, name = identity.partition(":")
    if way in WAYS and way != "ray" and address is not None:
        raise UserError("--address", address, f"is of Ray's dashboard, and {identity} is not Ray's", "leave it out")
    if way not in WAYS or not colon or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise UserError(option, identity, "is no launched run", "write it as `shardwise launch` did, e.g. slurm:123")
    return backend(way, address), name


def check_options(way: str, given: Mapping[str, object]) -> None:
    """Refuses what the chosen way would pass over in silence; `given`: options by name, None where not given."""
    for name, ways in BELONGS.items():
        if given.get(name) is not None and way not in ways:
            whose = f"belongs to {_listed(ways)}: --{way} can do nothing with it"
            raise UserError(f"--{name}", given[name], whose, "leave it out")
    lines = given.get("line") or ()
    assert isinstance(lines, list | tuple)
    for line in lines:
        if line.startswith("#SBATCH") and way != "slurm":
            problem = f"belongs to --slurm: for --{way} it is a comment"
            raise UserError("--line", line, problem, "leave it out")
    if way == "slurm" and given.get("gpu") is not None and given.get("gpus") is None:
        raise UserError("--gpu", given["gpu"], "says which, and not how many", "add e.g. --gpus 8")


def check_alone(option: str, given: Sequence[str]) -> None:
    """--status and --cancel are about a run that was launched; whatever else is given would be passed over."""
    if given:
        raise UserError(option, None, f"does not go with {given[0]}", f"leave {given[0]} out")


def _listed(ways: Sequence[str]) -> str:
    return " and ".join([", ".join(f"--{way}" for way in ways[:-1])] * (len(ways) > 1) + [f"--{ways[-1]}"])


def prepare(run_file: Path, overrides: list[str], hosts: str, ssh: str | None, **options: object) -> Submission:
    """The submission that the options ask for, once the run is sound for every number of hosts."""
    from shardwise.config.load import load_run

    loaded = load_run(run_file, overrides)
    loaded.print_notes()
    run = loaded.run
    if run.device == "cpu" and (gpus := options.get("gpus")):
        problem = "the run has device: cpu and would not use them"
        raise UserError("--gpus", gpus, problem, "leave it out, or set device: auto")
    names = tuple(names_of(ssh)) if ssh is not None else ()
    number = parse_hosts(hosts or str(len(names) or 1))
    if names and number.most > len(names):
        raise UserError("--hosts", hosts, f"--ssh names {len(names)} hosts", "lower it, or name more")
    output = Path(run.output).expanduser().absolute()
    env, passed = parse_env(options.pop("env"))  # type: ignore[arg-type]
    minutes = parse_minutes(options.pop("time"))  # type: ignore[arg-type]
    asked = Submission(
        run_file.absolute(), tuple(overrides), number, str(options.pop("name") or _name(output)), output, Path.cwd(),
        written=str(run.output), env=env, passed=passed, minutes=minutes, ssh=names, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    check_sizes(run, number, asked.ranks or asked.gpus or _ranks(run))
    return asked


def launch(way: str, asked: Submission, dry: bool, follow: bool) -> int:
    """Submits and follows; the exit code."""
    if way == "ssh":
        from shardwise.launch import ssh

        if dry:
            print(ssh.text(asked), end="")
            return 0
        if not follow:
            remedy = "leave it out (in tmux, if it is to outlive your terminal), or use another way"
            raise UserError("--no-follow", None, "agents started by ssh end with the connection", remedy)
        return ssh.run(asked)
    through = backend(way, asked.address)
    text = through.text(asked)
    if dry:
        print(text, end="")
        return 0
    identity = f"{way}:{through.submit(asked, text)}"
    print(f"launched {identity} (shardwise launch --status {identity}, --cancel {identity})", flush=True)
    with contextlib.suppress(OSError):  # beside the run's files, for those who look for it later
        asked.output.mkdir(parents=True, exist_ok=True)
        record = {"id": identity, "time": time.time(), "hosts": str(asked.hosts), "text": _without_secrets(text, asked)}
        (asked.output / "launch.json").write_text(json.dumps(record, indent=1))
    if not follow:
        return 0
    try:
        return through.follow(identity.partition(":")[2], asked)
    except KeyboardInterrupt:
        print(f"\n{identity} goes on; shardwise launch --cancel {identity} ends it", flush=True)
        return 130


def _without_secrets(text: str, asked: Submission) -> str:
    """The output folder is read by others, and passed on."""
    for name, value in asked.env.items():
        if SECRET_VARIABLE.search(name) and value:
            for form in (value, shlex.quote(value), json.dumps(value)[1:-1]):
                text = text.replace(form, HIDDEN)
    return redact(text)


def _ranks(run: Run) -> int:
    return int(run.ranks) if run.ranks != "auto" else 1


def _name(output: Path) -> str:
    """A job's name that every scheduler takes."""
    name = re.sub(r"[^a-z0-9]+", "-", output.name.lower()).strip("-")[:40].strip("-")
    return f"shardwise-{name}" if name else "shardwise"
