"""Runs that count in epochs: where they end, what their smaller last batches train, and how they resume."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import cli, faults, scenarios
from support.encoders import encoder_run, rows_for, write_rows
from support.families import config_of
from support.judged import judged_run, kto_file, preference_file
from support.meeting import meeting_point, meetings, worker_run
from support.ranks import run_ranks
from support.tiny import saved_model, tiny_run, tokenizer_folder

from shardwise.config.load import load_run
from shardwise.data.epochs import Epochs
from shardwise.foresight.prepare import prepare_run
from shardwise.observe.metrics import read_metrics
from shardwise.resolved_run import ResolvedRun

ROWS, BATCH = 9, 4  # batches of 4, 4 and 1: of four ranks three have no row in the last
LOSS, NORM = 1e-5, 1e-4


def texts(folder: Path, name: str = "few", rows: int = ROWS) -> str:
    """Rows that differ from one another."""
    words = ("shard", "gradient", "rank", "epoch", "batch")
    made = [{"text": f"{name} {i} " + f"{words[i % 5]} " * (2 + i * 3 % 11)} for i in range(rows)]
    return write_rows(folder / f"{name}.jsonl", made)


def the_run(folder: Path, output: str, /, **changes: Any) -> dict[str, Any]:
    """Two epochs of nine rows."""
    own: dict[str, Any] = {
        "data__train": texts(folder), "data__packing": False, "train__steps": None, "train__epochs": 2,
        "train__batch_size": BATCH, "train__learning_rate": 1e-3,
    }  # fmt: skip
    return tiny_run(folder, **own | {"output": str(folder / output)} | changes)


def trained(output: Path) -> list[dict[str, Any]]:
    return [r for r in read_metrics(output / "metrics.jsonl") if r["kind"] == "train"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("epochs")
    tokenizer_folder(tmp / "tokenizer")
    return tmp


# --- the real command ----------------------------------------------------------------------------------------------


def test_fewer_sequences_than_a_batch(folder: Path) -> None:
    """Eight documents in a batch of eight, packed: a step an epoch, said with what would be full."""
    run = tiny_run(folder, data__train=texts(folder, "eight", 8), data__sequence_length=64, train__steps=None,
                   train__epochs=3, train__batch_size=8, output=str(folder / "eight"), ranks=2)  # fmt: skip
    code, out, err = cli.train(cli.write_run(folder / "eight-run", run))
    assert code == 0, err
    records = trained(folder / "eight")
    (sequences,) = {r["sequences"] for r in records}
    assert 1 < sequences < 8 and [r["epoch"] for r in records] == [1.0, 2.0, 3.0]
    assert len({(r["tokens"], r["supervised_tokens"]) for r in records}) == 1
    said = " ".join(out.split())
    assert f"an epoch has {sequences} packed sequences, fewer than train.batch_size 8: it is one step of" in said
    assert f"train.batch_size={sequences // 2 * 2}" in said and "data.packing=false" in said
    assert "done: 3 steps, loss" in said and "; 3.00 epochs" in said
    assert f"steps 3 of up to 8 sequences of up to 64 tokens (packed); 3 epochs of {sequences} sequences" in said


# --- what is trained on --------------------------------------------------------------------------------------------


def test_a_mixture_on_one_then_three_then_two_ranks(folder: Path) -> None:
    """Two epochs, stopped in the middle of each and continued on other ranks; every document as often as asked."""
    sources = [texts(folder, "most", 70), texts(folder, "some", 25), {"path": texts(folder, "rare", 5), "epochs": 3}]
    found, vain = Counter[tuple[int, ...]](), 0
    for ranks, steps in ((1, 2), (3, 5), (2, None)):
        run = the_run(folder, "mixed", data__train=sources, data__packing=True, data__sequence_length=96,
                      data__packing_window=32, train__batch_size=6, train__steps=steps)  # fmt: skip
        for often, mine in run_ranks(scenarios.train_and_count, ranks, run):
            found.update(often)
            vain += mine
    assert Counter(found.values()) == {2: 95, 6: 5}
    records = trained(folder / "mixed")
    assert records[-1]["epoch"] == 2 and [r["step"] for r in records] == list(range(1, len(records) + 1))
    ends = [r for r in records if r["epoch"] in (1, 2)]
    assert len(ends) == 2 and all(r["sequences"] <= 6 for r in ends)
    assert all(r["sequences"] == 6 for r in records if r not in ends)


@pytest.mark.parametrize(
    ("changes", "sequences"),
    [
        ({"train__epochs": 1.5}, [4, 4, 1, 4, 1]),
        pytest.param({"train__epochs": 1.5, "train__steps": 2}, [4, 4], marks=pytest.mark.slow),
        pytest.param({"train__epochs": 0.5, "train__steps": 99}, [4, 1], marks=pytest.mark.slow),
    ],
    ids=["half", "sooner", "later"],
)
def test_a_part_of_an_epoch(folder: Path, changes: dict[str, Any], sequences: list[int]) -> None:
    """1.5 epochs of 9 rows are 14 rows; steps beside epochs end the run sooner, never later."""
    name = "part-" + "-".join(map(str, sequences))
    run_ranks(scenarios.train, 1, the_run(folder, name, **changes))
    records = trained(folder / name)
    assert [r["sequences"] for r in records] == sequences
    assert records[-1]["epoch"] == pytest.approx(sum(sequences) / 9, abs=1e-4)
    assert records[-1]["eta_seconds"] == 0


def test_the_smaller_batch_is_a_plain_loops(folder: Path) -> None:
    """Losses of our loop and of a plain model, document by document, whose batches end with the epoch as well."""
    ours = run_ranks(scenarios.train, 1, the_run(folder, "ours"))[0][0]
    plain = run_ranks(scenarios.plain_loop, 1, the_run(folder, "plain"))[0]
    assert len(ours) == 6 and ours == pytest.approx(plain, abs=LOSS)


PP, CP, TP, EP = ({f"parallel__{axis}": 2} for axis in ("pipeline", "context", "tensor", "expert"))
DEEP = {"num_hidden_layers": 4}
# Ranks and settings; some ranks have no row in the last batch of an epoch.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero-0": (4, {"parallel__zero": 0}),
    "zero-1": (4, {"parallel__zero": 1}),
    "zero-2": (4, {"parallel__zero": 2}),
    "zero-3": (4, {"parallel__zero": 3}),
    "hybrid": (4, {"parallel__zero": 3, "parallel__dp_shard_size": 2}),
    "packed": (4, {"data__packing": True, "data__sequence_length": 24, "data__over_length": "drop"}),
    "micro-2": (2, {"train__micro_batch_size": 2}),
    "accumulated": (2, {"train__batch_size": 8}),
    "in-backward": (4, {"train__optimizer_in_backward": True, "train__max_grad_norm": None, "parallel__zero": 3}),
    "offloaded": (4, {"offload__optimizer": "cpu", "parallel__zero": 2}),
    "on-disk": (4, {"offload__optimizer": "disk", "offload__parameters": "disk", "parallel__zero": 3}),
    "lora": (4, {"method": {"type": "lora", "rank": 4}, "parallel__zero": 3}),
    "pipeline": (4, PP),
    "interleaved": (4, PP | {"parallel__pipeline_schedule": "interleaved"}),
    "zbv": (4, PP | {"parallel__pipeline_schedule": "zbv", "parallel__zero": 0}),
    "gpipe-3": (3, {"parallel__pipeline": 3, "parallel__pipeline_schedule": "gpipe"}),
    "tensor": (4, TP | {"parallel__zero": 3}),
    "context": (4, CP | {"parallel__zero": 3}),
    "expert": (4, EP | {"parallel__zero": 2, "model": "qwen3_moe"}),
    "dpo": (4, {"objective": "dpo"}),
    "kto": (4, {"objective": "kto", "parallel__zero": 3}),
    "distill": (4, {"objective": "distill"}),
    "masked": (4, {"objective": "masked"}),
    "seq2seq": (4, {"objective": "seq2seq", "parallel__zero": 3}),
    "classify": (4, {"objective": "classify"}),
}
QUICK = ("zero-2", "pipeline", "kto")
_ALONE: dict[str, Any] = {}


def case_run(folder: Path, name: str, output: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The run of a case: the same data and model for one rank and for several."""
    kind, tokenizer = changes.get("objective"), str(folder / "tokenizer")
    train = {"train__steps": None, "train__epochs": 2, "train__batch_size": BATCH, "train__micro_batch_size": 1}
    train |= {"output": str(folder / output)} | {k: v for k, v in changes.items() if k not in ("objective", "model")}
    if kind in ("masked", "seq2seq", "classify"):
        made = write_rows(folder / f"{kind}-{ROWS}.jsonl", rows_for(kind, ROWS))
        family = "t5" if kind == "seq2seq" else "bert"
        return encoder_run(folder, family, kind, data__train=made, **train)
    if kind in ("dpo", "kto"):
        own = folder / f"judged-{kind}"
        own.mkdir(exist_ok=True)
        file = kto_file(own, 5) if kind == "kto" else preference_file(own, ROWS)
        run = judged_run(folder, kind, data__packing=False, **train)
        run["data"]["train"] = file
        return run
    config = config_of(str(changes.get("model", "llama"))) | DEEP
    model: Any = {"config": config, "tokenizer": tokenizer}
    if "method" in changes:
        model = saved_model(folder / "llama", config)
    objective = {}
    if kind == "distill":
        objective = {"objective": {"type": "distill", "teacher": saved_model(folder / "teacher", config, seed=1)}}
    return the_run(folder, output, **train | objective) | {"model": model}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_ranks_without_rows(folder: Path, name: str) -> None:
    """The last batch of an epoch has a row for some ranks only: losses and gradients of one rank."""
    ranks, changes = CASES[name]
    alone = {k: v for k, v in changes.items() if not k.startswith(("parallel", "offload"))}
    key = json.dumps(alone, sort_keys=True)
    if key not in _ALONE:
        run = case_run(folder, name, f"{name}-1", alone)
        _ALONE[key] = run_ranks(scenarios.train, 1, run)[0], [r["sequences"] for r in trained(folder / f"{name}-1")]
    (losses, norms, _), sequences = _ALONE[key]
    run = case_run(folder, name, name, changes | {"ranks": ranks})
    found, others, _ = run_ranks(scenarios.train, ranks, run, timeout=600)[0]
    assert [r["sequences"] for r in trained(folder / name)] == sequences and min(sequences) < max(sequences)
    loss = max(abs(a - b) for a, b in zip(found, losses, strict=True))
    norm = max(abs(a - b) / max(b, 1e-3) for a, b in zip(others, norms, strict=True))
    print(f"\n| {name} | {ranks} | {sequences} | {loss:.1e} | {norm:.1e} |")
    assert loss <= LOSS and norm <= NORM and all(n > 0 for n in norms)


