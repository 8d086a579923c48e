"""Distillation against a plain formula, top_k against all, stored answers against a teacher that is asked each time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import judged
from support.judged import Hand, as_reference, conversation, loss_of, start
from support.packed import tiny
from support.tiny import LLAMA, saved_model, tiny_run, tokenizer_folder

from shardwise.config.load import load_run
from shardwise.config.objectives import Distill
from shardwise.core.errors import UserError
from shardwise.data.distillation_batch import DistillationLayout
from shardwise.foresight.prepare import prepare_run
from shardwise.objectives.distill import DistillObjective, TeacherLogProbs, likeliest

pytestmark = pytest.mark.timeout(judged.PATIENCE)
WORDS = 515
DRAW = np.random.default_rng(1)
DOCUMENTS = [conversation(*DRAW.integers(2, 24, 2), DRAW) for _ in range(6)]
LARGER = LLAMA | {"hidden_size": 64, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """Pupil and teacher, in double precision: only the logits are rounded."""
    return tiny("llama").double(), tiny("qwen3", num_hidden_layers=3).double().requires_grad_(False)


def plain(pupil: Any, teacher: Any, settings: Distill) -> torch.Tensor:
    """Reference: one document after the other, one token after the other."""
    total, t = torch.zeros((), dtype=torch.float64), settings.temperature
    for marked in DOCUMENTS:
        ids = torch.from_numpy((marked & 0x7FFFFFFF).astype(np.int64))
        mine = pupil(input_ids=ids[None], use_cache=False).logits[0]
        theirs = teacher(input_ids=ids[None], use_cache=False).logits[0]
        for at in np.flatnonzero(marked >= 1 << 31):
            p, q = theirs[at - 1].softmax(-1), mine[at - 1].softmax(-1)
            plain_loss = -q[ids[at]].log()
            if settings.top_k is not None and settings.top_k < WORDS:
                kept = p.argsort(descending=True)[: settings.top_k]
                p, q = (torch.cat([x[kept], (1 - x[kept].sum())[None]]) for x in (p, q))
            p, q = (x ** (1 / t) / (x ** (1 / t)).sum() for x in (p, q))
            gap = t**2 * (p * (p / q).log()).sum()
            total = total + settings.weight * gap + (1 - settings.weight) * plain_loss
    return total


def gradients(model: Any, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def ours(models: tuple[Any, Any], settings: Distill, packing: bool = True) -> Any:
    pupil, teacher = models
    reader = Hand(DOCUMENTS, packing)
    rows = [[0, 1], [2], [3, 4, 5]] if packing else [[i] for i in range(6)]
    batch = DistillationLayout(0).collate(reader, reader.sequences(*rows), 0)
    asked = TeacherLogProbs(teacher, True, WORDS, as_reference(teacher))
    return loss_of(DistillObjective(pupil, True, settings, WORDS, asked), pupil, batch)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 2.5, "weight": 1.0}, {"top_k": 20, "temperature": 1.7}, {"top_k": WORDS, "weight": 0.8}],
    ids=["plain", "soft", "top-20", "top-all"],
)
def test_equals_the_formula(models: tuple[Any, Any], changes: dict[str, Any], packing: bool) -> None:
    settings = Distill(teacher="x", **changes)
    loss = ours(models, settings, packing)
    found = gradients(models[0], loss.total)
    expected = plain(*models, settings)
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-6)
    wanted = gradients(models[0], expected)
    assert (found - wanted).norm() / wanted.norm() < 1e-6
    count = sum(int((d >= 1 << 31).sum()) for d in DOCUMENTS)
    assert loss.units.tolist() == [count]
    mixed = settings.weight * loss.figures["loss_teacher"] + (1 - settings.weight) * loss.figures["loss_plain"]
    assert mixed.item() == pytest.approx(loss.total.item(), rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_all_but_one_token_are_as_good_as_all(models: tuple[Any, Any], temperature: float) -> None:
    """With k = V - 1 the bucket of the others holds one token: nothing is lumped together."""
    whole = ours(models, Distill(teacher="x", temperature=temperature))
    for k in (WORDS - 1, WORDS):
        some = ours(models, Distill(teacher="x", temperature=temperature, top_k=k))
        assert some.total.item() == pytest.approx(whole.total.item(), rel=1e-6)


def test_likeliest() -> None:
    log_probs = torch.tensor([[0.1, 0.6, 0.05, 0.25]]).log()
    tokens, told = likeliest(log_probs, 2)
    assert tokens.tolist() == [[1, 3]] and told.exp().tolist() == [pytest.approx([0.6, 0.25, 0.15])]


# Runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("distill")
    saved_model(tmp / "teacher", LARGER, seed=7)
    tokenizer_folder(tmp / "tokenizer")
    return tmp


def the_run(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    objective = {"type": "distill", "teacher": str(folder / "teacher"), "temperature": 2.0}
    objective |= {key: changes.pop(key) for key in ("top_k", "cache", "weight") if key in changes}
    changes = {"train__steps": 3, "train__batch_size": 4, "data__eval": "5%", "output": str(folder / name)} | changes
    return tiny_run(folder, objective=objective, **changes)


def test_runs(folder: Path) -> None:
    """1 rank = 2 ranks at stages 0 and 3; asked before = asked each time; the second time nobody is asked."""
    alone = {
        "all": the_run(folder, "all"),
        "top": the_run(folder, "top", top_k=16),
        "stored": the_run(folder, "stored", top_k=16, cache=True),
        "resumed": the_run(folder, "all", train__steps=4),
        "longer": the_run(folder, "longer", weight=1.0, train__steps=8),
    }
    again = {"again": the_run(folder, "again", top_k=16, cache=True)}
    found = start(judged.taught, 1, alone, again)[0]
    both = {f"all-{z}": the_run(folder, f"all-{z}", parallel__zero=z) for z in (0, 3)}
    unpacked = {"data__packing": False, "train__micro_batch_size": 2, "parallel__zero": 3}
    both |= {"flat": the_run(folder, "flat", top_k=16, **unpacked)}
    both |= {"flat-stored": the_run(folder, "flat-stored", top_k=16, cache=True, **unpacked)}
    found |= start(judged.all_of, 2, both)[0]
    for one, other in [
        ("all", "all-0"),
        ("all", "all-3"),
        ("top", "stored"),
        ("top", "again"),
        ("flat", "flat-stored"),
    ]:
        (records, final), (others, parameters) = found[one], found[other]
        close = 1e-6 if "all" not in one else 1e-5
        for key in ("loss", "loss_teacher", "loss_plain", "grad_norm"):
            assert [r[key] for r in others] == [pytest.approx(r[key], abs=close) for r in records], (other, key)
        assert max((parameters[n] - p).abs().max().item() for n, p in final.items()) < 1e-5
    longer = [r["loss_teacher"] for r in found["longer"][0]]
    assert longer[-1] < 0.9 * longer[0] and [r["loss"] for r in found["longer"][0]] == pytest.approx(longer)
    assert [r["loss"] for r in found["resumed"][0][:3]] == [r["loss"] for r in found["all"][0]]


def test_answers_are_stored_once_and_kept_apart(folder: Path) -> None:
    """The files' sizes are as the formula says; other data, k or teacher have other places."""
    job = prepare_run(load_run(the_run(folder, "stored", top_k=16, cache=True)))
    assert job.teacher is not None and job.teacher.answers is not None
    files = sorted(job.teacher.answers.root.rglob("*.npy"))
    stores = [s for one in job.data.train for s in (one.store, one.held_out)]
    learned = sum(int(s.table(0)["supervised"].sum()) for s in stores)
    assert sum(f.stat().st_size - 128 for f in files) == learned * (8 * 16 + 4)
    assert not list(job.teacher.answers.root.rglob(".*.npy*")), "nothing is left half-written"
    other = prepare_run(load_run(the_run(folder, "stored", top_k=8, cache=True)))
    assert other.teacher is not None and other.teacher.answers is not None
    assert other.teacher.answers.root != job.teacher.answers.root
    time.sleep(0.01)
    weights = folder / "teacher/model.safetensors"
    weights.write_bytes(weights.read_bytes())
    changed = prepare_run(load_run(the_run(folder, "stored", top_k=16, cache=True)))
    assert changed.teacher is not None and changed.teacher.answers is not None
    assert changed.teacher.answers.root != job.teacher.answers.root


