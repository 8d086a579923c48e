"""Runs on pairs and on judged answers: any ranks and stages alike, the reference that of the beginning."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import judged
from support.judged import judged_run, kto_file, preference_file, start
from support.tiny import LLAMA, PAIRS, saved_model, tiny_run, tokenizer_folder

from shardwise.config.load import load_run
from shardwise.core.errors import UserError
from shardwise.foresight.prepare import prepare_run

pytestmark = pytest.mark.timeout(judged.PATIENCE)
OBJECTIVES: list[Any] = ["dpo", {"type": "orpo", "beta": 0.2}, "kto"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("judged")


def named(objective: Any) -> str:
    return str(objective if isinstance(objective, str) else objective["type"])


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """Runs on one rank, one after the other in one process: records and parameters of each."""
    runs = {}
    for objective in OBJECTIVES:
        name = named(objective)
        runs[name] = judged_run(folder, objective, output=str(folder / name))
        longer = {"train__steps": 12, "train__learning_rate": 3e-3, "output": str(folder / f"{name}-longer")}
        runs[f"{name}-longer"] = judged_run(folder, objective, **longer)
    whole_batch = {"train__micro_batch_size": 4, "parallel__zero": 2, "output": str(folder / "whole batch")}
    runs["whole batch"] = judged_run(folder, "dpo", **whole_batch)
    runs["whole"] = judged_run(folder, "dpo", train__schedule="constant", output=str(folder / "whole"))
    halves = judged_run(folder, "dpo", train__schedule="constant", output=str(folder / "halves"))
    runs |= {"first half": halves | {"train": halves["train"] | {"steps": 2}}, "second half": halves}
    return start(judged.all_of, 1, runs)[0]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=named)
def test_the_same_on_any_ranks_and_stages(alone: dict[str, Any], folder: Path, objective: Any) -> None:
    """1 rank, accumulated or at once, against 2 at stages 0 and 3; the first step measures the model against itself."""
    name = named(objective)
    runs: dict[Any, Any] = {
        zero: judged_run(folder, objective, parallel__zero=zero, train__micro_batch_size=micro,
                         output=str(folder / f"{name}-{zero}"))
        for zero, micro in ((0, 1), (3, 2))
    }  # fmt: skip
    together = start(judged.all_of, 2, runs)[0]
    records, final = alone[name]
    figure = {"dpo": "margin", "orpo": "loss_chosen", "kto": "reward"}[name]
    if name == "dpo":
        together["at once"] = alone["whole batch"]
    for others, parameters in together.values():
        for key in ("loss", "grad_norm", figure, "accuracy"):
            # Adam makes much of little: rounding shows in the norm first.
            close = {"rel": 1e-4} if key == "grad_norm" else {"abs": 1e-5}
            assert [r[key] for r in others] == [pytest.approx(r[key], **close) for r in records], key
        assert max((parameters[n] - p).abs().max().item() for n, p in final.items()) < 1e-5
    if name != "orpo":
        assert records[0]["loss"] == pytest.approx(math.log(2) if name == "dpo" else 0.5, abs=1e-6)
        assert records[0][figure] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=named)
def test_training_raises_the_accuracy(alone: dict[str, Any], objective: Any) -> None:
    records, _ = alone[f"{named(objective)}-longer"]
    assert sum(r["accuracy"] for r in records[-3:]) / 3 > 0.85 > records[0]["accuracy"]
    assert records[-1]["loss"] < records[0]["loss"]


def test_a_resumed_run_has_the_reference_of_the_beginning(alone: dict[str, Any]) -> None:
    (whole, final), (halves, parameters) = alone["whole"], alone["second half"]
    assert [r["loss"] for r in halves] == [r["loss"] for r in whole]
    assert all(torch.equal(parameters[n], p) for n, p in final.items())
    assert abs(whole[2]["margin"]) > 1e-3, "else any reference would do"


def test_evaluation_of_held_out_pairs(folder: Path) -> None:
    changes = {"data__eval": "25%", "parallel__zero": 3, "train__steps": 2, "output": str(folder / "held-out")}
    start(judged.all_of, 2, {"held out": judged_run(folder, "dpo", **changes)})
    lines = (folder / "held-out/metrics.jsonl").read_text().splitlines()
    (record,) = [r for r in map(json.loads, lines) if r["kind"] == "eval"]
    assert record["loss"] != pytest.approx(math.log(2), abs=1e-6) and {"accuracy", "margin"} <= record.keys()


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_the_base_of_an_adapter_is_its_reference(folder: Path, objective: str) -> None:
    """At any stage as with a frozen copy of the base, but without holding one."""
    pytest.importorskip("shardwise.nn.adapters")

    def run(name: str, **changes: Any) -> dict[str, Any]:
        output = str(folder / f"{objective}-{name}")
        changes |= {"model": saved_model(folder / "saved", LLAMA), "method": {"type": "lora", "rank": 4}}
        return judged_run(folder, objective, train__learning_rate=1e-2, output=output, **changes)

    copied = start(judged.records_of, 1, {"copied": run("copied")}, True)[0]["copied"]
    both = {zero: run(f"lora-{zero}", parallel__zero=zero) for zero in (0, 2, 3)}
    assert abs(copied[-1]["margin" if objective == "dpo" else "reward"]) > 1e-3
    for records in start(judged.records_of, 2, both)[0].values():
        assert [r["loss"] for r in records] == [pytest.approx(r["loss"], abs=1e-5) for r in copied]


# Data


def prepared(run: dict[str, Any]) -> Any:
    return prepare_run(load_run(run))


def test_documents_are_counted_without_their_heads(folder: Path) -> None:
    """A pair that fits exactly goes in; both conversations are in the batch, as the template has them."""
    job = prepared(judged_run(folder, "dpo", output=str(folder / "counted")))
    longest = job.data.train[0].known["longest"]
    job = prepared(judged_run(folder, "dpo", data__sequence_length=longest, output=str(folder / "counted")))
    loader = job.loader()
    batch = loader.collate(loader.sequences(0, loader.epoch_sequences()))
    assert batch.input_ids.shape[1] <= longest and batch.count == 48
    assert loader.step(0, 4, 4, 0, 1).supervised == len([d for s in loader.sequences(0, 4) for d in s])
    texts = [job.tokenizer.decode(batch.input_ids[batch.conversations == n]) for n in range(48)]
    for prompt, chosen, rejected in judged.rows():
        here = [i for i, text in enumerate(texts) if f"user\n{prompt}<" in text and f"assistant\n{chosen}<" in text]
        assert here and here[0] % 2 == 0 and f"assistant\n{rejected}<|im_end|>" in texts[here[0] + 1]
    learned = batch.input_ids.roll(-1, 1)[batch.labels != -100]
    assert (learned == batch.labels[batch.labels != -100]).all()
    with pytest.raises(UserError, match="drop or truncate"):
        prepared(judged_run(folder, "dpo", data__sequence_length=longest - 1, output=str(folder / "counted")))


@pytest.mark.parametrize("policy", ["drop", "truncate"])
def test_pairs_that_are_too_long(folder: Path, policy: str) -> None:
    run = judged_run(folder, "dpo", data__sequence_length=100, data__over_length=policy, output=str(folder / policy))
    job = prepared(run)
    facts = job.data.train[0].known
    fates = facts["fates"]
    assert facts["documents"] + fates.get("dropped", 0) == 24
    assert fates["dropped" if policy == "drop" else "truncated"] > 0
    loader = job.loader()
    batch = loader.collate(loader.sequences(0, loader.epoch_sequences()))
    assert batch.input_ids.shape[1] <= 100
    counts = torch.zeros(batch.count + 1).index_add(
        0, batch.conversations.flatten(), (batch.labels != -100).flatten().float()
    )
    assert (counts[:-1] > 0).all(), "every answer has something left to compare"


def test_refusals(folder: Path) -> None:
    tokenizer_folder(folder / "tokenizer")
    pairs, single = preference_file(folder), kto_file(folder)

    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(UserError) as caught:
            prepared(tiny_run(folder, output=str(folder / "refused"), data__sequence_length=512, **changes))
        assert match in str(caught.value), str(caught.value)

    refused("use objective: dpo (or orpo)", data__train=pairs)
    refused("use objective: kto", data__train=single, objective="causal")
    refused("use objective: causal", data__train=str(PAIRS), objective="dpo")
    refused("use objective: kto", data__train=single, objective="orpo")
    refused("use objective: dpo", data__train=pairs, objective="kto")
    refused("cannot be split", data__train=pairs, objective="dpo", data__over_length="split")
    refused("data.loss_on", data__train=pairs, objective="dpo", data__loss_on="all")
    model = saved_model(folder / "model", LLAMA)
    refused("method.adapter", model=model, data__train=pairs, objective="dpo", method={"type": "lora", "adapter": "x"})
    refused(
        "method.modules_to_save",
        model=model,
        data__train=pairs,
        objective="kto",
        method={"type": "qlora", "modules_to_save": "lm_head"},
    )


def test_the_preview_shows_both_answers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from shardwise.foresight.data_report.survey import sample_at, samples_of, survey

    found = survey(load_run(judged_run(folder, "dpo")).run)
    sample = sample_at(found, "3")
    text = found.tokenizer.decode(sample.tokens)
    prompt, chosen, rejected = judged.rows()[2]
    assert text.count(prompt) == 2 and text.index(chosen) < text.index(rejected)
    assert sample.note.startswith("chosen: the first") and len(sample.learned) == len(sample.tokens)
    notes = [s.note for s in samples_of(survey(load_run(judged_run(folder, "kto")).run), 5)]
    assert set(notes) == {"wanted", "not wanted"}
