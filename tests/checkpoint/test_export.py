"""The Hugging Face folder: the trained model to the last bit, whole or not at all, in bounded memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import cli, scenarios
from support.ranks import run_ranks
from support.tiny import CHATML, GPT2, LLAMA, TIED, saved_model, tiny_run, tokenizer_folder

from shardwise.checkpoint.hf import ExportOptions, export_checkpoint, find_checkpoint
from shardwise.core.errors import UserError
from shardwise.export.inference import load_for_inference

CONFIGS = {"llama": LLAMA, "llama-tied": TIED, "gpt2": GPT2 | {"tie_word_embeddings": False}, "gpt2-tied": GPT2}
CLASSES = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}
IDS = torch.arange(2 * 64).view(2, 64) * 7 % 515


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("export")
    tokenizer_folder(tmp / "tokenizer")
    return tmp


def trained(folder: Path, name: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """A short run of two ranks at stage 3: its output folder, and its parameters as the ranks held them."""
    output, cache = folder / name, folder / f"{name}.pt"
    if not cache.exists():
        model = {"config": CONFIGS[name], "tokenizer": str(folder / "tokenizer")}
        run = tiny_run(folder, model, train__steps=2, train__micro_batch_size=3, parallel__zero=3, export__dtype="fp32",
                       output=str(output))  # fmt: skip
        torch.save(run_ranks(scenarios.train, 2, run)[0][2], cache)
    return output, torch.load(cache)


@pytest.fixture
def output(folder: Path) -> Path:
    return trained(folder, "llama")[0]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model.eval()(input_ids=IDS).logits)


def files_in(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_folder_is_the_trained_model(folder: Path, name: str) -> None:
    """Logits of the exported folder, of the checkpoint, and of the ranks' own parameters: no difference at all."""
    from transformers import AutoConfig, AutoModelForCausalLM

    output, parameters = trained(folder, name)
    values = dict(CONFIGS[name])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    fresh = logits(model)
    missing = model.load_state_dict(parameters, strict=False).missing_keys
    assert missing == (["lm_head.weight"] if "tied" in name else [])
    expected = logits(model)
    assert not torch.equal(expected, fresh)
    exported, report = AutoModelForCausalLM.from_pretrained(output / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and exported.dtype == torch.float32
    assert (logits(exported) - expected).abs().max() == 0
    assert (logits(load_for_inference(str(find_checkpoint(output)))[0]) - expected).abs().max() == 0
    tied = exported.get_input_embeddings().weight is exported.get_output_embeddings().weight
    assert tied == ("tied" in name)
    assert len(load_file(output / "model/model.safetensors")) == len(parameters), "a tied tensor is written once"


@pytest.mark.parametrize("name", ["llama", "gpt2-tied"])
def test_what_comes_along(folder: Path, name: str) -> None:
    """Tokenizer, chat template, generation settings, the run; and a config that says what the model is."""
    from transformers import AutoTokenizer, GenerationConfig

    model = trained(folder, name)[0] / "model"
    config = json.loads((model / "config.json").read_text())
    assert config["use_cache"] is True and config["dtype"] == "float32" and "torch_dtype" not in config
    assert config["architectures"] == [CLASSES[name.partition("-")[0]]]
    ours, theirs = AutoTokenizer.from_pretrained(model), AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert ours.chat_template == CHATML and ours.eos_token == "<|im_end|>"
    text = "What does ZeRO stage 3 shard? <|im_end|>"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    generation = GenerationConfig.from_pretrained(model)
    assert generation.use_cache is True
    for kind in ("bos", "eos", "pad"):
        assert getattr(generation, f"{kind}_token_id") == getattr(theirs, f"{kind}_token_id"), (
            "not the config's default"
        )
    assert config["eos_token_id"] == theirs.eos_token_id
    assert json.loads((model / "shardwise_run.json").read_text())["train"]["steps"] == 2


def test_generation_settings_of_the_original_stay(folder: Path) -> None:
    model = folder / "original"
    saved_model(model, LLAMA)
    settings = {"eos_token_id": [0, 2], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (model / "generation_config.json").write_text(json.dumps(settings))
    run = tiny_run(folder, str(model), train__steps=1, train__micro_batch_size=6, output=str(folder / "original-out"))
    run_ranks(scenarios.train, 1, run)
    assert json.loads((folder / "original-out/model/generation_config.json").read_text()) == settings


def test_many_files_and_an_index(output: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    limit = 64 << 10
    target = export_checkpoint(
        find_checkpoint(output), tmp_path / "model", ExportOptions(dtype="fp32", shard_size=limit)
    )
    files = sorted(target.glob("*.safetensors"))
    assert [f.name for f in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    index = json.loads((target / "model.safetensors.index.json").read_text())
    found = {name: (file.name, tensor) for file in files for name, tensor in load_file(file).items()}
    assert index["weight_map"] == {name: file for name, (file, _) in found.items()} and len(files) > 5
    whole = load_file(output / "model/model.safetensors")
    assert found.keys() == whole.keys() and all(torch.equal(found[name][1], whole[name]) for name in whole)
    sizes = {f.name: [t.numel() * 4 for t in load_file(f).values()] for f in files}
    assert all(sum(size) <= limit or len(size) == 1 for size in sizes.values()), "only a larger tensor stands alone"
    assert index["metadata"]["total_size"] == sum(sum(size) for size in sizes.values())
    pair = (AutoModelForCausalLM.from_pretrained(place) for place in (target, output / "model"))
    assert torch.equal(*map(logits, pair))


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_half_precision_is_rounded_once(output: Path, tmp_path: Path, kind: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    target = export_checkpoint(find_checkpoint(output), tmp_path / "model", ExportOptions(dtype=kind))
    half, whole = load_file(target / "model.safetensors"), load_file(output / "model/model.safetensors")
    assert half.keys() == whole.keys() and all(torch.equal(half[name], whole[name].to(dtype)) for name in whole)
    assert json.loads((target / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_a_target_in_use(output: Path, tmp_path: Path) -> None:
    checkpoint, target = find_checkpoint(output), tmp_path / "model"
    target.mkdir()
    export_checkpoint(checkpoint, target, ExportOptions(dtype="fp32"))
    with pytest.raises(UserError, match=r"exists and is not empty(.|\n)*--overwrite"):
        export_checkpoint(checkpoint, target, ExportOptions(dtype="bf16"))
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32", "untouched"
    (target / "stale.txt").write_text("from an earlier export")
    export_checkpoint(checkpoint, target, ExportOptions(dtype="bf16", overwrite=True))
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    assert not (target / "stale.txt").exists() and files_in(tmp_path) == {"model"} | {
        f"model/{name}" for name in files_in(target)
    }


@pytest.mark.parametrize("place", ["papers", "file", "run"])
def test_overwriting_deletes_no_more_than_a_model(output: Path, tmp_path: Path, place: str) -> None:
    """Not a folder of something else, not a file, not the run that the checkpoint belongs to."""
    run, papers, file = tmp_path / "run", tmp_path / "papers", tmp_path / "file"
    shutil.copytree(output / "checkpoints", run / "checkpoints")
    (run / "config.json").write_text("{}")
    papers.mkdir()
    (papers / "thesis.txt").write_text("years of work")
    file.write_text("a file")
    before = files_in(tmp_path)
    with pytest.raises(UserError, match="something other than a model"):
        export_checkpoint(find_checkpoint(run), tmp_path / place, ExportOptions(overwrite=True))
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), RuntimeError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("there", [False, True], ids=["new", "overwrite"])
def test_a_failure_half_way_leaves_nothing(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, there: bool
) -> None:
    """Neither a target nor pieces of one; what was there stays."""
    import safetensors.torch as real

    checkpoint, target, written = find_checkpoint(output), tmp_path / "model", []
    if there:
        export_checkpoint(checkpoint, target, ExportOptions(dtype="fp32"))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def save_file(tensors: Any, file: Path, **more: Any) -> None:
        if len(written) == 2:
            raise failure
        written.append(file)
        write(tensors, file, **more)

    write = real.save_file
    monkeypatch.setattr(real, "save_file", save_file)
    expected = UserError if isinstance(failure, OSError) else type(failure)
    with pytest.raises(expected, match="No space left on device" if expected is UserError else None):
        export_checkpoint(checkpoint, target, ExportOptions(dtype="fp32", shard_size=64 << 10, overwrite=there))
    assert len(written) == 2 and target.exists() == there
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Stacks of experts taken apart and tensors copied, in files of 8 MiB: the process grows by a few tensors."""
    places = str(tmp_path / "checkpoints"), str(tmp_path / "source")
    trained, copied = run_ranks(scenarios.save_plain, 1, *places, 24)[0]
    checkpoint, target = tmp_path / "checkpoints/step-00000001", tmp_path / "model"
    grown = run_ranks(scenarios.export_and_watch, 1, str(checkpoint), str(target), 8 << 20)[0]
    print(f"\nexporting {trained + copied >> 20} MiB took {grown >> 20} MiB at the peak")
    files = list(target.glob("*.safetensors"))
    assert sum(f.stat().st_size for f in files) > trained + copied > 200 << 20
    assert all(f.stat().st_size < (8 << 20) + (1 << 16) for f in files)
    assert grown < 40 << 20


def test_a_damaged_checkpoint_is_refused(output: Path, tmp_path: Path) -> None:
    """Through the command: named, nothing written; then whole again it is exported as asked."""
    checkpoint = Path(shutil.copytree(find_checkpoint(output), tmp_path / "checkpoints/step-00000002"))
    file, target = checkpoint / "state/__1_0.distcp", tmp_path / "model"
    whole = file.read_bytes()
    file.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    code, out, err = cli.command("export", tmp_path, target)
    assert code == 2 and f"{file} is damaged" in err and "Traceback" not in out + err
    assert not target.exists() and not list(tmp_path.glob(".*"))
    file.write_bytes(whole)
    code, out, err = cli.command("export", tmp_path, target, "--dtype", "bf16", "--shard-size", "100KiB")
    assert code == 0 and f"the model lies in {target}" in out, err
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    assert len(list(target.glob("model-*.safetensors"))) > 1


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        find_checkpoint(tmp_path / "nothing")
    with pytest.raises(UserError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