# --- resuming ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_resumed_to_the_bit(folder: Path, ranks: int) -> None:
    """From the end of an epoch, and from before its smaller batch."""
    whole = the_run(folder, f"whole-{ranks}", ranks=ranks, train__batch_size=6, checkpoint__every=1,
                    checkpoint__keep=9)  # fmt: skip
    losses = run_ranks(scenarios.train, ranks, whole)[0][0]
    assert len(losses) == 4
    for step in (1, 2):
        output = folder / f"resumed-{ranks}-{step}"
        shutil.copytree(folder / f"whole-{ranks}/checkpoints/step-{step:08d}", output / f"checkpoints/step-{step:08d}")
        later = run_ranks(scenarios.train, ranks, whole | {"output": str(output)})[0][0]
        assert later == losses[step:]


@pytest.mark.slow
def test_a_checkpoint_that_straddles_epochs(folder: Path) -> None:
    """As they were written when steps took sequences of two epochs: the next step takes what is left of the second."""
    run = the_run(folder, "old", train__epochs=None, train__steps=3)
    run_ranks(scenarios.train, 1, run)
    assert trained(folder / "old")[-1]["epoch"] == pytest.approx(12 / 9, abs=1e-4)
    run_ranks(scenarios.train, 1, the_run(folder, "old", train__epochs=3))
    records = trained(folder / "old")
    assert [r["sequences"] for r in records] == [4, 4, 4, 4, 2, 4, 4, 1] and records[-1]["epoch"] == 3


