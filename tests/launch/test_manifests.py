"""What is handed to Kubernetes and SkyPilot, held against their own schemas; and how their programs are called."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import cli
from support.tiny import tiny_run

from shardwise.cli import main as command_line
from shardwise.core.errors import UserError
from shardwise.launch.command import BELONGS
from shardwise.launch.hosts import Hosts
from shardwise.launch.kubernetes import Kubernetes
from shardwise.launch.sky import Sky
from shardwise.launch.submission import Submission, parse_env, parse_minutes

SCHEMAS = ("1.31", "1.34")


@pytest.fixture
def asked(tmp_path: Path) -> Submission:
    file = tmp_path / "run.yaml"
    file.write_text("model: x\noutput: out/run\n")
    return Submission(
        file, ("train.steps=5", "model=a 'b'"), Hosts(2, 4), "my-run", tmp_path / "out", tmp_path, written="out/run",
        gpus=8, gpu="H100", cpus=16, memory="64Gi", minutes=90, image="registry/shardwise:1", volume="outputs:/outputs",
        env={"A": "it's $HOME"}, passed=("TOKEN",), lines=("export B=1",), account="trainer", partition="team",
    )  # fmt: skip


def changed(asked: Submission, **changes: Any) -> Submission:
    from dataclasses import replace

    return replace(asked, **changes)


@pytest.mark.parametrize("version", SCHEMAS)
@pytest.mark.parametrize("hosts", [Hosts(2, 4), Hosts(2, 2), Hosts(1, 1)])
def test_kubernetes_takes_the_manifest(asked: Submission, version: str, hosts: Hosts) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    documents = list(yaml.safe_load_all(Kubernetes().text(changed(asked, hosts=hosts))))
    assert [one["kind"] for one in documents] == ["ConfigMap", "Service", "Job"]
    for one in documents:
        kubernetes_validate.validate(one, version, strict=True)


def test_the_job(asked: Submission) -> None:
    run, service, job = yaml.safe_load_all(Kubernetes().text(asked))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert run["data"]["run.yaml"] == asked.run_file.read_text() and service["spec"]["clusterIP"] == "None"
    assert spec["completions"] == spec["parallelism"] == 4 and spec["completionMode"] == "Indexed"
    assert spec["activeDeadlineSeconds"] == 5400 and spec["successPolicy"]["rules"] == [{"succeededIndexes": "0"}]
    assert spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [2], "a mistake is not tried again"
    assert pod["subdomain"] == service["metadata"]["name"] and pod["terminationGracePeriodSeconds"] == 330
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "cpu": "16", "memory": "64Gi"}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/dev/shm", "/outputs"}
    assert container["workingDir"] == "/outputs" and job["metadata"]["namespace"] == "team"
    script = container["command"][-1]
    assert "--rendezvous my-run-0.my-run:29400" in script and "--hosts 2:4" in script and "export B=1" in script
    assert "--withdraw" in script
    assert "'model=a '\"'\"'b'\"'\"''" in script and '--name "$HOSTNAME"' in script
    env = {one["name"]: one for one in container["env"]}
    assert env["A"]["value"] == "it's $HOME"
    kept = {"name": "my-run-meeting", "key": "SHARDWISE_MEETING_TOKEN"}
    assert env["SHARDWISE_MEETING_TOKEN"]["valueFrom"]["secretKeyRef"] == kept
    assert env["TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "my-run", "key": "TOKEN"}
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0


def test_what_kubernetes_cannot_do_is_refused(asked: Submission) -> None:
    for field, change in {
        "--image": {"image": None}, "--name": {"name": "My_Run"}, "--line": {"lines": ("a\nb",)},
        "output": {"written": "/home/me/out"},
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=field):
            Kubernetes().text(changed(asked, **change))
    for volume in (None, "outputs", "Bad_Claim:/x", "a:relative"):
        with pytest.raises(UserError, match="--volume"):
            Kubernetes().text(changed(asked, volume=volume))


def test_skypilot_takes_the_task(asked: Submission) -> None:
    task = yaml.safe_load(Sky().text(asked))
    assert task["num_nodes"] == 4 and task["resources"]["accelerators"] == "H100:8"
    assert task["secrets"] == {"TOKEN": None, "SHARDWISE_MEETING_TOKEN": None} and task["envs"] == {"A": "it's $HOME"}
    assert "node run.yaml" in task["run"] and '--rendezvous "$first:29400"' in task["run"]
    assert subprocess.run(["sh", "-n"], input=task["run"], text=True, check=False).returncode == 0
    schemas = pytest.importorskip("sky.utils.schemas")
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())


def test_what_skypilot_cannot_do_is_refused(asked: Submission, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--gpus"):
        Sky().text(changed(asked, gpu=None))
    with pytest.raises(UserError, match="outside of this folder"):
        Sky().text(changed(asked, folder=tmp_path / "other"))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """kubectl and sky that write down how they are called."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    for name in ("kubectl", "sky"):
        says = 'case "$*" in *"get pods"*) echo Running;; *"get job"*) echo "1 succeeded, Complete";; esac'
        keeps = f'case "$*" in "create -f -") cat > {calls}.manifest;; esac\nenv > {calls}.env'
        (folder / name).write_text(f'#!/bin/sh\nprintf "%s\\n" "{name} $*" >> {calls}\n{keeps}\n{says}\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return calls


def shardwise(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        command_line.main(["launch", *words])
    return int(left.value.code or 0)


def test_programs_are_called(
    tmp_path: Path, programs: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = cli.write_run(tmp_path / "run", tiny_run(tmp_path, output="out"))
    monkeypatch.chdir(tmp_path)
    k8s = [
        str(file),
        "--k8s",
        "--hosts",
        "2",
        "--ranks",
        "1",
        "--image",
        "i",
        "--volume",
        "c:/out",
        "--partition",
        "ns",
    ]
    assert shardwise(*k8s) == 0
    said = capfd.readouterr().out
    assert "launched k8s:ns.shardwise-out" in said and "has ended: 1 succeeded, Complete" in said
    assert json.loads((tmp_path / "out/launch.json").read_text())["id"] == "k8s:ns.shardwise-out"
    *_, secret = yaml.safe_load_all(Path(f"{programs}.manifest").read_text())
    token = secret["stringData"]["SHARDWISE_MEETING_TOKEN"]
    assert secret["metadata"] == {"name": "shardwise-out-meeting", "namespace": "ns"} and len(token) == 64
    assert token not in (tmp_path / "out/launch.json").read_text() + said
    assert shardwise("--status", "k8s:ns.shardwise-out") == 0 and shardwise("--cancel", "k8s:ns.shardwise-out") == 0
    assert shardwise(str(file), "--sky", "--ranks", "1", "--no-follow") == 0
    assert "SHARDWISE_MEETING_TOKEN=" in Path(f"{programs}.env").read_text(), "its value, by the environment"
    assert shardwise("--cancel", "sky:shardwise-out") == 0
    calls = programs.read_text()
    for call in ("kubectl create -f -", "kubectl -n ns logs -f", "kubectl -n ns delete --wait=false job/shardwise-out",
                 "sky launch --yes --detach-run --cluster shardwise-out", "sky cancel --yes --all"):  # fmt: skip
        assert call in calls, calls
    assert "secret/shardwise-out-meeting --ignore-not-found" in calls and "--secret SHARDWISE_MEETING_TOKEN" in calls


def test_mistakes_are_told_before_anything_is_submitted(
    tmp_path: Path, programs: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(cli.write_run(tmp_path / "run", tiny_run(tmp_path, train__batch_size=16)))
    for words, told in (
        ((file,), "is needed"),
        ((file, "--slurm", "--ray"), "only one of --slurm and --ray"),
        ((file, "--slurm", "--hosts", "2:3"), "with 3 of 2:3 hosts"),
        ((file, "--slurm", "--hosts", "x"), "--hosts"),
        ((file, "--ssh", "a,b", "--hosts", "3"), "--ssh names 2 hosts"),
        ((file, "--ssh", "a,b", "--no-follow"), "end with the connection"),
        ((file, "--slurm", "--time", "soon"), "--time"),
        ((file, "--slurm", "--env", "NOT_SET_HERE"), "is not set here"),
        ((file, "--slurm", "nonsense=1"), "nonsense"),
        (("--cancel", "123"), "is no launched run"),
        (("--cancel", "slurm:1;rm"), "is no launched run"),
    ):
        assert shardwise(*words) == 2
        assert told in capfd.readouterr().err, words
    assert not programs.exists() and not (tmp_path / "out").exists()
    monkeypatch.setenv("PATH", "")
    assert shardwise(file, "--slurm", "--hosts", "2") == 2
    assert "sbatch: is not installed here" in capfd.readouterr().err


def test_a_dry_run_of_each_way(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(cli.write_run(tmp_path / "run", tiny_run(tmp_path, output="out")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN", "secret-value")
    token = ("--env", "TOKEN")
    for words, told in (
        (("--slurm", *token), "srun"),
        (("--ssh", "me@a,b", *token), "IFS= read -r TOKEN && export TOKEN"),
        (("--k8s", "--image", "i", "--volume", "c:/o", *token), "kind: Job"),
        (("--sky", *token), "num_nodes: 2"),
        (("--ray",), "shardwise.launch.ray_driver"),
    ):
        assert shardwise(file, *words, "--hosts", "2", "--ranks", "1", "--dry-run") == 0
        said = capfd.readouterr().out
        assert told in said and "secret-value" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words, said", [
    ("--ssh a,b --partition p", "--partition = 'p': belongs to --slurm and --k8s: --ssh can do nothing with it"),
    ("--ssh a,b --account us", "--account = 'us': belongs to --slurm and --k8s"),
    ("--ssh a,b --time 4h", "--time = '4h': belongs to --slurm and --k8s"),
    ("--ssh a,b --cpus 8", "--cpus = 8: belongs to --slurm, --ray, --k8s and --sky"),
    ("--ssh a,b --memory 64G", "--memory = '64G': belongs to --slurm, --k8s and --sky"),
    ("--ssh a,b --image i", "--image = 'i': belongs to"),
    ("--ssh a,b --name n", "--name = 'n': belongs to"),
    ("--ssh a,b --line #SBATCH", "--line = '#SBATCH': belongs to --slurm: for --ssh it is a comment"),
    ("--ray --gpu h100", "--gpu = 'h100': belongs to --slurm, --k8s and --sky: --ray"),
    ("--slurm --volume c:/o", "--volume = 'c:/o': belongs to --k8s: --slurm"),
    ("--slurm --address head", "--address = 'head': belongs to --ray and --ssh: --slurm"),
    ("--slurm --gpu h100", "--gpu = 'h100': says which, and not how many"),
    ("--sky --time 4h", "--time = '4h': belongs to --slurm and --k8s: --sky"),
    ("--slurm --grace soon", "--grace = 'soon': expected a duration"),
    ("--status slurm:1", "--status: does not go with RUN.yaml"),
])  # fmt: skip
def test_what_the_chosen_way_cannot_do_is_refused(
    tmp_path: Path, words: str, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(cli.write_run(tmp_path / "run", tiny_run(tmp_path, output="out")))
    monkeypatch.chdir(tmp_path)
    assert shardwise(file, *words.split()) == 2
    assert said in capfd.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("words, said", [
    ("--status slurm:1 --gpus 8", "--status: does not go with --gpus"),
    ("--cancel slurm:1 --dry-run", "--cancel: does not go with --dry-run"),
    ("--status slurm:1 --cancel slurm:1", "--status: does not go with --cancel"),
    ("--status slurm:1 --address head", "--address = 'head': is of Ray's dashboard, and slurm:1 is not Ray's"),
])  # fmt: skip
def test_a_launched_run_is_asked_for_alone(words: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert shardwise(*words.split()) == 2 and said in capfd.readouterr().err


def test_every_option_is_known_to_some_way() -> None:
    """A new option of `launch` is listed here, or belongs to every way."""
    import inspect

    options = {name.rstrip("_") for name in inspect.signature(command_line.launch).parameters}
    everywhere = {"run_file", "overrides", "context", "slurm", "ray", "k8s", "sky", "ssh", "hosts", "dry_run", "follow",
                  "cancel", "status", "gpus", "ranks", "env", "line", "port", "restarts", "grace"}  # fmt: skip
    assert options == everywhere | set(BELONGS)


def test_times_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"90": 90, "90min": 90, "4h": 240, "2d": 2880, "04:00:00": 240, "1-00:00:30": 1441, None: None}
    assert {text: parse_minutes(text) for text in times} == times
    for wrong in ("0", "soon", "4 h", "-1"):
        with pytest.raises(UserError, match="--time"):
            parse_minutes(wrong)
    monkeypatch.setenv("HERE", "1")
    assert parse_env(["A=b=c", "HERE"]) == ({"A": "b=c"}, ("HERE",))
    for wrong in ("a b=1", "=x", "1A=2"):
        with pytest.raises(UserError, match="--env"):
            parse_env([wrong])
