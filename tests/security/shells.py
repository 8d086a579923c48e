"""Names that would be commands, and secrets that would be left lying about."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from typing import Any

from security.ground import SECRET, GotThrough, Ground, attempt, environment, refused

from shardwise.launch.hosts import Hosts
from shardwise.launch.submission import Submission

LAUNCH, SECRETS = "launch", "secrets"
VARIABLE = "SHARDWISE_MEETING_TOKEN"


def _asked(ground: Ground, **changes: Any) -> Submission:
    file = ground.folder / "run.yaml"
    file.write_text("model: x\noutput: out\n")
    values: dict[str, Any] = {
        "run_file": file, "overrides": (), "hosts": Hosts(2, 2), "name": "job", "output": ground.folder / "out",
        "folder": ground.folder, "written": "out", "image": "i", "volume": "c:/out",
    }  # fmt: skip
    return Submission(**values | changes)


def _slurm(ground: Ground, **changes: Any) -> str:
    from shardwise.launch.slurm import Slurm

    return Slurm().text(_asked(ground, **changes))


@attempt(LAUNCH, "a job's name with a line of its own for Slurm")
def _(ground: Ground) -> str:
    return refused(lambda: _slurm(ground, name="job\n#SBATCH --uid=0"))


@attempt(LAUNCH, "a partition with a line of its own for Slurm")
def _(ground: Ground) -> str:
    return refused(lambda: _slurm(ground, partition="a\n#SBATCH --uid=0"))


@attempt(LAUNCH, "--line with two lines")
def _(ground: Ground) -> str:
    return refused(lambda: _slurm(ground, lines=("module load a\nrm -rf /",)))


@attempt(LAUNCH, "an ssh host that is an option (-oProxyCommand=…)")
def _(ground: Ground) -> str:
    from shardwise.launch.hosts import names_of

    return refused(lambda: names_of(f"-oProxyCommand=touch {ground.mark}"))


@attempt(LAUNCH, "--cancel 'slurm:1; touch mark'")
def _(ground: Ground) -> str:
    return ground.command("launch", "--cancel", f"slurm:1; touch {ground.mark}")


@attempt(LAUNCH, "a Kubernetes name with quotes and braces")
def _(ground: Ground) -> str:
    from shardwise.launch.kubernetes import Kubernetes

    return refused(lambda: Kubernetes().text(_asked(ground, name='a", "b": {')))


@attempt(LAUNCH, "overrides, folders and values with $(touch mark), run by a shell")
def _(ground: Ground) -> str:
    from shardwise.launch.ssh import commands

    evil = f"$(touch {ground.mark})`touch {ground.mark}`;touch {ground.mark}'\"\n&touch {ground.mark}"
    folder = ground.folder / "a;$(touch mark) b"
    folder.mkdir()
    asked = _asked(ground, overrides=(f"model={evil}",), env={"A": evil}, folder=folder, ssh=("h",), image=None)
    (command,) = commands(asked).values()
    script = command[-1].replace(" -m shardwise node ", " -c 'import sys; print(sys.argv[1:])' ")
    done = subprocess.run(["sh", "-c", script], input="t\n", capture_output=True, text=True, check=False, timeout=20)
    if (folder / "mark").exists() or repr(f"model={evil}") not in done.stdout:
        raise GotThrough(done.stdout + done.stderr)
    return f"passed on as it is: {done.stdout.replace(str(ground.folder), '…')[:110]}"


def _hidden(text: str, where: str) -> str:
    if SECRET in text:
        raise GotThrough(f"the secret is in {where}")
    return text


@attempt(SECRETS, "--env HF_TOKEN=… in launch.json")
def _(ground: Ground) -> str:
    from shardwise.launch import command
    from shardwise.launch.slurm import Slurm

    asked = _asked(ground, env={"HF_TOKEN": SECRET}, image=None)

    class Quiet(Slurm):
        def submit(self, asked: Submission, text: str) -> str:
            assert SECRET in text, "it was asked for"
            return "1"

    before, command.backend = command.backend, lambda way, address=None: Quiet()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            command.launch("slurm", asked, False, False)
    finally:
        command.backend = before
    record = _hidden((asked.output / "launch.json").read_text(), "launch.json")
    return next(line for line in json.loads(record)["text"].splitlines() if "HF_TOKEN" in line)


@attempt(SECRETS, "the hosts' token in what is submitted or shown (Slurm, ssh, Ray, Kubernetes, SkyPilot)")
def _(ground: Ground) -> str:
    from shardwise.launch import ssh
    from shardwise.launch.kubernetes import Kubernetes
    from shardwise.launch.ray_jobs import RayJobs
    from shardwise.launch.sky import Sky

    with environment(**{VARIABLE: SECRET}):
        asked = _asked(ground, ssh=("a", "b"))
        for text in (
            _slurm(ground),
            ssh.text(asked),
            RayJobs().text(asked),
            Kubernetes().text(asked),
            Sky().text(asked),
        ):
            _hidden(text, "a script")
    return "all of them only refer to it by name"


@attempt(SECRETS, "the hosts' token in the ranks' environment")
def _(ground: Ground) -> str:
    import os

    from shardwise.launch.token import take_token

    with environment(**{VARIABLE: SECRET}):
        assert take_token(None) == SECRET
        if VARIABLE in os.environ:
            raise GotThrough("ranks inherit it")
    return "the agent takes it out of its environment before it starts ranks"


@attempt(SECRETS, "HF_TOKEN on the command line of DeepSpeed's launcher (ssh)")
def _(ground: Ground) -> str:
    from shardwise.deepspeed import launch

    with environment(HF_TOKEN=SECRET, HF_HOME="/models"):
        args = launch._parser().parse_args(["--hostfile", "x", "train.py"])
        command = " ".join(launch._remote(args, {"a": [0], "b": [0]}, 1, "a"))
    assert "HF_HOME=/models" in command, "others are passed on"
    _hidden(command, "the command line")
    return "left out; HF_HOME is passed on"


@attempt(SECRETS, "a key in the message of a failure (failure note, log)")
def _(ground: Ground) -> str:
    from shardwise.launch.worker import failure_note
    from shardwise.train.status import Status

    with environment(WANDB_API_KEY=SECRET):
        error = ValueError(f"401 for https://me:{SECRET}@host/x with key {SECRET}")
        note = failure_note(error, 0, Status(ground.folder / "status"))
    return str(_hidden(str(note["reason"]), "the note"))


@attempt(SECRETS, "a name and password in an address, as a model")
def _(ground: Ground) -> str:
    run = {"model": f"https://me:{SECRET}@host/model", "data": {"train": "x.jsonl"}, "output": str(ground.folder / "o")}
    (ground.folder / "run.yaml").write_text(json.dumps(run))
    return _hidden(ground.command("train", str(ground.folder / "run.yaml")), "the message")


@attempt(SECRETS, "a judge's address with a password, which would be stored with the results")
def _(ground: Ground) -> str:
    from shardwise.evaluate.client import Endpoint

    return _hidden(refused(lambda: Endpoint(f"https://me:{SECRET}@host/v1", "m")), "the message")


@attempt(SECRETS, "HF_TOKEN in what `doctor` prints")
def _(ground: Ground) -> str:
    from shardwise.cli.doctor import check_environment

    found = [f"{one.name}: {one.text}" for one in check_environment({"HF_TOKEN": SECRET, "HF_HOME": "/x"})]
    return _hidden(", ".join(found), "the findings")
