"""Quantised linear layers: equal to plain ones with the weights they stand for, at every stage of ZeRO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import quantized as scenarios
from support.ranks import run_ranks
from support.tiny import GPT2, LLAMA, TIED, saved_model, tiny_run, tokenizer_folder
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from shardwise.nn.adapters.quantized import dequantized, quantize_linears
from shardwise.nn.kernels.nf4 import Bits, RowFormat, dequantize, quantize

FORMS: list[tuple[Bits, bool]] = [("nf4", True), ("nf4", False), ("int8", False), ("fp8", False)]


def layer(kind: str, inputs: int, outputs: int, bias: bool = True) -> Any:
    torch.manual_seed(0)
    made = nn.Sequential(Conv1D(outputs, inputs) if kind == "conv" else nn.Linear(inputs, outputs, bias))
    made.requires_grad_(False)
    return made


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize(("bits", "double"), FORMS)
def test_equal_to_a_plain_layer(kind: str, bits: Bits, double: bool) -> None:
    plain, model = layer(kind, 100, 72), layer(kind, 100, 72)
    assert quantize_linears(model, lambda *_: True, bits, double) == ["0"]
    assert isinstance(model[0], type(plain[0])) and model[0].weight.dtype == torch.int8
    plain[0].weight.copy_(dequantized(model[0]))
    inputs = [torch.randn(2, 5, 100).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0])
    outputs = [plain(inputs[0]), model(inputs[1])]
    outputs[0].square().sum().backward()
    outputs[1].square().sum().backward()
    assert (outputs[0] - outputs[1]).abs().max() <= 1e-6
    assert (inputs[0].grad - inputs[1].grad).abs().max() <= 1e-6 * inputs[0].grad.abs().max()


def test_bf16_multiplies_bf16_weights() -> None:
    model = layer("linear", 128, 64, bias=False)
    quantize_linears(model, lambda *_: True)
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    with torch.backends.mkldnn.flags(enabled=False):  # whose bf16 kernels some processors lack instructions for
        assert torch.equal(model(x), x @ dequantized(model[0], torch.bfloat16).t())


def test_backward_keeps_packed_weights_alone() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
    quantize_linears(model, lambda *_: True)
    saved: dict[int, int] = {}

    def look(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(look, lambda t: t):
        model(torch.randn(1, 256, requires_grad=True))
    assert sum(saved.values()) == sum(p.nbytes for p in model.parameters()) == 3 * 256 * RowFormat(256).row_bytes


def test_compiled_equals_eager() -> None:
    """With the partitioner that would otherwise keep what both passes compute."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition as cut

    model, plain = layer("linear", 64, 48), None
    quantize_linears(model, lambda *_: True)
    kept: list[int] = []

    def watch(*args: Any, **kwargs: Any) -> Any:
        forward, backward = cut(*args, **kwargs)
        nodes = next(n for n in forward.graph.nodes if n.op == "output").args[0]
        kept.extend(n.meta["val"].numel() for n in nodes[1:] if hasattr(n, "meta") and "val" in n.meta)
        return forward, backward

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.compilers import nop

    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=watch))
    x = torch.randn(4, 64, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).square().sum(), x)
    (ours,) = torch.autograd.grad(compiled(x).square().sum(), x)
    assert torch.equal(plain, ours)
    assert kept and max(kept) <= model[0].weight.numel(), "the dequantised weight was kept for backward"


def test_operators_are_well_formed() -> None:
    form = RowFormat(40)
    packed = quantize(torch.randn(24, 40), form)
    for transposed, width in ((False, 40), (True, 24)):
        x = torch.randn(2, 3, width, requires_grad=True)
        torch.library.opcheck(torch.ops.shardwise.packed_linear.default, (x, packed, 40, "nf4", True, transposed))


def test_what_is_left_as_it_is() -> None:
    """The head, tied weights, embeddings, norms, other classes and whatever the caller does not name."""
    values = dict(TIED)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    names = quantize_linears(model, lambda name, _: "k_proj" not in name)
    assert len(names) == 3 * 6 and not any("lm_head" in n or "k_proj" in n for n in names)
    floats = {n for n, p in model.named_parameters() if p.is_floating_point()}
    assert "model.embed_tokens.weight" in floats and "model.norm.weight" in floats
    assert model.lm_head.weight is model.model.embed_tokens.weight
    values = dict(LLAMA)
    untied = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    assert "lm_head" not in quantize_linears(untied, lambda *_: True)
    assert "nf4, 6.67 bits" in repr(untied)


