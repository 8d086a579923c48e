"""Random faults over short runs of real processes, and what came of each: the table of docs/survive.md.

    PYTHONPATH=src:tests python -m survive.chaos OUT.json [--faults 200] [--seed 0] [--folder FOLDER] [--together]

Every run must end with the model of an undisturbed run, to the bit (where a step's data were left out on purpose: with
a model and a record of what was left out), or with a message; and none may take longer than its limit. A run that ended
with a message is started again by the same command, as a scheduler would: it passes over a damaged checkpoint where an
earlier one is whole. Where none is, it is started afresh, as the message says. Links are cut between two hosts, network
namespaces with an agent each (`shardwise node`), and mended after some seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from support import cli, faults
from support.hosts import Agent, some_hosts
from support.tiny import PAIRS, tiny_run

STEPS, EVERY, TIMEOUT = 24, 3, 6.0
LIMIT = 240.0  # seconds for a start to end, faults and restarts included
STARTS = 6  # by hand, for one run
PATIENCE = 4.0  # seconds after which a host that is not heard of counts as lost
CUT = (1.0, 10.0)  # seconds that a link is cut: some are mended before anyone loses patience


LINK = "link cut and mended"


@dataclass
class Entry:
    """One fault and what came of it."""

    trial: int
    fault: str
    step: int
    outcome: str = ""
    seconds: float = 0.0
    words: str = ""


@dataclass
class Trial:
    """One run in a folder of its own, started as often as need be."""

    folder: Path
    file: Path
    output: Path
    env: dict[str, str]

    def newest(self) -> Path | None:
        found = sorted((self.output / "checkpoints").glob("step-*"))
        return found[-1] if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("chaos"))
    parser.add_argument("--together", action="store_true", help="the newest checkpoint damaged as the command is ended")
    given = parser.parse_args()
    entries = run(given.faults, given.seed, given.folder.absolute(), given.out, given.together)
    bad = [entry for entry in entries if entry.outcome.startswith("BAD")]
    print(table(entries))
    sys.exit(1 if bad else 0)


def run(number: int, seed: int, folder: Path, out: Path | None = None, together: bool = False) -> list[Entry]:
    """So many faults, of kinds and at steps that the seed decides; `together`: each run a new command's own case."""
    choose, entries, trial = random.Random(seed), list[Entry](), 0
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pythons").mkdir(exist_ok=True)
    reference = _trial(folder, "undisturbed")
    code, _, err = cli.train(reference.file)
    assert code == 0, err
    while len(entries) < number:
        trial += 1
        if together:
            step = choose.randint(2 * EVERY + 1, STEPS - 6)
            plan = [(step, choose.choice(DAMAGES)), (step, choose.choice(ENDS))]
        else:
            plan = _plan(choose)[: number - len(entries)]
        way = _links if plan[0][1] == LINK else _one
        entries += way(folder, trial, plan, reference.output, choose)
        if out is not None:
            out.write_text(json.dumps([asdict(entry) for entry in entries], indent=1))
    return entries


def _plan(choose: random.Random) -> list[tuple[int, str]]:
    """One run's faults: a step and a kind each."""
    sort = choose.choices(["one", "links", "several"], weights=[30, 15, 55])[0]
    if sort == "one":
        kinds = [choose.choice(ALONE)]
    elif sort == "links":
        kinds = [LINK] * choose.randint(1, 3)
    else:
        kinds = choose.choices([kind for kind in KINDS if kind not in (*ALONE, LINK)], k=choose.randint(2, 4))
    return sorted((choose.randint(2, STEPS - 3), kind) for kind in kinds)


def table(entries: list[Entry]) -> str:
    """A row per kind of fault: how many, what came of them, the longest run."""
    lines = ["| fault | times | outcomes | longest, s |", "| --- | --- | --- | --- |"]
    for kind in sorted({entry.fault for entry in entries}):
        own = [entry for entry in entries if entry.fault == kind]
        ends = ", ".join(f"{count} {end}" for end, count in Counter(e.outcome for e in own).most_common())
        lines.append(f"| {kind} | {len(own)} | {ends} | {max(e.seconds for e in own):.0f} |")
    return "\n".join(lines)


def _trial(folder: Path, name: str, **changes: Any) -> Trial:
    values = {"train__steps": STEPS, "ranks": 2, "parallel__zero": 2, "checkpoint__every": EVERY} | changes
    values = {"timeout": f"{TIMEOUT:g}s", "restarts": 3, "output": str(folder / name / "out")} | values
    (folder / name).mkdir(parents=True, exist_ok=True)
    run = tiny_run(folder, **values)
    return Trial(folder / name, cli.write_run(folder / name, run), Path(values["output"]), {})


