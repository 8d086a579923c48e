"""Ray: a job whose driver (ray_driver.py) starts one agent on each node of the cluster. Needs `shardwise[ray]`."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable
from typing import Any

from shardwise.core.errors import RunFailed, UserError
from shardwise.launch.submission import HERE, Submission

ADDRESS = "http://127.0.0.1:8265"  # where Ray's dashboard is, unless RAY_ADDRESS or --address says so
NO_AGENT = "No available agent"  # Ray's words, after it has waited itself


class RayJobs:
    """Launches through Ray's job submission API."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address
        self._client: Any = None

    def text(self, submission: Submission) -> str:
        if submission.passed:
            raise UserError(
                "--env", submission.passed[0], "Ray keeps values with the job", "write NAME=VALUE if that is fine"
            )
        node = submission.node(HERE, "--id", submission.name, "--listen")
        folder = f"cd {shlex.quote(str(submission.folder))}"
        script = [folder, *submission.exports(), *submission.lines, f"exec {node}"]
        spec = {
            "node": "\n".join(script),
            "least": submission.hosts.least,
            "most": submission.hosts.most,
            "cpus": submission.cpus or 1,
            "gpus": submission.gpus or 0,
            "port": submission.port,
            "grace": submission.grace,
        }
        return shlex.join([HERE[0], "-m", "shardwise.launch.ray_driver", json.dumps(spec)]) + "\n"

    def submit(self, submission: Submission, text: str) -> str:
        # Without this Ray kills the driver 3 s after it was asked to stop, and nothing is saved.
        env = {"RAY_JOB_STOP_WAIT_TIME_S": str(submission.grace + 30)}
        identity = f"{submission.name}-{int(time.time())}"
        self._ask(
            lambda ray: ray.submit_job(entrypoint=text.strip(), submission_id=identity, runtime_env={"env_vars": env})
        )
        return identity

    def follow(self, identity: str, submission: Submission) -> int:
        printed = 0
        while True:
            status = self.status(identity)
            log = self._ask(lambda ray: ray.get_job_logs(identity))
            print(log[printed:], end="", flush=True)
            printed = len(log)
            if status in ("succeeded", "failed", "stopped"):
                print(f"ray:{identity} has ended: {status}", flush=True)
                return 0 if status == "succeeded" else 1
            time.sleep(1)

    def cancel(self, identity: str) -> None:
        self._ask(lambda ray: ray.stop_job(identity))

    def status(self, identity: str) -> str:
        return str(self._ask(lambda ray: ray.get_job_status(identity)).value).lower()

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Calls the dashboard; its error is shown to the user."""
        address = _address(self._address)
        try:
            return question(self._found(address))
        except (OSError, RuntimeError) as error:  # requests' errors are the one, Ray's answers the other
            words = f"Ray at {address} did not do it: {_first_line(error)}"
            if NO_AGENT in words:  # seen where a second cluster on one machine found the agent's port taken
                words += (
                    "\n  → see dashboard_agent.log on the head: its port (ray start --dashboard-agent-listen-port) "
                )
                words += "may be taken"
            raise RunFailed(words) from None

    def _found(self, address: str) -> Any:
        if self._client is None:
            self._client = _connect(address)
        return self._client


def _address(address: str | None) -> str:
    return address or os.environ.get("RAY_ADDRESS") or ADDRESS


def _connect(address: str) -> Any:
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise UserError("--ray", None, "Ray is not installed here", "pip install 'shardwise[ray]'") from None
    try:
        return JobSubmissionClient(address)
    except (OSError, RuntimeError) as error:
        raise RunFailed(f"Ray cannot be reached at {address}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
