"""GGUF files: every family read back by transformers gives the model's logits; what cannot be said is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gguf_models import (
    MODELS,
    NOBODY,
    ONLY_LLAMA_CPP,
    ONLY_TRANSFORMERS,
    SIZES,
    VARIANTS,
    family_folder,
)
from support.tiny import tokenizer_folder
from transformers import AutoConfig

from shardwise.checkpoint.hf import ExportOptions
from shardwise.config.schema import Model
from shardwise.core.errors import UserError
from shardwise.export import gguf_compat, gguf_file
from shardwise.export.check import BOUNDS, Comparison, Mismatch, compare, load_folder
from shardwise.export.command import export_gguf
from shardwise.export.families import FAMILIES, WINDOWLESS, Family, family_of
from shardwise.export.gguf_compat import judge
from shardwise.export.gguf_file import KINDS, plan_gguf, write_gguf
from shardwise.nn.models.gguf import load_gguf
from shardwise.nn.models.gguf_rules import READS, meaning, open_gguf
from shardwise.nn.models.source import find_model
from shardwise.nn.models.tasks import auto_class, task_of

IDS = [torch.arange(2 * 48).view(2, 48) * 37 % 515]


def written(models: Path, name: str, kind: str) -> tuple[Any, Path]:
    """The model, and the file that is written of it."""
    folder = family_folder(models, name)
    source, file = find_model(Model(name=str(folder))), models / f"{name}.{kind}.gguf"
    write_gguf(plan_gguf(source, kind), file, name)
    return load_folder(folder), file


def round_trip(models: Path, name: str, kind: str) -> Comparison:
    """The file as llama.cpp understands it, beside the model."""
    reference, file = written(models, name, kind)
    made = auto_class(task_of(reference.config))
    return compare(reference, load_gguf(file, made, meaning(open_gguf(file)))[0], IDS, kind)


def test_every_row_of_the_table_is_executed() -> None:
    assert {config["model_type"] for config in MODELS.values()} == set(FAMILIES)
    assert {family.arch for family in FAMILIES.values()} == set(READS)


@pytest.mark.parametrize("name", [*MODELS, *VARIANTS])
def test_who_reads_a_family(models: Path, name: str) -> None:
    """In fp32, so that nothing but reading differs; transformers is given nothing but the file."""
    reference, file = written(models, name, "f32")
    window = getattr(reference.config, "sliding_window", None) or 48
    ids = [one[:, :window] for one in IDS] if reference.config.model_type in WINDOWLESS else IDS
    llama, plain = judge(reference, file, ids, "f32", None)
    assert llama.reads == (name not in ONLY_TRANSFORMERS | NOBODY), llama.line
    assert plain.reads == (name not in ONLY_LLAMA_CPP | NOBODY), plain.line


class FakeLlama:
    """What llama-cpp-python's class does for us, with logits from elsewhere."""

    def __init__(self, model: Any, off: float) -> None:
        self.model, self.off, self.scores = model, off, None

    def reset(self) -> None:
        self.scores = None

    def eval(self, ids: list[int]) -> None:
        with torch.no_grad():
            self.scores = (self.model(input_ids=torch.tensor([ids])).logits[0] * self.off).numpy()


@pytest.mark.parametrize("off, reads", [(1.0, True), (1.02, True), (0.5, False)])
def test_llama_cpp_itself_is_asked_where_it_is_there(
    models: Path, monkeypatch: pytest.MonkeyPatch, off: float, reads: bool
) -> None:
    reference, file = written(models, "llama-biased", "f32")
    package = SimpleNamespace(__version__="1.2.3", Llama=lambda *_, **__: FakeLlama(reference, off))
    monkeypatch.setattr(gguf_compat, "find_spec", lambda _: True)
    monkeypatch.setattr(gguf_compat, "import_module", lambda _: package)
    itself = judge(reference, file, IDS, "f32", None)[0]
    assert itself.reader == "llama.cpp (llama-cpp-python 1.2.3)" and itself.reads is reads, itself.line


def test_the_reasons(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_compat, "find_spec", lambda _: None)
    reference, file = written(models, "llama-biased", "f32")
    llama, plain = judge(reference, file, IDS, "f32", None)
    assert "it reads all 51 tensors" in llama.why
    assert "it ignores 21 tensors (blk.N.attn_q.bias" in plain.why and "attention_bias as False" in plain.why
    reference, file = written(models, "llama3-rope", "f32")
    assert "ignores 1 tensor (rope_freqs.weight)" in judge(reference, file, IDS, "f32", None)[1].why
    reference, file = written(models, "phi3-head-dim", "f32")
    why = [verdict.why for verdict in judge(reference, file, IDS, "f32", None)]
    assert "it takes blk.0.attn_qkv.weight to be [192, 64]" in why[0] and "cannot compute with it" in why[1]


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize("name", MODELS)
def test_a_family_rounded_stays_within_its_bound(models: Path, name: str, kind: str) -> None:
    outcome = round_trip(models, name, kind)
    assert outcome.problem is None and 0 < outcome.relative < BOUNDS[kind].logits, outcome.line


