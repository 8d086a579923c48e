"""Encoder–decoders, masked models and classifiers: their losses against transformers' own, and whole runs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import cli, scenarios
from support.encoders import CONFIGS, encoder_run, encoder_tokenizer, rows_for, sentences, write_rows
from support.ranks import run_ranks

from shardwise.config.load import load_run
from shardwise.core.errors import UserError
from shardwise.data.rows import RowBatch, type_separator
from shardwise.foresight.prepare import prepare_run
from shardwise.nn.models.build import build_on_meta, find_blocks
from shardwise.nn.models.tasks import auto_class
from shardwise.objectives.classify import ClassifyObjective
from shardwise.objectives.masked import MaskedObjective
from shardwise.objectives.seq2seq import Seq2seqObjective
from shardwise.parallel.selfcheck import check_decoder

ALL = [
    ("t5", "seq2seq"), ("bart", "seq2seq"), ("bert", "masked"), ("bert", "classify"), ("roberta", "masked"),
    ("roberta", "classify"), ("distilbert", "masked"), ("distilbert", "classify"),
]  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


def first_batch(run: dict[str, Any]) -> tuple[Any, Any, RowBatch, int]:
    """Job, plain model, the first step as one micro-batch, and how many units it is said to have."""
    job = prepare_run(load_run(run))
    torch.manual_seed(0)
    model = auto_class(job.source.task).from_config(job.source.config).eval()
    step = job.loader().step(0, 8, 8, 0, 1)
    return job, model, step.micro_batches[0], step.supervised


@pytest.mark.parametrize(("name", "objective"), ALL)
def test_the_loss_is_transformers_own(shared: Path, name: str, objective: str) -> None:
    job, model, batch, units = first_batch(encoder_run(shared, name, objective))
    made = {"seq2seq": Seq2seqObjective, "masked": MaskedObjective}.get(objective)
    loss = (made() if made else ClassifyObjective(model))(model, batch)
    inputs = batch.inputs
    if name == "distilbert":
        inputs.pop("token_type_ids", None)
    plain = model(**inputs, labels=batch.labels)
    count = int((batch.labels != -100).sum())
    assert loss.total.item() / count == pytest.approx(plain.loss.item(), rel=1e-6)
    assert loss.units.tolist() == [count]
    assert units == count if job.layout.counted else batch.units.tolist() == [count]
    if objective != "seq2seq":
        right = (plain.logits.argmax(-1) == batch.labels)[batch.labels != -100].sum()
        assert loss.figures["accuracy"] == right
    found = [n for n, _ in find_blocks(build_on_meta(job.source))]
    assert len(found) == (4 if objective == "seq2seq" else 2), found


def test_both_stacks_are_divided_where_a_model_names_no_blocks() -> None:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    small = {k: v for k, v in CONFIGS["bart"].items() if k != "model_type"}
    for kind in ("marian", "pegasus", "blenderbot"):
        pad = {"pad_token_id": 1, "decoder_start_token_id": 1}
        model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(kind, **small, **pad))
        names = [n for n, _ in find_blocks(model)]
        assert sum(".encoder." in n for n in names) == sum(".decoder." in n for n in names) == 2, kind


def test_a_row_has_what_its_tokenizer_gives(shared: Path) -> None:
    texts = [(a, b) for a, b in zip(sentences()[:8], sentences()[8:16], strict=True)]
    rows = [{"sentence1": a[:90], "sentence2": b[:60], "label": i % 2} for i, (a, b) in enumerate(texts)]
    run = encoder_run(shared, "bert", "classify", data__train=write_rows(shared / "pairs.jsonl", rows))
    job, _, batch, _ = first_batch(run)
    assert (
        job.run.objective.labels == ("0", "1") and job.reasons["objective.labels"] == "the labels of the training rows"
    )
    assert job.source.config.id2label == {0: "0", 1: "1"} and job.source.config.num_labels == 2
    order = [int(s["index"][0]) for s in job.loader().sequences(0, 8)]
    pairs = [(rows[i]["sentence1"], rows[i]["sentence2"]) for i in order]
    given = job.tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")
    for key, value in given.items():
        assert torch.equal(getattr(batch, key), value), key
    assert batch.labels.tolist() == [i % 2 for i in order]
    assert type_separator(job.tokenizer) == job.tokenizer.sep_token_id


def test_scratch_configs_take_the_tokenizers_ids(shared: Path) -> None:
    t5, bart, roberta = (
        prepare_run(load_run(encoder_run(shared, name, objective))).source.config
        for name, objective in (("t5", "seq2seq"), ("bart", "seq2seq"), ("roberta", "masked"))
    )
    assert (t5.pad_token_id, t5.eos_token_id, t5.decoder_start_token_id) == (0, 1, 0)
    assert (bart.pad_token_id, bart.eos_token_id, bart.decoder_start_token_id) == (1, 2, 2)
    assert roberta.pad_token_id == 1


@pytest.mark.parametrize(("name", "objective"), [("t5", "seq2seq"), ("bert", "masked"), ("bert", "classify")])
def test_ranks_and_stages_are_equal(shared: Path, name: str, objective: str) -> None:
    one, two = (write_rows(shared / f"{objective}-{i}.jsonl", rows_for(objective, 48)[i::2]) for i in (0, 1))
    changes = {"data__train": [one, two], "data__eval": write_rows(shared / f"{objective}-held.jsonl",
               rows_for(objective, 64)[48:])}  # fmt: skip

    def run(ranks: int, zero: int) -> tuple[list[float], Any, list[dict[str, Any]]]:
        output = shared / f"{name}-{objective}-{ranks}-{zero}"
        values = encoder_run(shared, name, objective, output=str(output), parallel__zero=zero, **changes)
        losses, _, parameters = run_ranks(scenarios.train, ranks, values)[0]
        return losses, parameters, [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]

    losses, parameters, records = run(1, 2)
    for zero in (0, 3):
        others, moved, told = run(2, zero)
        assert max(abs(a - b) for a, b in zip(losses, others, strict=True)) < 1e-5
        assert max((parameters[k] - moved[k]).abs().max().item() for k in parameters) < 1e-4
        for a, b in zip(records, told, strict=True):
            if "losses" in a:
                assert a["losses"] == pytest.approx(b["losses"], abs=1e-5)
                assert a["supervised_by_source"] == b["supervised_by_source"]
            if objective != "seq2seq":
                assert a["accuracy"] == pytest.approx(b["accuracy"], abs=1e-6)
    assert losses[-1] < losses[0] and records[-1]["kind"] == "eval" and 0 <= records[-1].get("accuracy", 0) <= 1


def test_a_masked_run_goes_on_exactly(shared: Path) -> None:
    whole = encoder_run(shared, "bert", "masked", output=str(shared / "whole"), train__steps=6, checkpoint__every=3)
    whole["checkpoint"]["keep"] = 5
    losses, _, parameters = run_ranks(scenarios.train, 1, whole)[0]
    (first, *_) = sorted((shared / "whole/checkpoints").iterdir())
    again = whole | {"output": str(shared / "again"), "resume": str(first)}
    rest, _, moved = run_ranks(scenarios.train, 1, again)[0]
    assert rest == losses[3:], "8 epochs' worth of masks, none of them stored"
    assert all(torch.equal(parameters[k], moved[k]) for k in parameters)


@pytest.mark.parametrize(("name", "objective"), [("t5", "seq2seq"), ("bart", "seq2seq"), ("roberta", "masked")])
def test_recomputing_changes_nothing(shared: Path, name: str, objective: str) -> None:
    plain, again = (
        encoder_run(shared, name, objective, output=str(shared / f"{name}-{how}"), recompute=how, train__steps=2)
        for how in ("none", "full")
    )
    losses, norms, _ = run_ranks(scenarios.train, 1, plain)[0]
    others, moved, _ = run_ranks(scenarios.train, 1, again)[0]
    assert others == pytest.approx(losses, abs=1e-6) and moved == pytest.approx(norms, rel=1e-4)


@pytest.fixture(scope="module")
def body(shared: Path) -> Path:
    """A pretrained body without any head."""
    from transformers import AutoConfig, BertModel

    folder = shared / "body"
    encoder_tokenizer(folder, "bert")
    torch.manual_seed(1)
    values = {k: v for k, v in CONFIGS["bert"].items() if k != "model_type"}
    BertModel(AutoConfig.for_model("bert", **values)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("objective", "new"), [("classify", "classifier.weight"), ("masked", "cls.predictions.bias")])
def test_a_new_head_on_a_pretrained_body(shared: Path, body: Path, objective: str, new: str) -> None:
    from safetensors.torch import load_file

    run = encoder_run(shared, "bert", objective, model=str(body), output=str(shared / f"head-{objective}"))
    said: list[str] = []
    prepare_run(load_run(run), said.append)
    assert any(new in line and "new: the model's files have no such head" in line for line in said)
    one = run_ranks(scenarios.loaded_parameters, 1, run)[0]
    two = run_ranks(scenarios.loaded_parameters, 2, run | {"parallel": {"zero": 3}})[1]
    assert all(torch.equal(one[k], two[k]) for k in one), "the same whatever the ranks"
    stored = load_file(body / "model.safetensors")
    for key, value in stored.items():
        if f"bert.{key}" in one:  # the pooler is of no use to masks
            assert torch.equal(one[f"bert.{key}"], value)
    heads = [k for k in one if not k.startswith("bert.")]
    assert new in heads and all(one[k].abs().max() <= 1 and one[k].isfinite().all() for k in heads)
    weights = [one[k] for k in heads if k.endswith("weight") and one[k].ndim == 2]
    assert all(0.01 < w.std() < 0.04 for w in weights) and weights, "BERT's own rule: a deviation of 0.02"


def test_a_body_with_holes_is_refused(shared: Path, body: Path) -> None:
    from safetensors.torch import load_file, save_file

    holed = shared / "holed"
    encoder_tokenizer(holed, "bert")
    tensors = load_file(body / "model.safetensors")
    tensors.pop("encoder.layer.1.output.dense.weight")
    save_file(tensors, holed / "model.safetensors", metadata={"format": "pt"})
    (holed / "config.json").write_text((body / "config.json").read_text())
    with pytest.raises(UserError, match=r"lack .*encoder.layer.1.output.dense.weight"):
        prepare_run(load_run(encoder_run(shared, "bert", "classify", model=str(holed))))


def test_a_classifier_goes_on_with_its_own_classes(shared: Path) -> None:
    out = shared / "classifier"
    run = encoder_run(shared, "bert", "classify", output=str(out), train__steps=1)
    run_ranks(scenarios.train, 1, run)
    config = json.loads((out / "model/config.json").read_text())
    assert config["id2label"] == {"0": "long", "1": "short"} and config["label2id"] == {"long": 0, "short": 1}
    rows = write_rows(shared / "numbers.jsonl", [{"text": t, "label": i % 2} for i, t in enumerate(sentences()[:20])])
    job = prepare_run(load_run(run | {"model": str(out / "model"), "objective": "auto", "data": {
        "train": rows, "sequence_length": 64, "over_length": "truncate"}, "output": str(shared / "next")}))  # fmt: skip
    assert job.run.objective.type == "classify" and job.run.objective.labels == ("long", "short")
    assert job.reasons["objective.labels"] == "the model's own classes"
    other = write_rows(shared / "three.jsonl", [{"text": "a", "label": x} for x in "abc"])
    with pytest.raises(UserError, match="has a head for the classes long, short"):
        prepare_run(load_run(run | {"model": str(out / "model"), "data": {"train": other, "sequence_length": 64}}))
    from shardwise.export.inference import load_for_inference

    for name in (out, out / "checkpoints"):
        with pytest.raises(UserError, match=r"a model that classifies .* cannot be talked to"):
            load_for_inference(str(name))


MISTAKES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "split pairs": ("t5", "seq2seq", {"data__over_length": "split"}, "rows cannot be split"),
    "positions": ("bert", "masked", {"data__sequence_length": 131}, "the model has 130 positions"),
    "roberta's positions": ("roberta", "masked", {"data__sequence_length": 129}, "the model has 128 positions"),
    "another model": ("bert", "seq2seq", {}, "is not an encoder–decoder model"),
    "no labels": ("bert", "classify", {"data__train": "masked"}, "no format fits the rows"),
    "no pairs": ("t5", "seq2seq", {"data__train": "masked"}, "text rows have no source and target"),
    "one class": ("bert", "classify", {"objective": {"type": "classify", "labels": ["a"]}}, "one class cannot be told"),
    "unknown class": ("bert", "classify", {"objective": {"type": "classify", "labels": ["a", "b"]}},
                      "is none of the classes"),
    "no mask": ("bert", "masked", {"model__tokenizer": "unigram"}, "no mask token"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told(shared: Path, mistake: str) -> None:
    name, objective, changes, problem = MISTAKES[mistake]
    changes = dict(changes)
    if "data__train" in changes:
        changes["data__train"] = write_rows(shared / "texts.jsonl", rows_for("masked"))
    if "model__tokenizer" in changes:
        changes["model__tokenizer"] = encoder_tokenizer(shared / "tokenizer-unigram", "t5")
    with pytest.raises(UserError, match=problem):
        prepare_run(load_run(encoder_run(shared, name, objective, **changes)))


class _Unsharded:
    """A model as check_decoder sees it."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()

    @contextlib.contextmanager
    def evaluation(self) -> Any:
        with torch.no_grad():
            yield