def _one(folder: Path, number: int, plan: list[tuple[int, str]], reference: Path, choose: random.Random) -> list[Entry]:
    """One run with its faults; they all share what came of it."""
    entries = [Entry(number, kind, step) for step, kind in plan]
    trial, begun = _trial(folder, f"trial-{number}", **CHANGES.get(plan[0][1], {})), time.monotonic()
    if plan[0][1] in SETUPS:
        SETUPS[plan[0][1]](trial, plan[0][0])
    pending, words, outcome, offered = list(plan), list[str](), "", list[str]()
    for _ in range(STARTS):
        process, limit = cli.start(trial.file, *offered, env=trial.env), time.monotonic() + LIMIT
        while process.poll() is None and time.monotonic() < limit:
            if pending and cli.steps_done(trial.output) >= pending[0][0]:
                _, kind = pending.pop(0)
                with contextlib.suppress(Exception):  # the rank may be gone already
                    KINDS[kind](trial, process, choose)
            time.sleep(0.02)
        if process.poll() is None:
            process.kill()
            outcome = "BAD: hung"
            break
        out, err = process.communicate()
        words.append(err)
        if "Traceback" in out + err:
            outcome = "BAD: traceback"
            break
        if process.returncode == 0:
            outcome = _compared(trial, reference, plan)
            break
        if process.returncode not in (1, 2, 143, -9) or (process.returncode in (1, 2) and "error: " not in err):
            outcome = f"BAD: code {process.returncode} without a message"
            break
        offered = re.findall(r"start afresh with (resume=never)", err)[:1]  # every checkpoint is damaged
        for kind in {kind for _, kind in plan} & set(MENDED):
            MENDED[kind](trial)
    else:
        outcome = f"BAD: not done after {STARTS} starts"
    hands = f", started by hand {len(words) - 1} ×" if len(words) > 1 else ""
    return _told(entries, outcome + hands, time.monotonic() - begun, "\n".join(words), trial)


def _links(
    folder: Path, number: int, plan: list[tuple[int, str]], reference: Path, choose: random.Random
) -> list[Entry]:
    """Two hosts of one rank, whose links are cut and mended; both must be there, so the run waits for a lost one."""
    entries = [Entry(number, kind, step) for step, kind in plan]
    trial, begun, pending = _trial(folder, f"trial-{number}", ranks="auto", timeout="60s"), time.monotonic(), list(plan)
    with some_hosts(2) as hosts:
        meet = ["--hosts", "2", "--rendezvous", f"{hosts[0].address}:29400", "--patience", f"{PATIENCE:g}"]
        agents = [Agent(trial.file, *meet, "--name", f"host-{n}", inside=host.inside) for n, host in enumerate(hosts)]
        try:
            limit = time.monotonic() + LIMIT
            while any(agent.process.poll() is None for agent in agents) and time.monotonic() < limit:
                if pending and cli.steps_done(trial.output) >= pending[0][0]:
                    pending.pop(0)
                    host, seconds = choose.choice(hosts), choose.uniform(*CUT)
                    host.cut()
                    time.sleep(seconds)
                    host.mend()
                time.sleep(0.02)
            codes = [agent.process.poll() for agent in agents]
        finally:
            for agent in agents:
                agent.end()
    words = "\n\n".join(agent.text for agent in agents)
    if None in codes:
        outcome = "BAD: hung"
    elif codes != [0, 0]:
        outcome = f"BAD: codes {codes}"
    else:
        outcome = "BAD: traceback" if "Traceback" in words else _compared(trial, reference, plan)
    return _told(entries, outcome, time.monotonic() - begun, words, trial)


def _told(entries: list[Entry], outcome: str, seconds: float, words: str, trial: Trial) -> list[Entry]:
    for entry in entries:
        entry.outcome, entry.seconds, entry.words = outcome, round(seconds, 1), words[-1500:]
    plan = ", ".join(f"{entry.fault} at {entry.step}" for entry in entries)
    print(f"{entries[0].trial}: {plan}: {outcome}, {seconds:.0f} s", flush=True)
    if not outcome.startswith("BAD"):  # what went wrong is kept
        _clear(trial)
    return entries