@pytest.mark.parametrize("kind", KINDS)
def test_every_type(models: Path, kind: str) -> None:
    """Against the definition of each type: rounding one tensor by hand gives what the file gives."""
    import gguf

    outcome = round_trip(models, "llama", kind)
    assert outcome.problem is None, outcome.line
    file = gguf.GGUFReader(models / f"llama.{kind}.gguf")
    found = {tensor.name: tensor for tensor in file.tensors}
    assert found["blk.0.ffn_up.weight"].tensor_type.name.lower() == kind
    assert found["blk.0.attn_norm.weight"].tensor_type.name == "F32", "norms are not rounded"
    if kind.startswith(("q4", "q5")):
        assert found["token_embd.weight"].tensor_type.name == found["output.weight"].tensor_type.name == "Q8_0"
    exact = load_folder(models / "llama").model.layers[0].mlp.up_proj.weight.detach()
    stored = torch.tensor(gguf.dequantize(found["blk.0.ffn_up.weight"].data, found["blk.0.ffn_up.weight"].tensor_type))
    steps = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 254, "q5_1": 1 / 31, "q5_0": 1 / 16, "q4_1": 1 / 15,
             "q4_0": 1 / 8}[kind]  # fmt: skip
    blocks = exact.view(-1, 32).abs().max(-1, keepdim=True).values
    assert ((exact - stored).view(-1, 32).abs() <= blocks * (steps + 1e-3 * (steps > 0)) + 1e-7).all()