@pytest.mark.slow
def test_another_batch_size_and_more_epochs(folder: Path) -> None:
    """The run ends where the epochs do, at whichever step, and has nothing left to train when started again."""
    run_ranks(scenarios.train, 1, the_run(folder, "grown", train__epochs=1))
    run_ranks(scenarios.train, 1, the_run(folder, "grown", train__epochs=2, train__batch_size=6))
    records = trained(folder / "grown")
    assert [r["sequences"] for r in records] == [4, 4, 1, 6, 3] and records[-1]["epoch"] == 2
    assert records[-1]["eta_seconds"] == 0
    run_ranks(scenarios.train, 1, the_run(folder, "grown", train__epochs=2, train__batch_size=6))
    assert trained(folder / "grown") == records


@pytest.mark.slow
def test_sequences_that_the_guard_dropped_are_not_made_up_for(folder: Path) -> None:
    """A run that went back skips them: it ends with its last epoch, in fewer steps."""
    run = the_run(folder, "back", ranks=2, checkpoint__every=2, timeout="60s", guard={"nan": "back"})
    run["train"]["epochs"] = 3
    env = faults.environment(folder / "nans", "nan", "all", 5)
    code, _, err = cli.train(cli.write_run(folder / "back-run", run), env=env)
    assert code == 0, err
    assert [r["sequences"] for r in trained(folder / "back")] == [4, 4, 1, 4, 1, 4, 4, 1]
    assert trained(folder / "back")[-1]["epoch"] == 3


