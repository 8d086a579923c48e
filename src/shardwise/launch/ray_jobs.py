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
    """Ray's job submission."""

    def __init__(self, address: str | None = None) -> None:
        self._address = address
        self._client: Any = None

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
        identity = f"{asked.name}-{int(time.time())}"
        self._ask(
            lambda ray: ray.submit_job(entrypoint=text.strip(), submission_id=identity, runtime_env={"env_vars": env})
        )
        return identity

    def follow(self, identity: str, asked: Submission) -> int:
        shown = 0
        while True:
            status = self.status(identity)
            log = self._ask(lambda ray: ray.get_job_logs(identity))
            print(log[shown:], end="", flush=True)
            shown = len(log)
            if status in ("succeeded", "failed", "stopped"):
                print(f"ray:{identity} has ended: {status}", flush=True)
                return 0 if status == "succeeded" else 1
            time.sleep(1)

    def cancel(self, identity: str) -> None:
        self._ask(lambda ray: ray.stop_job(identity))

    def status(self, identity: str) -> str:
        return str(self._ask(lambda ray: ray.get_job_status(identity)).value).lower()

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Asks the dashboard; its refusal is the user's to read."""
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


def _address(given: str | None) -> str:
    return given or os.environ.get("RAY_ADDRESS") or ADDRESS


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