def test_rows_that_are_no_whole_blocks_get_fp16(models: Path, tmp_path: Path) -> None:
    import gguf

    config = AutoConfig.for_model("llama", **(SIZES | {"hidden_size": 48, "intermediate_size": 80}))
    kinds = {n: gguf_file._kind_of(n, (64, w), "q8_0").name for n, w in (("a", config.hidden_size), ("b", 64))}
    assert kinds == {"a": "F16", "b": "Q8_0"} and gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_0][0] == 32


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "architecture": ("gpt_neox", {}, "no GGUF export for this architecture"),
    "falcon-40b": ("falcon", {"new_decoder_architecture": True}, "new_decoder_architecture is True"),
    "activation": ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "window": ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "sliding window"),
    "gemma": ("gemma2", {"query_pre_attn_scalar": 100}, "query_pre_attn_scalar"),
    "sparse": ("qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}, "no experts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_file_cannot_say_is_refused_by_name(case: str) -> None:
    kind, values, words = REFUSED[case]
    with pytest.raises(UserError, match=words) as raised:
        family_of(AutoConfig.for_model(kind, **values), "--gguf")
    assert raised.value.value == kind


def test_a_scaling_that_files_have_not(models: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(family_folder(models, "llama"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="cannot say this scaling"):
        export_gguf(str(folder), tmp_path / "model.gguf", "f32")
    assert not list(tmp_path.glob("*.gguf*")) and not list(tmp_path.glob(".*"))


def test_numbers_beyond_fp16(models: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(family_folder(models, "llama"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = 1e5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight holds numbers that fp16 cannot"):
        export_gguf(str(folder), tmp_path / "model.gguf", "f16")
    assert not list(tmp_path.glob("*.gguf*")) and not list(tmp_path.glob(".*"))
    assert export_gguf(str(folder), tmp_path / "model.gguf", "bf16").checked


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0"])
def test_a_wrong_tensor_is_caught(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The target keeps what it held, and the rejected file stands beside it."""
    folder, target = family_folder(models, "llama"), tmp_path / "model.gguf"
    target.write_bytes(b"the one before")
    encoded = gguf_file._encoded

    def flipped(tensor: torch.Tensor, one: gguf_file.Tensor) -> Any:
        return encoded(-tensor if one.name == "blk.1.attn_v.weight" else tensor, one)

    monkeypatch.setattr(gguf_file, "_encoded", flipped)
    with pytest.raises(Mismatch, match=r"model\.layers\.1\.self_attn\.v_proj\.weight differs(.|\n)*rejected"):
        export_gguf(str(folder), target, kind, ExportOptions(overwrite=True))
    assert target.read_bytes() == b"the one before"
    assert (tmp_path / "model.gguf.rejected").read_bytes()[:4] == b"GGUF"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf", "model.gguf.rejected"]


def test_a_wrong_setting_is_caught(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors are right; the logits tell, and of rotary scalings, which few tokens hardly show, the frequencies."""
    row = FAMILIES["llama"]
    wrong = {"its logits differ": {"attention.layer_norm_rms_epsilon": 0.5},
             "its rotary frequencies": {"rope.scaling.factor": 1.01, "rope.scaling.type": "linear"}}  # fmt: skip
    for words, values in wrong.items():
        lost = Family(row.arch, lambda config, v=values: row.settings(config) | v, row.layouts, row.demands)
        monkeypatch.setitem(FAMILIES, "llama", lost)
        with pytest.raises(Mismatch, match=words):
            export_gguf(
                str(family_folder(models, "llama")), tmp_path / "model.gguf", "q8_0", ExportOptions(overwrite=True)
            )


def test_a_file_that_nobody_reads_is_written_only_when_asked_for(models: Path, tmp_path: Path) -> None:
    """One that llama.cpp refuses and transformers misreads, and a setting that both have built in otherwise."""
    folder, target = str(family_folder(models, "phi3-head-dim")), tmp_path / "model.gguf"
    with pytest.raises(Mismatch, match=r"no reader reads it(.|\n)*llama.cpp .*: no, it takes blk.0.attn_qkv.weight"):
        export_gguf(folder, target, "q8_0")
    assert not target.exists()
    done = export_gguf(folder, target, "q8_0", unreadable=True)
    assert target.exists() and str(done.checked).count(": no, ") == 2 and "llama.cpp" in done.card
    other = Path(shutil.copytree(family_folder(models, "llama"), tmp_path / "gelu"))
    config = json.loads((other / "config.json").read_text()) | {"hidden_act": "gelu"}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="--allow-unreadable"):
        export_gguf(str(other), tmp_path / "gelu.gguf", "q8_0")
    done = export_gguf(str(other), tmp_path / "gelu.gguf", "q8_0", unreadable=True)
    assert "llama.cpp (by its rules): no, its hidden_act is 'gelu'" in str(done.checked)


def test_one_that_only_llama_cpp_reads_is_written_and_said(models: Path, tmp_path: Path) -> None:
    done = export_gguf(str(family_folder(models, "llama-biased")), tmp_path / "model.gguf", "q8_0")
    lines = str(done.checked).splitlines()
    assert lines[1].startswith("llama.cpp") and ": yes, " in lines[1]
    assert lines[2].startswith("transformers (gguf_file=): no, it ignores 21 tensors")
    assert "it ignores 21 tensors" in done.card


def test_tensors_that_files_have_no_place_for_are_named(models: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(family_folder(models, "llama"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors") | {"mtp.proj.weight": torch.ones(3, 3)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    done = export_gguf(str(folder), tmp_path / "model.gguf", "f16")
    assert any("without 1 tensor (mtp.proj.weight) of the source" in note for note in done.notes)


@pytest.mark.parametrize("name", ["llama-biased", "llama-linear", "llama3-rope", "qwen3", "phi3-partial"])
def test_a_file_as_a_model_is_read_as_it_is_meant(models: Path, name: str) -> None:
    """Trained from a file, what transformers does not read of it by itself is there too."""
    reference, file = written(models, name, "f32")
    source = find_model(Model(name=str(file)))
    assert source.weights is not None and source.origin is None
    assert compare(reference, load_folder(source.weights), IDS, "f16").problem is None


def test_the_files_own_facts(models: Path, tmp_path: Path) -> None:
    import gguf

    export_gguf(str(family_folder(models, "llama-biased")), tmp_path / "model.gguf", "f16")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    got = {key: field.contents() for key, field in fields.items() if key.startswith(("llama.", "general."))}
    assert got["general.architecture"] == "llama" and got["general.file_type"] == gguf.LlamaFileType.MOSTLY_F16
    wanted = {"context_length": 128, "embedding_length": 64, "block_count": 3, "feed_forward_length": 96,
              "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32,
              "rope.dimension_count": 32, "rope.freq_base": 10000.0, "vocab_size": 515}  # fmt: skip
    assert {key: got[f"llama.{key}"] for key in wanted} == wanted


def test_a_window_that_files_have_not_ends_the_context() -> None:
    config = AutoConfig.for_model("mistral", **(SIZES | {"sliding_window": 32}))
    assert FAMILIES["mistral"].settings(config)["context_length"] == 32


@pytest.mark.parametrize("target, words", [("model", "no name for a GGUF file"), ("there.gguf", "exists")])
def test_targets(models: Path, tmp_path: Path, target: str, words: str) -> None:
    (tmp_path / "there.gguf").write_text("something")
    with pytest.raises(UserError, match=words):
        export_gguf(str(family_folder(models, "llama")), tmp_path / target, "f16")
    assert (tmp_path / "there.gguf").read_text() == "something"


def test_a_tokenizer_that_files_have_not(models: Path, tmp_path: Path) -> None:
    """Found before anything is written."""
    from tokenizers import Tokenizer, pre_tokenizers

    folder = Path(shutil.copytree(family_folder(models, "llama"), tmp_path / "model"))
    tokenizer_folder(folder)
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.UnicodeScripts(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match="cuts text in a way that llama"):
        export_gguf(str(folder), tmp_path / "model.gguf", "f16")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
