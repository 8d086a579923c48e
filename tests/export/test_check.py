"""Exports are compared with the trained model: the figures are told, what is wrong never takes the target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support import cli
from support.tiny import LLAMA, saved_model

from shardwise.checkpoint.hf import ExportOptions, find_checkpoint
from shardwise.export import check, command
from shardwise.export.check import Mismatch, compare, load_folder, sample_ids
from shardwise.export.command import export_folder, export_gguf
from shardwise.export.inference import from_checkpoint

IDS = [torch.arange(64).view(1, 64) * 7 % 515]


def test_a_finished_run_was_checked(output: Path) -> None:
    result = json.loads((output / "result.json").read_text())
    assert "checked against the trained model (fp32" in result["check"] and "at most 0," in result["check"]
    assert len(json.loads((output / "data.json").read_text())["samples"]) == 4, "real tokens for later exports"


def test_the_figures_are_the_differences(tmp_path: Path) -> None:
    """Against plain formulas on two models that differ."""
    one, other = (load_folder(Path(saved_model(tmp_path / str(seed), LLAMA, seed))) for seed in (0, 1))
    with torch.no_grad():
        a, b = one(input_ids=IDS[0]).logits, other(input_ids=IDS[0]).logits
    outcome = compare(one, other, IDS, "fp32")
    assert outcome.largest == pytest.approx(float((a - b).abs().max()))
    assert outcome.mean == pytest.approx(float((a - b).abs().mean()))
    assert outcome.relative == pytest.approx(float((a - b).pow(2).mean().sqrt() / a.std()), rel=1e-4)
    assert outcome.same_top == float((a.argmax(-1) == b.argmax(-1)).float().mean()) and outcome.tokens == 64
    assert outcome.problem is not None and compare(one, one, IDS, "fp32").problem is None


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
def test_a_folder_is_checked_within_its_types_bound(output: Path, tmp_path: Path, kind: str) -> None:
    done = export_folder(find_checkpoint(output), tmp_path / "model", ExportOptions(dtype=kind))
    assert done.checked is not None and f"({kind}, " in done.checked and (tmp_path / "model/README.md").is_file()
    outcome = compare(from_checkpoint(find_checkpoint(output)), load_folder(tmp_path / "model"), IDS, kind)
    assert outcome.problem is None and (outcome.largest == 0) == (kind == "fp32")


@pytest.mark.parametrize("damage", ["one number", "not a number", "swapped"])
def test_a_folder_that_is_not_the_model_is_set_aside(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """One wrong number among a hundred thousand is enough."""
    import safetensors.torch as real

    def save_file(tensors: dict[str, torch.Tensor], file: Path, **more: Any) -> None:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        weight = tensors["model.layers.0.mlp.up_proj.weight"]
        if damage == "swapped":
            tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.gate_proj.weight"].clone()
        else:
            weight[3, 5] = float("nan") if damage == "not a number" else weight[3, 5] + 0.01
        write(tensors, file, **more)

    write = real.save_file
    monkeypatch.setattr(real, "save_file", save_file)
    with pytest.raises(Mismatch, match=r"up_proj\.weight(.|\n)*model\.rejected"):
        export_folder(find_checkpoint(output), tmp_path / "model", ExportOptions(dtype="bf16"))
    assert [p.name for p in tmp_path.iterdir()] == ["model.rejected"]
    assert (tmp_path / "model.rejected/config.json").is_file()


def test_unchecked_where_told_or_too_large(output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = find_checkpoint(output)
    monkeypatch.setattr(command, "check_export", lambda *_: pytest.fail("was compared"))
    assert export_folder(checkpoint, tmp_path / "a", check=False).checked is None
    told = export_folder(checkpoint, tmp_path / "b", most=1000).checked
    assert told is not None and told.startswith("not checked: ")
    monkeypatch.setattr(check, "free_memory", lambda: 1 << 20)
    told = export_folder(checkpoint, tmp_path / "c").checked
    assert told is not None and "0.0 GiB are free" in told
    told = export_gguf(str(output), tmp_path / "d.gguf", "f16").checked
    assert told is not None and told.startswith("not checked: comparing takes")


def test_a_run_as_gguf(output: Path, tmp_path: Path) -> None:
    done = export_gguf(str(output), tmp_path / "m.gguf", "q8_0")
    assert done.checked is not None and "(q8_0, " in done.checked and "library_name: gguf" in done.card
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"], "nothing else is left"


def test_sequences_come_from_the_run_or_from_text(output: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    own = json.loads((output / "data.json").read_text())["samples"]
    assert [one[0].tolist() for one in sample_ids(tokenizer, 515, own)] == own
    assert all(len(one[0]) > 8 for one in sample_ids(tokenizer, 515)) and len(sample_ids(tokenizer, 515)) == 4


def test_the_command(output: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    code, out, err = cli.command("export", output, target, "--gguf", "q8_0")
    assert code == 0 and "logits differ by at most" in out and "the same tokens when transformers reads" in out, err
    assert "llama.cpp (by its rules): yes" in out and "transformers (gguf_file=): yes" in out
    code, out, err = cli.command("export", output, tmp_path / "folder", "--no-check")
    assert code == 0 and "not checked" in out and (tmp_path / "folder/README.md").is_file(), err


@pytest.mark.parametrize("options, words", [
    (("--gguf", "q3_k"), "use one of f32"), (("--gguf", "f16", "--dtype", "bf16"), "--dtype"),
    (("--private",), "has no effect without --push"), (("--push", "no repo!"), "owner/name"),
    ((), "add --gguf with a type"),
])  # fmt: skip
def test_mistakes(output: Path, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    code, _, err = cli.command("export", output, tmp_path / "x.gguf", *options)
    assert code == 2 and words in err and "Traceback" not in err and not list(tmp_path.iterdir())


def test_what_is_no_run_is_told_apart(output: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    for options in ((), ("--gguf", "f16")):
        target = tmp_path / ("x.gguf" if options else "x")
        code, _, err = cli.command("export", tmp_path / "adapter", target, *options)
        assert code == 2 and "is an adapter, not a run" in err and "the run that trained it" in err
    code, _, err = cli.command("export", output / "model", tmp_path / "x")
    assert code == 2 and "is a Hugging Face folder already" in err


def test_a_run_that_cannot_become_gguf_says_so_first(output: Path, tmp_path: Path) -> None:
    from shardwise.core.errors import UserError

    run = Path(shutil.copytree(output, tmp_path / "run"))
    file = find_checkpoint(run) / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "relu"}))
    with pytest.raises(UserError, match="hidden_act is 'relu'"):
        export_gguf(str(run), tmp_path / "m.gguf", "f16")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