def _compared(trial: Trial, reference: Path, plan: list[tuple[int, str]]) -> str:
    steps = cli.losses(trial.output)
    if list(steps) != list(range(1, STEPS + 1)):
        return "BAD: a step is missing or told twice"
    if any(kind == "nan" for _, kind in plan):
        recorded = (trial.output / "skipped.jsonl").exists()
        return "a model, and what was left out recorded" if recorded else "BAD: nothing recorded"
    mine, other = (load_file(f / "model/model.safetensors") for f in (trial.output, reference))
    alike = steps == cli.losses(reference) and all(mine[name].equal(other[name]) for name in other)
    return "the right model" if alike else "BAD: another model"


def _kill_rank(trial: Trial, process: subprocess.Popen[str], choose: random.Random) -> None:
    cli.kill_rank(process, choose.randrange(2))


def _kill_launcher(trial: Trial, process: subprocess.Popen[str], choose: random.Random) -> None:
    process.kill()


def _stop_rank(trial: Trial, process: subprocess.Popen[str], choose: random.Random) -> None:
    cli.rank_process(process, choose.randrange(2)).send_signal(signal.SIGSTOP)


def _preempt(trial: Trial, process: subprocess.Popen[str], choose: random.Random) -> None:
    process.send_signal(signal.SIGTERM)


def _damage(how: Callable[[Path], None]) -> Callable[[Trial, subprocess.Popen[str], random.Random], None]:
    def fault(trial: Trial, process: subprocess.Popen[str], choose: random.Random) -> None:
        ranks = cli.rank_processes(process)
        for rank in ranks:
            rank.suspend()  # nothing is written meanwhile
        newest = trial.newest()
        if newest is not None:
            files = sorted(file for file in newest.rglob("*") if file.is_file() and file.stat().st_size)
            how(choose.choice(files))
        for rank in ranks:
            rank.resume()
        cli.kill_rank(process, choose.randrange(2))

    return fault


def _tear(file: Path) -> None:
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size // 2)


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(bytes(data))


def _nothing(trial: Trial, process: subprocess.Popen[str], choose: random.Random) -> None:
    """It was set up before the start."""


def _full_disk(trial: Trial, step: int) -> None:
    """A small disk of its own, which a checkpoint or two fill."""
    trial.output.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(trial.output)], check=True)


def _larger_disk(trial: Trial) -> None:
    subprocess.run(["mount", "-o", "remount,size=300m", str(trial.output)], check=True)


def _clear(trial: Trial) -> None:
    subprocess.run(["umount", str(trial.output)], check=False, capture_output=True)
    shutil.rmtree(trial.folder, ignore_errors=True)


def _nan(trial: Trial, step: int) -> None:
    trial.env |= faults.environment(trial.folder / "site", "nan", "all", step)


def _malformed(trial: Trial, step: int) -> None:
    lines = PAIRS.read_text().splitlines()
    lines.insert(step, '{"messages": [{"role": "user", "content": ')
    (trial.folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    text = trial.file.read_text().replace(str(PAIRS), str(trial.folder / "rows.jsonl"))
    trial.file.write_text(text)


def _skip_rows(trial: Trial) -> None:
    """What the message says."""
    text = trial.file.read_text()
    if "on_bad_row" not in text:
        trial.file.write_text(text.replace("data:\n", "data:\n  on_bad_row: skip\n"))


KINDS: dict[str, Callable[[Trial, subprocess.Popen[str], random.Random], None]] = {
    "kill -9 of a rank": _kill_rank, "kill -9 of the launcher": _kill_launcher, "SIGSTOP of a rank": _stop_rank,
    "SIGTERM": _preempt, "torn checkpoint": _damage(_tear), "flipped bit in a checkpoint": _damage(_flip),
    "disk full": _nothing, "nan": _nothing, "malformed row": _nothing, LINK: _nothing,
}  # fmt: skip
DAMAGES = ("torn checkpoint", "flipped bit in a checkpoint")
ENDS = ("SIGTERM", "kill -9 of the launcher")  # before the run itself can put the checkpoint aside
ALONE = ("disk full", "nan", "malformed row")  # they are set up before the start
SETUPS: dict[str, Callable[[Trial, int], None]] = {"disk full": _full_disk, "nan": _nan, "malformed row": _malformed}
CHANGES: dict[str, dict[str, Any]] = {"nan": {"guard__nan": "back"}}
MENDED: dict[str, Callable[[Trial], None]] = {"disk full": _larger_disk, "malformed row": _skip_rows}


if __name__ == "__main__":
    main()