def test_a_decoder_that_looks_ahead_is_refused(shared: Path) -> None:
    _, model, _, _ = first_batch(encoder_run(shared, "bart", "seq2seq"))
    check_decoder(_Unsharded(model), 400, "bart", torch.device("cpu"))  # type: ignore[arg-type]
    decoder = model.model.decoder
    whole, encode = decoder.forward, model.model.encoder.forward

    def ahead(input_ids: torch.Tensor, **more: Any) -> Any:
        return whole(input_ids=input_ids.flip(1), **more)

    decoder.forward = ahead
    with pytest.raises(UserError, match="depend on later tokens of the target"):
        check_decoder(_Unsharded(model), 400, "bart", torch.device("cpu"))  # type: ignore[arg-type]
    decoder.forward = whole
    model.model.encoder.forward = lambda input_ids=None, **more: encode(input_ids=input_ids * 0, **more)
    with pytest.raises(UserError, match="does not depend on the source"):
        check_decoder(_Unsharded(model), 400, "bart", torch.device("cpu"))  # type: ignore[arg-type]


# The first of each kind; the others are slow tests.
COMMANDS = [
    pytest.param(*p, marks=() if p[0] in ("t5", "bert") else pytest.mark.slow)
    for p in [p for p in ALL if p[0] in ("t5", "bart")] + [ALL[3], ALL[4], ALL[6]]
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "objective"), COMMANDS)
def test_the_command_trains_it(shared: Path, name: str, objective: str) -> None:
    out = shared / f"command-{name}"
    run = encoder_run(shared, name, objective, output=str(out), data__eval=0.1)
    code, said, err = cli.train(cli.write_run(out.with_name(f"{out.name}-run"), run))
    assert code == 0, err
    assert "done: 4 steps" in said and "talk to it" not in said and "UserWarning" not in err
    losses = cli.losses(out)
    assert len(losses) == 4 and all(np.isfinite(list(losses.values())))
    model = auto_class(objective).from_pretrained(out / "model")  # type: ignore[arg-type]
    assert sum(p.numel() for p in model.parameters()) > 0
    if objective == "seq2seq":
        written = model.generate(torch.tensor([[5, 6, 7, 1]]), max_new_tokens=4)
        assert written[0, 0] == model.generation_config.decoder_start_token_id


def test_the_data_command_shows_rows(shared: Path) -> None:
    file = cli.write_run(shared / "show", encoder_run(shared, "t5", "seq2seq"))
    code, said, err = cli.command("data", file, "--rows", "1")
    assert code == 0, err
    assert "source " in said and "pair: the rows have source, target" in said and "packing: true" not in said
    file = cli.write_run(shared / "show", encoder_run(shared, "bert", "classify"))
    code, said, err = cli.command("data", file, "--rows", "1")
    assert code == 0 and ("class short" in said or "class long" in said), err
    assert "label: the rows have text, label" in said and "packing: true" not in said
