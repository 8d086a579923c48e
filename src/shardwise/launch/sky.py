"""SkyPilot: a task whose nodes each start an agent; the first of SKYPILOT_NODE_IPS is the rendezvous."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from shardwise.core.errors import UserError
from shardwise.launch.submission import INSTALLED, PORT, Submission, as_yaml, output_of, single_line, tool
from shardwise.launch.token import VARIABLE, make_token


class Sky:
    """Launches through SkyPilot: sky launch, logs, cancel, queue."""

    def text(self, submission: Submission) -> str:
        if not re.fullmatch(r"[a-zA-Z]([a-zA-Z0-9_.-]*[a-zA-Z0-9])?", submission.name):
            raise UserError("--name", submission.name, "is no name for a cluster", "use letters, digits and -")
        if submission.gpus and not submission.gpu:
            raise UserError("--gpus", submission.gpus, "SkyPilot must know which", "add e.g. --gpu H100")
        if not submission.run_file.is_relative_to(submission.folder):
            problem = "is outside of this folder, which is what SkyPilot copies"
            raise UserError("RUN.yaml", str(submission.run_file), problem, "start it in the folder of the run")
        resources: dict[str, Any] = {
            "accelerators": f"{submission.gpu}:{submission.gpus or 1}" if submission.gpu else None,
            "cpus": _at_least(submission.cpus),
            "memory": _at_least(submission.memory),
            "image_id": f"docker:{submission.image}" if submission.image else None,
        }
        file = str(submission.run_file.relative_to(submission.folder))
        node = submission.node(INSTALLED, "--id", submission.name, file=file)
        lines = [single_line("--line", line) for line in submission.lines]
        run = [
            *lines,
            'first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
            f'exec {node} --rendezvous "$first:{submission.port or PORT}" --name "node-$SKYPILOT_NODE_RANK"',
        ]
        task = {
            "name": submission.name,
            "num_nodes": submission.hosts.most,
            "workdir": str(submission.folder),
            "resources": {name: value for name, value in resources.items() if value is not None},
            "envs": dict(submission.env),
            "secrets": dict.fromkeys((*submission.passed, VARIABLE)),  # values: see submit
            "run": "\n".join(run) + "\n",
        }
        if submission.image is None:
            task["setup"] = "command -v shardwise || pip install shardwise\n"
        return as_yaml({name: value for name, value in task.items() if value})

    def submit(self, submission: Submission, text: str) -> str:
        program = tool("sky", "--sky")
        secrets = [word for name in (*submission.passed, VARIABLE) for word in ("--secret", name)]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "task.yaml"
            file.write_text(text)
            command = [program, "launch", "--yes", "--detach-run", "--cluster", submission.name, *secrets, str(file)]
            # A name alone is looked up in the environment: command lines are for all to read.
            if subprocess.run(command, env=os.environ | {VARIABLE: make_token()}, check=False).returncode:
                raise UserError("--sky", submission.name, "SkyPilot did not start it", "see above, or try --dry-run")
        print(f"the machines cost money until `sky down {submission.name}`", flush=True)
        return submission.name

    def follow(self, identity: str, submission: Submission) -> int:
        return subprocess.run([tool("sky", "--sky"), "logs", identity], check=False).returncode

    def cancel(self, identity: str) -> None:
        output_of([tool("sky", "--sky"), "cancel", "--yes", "--all", identity])

    def status(self, identity: str) -> str:
        return output_of([tool("sky", "--sky"), "queue", identity]).strip()


def _at_least(amount: object) -> str | None:
    return None if amount is None else f"{str(amount).removesuffix('i').removesuffix('G')}+"
