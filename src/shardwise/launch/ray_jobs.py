"""Ray: a job whose driver (ray_driver.py) starts one agent on each node of the cluster. Needs `shardwise[ray]`."""

from __future__ import annotations

import json
import os
import shlex
import time
from typing import Any

from shardwise.errors import RunFailed, UserError
from shardwise.launch.submission import HERE, Submission

ADDRESS = "http://127.0.0.1:8265"  # where Ray's dashboard is, unless RAY_ADDRESS or --address says so


class RayJobs:
    """Ray's job submission."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address

    def text(self, asked: Submission) -> str:
        if asked.passed:
            raise UserError(
                "--env", asked.passed[0], "Ray keeps values with the job", "write NAME=VALUE if that is fine"
            )
        node = asked.node(HERE, "--id", asked.name, "--listen")
        spec = {
            "node": "\n".join([f"cd {shlex.quote(str(asked.folder))}", *asked.exports(), *asked.lines, f"exec {node}"]),
            "least": asked.hosts.least, "most": asked.hosts.most, "cpus": asked.cpus or 1, "gpus": asked.gpus or 0,
            "port": asked.port, "grace": asked.grace,
        }  # fmt: skip
        return shlex.join([HERE[0], "-m", "shardwise.launch.ray_driver", json.dumps(spec)]) + "\n"

    def submit(self, asked: Submission, text: str) -> str:
        # Without this Ray kills the driver 3 s after it was asked to stop, and nothing is saved.
        env = {"RAY_JOB_STOP_WAIT_TIME_S": str(asked.grace + 30)}
        client = _client(self._address)
        identity = f"{asked.name}-{int(time.time())}"
        client.submit_job(entrypoint=text.strip(), submission_id=identity, runtime_env={"env_vars": env})
        return identity

    def follow(self, identity: str, asked: Submission) -> int:
        client, shown = _client(self._address), 0
        while True:
            status = str(client.get_job_status(identity).value)
            log = client.get_job_logs(identity)
            print(log[shown:], end="", flush=True)
            shown = len(log)
            if status in ("SUCCEEDED", "FAILED", "STOPPED"):
                print(f"ray:{identity} has ended: {status.lower()}", flush=True)
                return 0 if status == "SUCCEEDED" else 1
            time.sleep(1)

    def cancel(self, identity: str) -> None:
        _client(self._address).stop_job(identity)

    def status(self, identity: str) -> str:
        return str(_client(self._address).get_job_status(identity).value).lower()


def _client(address: str | None) -> Any:
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise UserError("--ray", None, "Ray is not installed here", "pip install 'shardwise[ray]'") from None
    address = address or os.environ.get("RAY_ADDRESS") or ADDRESS
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        raise RunFailed(f"Ray cannot be reached at {address}: {str(error).splitlines()[0]}") from None
