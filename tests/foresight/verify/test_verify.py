"""`shardwise verify`: right runs are certified, whatever they are made of; the command keeps its manners."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import cli, planted
from support.families import config_of
from support.tiny import rows_of_pairs, saved_model, tiny_run, tokenizer_folder

from shardwise.cli import main as commands
from shardwise.core.errors import UserError
from shardwise.foresight.verify import command, ranks
from shardwise.foresight.verify.certificate import OPEN, PASS, Certificate

OWN = {"bert": ("masked", "texts"), "t5": ("seq2seq", "pairs")}
TP_PP = {"parallel__tensor": 2, "parallel__pipeline": 2}
CPU = {"optimizer": "cpu", "parameters": "cpu", "activations": "cpu"}
PLUS = {"hpz_size": 2, "quantize_weights": True, "quantize_gradients": True}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"parallel__zero": stage, **{f"parallel__{name}": value for name, value in more.items()}}


# Family, settings, and claims that must be among those shown.
QUICK: list[tuple[str, dict[str, Any], list[str]]] = [
    ("gpt2", TP_PP | {"ranks": 4}, ["packing", "tensor 2", "pipeline 2 (1f1b)", "tensor 2 × pipeline 2 on 4 ranks"]),
    ("t5", zero(2) | {"ranks": 2}, ["model and loss", "accumulation", "ZeRO-2 on 2 ranks"]),
    ("bert", zero(3) | {"ranks": 2}, ["model and loss", "accumulation", "ZeRO-3 on 2 ranks"]),
]
SLOW: list[tuple[str, dict[str, Any], list[str]]] = [
    ("llama", zero(3) | {"ranks": 2, "offload": CPU, "recompute": "full"}, ["recompute", "offload"]),
    ("t5", TP_PP | {"ranks": 4}, ["tensor 2 × pipeline 2 on 4 ranks"]),
    ("bert", TP_PP | {"ranks": 4}, ["tensor 2 × pipeline 2 on 4 ranks"]),
    ("llama", zero(2, dp_shard_size=2) | {"ranks": 4, "train__micro_batch_size": 1}, ["ZeRO-2 hybrid on 2 × 2 ranks"]),
    ("llama", zero(3, **PLUS) | {"ranks": 4, "train__micro_batch_size": 1},
     ["ZeRO++ hpZ on 4 ranks", "ZeRO++ qwZ on 2 ranks", "ZeRO++ qgZ on 2 ranks"]),
    ("llama", zero(3) | {"ranks": 2, "offload": {"optimizer": "disk", "parameters": "disk"}}, ["offload"]),
    ("llama", zero(3) | {"ranks": 2, "method": {"type": "lora", "rank": 4, "dropout": 0.1}}, ["packing"]),
    ("llama", zero(3) | {"ranks": 2, "method": {"type": "qlora", "rank": 4}}, ["ZeRO-3 on 2 ranks"]),
    ("llama", zero(1) | {"ranks": 2, "train__optimizer": "lion"}, ["ZeRO-1 on 2 ranks"]),
    ("llama", {"ranks": 1, "train__optimizer_in_backward": True, "train__max_grad_norm": None},
     ["updates in backward"]),
    ("mixtral", zero(1, context=2, expert=2) | TP_PP | {"ranks": 8},
     ["context 2 (ring)", "expert 2", "tensor 2 × context 2 × pipeline 2 × expert 2 × ZeRO-1 on 8 ranks"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    tokenizer_folder(folder / "tokenizer")
    rows_of_pairs(folder)
    return folder


def a_run(shared: Path, family: str = "llama", **changes: Any) -> dict[str, Any]:
    model: Any = {"config": config_of(family), "tokenizer": str(shared / "tokenizer")}
    if "method" in changes:
        saved_model(shared / family, config_of(family))
        model = str(shared / family)
    own = OWN.get(family)
    data = {} if own is None else {"objective": own[0], "data__train": str(shared / f"{own[1]}.jsonl")}
    usual = {"train__batch_size": 8, "train__micro_batch_size": 2, "data__sequence_length": 160}
    return tiny_run(shared, model, **(usual | {"data__over_length": "drop"} | data | changes))


def told(certificate: Certificate) -> str:
    return "\n".join(f"{r.verdict:9} {r.claim.name}: {r.why} {r.difference}" for r in certificate.rows)


@pytest.mark.parametrize(
    ("family", "settings", "claims"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_right_runs_are_certified(family: str, settings: dict[str, Any], claims: list[str], shared: Path) -> None:
    certificate = command.verify(a_run(shared, family, **settings))
    print(f"\n{told(certificate)}")
    assert certificate.passed, told(certificate)
    shown = {row.claim.name for row in certificate.rows if row.verdict == PASS}
    assert set(claims) <= shown, told(certificate)
    adapted = settings.get("method", {}).get("type") == "qlora"
    assert {row.claim.name for row in certificate.rows if row.verdict == OPEN} == (
        {"model and loss", "packing"} if adapted else set()
    )
    for row in certificate.rows:
        exact = row.difference is not None and not row.claim.lossy
        assert not exact or (row.difference.gradient or 0.0) < 2e-5, told(certificate)  # far within the bound


def test_the_command_certifies(shared: Path, tmp_path: Path) -> None:
    run = a_run(shared, ranks=8, train__batch_size=32, **zero(3))
    file, target = cli.write_run(tmp_path, run), tmp_path / "certificate.json"
    code, out, err = cli.command("verify", file, "recompute=full", "offload.optimizer=cpu", "--output", target)
    assert code == 0, out + err
    assert "smallest world with every axis of the run: 8 ranks → 2" in out
    for claim in (
        "model and loss",
        "packing",
        "recompute",
        "ZeRO-3 on 2 ranks",
        "offload",
        "ZeRO-3 + recompute + offload on 2 ranks",
    ):
        assert claim in out
    found = json.loads(target.read_text())
    assert found["passed"] and found["failed"] is None and found["precision"] == "fp32"
    assert [one["verdict"] for one in found["claims"]] == ["pass"] * len(found["claims"])
    assert all(one["difference"]["worst"] and one["compared"] for one in found["claims"])
    assert not list(tmp_path.glob(".certificate*"))


def test_a_failure_leaves_with_one_and_names_the_parameter(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "HOST", [sys.executable, planted.__file__, "leak_between_documents"])
    file, target = cli.write_run(tmp_path, a_run(shared, ranks=1)), tmp_path / "certificate.json"
    with pytest.raises(SystemExit) as left:
        commands.main(["verify", str(file), "--json", "--output", str(target)])
    assert left.value.code == 1
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(target.read_text())
    assert found["failed"] == "packing" and not found["passed"]
    broken = next(one for one in found["claims"] if one["claim"] == "packing")
    assert broken["difference"]["first"] == "model.embed_tokens.weight" and "model.embed_tokens" in broken["why"]
    assert next(one["verdict"] for one in found["claims"] if one["claim"] == "accumulation") == "not tried"


def test_what_cannot_be_shown_is_said(shared: Path) -> None:
    """Documents as long as a row: nothing is packed together."""
    certificate = command.verify(a_run(shared, ranks=1, data__sequence_length=32, data__over_length="truncate"))
    row = next(row for row in certificate.rows if row.claim.name == "packing")
    assert row.verdict == OPEN and "no row of the batch holds two documents" in row.why
    assert certificate.passed


@pytest.mark.slow
def test_the_whole_model(shared: Path) -> None:
    saved_model(shared / "whole", config_of("llama") | {"attention_dropout": 0.1})
    run = a_run(shared, ranks=2, **zero(3)) | {"model": str(shared / "whole")}
    certificate = command.verify(run, options=command.VerifyOptions(full=True))
    assert certificate.passed, told(certificate)
    assert certificate.model.endswith("whole") and any("dropout is off" in note for note in certificate.notes)


@pytest.mark.slow
def test_in_the_precision_of_the_run(shared: Path, cpu_precision_env: dict[str, str]) -> None:
    run = a_run(shared, ranks=2, precision="bf16", **zero(3))
    certificate = command.verify(run, options=command.VerifyOptions(own_precision=True))
    assert certificate.passed and certificate.precision == "bf16", told(certificate)
    assert all(row.claim.bounds.gradient > 1e-2 for row in certificate.rows)


def test_mistakes_get_one_message(shared: Path, tmp_path: Path) -> None:
    file = cli.write_run(tmp_path, a_run(shared))
    code, _, err = cli.command("verify", file, "--output", tmp_path / "nowhere" / "certificate.json")
    assert code == 2 and "--output" in err and "there is no such folder" in err and "Traceback" not in err
    with pytest.raises(UserError, match=r"(?s)--layers.*leave --full out"):
        command.verify(file, options=command.VerifyOptions(full=True, layers=3))
    with pytest.raises(UserError, match=r"--keep.*is not a folder"):
        command.verify(file, options=command.VerifyOptions(keep=file))
    for changes, named in (
        ({"parallel__tensor": 3, "ranks": 3, "train__batch_size": 6}, "parallel.tensor.*attention heads"),
        ({"ranks": 2, "parallel__zero": 2, "offload": {"optimizer": "cpu", "parameters": "cpu"}}, "parallel.zero: 3"),
        ({"ranks": 64}, "train.batch_size.*cannot be divided among 64 ranks"),
    ):
        with pytest.raises(UserError, match=named):  # as `shardwise train` would, before anything is computed
            command.verify(a_run(shared, **changes))
    with pytest.raises(UserError, match="no such"):
        command.verify(
            a_run(shared, data__train=str(tmp_path / "nothing.jsonl")),
            options=command.VerifyOptions(keep=tmp_path / "logs"),
        )


def started(file: Path) -> subprocess.Popen[str]:
    """`shardwise verify` with ranks at work, its files in a folder of their own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwise", "verify", str(file)], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=dict(os.environ) | {"TMPDIR": str(file.parent)},
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not any(child.environ().get("WORLD_SIZE") or child.parent().pid != process.pid for child in below(process)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return process


def below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.slow
def test_a_signal_leaves_nothing_behind(number: signal.Signals, code: int, shared: Path, tmp_path: Path) -> None:
    process = started(cli.write_run(tmp_path, a_run(shared, ranks=2, **zero(3))))
    children = below(process)
    process.send_signal(number)
    found, _, err = cli.finish(process)
    assert found == code and "nothing was certified" in err and "Traceback" not in err
    assert cli.all_gone(children) and not list(tmp_path.glob("shardwise-verify-*"))


@pytest.mark.slow
def test_a_killed_command_leaves_no_process_behind(shared: Path, tmp_path: Path) -> None:
    process = started(cli.write_run(tmp_path, a_run(shared, ranks=2, **zero(3))))
    children = below(process)
    process.kill()
    assert children and cli.all_gone(children)
    process.communicate()
