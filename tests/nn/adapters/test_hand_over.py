"""From a trained adapter to a model: merged, worn, resumed; and from a partly frozen one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from support import adapters, cli
from support.ranks import run_ranks
from support.tiny import GPT2, LLAMA, TIED, saved_model, tiny_run

from shardwise.checkpoint.hf import ExportOptions, export_checkpoint, find_checkpoint
from shardwise.core.errors import UserError
from shardwise.export.check import Mismatch, compare, load_folder
from shardwise.export.command import export_folder
from shardwise.export.inference import from_checkpoint, load_for_inference
from shardwise.nn.adapters.library import load_adapters, use_adapter

CONFIGS = {"llama": LLAMA, "tied": TIED, "gpt2": GPT2}
BOUND = 1e-5
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"method": {"type": "lora", "rank": 4}, "export__merged": True}),
    "dora": ("gpt2", {"method": {"type": "lora", "rank": 4, "dora": True}}),
    "also": ("tied", {"method": {"type": "lora", "rank": 4, "modules_to_save": ["lm_head"]}}),
    "ia3": ("gpt2", {"method": "ia3"}),
    "freeze": ("llama", {"freeze": ["embed_tokens", "*.0.*"]}),
}


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hand-over")
    for name, config in CONFIGS.items():
        saved_model(folder / name, config)
    return folder


def a_run(tmp: Path, case: str, name: str, **changes: Any) -> dict[str, Any]:
    model, settings = CASES[case]
    return tiny_run(tmp, str(tmp / model), output=str(tmp / name),
                    **({"train__steps": 2, "train__learning_rate": 0.02, "train__micro_batch_size": 6}
                       | settings | changes))  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp: Path) -> dict[str, Path]:
    runs = {case: a_run(tmp, case, case) for case in CASES}
    run_ranks(adapters.train_each, 1, runs)
    return {case: Path(run["output"]) for case, run in runs.items()}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=adapters.IDS).logits


def pretrained(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model.eval()


@pytest.mark.parametrize("case", [c for c in CASES if c != "freeze"])
def test_merged_is_the_same_model(tmp: Path, trained: dict[str, Path], case: str) -> None:
    """Base and adapter as one folder, in files of a few KB: the logits of the worn adapter."""
    target = export_checkpoint(
        find_checkpoint(trained[case]), tmp / f"{case}-merged", ExportOptions(shard_size=50_000, merged=True)
    )
    assert len(list(target.glob("model-*.safetensors"))) > 2 and not (target / "adapter_config.json").exists()
    worn = logits(load_for_inference(str(trained[case]))[0])
    assert (logits(pretrained(target)) - worn).abs().max() <= BOUND
    assert (logits(pretrained(tmp / CASES[case][0])) - worn).abs().max() > 1e-3
    again = logits(load_for_inference(str(find_checkpoint(trained[case])))[0])
    torch.testing.assert_close(again, worn, rtol=1e-5, atol=1e-6)  # DoRA's norms round as memory happens to be aligned
    checked = compare(from_checkpoint(find_checkpoint(trained[case])), load_folder(target), [adapters.IDS[:1]], "fp32")
    assert checked.problem is None, "layer by layer, what the merged weight is"


def test_a_run_can_leave_the_merged_model_besides(tmp: Path, trained: dict[str, Path]) -> None:
    assert (
        logits(pretrained(trained["lora"] / "merged")) - logits(load_for_inference(str(trained["lora"]))[0])
    ).abs().max() <= BOUND
    assert not (trained["dora"] / "merged").exists()
    assert {p.name for p in (trained["lora"] / "model").iterdir()} >= {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"
    }  # fmt: skip
    assert not (trained["lora"] / "model/config.json").exists()


@pytest.mark.parametrize("case", ["lora", "dora", "also", "ia3"])
def test_an_adapters_folder_is_held_against_the_checkpoint(tmp: Path, trained: dict[str, Path], case: str) -> None:
    """Through PEFT's names and back; a file that says something else does not pass."""
    told = json.loads((trained[case] / "result.json").read_text())["check"]
    assert told.startswith("checked against the trained model (fp32, ")

    def spoil(tensors: dict[str, torch.Tensor], file: Path, **more: Any) -> None:
        name = next(n for n in tensors if n.endswith(("lora_B.weight", "ia3_l")))
        save_file(tensors | {name: tensors[name] + 0.01}, file, **more)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Mismatch, match=r"rejected"):
        patch.setattr(safetensors.torch, "save_file", spoil)
        export_folder(find_checkpoint(trained[case]), tmp / f"{case}-spoiled")


def test_a_partly_frozen_model_is_exported_whole(tmp: Path, trained: dict[str, Path]) -> None:
    """Frozen tensors are the base's own to the last bit, whatever type they were computed in; the others moved."""
    before, after = load_file(tmp / "llama/model.safetensors"), load_file(trained["freeze"] / "model/model.safetensors")
    assert set(before) == set(after)
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {name for name in before if "layers.0." in name or "embed_tokens" in name}
    whole = logits(pretrained(trained["freeze"] / "model"))
    assert torch.equal(logits(load_for_inference(str(find_checkpoint(trained["freeze"])))[0]), whole)


