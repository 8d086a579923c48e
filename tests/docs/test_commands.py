"""Every command of README and docs is parsed by the real parsers, and run unless the table says why it cannot be."""

from __future__ import annotations

import argparse
import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
from support.each import check_each
from support.pages import ROOT, Command, commands
from support.typed import furnish, type_in

from shardwise.cli.main import app
from shardwise.config.load import load_run
from shardwise.core.errors import UserError

ALL = commands()
FENCED = [one for one in ALL if one.fenced]

# Commands (or how they begin) that cannot be run here. Their words are parsed all the same.
NOT_RUN = {
    "make ": "sets up a machine or runs all tests: `make -n` says what it would do",
    "pip ": "the package index",
    "apt-get ": "Debian's archive",
    "export OPENAI_API_KEY": "a secret",
    "export SHARDWISE_MEETING_TOKEN": "a secret",
    "pre-commit ": "changes the clone",
    "torchrun --nnodes 2": "two hosts; tests/launch runs a rank of torchrun's",
    "shardwise node ": "two hosts; tests/launch/test_three_hosts.py has them",
    "shardwise launch --": "a job on a cluster; tests/launch has Slurm's commands",
    "shardwise export out/run my-model --push": "an upload; tests/export has a hub that takes it",
    "shardwise eval base tuned --judge": "a model behind a URL; tests/evaluate has one",
    "shardwise eval smollm2-135m-instruct out/openbookqa": "what these read is downloaded first",
    "shardwise eval out/before out/sections": "what these read is downloaded first",
    "shardwise train openbookqa": "what it reads is downloaded first",
    "shardwise train classify.yaml": "what it reads is downloaded first",
    "shardwise train de_en.yaml": "what it reads is downloaded first",
    "python olmo_tasks.py": "what it reads is downloaded first",
    "python debian_sections.py": "Debian's package lists",
    "python de_en.py": "what it reads is downloaded first",
    "python score_de_en.py": "what it reads is downloaded first",
    "python -m shardwise.deepspeed.zero_to_fp32": "tests/deepspeed_api/test_checkpoint.py runs it on a checkpoint",
    "pytest -m slow": "one of these tests itself",
    "python benchmarks/": "minutes of a GPU or of the machine to itself",
    "DILOCO_TOKEN=… shardwise train": "a sync server on another host; tests/diloco has one here",
}
QUICK = (  # run in the default set; the others with the slow ones
    "shardwise recipes", "shardwise config run.yaml",
    "shardwise launch run.yaml --slurm --hosts 6:8 --gpus 8 --dry-run",
)  # fmt: skip


def cannot(command: Command) -> str | None:
    texts = command.text, re.sub(r"^([A-Z_]+=\S+ )+", "", command.text)  # with and without what it sets
    return next((why for start, why in NOT_RUN.items() if any(text.startswith(start) for text in texts)), None)


RUN = [one for one in FENCED if cannot(one) is None]


class Parsed(Exception):
    """The words were understood."""