def test_teachers_that_cannot_teach(folder: Path, tmp_path: Path) -> None:
    def refused(match: str, teacher: str, **changes: Any) -> None:
        run = the_run(folder, "refused", **changes)
        run["objective"]["teacher"] = teacher
        with pytest.raises(UserError) as caught:
            prepare_run(load_run(run))
        assert match in str(caught.value) and "objective" in caught.value.field, str(caught.value)

    refused("no folder here", "no-such-model")
    good = str(folder / "teacher")
    refused("both models know 515 tokens", good, top_k=516)
    refused("set top_k", good, cache=True)
    other = Path(saved_model(tmp_path / "other", LARGER))
    spelled = json.loads((other / "tokenizer.json").read_text())
    words = spelled["model"]["vocab"]
    a, b = [w for w in words if words[w] in (300, 301)]
    words[a], words[b] = words[b], words[a]
    (other / "tokenizer.json").write_text(json.dumps(spelled))
    refused("has another vocabulary", str(other))
    short = saved_model(tmp_path / "short", LARGER | {"max_position_embeddings": 64})
    refused("has 64 positions", short)
    (tmp_path / "short/tokenizer.json").unlink()
    refused("tokenizer", short)


def test_the_plan_tells_what_a_teacher_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from shardwise.train.describe import print_plan

    console = Console(width=400, record=True)
    print_plan(prepare_run(load_run(the_run(folder, "plan"))), console)
    print_plan(prepare_run(load_run(the_run(folder, "plan", top_k=16, cache=True))), console)
    print_plan(prepare_run(load_run(judged.judged_run(folder, "dpo", output=str(folder / "plan")))), console)
    text = console.export_text()
    assert "M parameters in fp32: " in text and "132 bytes per learned token" in text
    assert "a frozen copy of the model in fp32: " in text