MIXTRAL = dict(
    model_type="mixtral", hidden_size=32, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=128, max_position_embeddings=64,
)  # fmt: skip
GPT_OSS = MIXTRAL | dict(model_type="gpt_oss", head_dim=8)


@pytest.mark.parametrize("config", [MIXTRAL, GPT_OSS], ids=["mixtral", "gpt_oss"])
def test_experts_equal_plain_ones(config: dict[str, Any]) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        values = dict(config)
        models.append(AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values)))
    plain, model = models
    stacks = [n for n, p in plain.named_parameters() if p.ndim == 3]
    names = quantize_linears(model, lambda *_: True)
    assert len(stacks) == 4 and len(names) == 8
    for name in stacks + [f"{n}.weight" for n in names]:
        owner, _, leaf = name.rpartition(".")
        assert model.get_parameter(name).dtype == torch.int8
        plain.get_parameter(name).data.copy_(dequantized(model.get_submodule(owner), name=leaf))
    ids = torch.arange(24).view(2, 12)
    logits = []
    for one in models:
        logits.append(one(input_ids=ids, use_cache=False).logits)
        logits[-1].square().mean().backward()
    embeddings = [one.get_input_embeddings().weight.grad for one in models]
    assert (logits[0] - logits[1]).abs().max() <= 1e-6
    assert (embeddings[0] - embeddings[1]).abs().max() <= 1e-6 * embeddings[0].abs().max()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    tmp = tmp_path_factory.mktemp("models")
    return {"llama": saved_model(tmp / "llama", LLAMA), "gpt2": saved_model(tmp / "gpt2", GPT2)}


def runs_of(tmp: Path, model: Any, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        tiny_run(tmp, model, parallel=dict(layout), train__batch_size=4, train__steps=2,
                 recompute="full" if index % 2 else "none", output=str(tmp / str(index)))
        for index, layout in enumerate(layouts)
    ]  # fmt: skip


def compare(result: dict[str, Any], reference: dict[str, Any]) -> tuple[float, float]:
    """Largest differences: of losses, and of gradients as a share of the largest."""
    loss = max(abs(a - b) for a, b in zip(result["losses"], reference["losses"], strict=True))
    most = max(g.abs().max().item() for g in reference["gradients"].values())
    assert result["gradients"].keys() == reference["gradients"].keys() and most > 0
    pairs = [(result["gradients"][n], g) for n, g in reference["gradients"].items()]
    return loss, max((a - b).abs().max().item() for a, b in pairs) / most


