"""Kubernetes: an Indexed Job and a headless Service, which every cluster supports; no operator is needed.

The pod with index 0 is the rendezvous: the Service gives it a name that outlives the pod. RUN.yaml is passed as a
ConfigMap. A user error (exit code 2) fails the Job at once; a pod that ends otherwise is restarted. The agents' token
is a Secret created on submission; the manifest, which is shown and stored, only refers to it.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import PurePosixPath
from typing import Any

from shardwise.core.errors import UserError
from shardwise.launch.submission import INSTALLED, PORT, Submission, as_yaml, output_of, single_line, tool
from shardwise.launch.token import VARIABLE, make_token

TRIES = 6  # times that each pod is started again
RUN = "/etc/shardwise/run.yaml"
GPU = "nvidia.com/gpu"
_BY_HAND = (
    "# Refers to the Secret {name}, which `shardwise launch` makes. By hand, before this:\n"
    f"#   openssl rand -hex 32 | kubectl create secret generic {{name}} --from-file={VARIABLE}=/dev/stdin\n"
)


class Kubernetes:
    """Launches through kubectl: create, logs, delete."""

    def text(self, submission: Submission) -> str:
        name = submission.name
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", name):
            raise UserError("--name", name, "is no name for Kubernetes", "use small letters, digits and -, at most 52")
        if submission.image is None:
            raise UserError("--image", None, "is needed with --k8s", "name a container image that has shardwise")
        labels = {"app.kubernetes.io/name": "shardwise", "app.kubernetes.io/instance": name}
        where = {"namespace": submission.partition} if submission.partition else {}
        meta = {"name": name, **where, "labels": labels}
        run = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta}
        service = {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {
            "clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True,  # they meet before
            "ports": [{"name": "meet", "port": submission.port or PORT}],
        }}  # fmt: skip
        job: dict[str, Any] = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": meta,
            "spec": self._job(submission, labels),
        }
        text = submission.run_file.read_text()
        return _BY_HAND.format(name=_secret(name)) + as_yaml(run | {"data": {"run.yaml": text}}, service, job)

    def _job(self, submission: Submission, labels: dict[str, str]) -> dict[str, Any]:
        hosts = submission.hosts.most
        spec: dict[str, Any] = {
            "completionMode": "Indexed",
            "completions": hosts,
            "parallelism": hosts,
            "backoffLimit": TRIES * hosts,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [2]}},
                ]
            },
        }
        if submission.minutes is not None:
            spec["activeDeadlineSeconds"] = submission.minutes * 60
        if submission.hosts.least < hosts:  # the run may end while some pods still wait for a place
            spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
        return spec | {"template": {"metadata": {"labels": labels}, "spec": self._pod(submission)}}

    def _pod(self, submission: Submission) -> dict[str, Any]:
        limits: dict[str, Any] = {GPU: submission.gpus} if submission.gpus else {}
        requests = {
            key: value for key, value in (("cpu", submission.cpus), ("memory", submission.memory)) if value is not None
        }
        mounts = [
            {"name": "run", "mountPath": str(PurePosixPath(RUN).parent), "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ]
        volumes: list[dict[str, Any]] = [
            {"name": "run", "configMap": {"name": submission.name}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL and data workers need more than the usual 64 MB
        ]
        secrets = [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": submission.name, "key": name}}}
            for name in submission.passed
        ]
        secrets.append(
            {"name": VARIABLE, "valueFrom": {"secretKeyRef": {"name": _secret(submission.name), "key": VARIABLE}}}
        )
        container: dict[str, Any] = {
            "name": "node",
            "image": submission.image,
            "command": ["/bin/sh", "-c", self._command(submission)],
            "ports": [{"name": "meet", "containerPort": submission.port or PORT}],
            "env": [{"name": name, "value": value} for name, value in submission.env.items()] + secrets,
            "resources": {"limits": limits | {k: str(v) for k, v in requests.items()}},
            "volumeMounts": mounts,
        }
        claim, path = _claim(submission)
        if claim is not None:
            mounts.append({"name": "output", "mountPath": path})
            volumes.append({"name": "output", "persistentVolumeClaim": {"claimName": claim}})
            container["workingDir"] = path
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "subdomain": submission.name,
            "containers": [container],
            "volumes": volumes,
            "terminationGracePeriodSeconds": submission.grace + 30,
        }
        if submission.account:
            pod["serviceAccountName"] = submission.account
        if submission.gpu:
            pod["nodeSelector"] = {"nvidia.com/gpu.product": submission.gpu}
        return pod

    def _command(self, submission: Submission) -> str:
        lines = [single_line("--line", line) for line in submission.lines]
        meet = f"{submission.name}-0.{submission.name}:{submission.port or PORT}"
        # A pod that is evicted saves and leaves; when the Job is deleted all of them do.
        node = submission.node(INSTALLED, "--id", submission.name, "--rendezvous", meet, "--withdraw", file=RUN)
        return "\n".join([*lines, f'exec {node} --name "$HOSTNAME"'])

    def submit(self, submission: Submission, text: str) -> str:
        meta = {"name": _secret(submission.name)} | (
            {"namespace": submission.partition} if submission.partition else {}
        )
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": {VARIABLE: make_token()}}
        output_of([tool("kubectl", "--k8s"), "create", "-f", "-"], f"{text}---\n{as_yaml(secret)}")
        return f"{submission.partition}.{submission.name}" if submission.partition else submission.name

    def follow(self, identity: str, submission: Submission) -> int:
        kubectl, (name, where) = tool("kubectl", "--k8s"), _parse_identity(identity)
        first = f"batch.kubernetes.io/job-name={name},batch.kubernetes.io/job-completion-index=0"
        while True:  # a pod that is started again has a log of its own
            phases = output_of([kubectl, *where, "get", "pods", "-l", first, "-o", "jsonpath={.items[*].status.phase}"])
            if "Running" in phases:
                subprocess.run([kubectl, *where, "logs", "-f", "--tail=-1", "-l", first], check=False)
            status = self.status(identity)
            if "Complete" in status or "Failed" in status:
                print(f"k8s:{identity} has ended: {status}", flush=True)
                return 0 if "Complete" in status else 1
            time.sleep(2)

    def cancel(self, identity: str) -> None:
        name, where = _parse_identity(identity)
        kinds = [f"{kind}/{name}" for kind in ("job", "service", "configmap")] + [f"secret/{_secret(name)}"]
        output_of([tool("kubectl", "--k8s"), *where, "delete", "--wait=false", *kinds, "--ignore-not-found"])

    def status(self, identity: str) -> str:
        name, where = _parse_identity(identity)
        figures = "{.status.active} active, {.status.succeeded} succeeded, {.status.failed} failed"
        path = f"jsonpath={figures}" + "{range .status.conditions[*]}, {.type}{end}"
        return output_of([tool("kubectl", "--k8s"), *where, "get", "job", name, "-o", path]).strip()


def _secret(name: str) -> str:
    return f"{name}-meeting"  # the one with the run's own name is the user's


def _parse_identity(identity: str) -> tuple[str, list[str]]:
    namespace, dot, name = identity.rpartition(".")
    return name, ["-n", namespace] if dot else []


def _claim(submission: Submission) -> tuple[str | None, str]:
    """The output volume and its path; required for several hosts, as pods' own disks are not shared or persistent."""
    written = PurePosixPath(submission.written)
    if submission.volume is None:
        if submission.hosts.most > 1:
            problem = "is needed: hosts share the output folder"
            remedy = "write --volume CLAIM:PATH, e.g. outputs:/outputs"
            raise UserError("--volume", None, problem, remedy)
        return None, "/"
    claim, _, path = submission.volume.partition(":")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", claim) or not path.startswith("/"):
        raise UserError(
            "--volume", submission.volume, "is no claim and path", "write CLAIM:PATH, e.g. outputs:/outputs"
        )
    if written.is_absolute() and not written.is_relative_to(path):
        problem = f"is not on the volume, which is at {path}"
        raise UserError("output", submission.written, problem, f"use a relative folder, or one below {path}")
    return claim, path