def test_several_adapters_on_one_base(tmp: Path, trained: dict[str, Path]) -> None:
    """Each is worn as if it were alone, in any order, and the base comes back as it was."""
    run_ranks(
        adapters.train, 1, a_run(tmp, "dora", "second", method={"type": "lora", "rank": 2, "target_modules": "c_attn"})
    )
    folders = {"first": trained["dora"] / "model", "second": tmp / "second/model", "third": trained["ia3"] / "model"}
    alone = {name: logits(load_for_inference(str(folder))[0]) for name, folder in folders.items()}
    model = pretrained(tmp / "gpt2")
    bare = logits(model)
    load_adapters(model, folders)
    for name in ("first", "second", None, "third", "first", None):
        use_adapter(model, name)
        assert torch.equal(logits(model), bare if name is None else alone[name])
    with pytest.raises(UserError, match="first, second, third"):
        use_adapter(model, "fourth")


def test_a_trained_head_is_worn_and_taken_off(tmp: Path, trained: dict[str, Path]) -> None:
    model = pretrained(tmp / "tied")
    bare = logits(model)
    load_adapters(model, {"a": trained["also"] / "model"})
    use_adapter(model, "a")
    assert torch.equal(logits(model), logits(load_for_inference(str(trained["also"]))[0]))
    use_adapter(model, None)
    assert torch.equal(logits(model), bare)


@pytest.mark.parametrize("case", ["lora", "freeze"])
def test_resumed_on_other_ranks_and_another_stage(tmp: Path, case: str) -> None:
    """One rank at stage 0, then two at stage 3: the losses of the run that was not moved."""
    changes = {"train__steps": 4, "checkpoint__every": 2, "checkpoint__keep": 5, "train__micro_batch_size": 3}
    whole, _ = run_ranks(adapters.train, 1, a_run(tmp, case, f"{case}-whole", parallel__zero=0, **changes))[0]
    half = str(tmp / f"{case}-whole/checkpoints/step-00000002")
    moved = a_run(tmp, case, f"{case}-moved", parallel__zero=3, ranks=2, resume=half, **changes)
    losses, _ = run_ranks(adapters.train, 2, moved)[0]
    assert losses == pytest.approx(whole[2:], abs=1e-6)


def test_a_checkpoint_of_another_method_is_refused(tmp: Path, trained: dict[str, Path]) -> None:
    from shardwise.config.load import load_run
    from shardwise.foresight.prepare import prepare_run

    for changes in ({"method": "full"}, {"method": {"type": "lora", "rank": 8}}, {"freeze": ["lora_A"]}):
        with pytest.raises(UserError, match="resume"):
            prepare_run(load_run(a_run(tmp, "lora", "lora", **({"export__merged": False} | changes))))


def test_the_command_line_merges(tmp: Path, trained: dict[str, Path]) -> None:
    code, _, err = cli.command("export", str(trained["lora"]), str(tmp / "by-command"), "--merged")
    assert code == 0, err
    assert (tmp / "by-command/model.safetensors").is_file()
    code, _, err = cli.command("export", str(trained["freeze"]), str(tmp / "no"), "--merged")
    assert code == 2 and "no adapter" in err
    plan = json.loads((trained["lora"] / "model/adapter_config.json").read_text())
    assert plan["r"] == 4 and plan["base_model_name_or_path"] == str(tmp / "llama")


@pytest.mark.parametrize("objective", ["classify", "masked"])
def test_a_new_head_is_trained_and_handed_over(tmp: Path, objective: str) -> None:
    """A body without head: what stands on it is trained whole, so that nothing random is left in what is exported."""
    from support.encoders import CONFIGS, encoder_run, encoder_tokenizer
    from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

    body = tmp / "body"
    if not body.exists():
        values = dict(CONFIGS["bert"])
        torch.manual_seed(0)
        AutoModel.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).save_pretrained(body)
        encoder_tokenizer(body, "bert")
    run = encoder_run(tmp, "bert", objective, model=str(body), output=str(tmp / objective), train__steps=2,
                      method={"type": "lora", "rank": 4})  # fmt: skip
    _, facts = run_ranks(adapters.train, 1, run)[0]
    head = "classifier.weight" if objective == "classify" else "cls.predictions.bias"
    assert head in facts["stored"] and "bert.encoder.layer.0.attention.self.query.lora_A" in facts["stored"]
    worn = load_for_inference(str(tmp / objective), talks=False)[0]
    target = export_checkpoint(
        find_checkpoint(tmp / objective), tmp / f"{objective}-merged", ExportOptions(merged=True)
    )
    kind = AutoModelForSequenceClassification if objective == "classify" else AutoModelForMaskedLM
    model, report = kind.from_pretrained(target, output_loading_info=True)
    assert not report["missing_keys"]
    ids = torch.arange(40).view(2, 20) + 5
    with torch.no_grad():
        assert (model.eval()(input_ids=ids).logits - worn(input_ids=ids).logits).abs().max() <= BOUND