def packed_bytes(config: dict[str, Any], bits: Bits, double: bool) -> int:
    """Of all linear layers but the head, by the formula of the format."""
    values = dict(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    total = 0
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)) and name != "lm_head":
            rows, columns = module.weight.shape
            codes = -(-columns // 64) * 32
            scales = -(-(4 + codes // 32) // 4) * 4 if double else codes // 8
            total += rows * (codes + scales if bits == "nf4" else -(-columns // 4) * 4 + 4)
    return total


@pytest.mark.parametrize(("model", "bits", "double"), [
    ("llama", "nf4", True),
    pytest.param("gpt2", "nf4", True, marks=pytest.mark.slow),
    pytest.param("llama", "nf4", False, marks=pytest.mark.slow),
    pytest.param("gpt2", "int8", False, marks=pytest.mark.slow),
    pytest.param("llama", "int8", False, marks=pytest.mark.slow),
])  # fmt: skip
def test_every_stage_equals_stage_0_on_one_rank(
    model: str, bits: Bits, double: bool, folders: dict[str, str], tmp_path: Path
) -> None:
    layouts = [{"zero": stage} for stage in range(4)]
    one = run_ranks(scenarios.train, 1, runs_of(tmp_path / "1", folders[model], layouts), bits, double)[0]
    two = run_ranks(scenarios.train, 2, runs_of(tmp_path / "2", folders[model], layouts), bits, double)
    whole = packed_bytes({"llama": LLAMA, "gpt2": GPT2}[model], bits, double)
    assert one[0]["losses"][1] != one[0]["losses"][0]
    for ranks, results in ((1, [one]), (2, two)):
        for result in results:
            for stage, outcome in enumerate(result):
                loss, gradient = compare(outcome, one[0])
                assert loss <= 1e-5 and gradient <= 1e-5, (ranks, stage, loss, gradient)
                assert outcome["bytes"] == whole / (ranks if stage == 3 else 1), "a frozen base is divided at stage 3"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_hybrid_and_hpz_on_four_ranks(
    precision: str, folders: dict[str, str], tmp_path: Path, cpu_precision_env: dict[str, str]
) -> None:
    layouts = [
        {"zero": 0}, {"zero": 3}, {"zero": 3, "dp_shard_size": 2}, {"zero": 2, "dp_shard_size": 2},
        {"zero": 3, "hpz_size": 2},
        {"zero": 3, "hpz_size": 2, "quantize_weights": True},
    ]  # fmt: skip
    divided = [1, 4, 2, 1, 4, 4]
    runs = [run | {"precision": precision} for run in runs_of(tmp_path, folders["llama"], layouts)]
    one = run_ranks(scenarios.train, 1, runs[:1], "nf4", True, env=cpu_precision_env)[0][0]
    four = run_ranks(scenarios.train, 4, runs, "nf4", True, env=cpu_precision_env, timeout=900)
    whole = packed_bytes(LLAMA, "nf4", True)
    for result in four:
        for layout, parts, outcome in zip(layouts, divided, result, strict=True):
            loss, gradient = compare(outcome, one)
            print(f"\n{precision} {layout}: loss {loss:.1e}, gradients {gradient:.1e}")
            # qwZ rounds what is left in floats (embedding, norms, head); packed bytes go as they are.
            bound = 1e-5 if precision == "fp32" and "quantize_weights" not in layout else 2e-2
            assert loss <= bound and gradient <= bound, (layout, loss, gradient)
            assert outcome["bytes"] == whole / parts


@pytest.mark.slow
def test_files_and_fresh_weights_are_packed_alike(tmp_path: Path, folders: dict[str, str]) -> None:
    """On one rank and on three: what comes out is what packing the whole matrix gives."""
    from safetensors.torch import load_file

    runs = [{"folder": folders["gpt2"]}, {"config": GPT2, "tokenizer": tokenizer_folder(tmp_path / "tokenizer")}]
    for number, given in enumerate(runs):
        model = given.get("folder", given)
        run = tiny_run(tmp_path, model, output=str(tmp_path / str(number)))
        one = run_ranks(scenarios.loaded, 1, run, "nf4", True)[0]
        three = run_ranks(scenarios.loaded, 3, run | {"parallel": {"zero": 3}}, "nf4", True)
        assert len(one) == 2 * 12 and all(torch.equal(one[n], r[n]) for r in three for n in one)
        if number == 0:
            files = load_file(Path(folders["gpt2"]) / "model.safetensors")
            for name in [n for n in one if n.endswith(".weight")]:
                stored = files[name]
                form = RowFormat(stored.shape[1])
                assert torch.equal(one[name], dequantize(quantize(stored, form), form, torch.float32))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads the process's memory from /proc")
def test_no_rank_holds_the_model_in_full_precision(tmp_path: Path) -> None:
    """Peak while loading: this rank's shards and a few pieces, where full precision is eight times as much."""
    config = LLAMA | dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_key_value_heads=4)
    run = tiny_run(tmp_path, saved_model(tmp_path / "model", config), parallel__zero=3)
    piece = 4 << 20
    results = run_ranks(scenarios.load_and_watch, 2, run, piece)
    full = 4 * 6 * (4 * 768 * 768 + 3 * 768 * 2048)
    for result in results:
        grown = result["peak"] - result["before"]
        print(f"\nfull {full / 1e6:.0f} MB, held {result['held'] / 1e6:.1f} MB, peak +{grown / 1e6:.1f} MB")
        assert grown - result["held"] < 12 * piece < full / 3  # about 3 pieces