@pytest.mark.slow
def test_workers_that_train_apart(folder: Path) -> None:
    """They count their own epochs and end with the same round."""
    with meeting_point(folder / "meet", "--method", "fedavg") as point:
        own: dict[str, Any] = {"data__train": texts(folder), "data__packing": False, "train__steps": None,
                               "train__epochs": 2, "train__batch_size": BATCH}  # fmt: skip
        run_ranks(scenarios.train, 2, worker_run(folder, point, "worker", 3, **own))
    assert [r["sequences"] for r in trained(folder / "worker")] == [4, 4, 1] * 2
    assert [m["round"] for m in meetings(folder / "worker")] == [1, 2]


# --- where a run ends ----------------------------------------------------------------------------------------------


def ending(steps: int, **train: Any) -> ResolvedRun:
    run = load_run({"model": "m", "data": {"train": "a"}, "train": {"steps": steps, "batch_size": 4, **train}}).run
    return ResolvedRun(run, {}, None, None, None, None, Path(), None, Epochs((9, 9)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "done", "sequences", "end"),
    [(6, 0, 0, 6), (6, 3, 9, 6), (6, 6, 18, 6), (6, 1, 9, 4), (6, 4, 12, 6), (5, 0, 0, 5), (5, 4, 13, 5), (2, 1, 9, 2),
     (6, 9, 30, 9)],
)  # fmt: skip
def test_the_last_step(steps: int, done: int, sequences: int, end: int) -> None:
    assert ending(steps).last_step(done, sequences) == end


def test_what_is_said(folder: Path) -> None:
    said: list[str] = []
    prepare_run(load_run(the_run(folder, "said", train__steps=99)), said.append)
    assert "train.epochs=2 ends at step 6, before train.steps=99" in said
    said.clear()
    job = prepare_run(load_run(the_run(folder, "said", train__batch_size=12, train__micro_batch_size=2)), said.append)
    assert job.run.train.steps == 2 and job.run.train.epochs == 2 and job.epochs == Epochs((9, 9))
    (line,) = [one for one in said if "fewer than" in one]
    assert line.endswith("→ for full steps: train.batch_size=9 train.micro_batch_size=1")
    said.clear()
    prepare_run(load_run(the_run(folder, "said", train__batch_size=16, ranks=16)), said.append)
    assert any(one.endswith("→ for full steps: 9 ranks or fewer") for one in said)
