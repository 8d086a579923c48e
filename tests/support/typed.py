"""A folder in which commands of the docs can be run as they stand, and what their words become there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from support.pages import ROOT
from support.tiny import LLAMA, PAIRS, saved_model, tiny_run

# As many heads and blocks as the docs divide them by.
WIDE = LLAMA | {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 4}
WORDS = {  # what stands for something of the reader's own
    r"\bsmollm2-135m-instruct\b": "tiny",
    r"\bA B C\b": "tiny out/run my-model",
    r"export out/run my-model --merged": "export out/lora my-merged --merged",  # of a run that trained an adapter
    r"^(shardwise rehearse run\.yaml --nodes 64.*)$": r"\1 train.batch_size=512",
    r"/mnt/scratch\b": "scratch",
    r"^shardwise bench$": "shardwise bench --quick",
    r"^shardwise bench --ranks 2$": "shardwise bench --ranks 2 --quick",
    r"^(shardwise launch run\.yaml (?!.*--dry-run).*)$": r"\1 --dry-run",
    r"--hosts (6:8|2:4)(.*)$": r"--hosts \1\2 train.batch_size=1344",  # what any number of these hosts divides
    r"^(shardwise launch run\.yaml .*--gpus .*)$": r"\1 device=auto",  # the file there says cpu
    r"--num_gpus 2 train\.py …": "--num_gpus 2 train.py --deepspeed_config examples/deepspeed/ds_config.json",
    r" …": "",
    r"^python -m shardwise\.config": f"{sys.executable} -m shardwise.config",
}
SERVERS = {  # what a command that stays says once it serves
    r"^shardwise serve": r"http://",
    r"^shardwise watch(?!.*(--terminal|--html))": r"http://",
    r"^(DILOCO_TOKEN=\S+ )?shardwise diloco-server": r"29400",
}
ELSEWHERE = ("shardwise demo --write", "shardwise plan qwen3-30b-a3b")  # these write a run.yaml of their own


def furnish(folder: Path) -> None:
    """run.yaml with a tiny model, data, questions, a DeepSpeed config and script, and the programs by their names."""
    saved_model(folder / "tiny", WIDE)
    shutil.copy(PAIRS, folder / "chat.jsonl")
    lines = PAIRS.read_text().splitlines()
    (folder / "heldout.jsonl").write_text("\n".join(lines[:4]) + "\n")
    asked = ["What is a shard?", "What is a rank?"]
    (folder / "questions.txt").write_text("\n".join(asked) + "\n")
    (folder / "questions.csv").write_text("question,A,B,C,D,answer\nOne and one?,2,3,4,5,A\nTwo and two?,1,4,7,9,B\n")
    (folder / "eval.yaml").write_text("tasks:\n  - {type: loss, data: heldout.jsonl}\n")
    (folder / "hosts").write_text("worker-0 slots=4\nworker-1 slots=4\n")
    (folder / "scratch").mkdir()
    shutil.copytree(ROOT / "examples", folder / "examples")
    shutil.copy(ROOT / "examples/deepspeed/train.py", folder / "train.py")
    (folder / "ds_config.json").write_text('{"train_batch_size": 32, "zero_optimization": {"stage": 2}}\n')
    run = tiny_run(folder, "tiny", data__train="chat.jsonl", data__eval="5%", output="out/run", ranks=1, train__steps=4)
    run["train"] |= {"batch_size": 32, "micro_batch_size": "auto"}
    run["checkpoint"] = {"every": 2}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    programs = folder / "bin"
    programs.mkdir()
    for name, module in (("shardwise", "-m shardwise"), ("python", ""), ("torchrun", "-m torch.distributed.run")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        (programs / name).chmod(0o755)


def as_typed(text: str) -> str:
    """The command with the folder's own names."""
    for pattern, word in WORDS.items():
        text = re.sub(pattern, word, text)
    return text


def type_in(text: str, folder: Path, timeout: float = 280) -> tuple[int, str]:
    """Types a command and waits for its end, or of a server for its first word, after which it gets Ctrl-C."""
    line = as_typed(text)
    if line.startswith("shardwise export"):  # it overwrites nothing
        _remove(folder / line.split()[3])
    ready = next((word for pattern, word in SERVERS.items() if re.match(pattern, text)), None)
    where = Path(tempfile.mkdtemp(dir=folder)) if text.startswith(ELSEWHERE) else folder
    env = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "COLUMNS": "200",
        "DILOCO_TOKEN": "secret-of-16-letters",
    }
    said = folder / "said.txt"
    with said.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-o", "pipefail", "-c", line.replace("DILOCO_TOKEN=…", "")], cwd=where, env=env, stdout=out,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_hears_ctrl_c,
        )  # fmt: skip
        try:
            if ready is None:
                process.wait(timeout)
            else:
                _until(ready, said, process, timeout)
                os.killpg(process.pid, signal.SIGINT)
                process.wait(120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    code = 0 if ready is not None and process.returncode in (0, 130, -signal.SIGINT) else process.returncode
    return code, said.read_text()


def _hears_ctrl_c() -> None:
    """A shell's background jobs, tests among them, hand on that it is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _remove(target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)


def _until(word: str, said: Path, process: subprocess.Popen[bytes], timeout: float) -> None:
    end = time.monotonic() + timeout
    while not re.search(word, said.read_text()):
        assert process.poll() is None, f"ended early: {said.read_text()}"
        assert time.monotonic() < end, f"never said {word}: {said.read_text()}"
        time.sleep(0.1)


def rows_of(text: str) -> list[object]:
    """A block of JSON lines."""
    return [json.loads(line) for line in text.splitlines() if line.strip()]
