"""`shardwise launch`: checks the run, writes the script or manifest, submits it and follows its log."""

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

LAUNCHERS = ("slurm", "ray", "k8s", "sky")
# The ways that can do something with an option; those that all can are not named.
BELONGS = {
    "gpu": ("slurm", "k8s", "sky"), "cpus": ("slurm", "ray", "k8s", "sky"), "memory": ("slurm", "k8s", "sky"),
    "time": ("slurm", "k8s"), "partition": ("slurm", "k8s"), "account": ("slurm", "k8s"), "volume": ("k8s",),
    "image": ("slurm", "k8s", "sky"), "name": ("slurm", "ray", "k8s", "sky"), "address": ("ray", "ssh"),
}  # fmt: skip


@dataclass(frozen=True)
class LauncherOptions:
    """The launcher options of the command line."""

    slurm: bool = False
    ray: bool = False
    k8s: bool = False
    sky: bool = False
    ssh: str | None = None

    def chosen(self) -> str:
        selected = [launcher for launcher in LAUNCHERS if getattr(self, launcher)] + ["ssh"] * (self.ssh is not None)
        if len(selected) != 1:
            problem = "is needed" if not selected else f"only one of --{' and --'.join(selected)} can be used"
            raise UserError("--slurm | --ray | --k8s | --ssh | --sky", None, problem, "choose one of them")
        return selected[0]


def backend(launcher: str, address: str | None = None) -> Backend:
    """Returns a launch backend by name; `address` is the address of Ray's dashboard."""
    if launcher == "slurm":
        from shardwise.launch.slurm import Slurm

        return Slurm()
    if launcher == "ray":
        from shardwise.launch.ray_jobs import RayJobs

        return RayJobs(address)
    if launcher == "k8s":
        from shardwise.launch.kubernetes import Kubernetes

        return Kubernetes()
    assert launcher == "sky", launcher
    from shardwise.launch.sky import Sky

    return Sky()


def status(identity: str, address: str | None = None) -> str:
    """State of a launched run."""
    through, name = find(identity, "--status", address)
    return through.status(name)


def cancel(identity: str, address: str | None = None) -> str:
    """Cancels a launched run."""
    through, name = find(identity, "--cancel", address)
    through.cancel(name)
    return f"{identity} is ending: its ranks save first"


def find(identity: str, option: str, address: str | None = None) -> tuple[Backend, str]:
    """Backend and job id of an identity such as `slurm:123`, as printed on submission."""
    launcher, colon, name = identity.partition(":")
    if launcher in LAUNCHERS and launcher != "ray" and address is not None:
        raise UserError("--address", address, f"is of Ray's dashboard, and {identity} is not Ray's", "leave it out")
    if launcher not in LAUNCHERS or not colon or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise UserError(option, identity, "is no launched run", "write it as `shardwise launch` did, e.g. slurm:123")
    return backend(launcher, address), name


def check_options(launcher: str, options: Mapping[str, object]) -> None:
    """Rejects options that the chosen launcher would ignore; `options` by name, None if not given."""
    for name, launchers in BELONGS.items():
        if options.get(name) is not None and launcher not in launchers:
            reason = f"belongs to {_listed(launchers)}: --{launcher} can do nothing with it"
            raise UserError(f"--{name}", options[name], reason, "leave it out")
    lines = options.get("line") or ()
    assert isinstance(lines, list | tuple)
    for line in lines:
        if line.startswith("#SBATCH") and launcher != "slurm":
            problem = f"belongs to --slurm: for --{launcher} it is a comment"
            raise UserError("--line", line, problem, "leave it out")
    if launcher == "slurm" and options.get("gpu") is not None and options.get("gpus") is None:
        raise UserError("--gpu", options["gpu"], "says which, and not how many", "add e.g. --gpus 8")


def check_alone(option: str, others: Sequence[str]) -> None:
    """Rejects further arguments of --status and --cancel, which would be ignored."""
    if others:
        raise UserError(option, None, f"does not go with {others[0]}", f"leave {others[0]} out")


def _listed(launchers: Sequence[str]) -> str:
    return " and ".join(
        [", ".join(f"--{launcher}" for launcher in launchers[:-1])] * (len(launchers) > 1) + [f"--{launchers[-1]}"]
    )


def prepare(run_file: Path, overrides: list[str], hosts: str, ssh: str | None, **options: object) -> Submission:
    """Builds the submission from the options, after checking the run for every number of hosts."""
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
    submission = Submission(
        run_file.absolute(), tuple(overrides), number, str(options.pop("name") or _name(output)), output, Path.cwd(),
        written=str(run.output), env=env, passed=passed, minutes=minutes, ssh=names, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    check_sizes(run, number, submission.ranks or submission.gpus or _ranks(run))
    return submission


def launch(launcher: str, submission: Submission, dry: bool, follow: bool) -> int:
    """Submits the run and follows it; returns the exit code."""
    if launcher == "ssh":
        from shardwise.launch import ssh

        if dry:
            print(ssh.text(submission), end="")
            return 0
        if not follow:
            remedy = "leave it out (in tmux, if it is to outlive your terminal), or use another way"
            raise UserError("--no-follow", None, "agents started by ssh end with the connection", remedy)
        return ssh.run(submission)
    through = backend(launcher, submission.address)
    text = through.text(submission)
    if dry:
        print(text, end="")
        return 0
    identity = f"{launcher}:{through.submit(submission, text)}"
    print(f"launched {identity} (shardwise launch --status {identity}, --cancel {identity})", flush=True)
    with contextlib.suppress(OSError):  # beside the run's files, for those who look for it later
        submission.output.mkdir(parents=True, exist_ok=True)
        record = {
            "id": identity,
            "time": time.time(),
            "hosts": str(submission.hosts),
            "text": _without_secrets(text, submission),
        }
        (submission.output / "launch.json").write_text(json.dumps(record, indent=1))
    if not follow:
        return 0
    try:
        return through.follow(identity.partition(":")[2], submission)
    except KeyboardInterrupt:
        print(f"\n{identity} goes on; shardwise launch --cancel {identity} ends it", flush=True)
        return 130


def _without_secrets(text: str, submission: Submission) -> str:
    """Redacts secrets in the script, as others can read the output folder."""
    for name, value in submission.env.items():
        if SECRET_VARIABLE.search(name) and value:
            for form in (value, shlex.quote(value), json.dumps(value)[1:-1]):
                text = text.replace(form, HIDDEN)
    return redact(text)


def _ranks(run: Run) -> int:
    return int(run.ranks) if run.ranks != "auto" else 1


def _name(output: Path) -> str:
    """A job name that every scheduler accepts."""
    name = re.sub(r"[^a-z0-9]+", "-", output.name.lower()).strip("-")[:40].strip("-")
    return f"shardwise-{name}" if name else "shardwise"
