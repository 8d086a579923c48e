"""The answers to `auto`, and every check that needs more than one field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from shardwise.config import Run, load_run
from shardwise.config.resolve import (
    Machine,
    Resolution,
    check_output,
    resolve_machine,
    resolve_model,
    resolve_steps,
    world_size,
)
from shardwise.core.errors import UserError
from shardwise.foresight.prepare import prepare_run

SHARD = "parallel.dp_shard_size"


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    _gpus(monkeypatch, 0)


def _gpus(monkeypatch: pytest.MonkeyPatch, count: int, bf16: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16)


def run(*overrides: str) -> Run:
    return load_run({"model": "m", "data": {"train": "a.jsonl", "sequence_length": 512}}, overrides).run


def refused(*overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        resolve_machine(run(*overrides))
    return caught.value


def test_cpu_answers_and_reasons() -> None:
    result = resolve_machine(run())
    assert (result.run.device, result.run.ranks, result.run.backend, result.run.precision) == ("cpu", 1, "gloo", "fp32")
    assert result.reasons["device"] == "no CUDA device is visible"
    assert result.reasons["ranks"].startswith("one process on a CPU")
    assert result.reasons["backend"] == "device is cpu"
    assert result.reasons["precision"].startswith("on a CPU")
    assert result.reasons["train.micro_batch_size"] == "at most 2048 tokens per forward on cpu"


def test_a_cpu_that_is_fast_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.config.resolve.gain_of_bf16", lambda: 2.1)
    result = resolve_machine(run())
    assert result.run.precision == "bf16" and "2.1 times as fast" in result.reasons["precision"]
    assert resolve_machine(run("precision=fp32")).run.precision == "fp32"
    monkeypatch.setattr("shardwise.config.resolve.gain_of_bf16", lambda: 1.2)
    assert resolve_machine(run()).run.precision == "fp32"
    assert resolve_machine(run("device=cpu"), Machine(0, ranks=4)).run.precision == "fp32"  # another machine's


def test_gpu_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus(monkeypatch, 4)
    result = resolve_machine(run())
    assert (result.run.device, result.run.ranks, result.run.backend, result.run.precision) == (
        "cuda",
        4,
        "nccl",
        "bf16",
    )
    assert result.reasons["ranks"] == "one per GPU" and result.reasons["device"] == "4 CUDA devices are visible"
    _gpus(monkeypatch, 1, bf16=False)
    assert resolve_machine(run()).run.precision == "fp16"
    assert resolve_machine(run("device=cpu")).run.backend == "gloo"


def test_what_was_given_needs_no_reason() -> None:
    result = resolve_machine(
        run("device=cpu", "ranks=2", "advanced.backend=gloo", "precision=bf16", "train.micro_batch_size=4")
    )
    assert result.reasons == {} and result.run.precision == "bf16" and result.run.train.micro_batch_size == 4


@pytest.mark.parametrize(
    ("overrides", "micro"),
    [
        ([], 4),  # 2048 tokens hold four sequences of 512
        (["data.sequence_length=4096"], 1),  # one sequence is more than the budget, and the least there is
        (["data.sequence_length=8"], 32),  # never more than the batch
        (["train.batch_size=6"], 3),  # a divisor of what a rank has
        (["train.batch_size=6", "ranks=2"], 3),
        (["train.batch_size=7"], 1),
        (["ranks=16"], 2),
    ],
)
def test_auto_micro_batch(overrides: list[str], micro: int) -> None:
    assert resolve_machine(run(*overrides)).run.train.micro_batch_size == micro


def test_auto_micro_batch_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus(monkeypatch, 1)
    assert resolve_machine(run()).run.train.micro_batch_size == 16


@pytest.mark.parametrize(
    ("overrides", "field", "value", "problem", "remedy"),
    [
        (["device=cuda"], "device", "cuda", "no CUDA device", "device: cpu"),
        (["advanced.backend=nccl"], "advanced.backend", "nccl", "CUDA devices only", "backend: gloo"),
        (["parallel.zero=0", "parallel.dp_shard_size=2", "ranks=2"], SHARD, 2, "stage 0", "1, 2 or 3"),
        (["parallel.dp_shard_size=3", "ranks=4"], SHARD, 3, "does not divide the 4 ranks", "[1, 2, 4]"),
        (["parallel.dp_shard_size=8", "ranks=4"], SHARD, 8, "does not divide the 4 ranks", "[1, 2, 4]"),
        (["train.batch_size=10", "ranks=4"], "train.batch_size", 10, "among 4 ranks", "use 8 or 12"),
        (["train.batch_size=2", "ranks=4"], "train.batch_size", 2, "among 4 ranks", "use 4"),
        (["train.micro_batch_size=3", "ranks=2"], "train.micro_batch_size", 3, "16 sequences", "[1, 2, 4, 8, 16]"),
        (["train.micro_batch_size=64"], "train.micro_batch_size", 64, "32 sequences per rank", "[1, 2, 4, 8, 16, 32]"),
        (["train.optimizer=muon", "advanced.optimizer_state=bf16"], "advanced.optimizer_state", "bf16", "muon", "lion"),
        (["train.optimizer=sgd", "train.betas=[0, 0.9]", "advanced.optimizer_state=bf16"], "advanced.optimizer_state",
         "bf16", "has no state", "leave it out"),
        (["train.optimizer=adafactor", "train.betas=[0.9, 0.99]"], "train.betas", [0.9, 0.99], "of its own", "leave"),
    ],
)  # fmt: skip
def test_refused(overrides: list[str], field: str, value: Any, problem: str, remedy: str) -> None:
    error = refused(*overrides)
    assert (error.field, error.value) == (field, value)
    assert problem in error.problem and remedy in error.remedy


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus(monkeypatch, 2)
    error = refused("ranks=4")
    assert (error.field, error.value) == ("ranks", 4) and "backend: gloo" in error.remedy
    error = refused("ranks=4", "advanced.backend=nccl")
    assert "one rank per GPU" in error.problem and error.remedy == "use ranks: 2"
    assert resolve_machine(run("ranks=4", "advanced.backend=gloo")).run.ranks == 4


# --- torchrun and other launchers --------------------------------------------------------------------------------


def test_launcher_sets_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    result = resolve_machine(run())
    assert result.run.ranks == world_size(result.run) == 4
    assert result.reasons["ranks"] == "the launcher started 4 in all"


def test_launcher_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    result = resolve_machine(run("ranks=8"))
    assert result.run.ranks == 8 and world_size(result.run) == 16
    assert result.run.train.micro_batch_size == 2  # 32 sequences over all 16 ranks, not over this host's 8
    assert resolve_machine(run("parallel.dp_shard_size=16")).run.parallel.dp_shard_size == 16
    error = refused("train.batch_size=8")
    assert error.field == "train.batch_size" and "16 ranks" in error.problem


def test_launcher_and_config_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    error = refused("ranks=2")
    assert (error.field, error.value) == ("ranks", 2) and "started 4" in error.problem


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("text", ["", "two", "0", "-1"])
def test_launcher_that_left_nonsense(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, text)
    error = refused()
    assert (error.field, error.value) == (name, text) and f"unset {name}" in error.remedy


# --- what depends on model and data ------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LlamaConfig(max_position_embeddings=256), GPT2Config(n_positions=256)])
def test_sequence_length_beyond_the_models_positions(config: Any) -> None:
    with pytest.raises(UserError) as caught:
        resolve_model(Resolution(run()), config)
    assert (caught.value.field, caught.value.value) == ("data.sequence_length", 512)
    assert caught.value.remedy == "use 256 or less"
    resolve_model(Resolution(run("data.sequence_length=256")), config)


def test_models_without_a_limit_take_any_length() -> None:
    class Config:
        def get_text_config(self) -> Any:
            return object()

    resolve_model(Resolution(run("data.sequence_length=1_000_000")), Config())


@pytest.mark.parametrize(
    ("overrides", "steps", "reason"),
    [
        ([], 12, "how"),
        (["train.epochs=3"], 12, "how"),
        (["train.epochs=3", "train.steps=7"], 7, None),
        (["train.epochs=3", "train.steps=12"], 12, None),
        (["train.epochs=3", "train.steps=13"], 12, "how; they end before step 13, which train.steps allows"),
    ],
)
def test_steps_from_epochs(overrides: list[str], steps: int, reason: str | None) -> None:
    result = Resolution(run(*overrides))
    resolve_steps(result, 3.0, 12, "how")
    assert result.run.train.steps == steps and result.run.train.epochs == 3.0
    assert result.reasons.get("train.steps") == reason
    assert Run.model_validate(result.run.model_dump(mode="json")) == result.run  # as checkpoints keep it


# --- output and resume -------------------------------------------------------------------------------------------


def test_output_may_be_new_or_there(tmp_path: Path) -> None:
    check_output(run(f"output={tmp_path}/a/b/c"))
    check_output(run(f"output={tmp_path}"))
    assert list(tmp_path.iterdir()) == []  # the check leaves nothing


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_output_at_or_below_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError) as caught:
        check_output(run(f"output={tmp_path}/{name}"))
    assert caught.value.field == "output" and "is a file" in caught.value.problem


def test_output_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shardwise.config.resolve.tempfile.NamedTemporaryFile", refuse)
    with pytest.raises(UserError, match=r"cannot be written \(Permission denied\)"):
        check_output(run(f"output={tmp_path}"))


def test_resume_must_name_a_checkpoint(tmp_path: Path) -> None:
    """Before the model is looked for."""
    (tmp_path / "empty").mkdir()

    def settings(name: str) -> list[str]:
        return [f"output={tmp_path}/out", f"resume={tmp_path}/{name}", "device=cpu"]

    for name, problem in {"empty": "is no checkpoint", "absent": "there is no such checkpoint"}.items():
        with pytest.raises(UserError) as caught:
            prepare_run(load_run({"model": "none", "data": {"train": "none"}}, settings(name)))
        assert caught.value.field == "resume" and problem in caught.value.problem


@pytest.mark.parametrize(
    ("overrides", "machine", "compiled", "why"),
    [
        ((), Machine(1, ranks=1), True, "fused"),
        (("train.steps=50",), Machine(8, ranks=8), True, "fused"),
        (("train.steps=49",), Machine(1, ranks=1), False, "within 49 steps"),
        (("parallel.tensor=2",), Machine(2, ranks=2), False, "beside tensor and pipeline"),
        (("parallel.pipeline=2", "train.batch_size=8"), Machine(2, ranks=2), False, "beside tensor and pipeline"),
        ((), Machine(1, ranks=1, compiles=False), False, "C compiler"),
        (("compile=true", "train.steps=3"), Machine(1, ranks=1), True, ""),
        (("compile=false",), Machine(1, ranks=1), False, ""),
        (("device=cpu",), Machine(0, ranks=1), False, ""),
    ],
)
def test_what_is_compiled(overrides: tuple[str, ...], machine: Machine, compiled: bool, why: str) -> None:
    result = resolve_machine(run("precision=bf16", *overrides), machine)
    assert result.run.compile is compiled is result.run.compiled
    assert why in result.reasons.get("compile", "") and bool(why) == ("compile" in result.reasons)


def test_what_is_left_open_is_not_compiled() -> None:
    assert run().compile == "auto" and not run().compiled


def test_recomputing_lightly_needs_a_compiler() -> None:
    assert refused("recompute=light").field == "recompute"
    assert resolve_machine(run("recompute=light", "precision=bf16"), Machine(1, ranks=1)).run.compiled
