"""Slurm: a batch script that starts one agent on each node, saves before the time limit, and is then requeued."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from shardwise.core.errors import RunFailed, UserError
from shardwise.launch.submission import HERE, INSTALLED, Submission, follow_file, output_of, single_line, tool
from shardwise.launch.token import VARIABLE

BEFORE = 30  # seconds of the time limit, beyond those for saving, that are left for all to end
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")

BODY = """\
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# The address that Slurm itself reaches the node at: its name need not be known to name servers.
address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p' | head -n 1)
port={port}
# Drawn here, for this job: it goes to the agents with srun's environment, and stands in no file or command line.
{token}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export {token}

warned=
stop() {{
    warned=yes
    scancel --signal=TERM "$SLURM_JOB_ID"  # to the agents, whose ranks save; srun would kill them if it got it itself
}}
trap stop TERM

srun {srun} \\
    {node} --rendezvous "${{address:-$first}}:$port" &
agents=$!
wait "$agents"
code=$?
while kill -0 "$agents" 2>/dev/null; do  # a signal interrupts wait
    wait "$agents"
    code=$?
done
# Not after a cancellation: the job is then no longer running.
if [ -n "$warned" ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
    echo "out of time: saved, and queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


class Slurm:
    """Launches through Slurm: sbatch, squeue, scancel."""

    def text(self, submission: Submission) -> str:
        hosts = submission.hosts
        lines = [single_line("--line", line) for line in submission.lines]
        nodes = str(hosts.most) if hosts.least == hosts.most else f"{hosts.least}-{hosts.most}"
        gpus = f"{submission.gpu}:{submission.gpus}" if submission.gpu and submission.gpus else submission.gpus
        options: dict[str, object | None] = {
            "job-name": submission.name,
            "nodes": nodes,
            "ntasks-per-node": 1,
            "output": str(self._log(submission, "%j")),
            "open-mode": "append",
            "partition": submission.partition,
            "account": submission.account,
            "time": submission.minutes,
            "gpus-per-node": gpus,
            "cpus-per-task": submission.cpus,
            "mem": submission.memory,
            "signal": f"B:TERM@{submission.grace + BEFORE}",
        }
        for name, value in options.items():
            if isinstance(value, str) and any(letter.isspace() for letter in value):
                option = {"job-name": "name", "mem": "memory", "output": "output"}.get(name, name)
                raise UserError(f"--{option}", value, "Slurm takes no blanks there", "leave them out")
        head = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
        head += ["#SBATCH --requeue"]
        head += ["#SBATCH --no-kill"] * (hosts.least < hosts.most)  # the others go on without a node that failed
        head += [line for line in lines if line.startswith("#SBATCH")]
        srun = "--kill-on-bad-exit=0 --wait=0"
        if submission.cpus is not None:
            srun += f" --cpus-per-task={submission.cpus}"  # since 22.05 srun does not take it over from the job
        program: tuple[str, ...] = HERE
        if submission.image is not None:  # options of the pyxis plugin, which most clusters with containers have
            mounts = shlex.quote(str(submission.folder))
            srun += f" --container-image={shlex.quote(submission.image)} --container-mounts={mounts}"
            program = INSTALLED
        port = submission.port or "$((20000 + SLURM_JOB_ID % 20000))"
        body = BODY.format(node=submission.node(program, "--id", submission.name), srun=srun, port=port, token=VARIABLE)
        setup = [line for line in lines if not line.startswith("#SBATCH")]
        folder = f"cd {shlex.quote(str(submission.folder))} || exit 1"
        return "\n".join(["#!/bin/bash", *head, "", folder, *submission.exports(), *setup, body])

    def submit(self, submission: Submission, text: str) -> str:
        program = tool("sbatch", "--slurm")
        if submission.cpus is None and submission.gpus is not None:
            print("no --cpus given: Slurm's usual is one core for each host", flush=True)
        submission.output.mkdir(parents=True, exist_ok=True)
        # The submitter's environment goes along (it is not in the script): what --env NAME asks for is in it.
        return output_of([program, "--parsable", "--export=ALL"], text).strip().partition(";")[0]

    def follow(self, identity: str, submission: Submission) -> int:
        def alive() -> bool:
            return self._state(identity) not in (*ENDED, "")

        follow_file(self._log(submission, identity), alive, lambda: time.sleep(1))
        state = self._state(identity)
        print(f"slurm:{identity} has ended: {state.lower() or 'it is no longer known'}", flush=True)
        return 0 if state in ("COMPLETED", "") else 1

    def cancel(self, identity: str) -> None:
        # To the job's steps first, so that ranks save; what is left when they have not ended is Slurm's KillWait.
        output_of([tool("scancel", "--slurm"), identity])

    def status(self, identity: str) -> str:
        state = self._state(identity)
        if not state:
            return "not known to the controller any more: see sacct, and the log"
        where = output_of(
            [tool("squeue", "--slurm"), "-h", "-t", "all", "-j", identity, "-o", "%N %M of %l %r"]
        ).strip()
        return f"{state.lower()} {where}"

    def _state(self, identity: str) -> str:
        squeue = [tool("squeue", "--slurm"), "-h", "-t", "all", "-j", identity, "-o", "%T"]
        try:
            return output_of(squeue).strip()
        except RunFailed as error:
            if "Invalid job id" in str(error):
                return ""
            raise

    def _log(self, submission: Submission, identity: str) -> Path:
        return submission.output / f"slurm-{identity}.log"
