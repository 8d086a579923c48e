"""Names of tensors: what transformers renames or converts while it loads goes back as it was, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import GPT2, LLAMA, QWEN3_MOE, TIED, saved_model

from shardwise.config.schema import Model
from shardwise.core.errors import UserError
from shardwise.nn.models.build import build_on_meta
from shardwise.nn.models.names import link
from shardwise.nn.models.readable import readable
from shardwise.nn.models.source import ModelSource, config_from, find_model
from shardwise.nn.models.stored import read_stored, sample_digest, stored_tensors, tensor_files
from shardwise.nn.models.tasks import auto_class

SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=515)
DEEPSEEK = SMALL | dict(
    model_type="deepseek_v3", moe_intermediate_size=32, num_key_value_heads=4, n_routed_experts=4, n_group=2,
    num_experts_per_tok=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
    qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA, "tied": TIED, "gpt2": GPT2, "qwen3_moe": QWEN3_MOE, "deepseek_v3": DEEPSEEK,
    "gpt_neox": SMALL | dict(model_type="gpt_neox"),
    "mixtral": LLAMA | dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip
ORIGINAL = {  # as the published files have them, where transformers has other names for its parameters
    "qwen3_moe": "model.layers.0.mlp.experts.1.up_proj.weight",
    "deepseek_v3": "model.layers.1.mlp.experts.3.down_proj.weight",
    "gpt_neox": "embed_out.weight",
    "mixtral": "model.layers.2.block_sparse_moe.experts.0.w1.weight",
}


def on_meta(values: dict[str, Any]) -> Any:
    return build_on_meta(ModelSource("m", config_from(dict(values)), None, "none"))


def written(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("files", [True, False], ids=["from files", "from scratch"])
def test_as_transformers_saves_them(tmp_path: Path, name: str, files: bool) -> None:
    """Names and values of `save_pretrained`, asked for one group of tensors at a time."""
    saved_model(tmp_path, FAMILIES[name])
    wanted = written(tmp_path)
    model = auto_class("causal").from_pretrained(tmp_path)
    linked = link(on_meta(FAMILIES[name]), wanted if files else None)
    state, got = model.state_dict(), {}
    for part in linked.parts:
        got |= linked.back(part, {one: state[one] for one in part.reads})
    assert got.keys() == wanted.keys() and ORIGINAL.get(name, next(iter(wanted))) in got
    assert all(torch.equal(got[key], wanted[key]) for key in wanted) and not linked.extra and not linked.lost


def test_what_the_model_has_no_place_for(tmp_path: Path) -> None:
    saved_model(tmp_path, DEEPSEEK)
    extra = {"model.layers.2.mlp.experts.0.gate_proj.weight", "model.layers.2.eh_proj.weight", "mtp.norm.weight"}
    linked = link(on_meta(DEEPSEEK), {*written(tmp_path), *extra})
    assert set(linked.extra) == extra and not linked.lost
    assert linked.extra["model.layers.2.mlp.experts.0.gate_proj.weight"] == "model.layers.2.mlp.experts.gate_up_proj"


def test_tied_tensors_go_back_under_every_name_that_files_have(tmp_path: Path) -> None:
    saved_model(tmp_path, TIED)
    names = {*written(tmp_path), "lm_head.weight"}
    parts = [part for part in link(on_meta(TIED), names).parts if len(part.writes) > 1]
    assert [part.reads for part in parts] == [("model.embed_tokens.weight",)]
    assert set(parts[0].writes) == {"lm_head.weight", "model.embed_tokens.weight"}


def test_two_tensors_for_one_tie_are_refused(tmp_path: Path) -> None:
    """transformers would not tie them; trained as one, one of them would be lost in silence."""
    saved_model(tmp_path, TIED)
    tensors = written(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = find_model(Model(name=str(tmp_path)))
    assert readable(source, build_on_meta(source)).extra == ()
    tensors["lm_head.weight"][100, 3] += 1
    tensors["lm_head.weight"][-1] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"ties .*lm_head.* but its files hold two different tensors"):
        readable(source, build_on_meta(source))


def test_quantised_files_are_not_read_as_plain_ones(tmp_path: Path) -> None:
    """Codes without their scales would be other weights."""
    import json

    saved_model(tmp_path, LLAMA)
    tensors, plain = {}, written(tmp_path)
    for name, tensor in plain.items():
        if "proj" in name:
            scale = tensor.abs().max() / 448
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)
        else:
            tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3",
                                     "activation_scheme": "dynamic"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = find_model(Model(name=str(tmp_path)))
    ready = readable(source, build_on_meta(source))
    assert ready.weights != tmp_path and not hasattr(ready.config, "quantization_config")
    assert ready.weights is not None
    name = "model.layers.1.mlp.up_proj.weight"
    got = written(ready.weights)[name].float()
    assert (got - plain[name]).abs().max() <= plain[name].abs().max() * 2**-3 and got.std() > 0.5 * plain[name].std()
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").touch()
    source = find_model(Model(name=str(tmp_path)))
    save_file(tensors | {"new": torch.ones(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"quantised \(gptq\), which cannot be undone"):
        readable(source, build_on_meta(source))


def test_the_files_that_transformers_reads(tmp_path: Path) -> None:
    """Beside model.safetensors the same weights may lie under other names; a .bin is read where there is no other."""
    one = {"a": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3), "h": torch.ones(4, dtype=torch.bfloat16)}
    save_file(one, tmp_path / "model.safetensors")
    save_file({"layers.0.wq": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert set(tensor_files(tmp_path)) == {"a", "n", "h"}
    found = stored_tensors(tmp_path)
    assert found["h"].dtype == torch.bfloat16 and found["a"].shape == (2, 3) and found["n"].shape == ()
    assert torch.equal(read_stored("a", found["a"]), one["a"])
    other = tmp_path / "bin"
    other.mkdir()
    torch.save(one, other / "pytorch_model.bin")
    found = stored_tensors(other)
    assert {name: entry.dtype for name, entry in found.items()} == {name: t.dtype for name, t in one.items()}
    assert all(sample_digest(read_stored(name, found[name])) == sample_digest(one[name]) for name in one)


def test_a_digest_tells_tensors_apart() -> None:
    big = torch.zeros(1 << 20)
    digests = {sample_digest(big), sample_digest(big.to(torch.float16)), sample_digest(big.view(1024, 1024))}
    for place in (0, 1 << 19, -1):
        other = big.clone()
        other[place] = 1
        digests.add(sample_digest(other))
    assert len(digests) == 6 and sample_digest(big) == sample_digest(big.clone())
