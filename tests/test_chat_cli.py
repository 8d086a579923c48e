"""`shardwise chat` finds the model in whatever folder of a run it is given, and gives scripts what they need."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import cli, scenarios
from support.ranks import run_ranks
from support.tiny import tiny_run

from shardwise.checkpoint.hf import ExportOptions, export_checkpoint, find_checkpoint
from shardwise.cli import main as command_line

QUESTION = "What does ZeRO stage 3 shard?"
SHORT = ("--max-tokens", "8")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on two ranks, its model exported once more beside it."""
    tmp = tmp_path_factory.mktemp("chat")
    run_ranks(scenarios.train, 2, tiny_run(tmp, train__steps=10, train__micro_batch_size=6, parallel__zero=3))
    export_checkpoint(find_checkpoint(tmp / "out"), tmp / "exported", ExportOptions(shard_size=100 << 10))
    return tmp / "out"


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int | str | None, str, str]:
    """The command in this process: exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as left:
        command_line.main(["chat", *words])
    shown = capsys.readouterr()
    return left.value.code, shown.out, shown.err


def test_the_same_answer_from_every_folder(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Output folder, its checkpoints, one checkpoint, the model in it, and a folder that was exported to."""
    checkpoint = find_checkpoint(output)
    answers = set()
    for place in (output, output / "checkpoints", checkpoint, output / "model", output.parent / "exported"):
        code, out, err = ask(capsys, str(place), "--prompt", QUESTION, *SHORT)
        assert code == 0 and out.strip() and out.endswith("\n"), err
        assert err == "" or err.startswith("note: cut at max_tokens=8"), "notes are all that stderr may hold"
        answers.add(out)
    assert len(answers) == 1


def test_an_unfinished_run(output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its newest checkpoint answers, for there is no exported model yet."""
    (tmp_path / "checkpoints").symlink_to(output / "checkpoints")
    _, expected, _ = ask(capsys, str(output), "--prompt", QUESTION, *SHORT)
    code, out, _ = ask(capsys, str(tmp_path), "--prompt", QUESTION, *SHORT)
    assert code == 0 and out == expected


def test_questions_on_stdin(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own: an answer to each question, blank lines are none, and nothing else on stdout."""
    _, expected, _ = ask(capsys, str(output), "--prompt", QUESTION, *SHORT)
    code, out, err = cli.command("chat", output, *SHORT, stdin=f"\n{QUESTION}\n\nAnd stage 2?\n")
    assert code == 0, err
    assert out.startswith(expected) and len(out) > len(expected) and out.endswith("\n")
    assert all(line.startswith("note: ") for line in err.splitlines())


@pytest.mark.parametrize(
    ("place", "words"),
    [("nothing", "is neither a model folder"), ("empty", "has no config.json"), ("weightless", "no weights")],
)
def test_no_model_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless/config.json").write_text('{"model_type": "llama"}')
    code, out, err = ask(capsys, str(tmp_path / place), "--prompt", QUESTION)
    assert code == 2 and out == ""
    assert err.startswith("error: model = ") and place in err and words in err and "→" in err


def test_a_damaged_checkpoint_does_not_talk(output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = Path(shutil.copytree(find_checkpoint(output), tmp_path / "step-00000010"))
    (checkpoint / "state/__0_0.distcp").unlink()
    code, out, err = ask(capsys, str(checkpoint), "--prompt", QUESTION)
    assert code == 2 and out == "" and "__0_0.distcp is missing" in err


def test_an_empty_question(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ask(capsys, str(output), "--prompt", " ")
    assert code == 2 and out == "" and "prompt" in err and "is empty" in err