def parse_ours(words: list[str], whole: bool) -> None:
    """A `shardwise` command as click takes it apart, its settings as the schema does; nothing is executed."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    alone = not hasattr(command, "commands") or getattr(command, "invoke_without_command", False)
    assert alone or rest[0] in ("--help", "--version"), f"no such command: {rest}"
    if "--help" in rest:
        return
    if command.name == "deepspeed":
        from shardwise.deepspeed.launch import _parser

        _parser().parse_args(rest)
        return
    try:
        context = command.make_context(command.name, list(rest))
    except Exception as error:  # of click, or of the copy of it that typer has
        assert type(error).__name__ == "MissingParameter" and not whole, str(error)
        return
    settings = [s for s in context.params.get("overrides") or [] if "=" in s]
    base = {"model": "tiny", "data": {"train": "chat.jsonl", "sequence_length": 64}}
    load_run(base, settings)


def parse_script(path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's words as its own argparse takes them; one without it must say how it is called, or is known here."""

    def parse(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        _, unknown = argparse.ArgumentParser.parse_known_args(parser, args, namespace)
        assert not unknown, f"{path.name} has no {unknown}"
        raise Parsed

    monkeypatch.setattr(sys, "argv", [str(path), *words])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    if "argparse" in path.read_text():
        with pytest.raises(Parsed):
            runpy.run_path(str(path), run_name="__main__")
        return
    known = {"peers": lambda m: m["ROWS"], "offload": lambda m: m["SHAPES"]}
    if path.stem in known:
        names = known[path.stem](runpy.run_path(str(path), run_name="asked"))
        named = [word for word in words if "=" not in word and "." not in word]
        assert named and set(named) <= set(names), f"{path.name} knows {sorted(names)}"
        return
    called = [line for line in path.read_text().splitlines() if "python " in line and path.name in line]
    assert called, f"{path.name} does not say how it is called"
    assert len(words) <= max(len(line.partition(path.name)[2].split()) for line in called), f"it says {called}"


def parse_python(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if words[0] == "-m":
        monkeypatch.setattr(sys, "path", [str(ROOT / "tests"), *sys.path])
        spec = importlib.util.find_spec(words[1])
        assert spec is not None and spec.origin is not None, f"no module {words[1]}"
        if len(words) > 2:
            origin = Path(spec.origin)
            package = origin.with_name("__main__.py") if origin.name == "__init__.py" else origin
            parse_script(package, words[2:], monkeypatch)
        return
    places = [ROOT / words[0], *(ROOT / "examples").glob(f"*/{words[0]}")]
    path = next((p for p in places if p.exists()), None)
    assert path is not None, f"no script {words[0]}"
    parse_script(path, words[1:], monkeypatch)


def parse_pytest(words: list[str]) -> None:
    for word in words:
        if word.startswith("tests/"):
            assert (ROOT / word.partition("::")[0]).exists(), f"no {word}"


def parse_torchrun(words: list[str]) -> None:
    from torch.distributed.run import parse_args

    found = parse_args(words)
    assert found.module and found.training_script == "shardwise"
    parse_ours(found.training_script_args, True)


def parse_pip(words: list[str]) -> None:
    assert words[0] in ("install", "download")
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for word in words[1:]:
        if word.startswith(("shardwise[", ".[")):
            assert set(word.partition("[")[2][:-1].split(",")) <= extras, f"extras are {sorted(extras)}"


def test_every_command_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(command: Command) -> None:
        with monkeypatch.context() as patch:
            parse(command, patch)

    check_each(ALL, check, lambda one: f"{one.where} {one.text}")


def parse(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = command.words
    if program == "shardwise":
        parse_ours(words, command.fenced)
    elif program == "python":
        parse_python(words, monkeypatch)
    elif program == "pytest":
        parse_pytest(words)
    elif program == "torchrun":
        parse_torchrun(words)
    elif program == "pip":
        parse_pip(words)
    elif program == "make":
        lines = (ROOT / "Makefile").read_text().splitlines()
        targets = {line.partition(":")[0] for line in lines if line[:1].isalpha()}
        settings = {line.split()[0] for line in lines if line.split()[1:2] == ["?="]}
        unknown = [word for word in words if word not in targets and word.partition("=")[0] not in settings]
        assert not unknown, f"no target or setting {unknown}"
    else:
        assert command.fenced and (cannot(command) or program == "cat"), f"{program}: run it, or say in NOT_RUN why not"


@pytest.mark.parametrize(
    "text",
    ["shardwise data run.yaml --preview", "shardwise trane run.yaml", "shardwise train run.yaml train.stepz=1",
     "shardwise train", "shardwise bench --quik", "shardwise deepspeed --num_gpu_s 2 train.py",
     "python benchmarks/quantize.py --billions 1", "python benchmarks/none.py", "pytest tests/none.py",
     "make nothing", "pip install 'shardwise[nothing]'", "python benchmarks/peers.py OUT.json 9b-full",
     "frobnicate now"],
)  # fmt: skip
def test_mistakes_are_found(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, UserError, SystemExit)):
        parse(Command(text, "nowhere", True), monkeypatch)


def test_the_table_is_of_use() -> None:
    """What is not run any more leaves it; what it says of quick ones is there."""
    unused = [start for start in NOT_RUN if not any(one.text.startswith(start) for one in FENCED)]
    assert unused == [] or unused == ["pre-commit "]
    assert [text for text in QUICK if text not in [one.text for one in RUN]] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reader")
    furnish(made)
    return made


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """With a run that has ended, and its model."""
    first = ("shardwise train run.yaml", "shardwise train run.yaml method=lora train.steps=2 output=out/lora")
    for text in (*first, "shardwise export out/run my-model"):
        code, said = type_in(text, folder)
        assert code == 0, said
    return folder


@pytest.mark.parametrize("text", QUICK)
def test_quick_ones_run(text: str, folder: Path) -> None:
    code, said = type_in(text, folder)
    assert code == 0, said


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for one in RUN if one.text not in QUICK], ids=lambda one: one.text[:100])
def test_the_others_run(command: Command, trained: Path) -> None:
    code, said = type_in(command.text, trained)
    print(said)
    assert code == 0, said


@pytest.mark.slow
@pytest.mark.parametrize("command", [one for one in FENCED if one.text.startswith("make ")], ids=lambda one: one.text)
def test_make_knows_what_to_do(command: Command) -> None:
    done = subprocess.run(["make", "-n", *shlex.split(command.text)[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr
