"""A fine-tuned model comes back with everything that it came with: every tensor, every file, its own config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import cli, scenarios
from support.ranks import run_ranks
from support.tiny import LLAMA, QWEN3_MOE, TIED, saved_model, tiny_run
from transformers import AutoModelForCausalLM

from shardwise.checkpoint.hf import ExportOptions, find_checkpoint
from shardwise.core.errors import UserError
from shardwise.export.command import export_folder
from shardwise.nn.models.origin import RECORD
from shardwise.nn.models.stored import read_stored, stored_tensors

EXTRA = {
    "mtp.layers.0.proj.weight": torch.randn(48, 96).bfloat16(),
    "mtp.norm.weight": torch.randn(48),
    "model.layers.3.self_attn.q_proj.weight": torch.randn(48, 48).bfloat16(),
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.arange(6.0),
    "mtp.steps": torch.tensor([3, 5]),
}
GENERATION = {"temperature": 0.6, "do_sample": True, "eos_token_id": [0, 2]}


def make_source(folder: Path, config: dict[str, Any], wide: str | None = None, shards: int = 1) -> Path:
    """A folder in bf16 (`wide` in fp32) with tensors and files that training has no use for."""
    saved_model(folder, config)
    tensors = load_file(folder / "model.safetensors")
    half = {name: tensor.to(torch.float32 if name == wide else torch.bfloat16) for name, tensor in tensors.items()}
    everything = half | EXTRA
    (folder / "model.safetensors").unlink()
    names = list(everything)
    files = [f"model-{n:05d}-of-{shards:05d}.safetensors" for n in range(1, shards + 1)]
    if shards == 1:
        files = ["model.safetensors"]
    for number, file in enumerate(files):
        part = {name: everything[name].contiguous() for name in names[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
    if shards > 1:
        index = {"metadata": {}, "weight_map": {name: files[i % shards] for i, name in enumerate(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    raw = json.loads((folder / "config.json").read_text())
    raw = {k: v for k, v in raw.items() if k not in ("dtype", "use_cache")} | {
        "torch_dtype": "bfloat16",
        "note": "kept",
    }
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    for name in ("LICENSE", "modeling_own.py", "preprocessor_config.json", "tokenizer.model", "model.onnx"):
        (folder / name).write_text(name)
    (folder / "original").mkdir()
    return folder


def train(tmp: Path, source: Path, name: str, **changes: Any) -> Path:
    """One step at a rate that changes nothing: what is exported should be what came in."""
    changes = {"train__learning_rate": 1e-30, "train__weight_decay": 0.0} | changes
    run = tiny_run(tmp, str(source), train__steps=1, train__micro_batch_size=6, output=str(tmp / name), **changes)
    run_ranks(scenarios.train, 1, run)
    return tmp / name


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: read_stored(name, one) for name, one in stored_tensors(folder).items()}


def differing(one: Path, other: Path) -> set[str]:
    """Names that are not in both, or not the same tensor of the same type."""
    a, b = tensors_in(one), tensors_in(other)
    return set(a) ^ set(b) | {k for k in a.keys() & b.keys() if a[k].dtype != b[k].dtype or not torch.equal(a[k], b[k])}


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("origin")


@pytest.fixture(scope="module")
def source(tmp: Path) -> Path:
    return make_source(tmp / "source", LLAMA, wide="model.norm.weight", shards=3)


@pytest.fixture(scope="module")
def output(tmp: Path, source: Path) -> Path:
    return train(tmp, source, "full")


def test_untrained_it_is_the_source(output: Path, source: Path) -> None:
    """Every tensor to the bit and in its own type, from files in several pieces; config and files too."""
    model = output / "model"
    assert differing(source, model) == set() and EXTRA.keys() <= tensors_in(model).keys()
    assert json.loads((model / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert json.loads((model / "generation_config.json").read_text()) == GENERATION
    for name in ("LICENSE", "modeling_own.py", "preprocessor_config.json", "tokenizer.model"):
        assert (model / name).read_text() == name
    assert not (model / RECORD).exists() and not (model / "source").exists() and not (model / "model.onnx").exists()
    result = json.loads((output / "result.json").read_text())
    assert "35 of the source's 35 tensors are there" in result["check"]
    assert any("5 tensors" in note and "copied as they are" in note for note in result["notes"])
    assert any("not copied from the source's folder: model.onnx, original/" in note for note in result["notes"])
    _, report = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not report["missing_keys"]


def test_in_many_files_and_another_type(output: Path, source: Path, tmp_path: Path) -> None:
    limit = 32 << 10
    done = export_folder(find_checkpoint(output), tmp_path / "model", ExportOptions(dtype="fp16", shard_size=limit))
    got, wanted = tensors_in(done.path), tensors_in(source)
    index = json.loads((done.path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == got.keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in got.values())
    for file in done.path.glob("*.safetensors"):
        sizes = [tensor.nbytes for tensor in load_file(file).values()]
        assert sum(sizes) <= limit or len(sizes) == 1
    assert all(torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype for name, tensor in EXTRA.items())
    assert got["lm_head.weight"].dtype == torch.float16 and got["model.norm.weight"].dtype == torch.float32
    assert json.loads((done.path / "config.json").read_text())["torch_dtype"] == "float16"


@pytest.mark.parametrize("name, config", [("moe", QWEN3_MOE | {"output_router_logits": True}), ("tied", TIED)])
def test_names_that_transformers_does_not_use(tmp: Path, name: str, config: dict[str, Any]) -> None:
    """Experts one by one, and a head that is written out though it is tied."""
    folder = make_source(tmp / f"{name}-source", config)
    if name == "tied":
        tensors = load_file(folder / "model.safetensors")
        head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        save_file(tensors | head, folder / "model.safetensors", metadata={"format": "pt"})
    model = train(tmp, folder, name) / "model"
    assert differing(folder, model) == set()
    assert json.loads((model / "config.json").read_text()) == json.loads((folder / "config.json").read_text())


def test_a_tied_head_is_trained_under_both_names(tmp: Path) -> None:
    folder = make_source(tmp / "tied-again", TIED)
    tensors = load_file(folder / "model.safetensors")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | head, folder / "model.safetensors", metadata={"format": "pt"})
    got = tensors_in(train(tmp, folder, "tied-trained", train__learning_rate=1e-2) / "model")
    assert torch.equal(got["lm_head.weight"], got["model.embed_tokens.weight"])
    assert not torch.equal(got["lm_head.weight"], head["lm_head.weight"])


def test_an_adapter_alone_and_merged(tmp: Path, source: Path) -> None:
    output = train(tmp, source, "lora", method="lora", train__learning_rate=1e-2, export__merged=True)
    assert differing(source, output / "merged") == {
        name for name in tensors_in(source) if "_proj" in name and name not in EXTRA
    }
    assert not {"LICENSE", RECORD, "source", "modeling_own.py"} & {p.name for p in (output / "model").iterdir()}
    done = export_folder(find_checkpoint(output), tmp / "adapter")
    assert done.checked is not None and "PEFT reads it: logits differ by 0.00%" in done.checked


def test_frozen_parts_come_from_the_source(tmp: Path, source: Path) -> None:
    output = train(tmp, source, "frozen", freeze=["model.layers.0.*"], train__learning_rate=1e-2)
    changed = differing(source, output / "model")
    assert changed and not any(name.startswith("model.layers.0.") or name in EXTRA for name in changed)


def gone(source: Path) -> None:
    shutil.rmtree(source)


def altered(source: Path) -> None:
    file = source / "model-00001-of-00003.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name in EXTRA)
    tensors[name] = tensors[name] + 1
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("damage", [gone, altered])
def test_without_the_source(
    tmp: Path, output: Path, source: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """As on another machine: what would be lost is named and counted; exported only when that is asked for."""
    run = Path(shutil.copytree(output, tmp_path / "run"))
    copy = Path(shutil.copytree(source, tmp_path / "source"))
    checkpoint = find_checkpoint(run)
    for file in (checkpoint / "model" / RECORD, checkpoint / "run.json"):
        file.write_text(file.read_text().replace(str(source), str(copy)))
    (checkpoint / "manifest.json").unlink()
    assert differing(source, export_folder(checkpoint, tmp_path / "a", ExportOptions(verified=True)).path) == set()
    damage(copy)
    with pytest.raises(UserError, match=r"5 tensors \(.*and 2 more\)(.|\n)*--allow-missing-tensors"):
        export_folder(checkpoint, tmp_path / "b", ExportOptions(verified=True))
    assert not (tmp_path / "b").exists()
    done = export_folder(checkpoint, tmp_path / "b", ExportOptions(verified=True, allow_missing=True))
    assert differing(source, done.path) == set(EXTRA) and "30 of the source's 35 tensors" in str(done.checked)
    assert any("left out: 5 tensors" in note for note in done.notes) and "left out: 5 tensors" in done.card


def test_a_checkpoint_without_a_record(output: Path, source: Path, tmp_path: Path) -> None:
    """Of an earlier version: the source is looked at again, where it is there."""
    checkpoint = find_checkpoint(Path(shutil.copytree(output, tmp_path / "run")))
    (checkpoint / "model" / RECORD).unlink()
    (checkpoint / "manifest.json").unlink()
    assert differing(source, export_folder(checkpoint, tmp_path / "a", ExportOptions(verified=True)).path) == set()
    run = checkpoint / "run.json"
    run.write_text(run.read_text().replace(str(source), str(tmp_path / "nowhere")))
    done = export_folder(checkpoint, tmp_path / "b", ExportOptions(verified=True))
    assert any("is not known" in note for note in done.notes)


def test_the_command(output: Path, source: Path, tmp_path: Path) -> None:
    code, out, err = cli.command("export", output, tmp_path / "model", "--shard-size", "50KiB")
    assert code == 0 and "35 of the source's 35 tensors are there" in out and "copied as they are" in out, err
    assert differing(source, tmp_path / "model") == set()
    for words, option in (("is for GGUF files", "--allow-unreadable"),):
        code, _, err = cli.command("export", output, tmp_path / "other", option)
        assert code == 2 and words in err


def test_code_is_run_only_when_asked_for(output: Path, tmp_path: Path) -> None:
    """A checkpoint cannot say by itself that what it brings is run."""
    checkpoint = find_checkpoint(Path(shutil.copytree(output, tmp_path / "run")))
    run = json.loads((checkpoint / "run.json").read_text())
    run["model"]["trust_remote_code"] = True
    (checkpoint / "run.json").write_text(json.dumps(run))
    with pytest.raises(UserError, match="--trust-remote-code"):
        export_folder(checkpoint, tmp_path / "a", ExportOptions(verified=True))
    assert not (tmp_path / "a").exists()
