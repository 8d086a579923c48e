"""`shardwise bench train`: kinds of work by names, what overlaps, advice by figures, and the command itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.families import config_of
from support.tiny import LLAMA

from shardwise.cli.main import main
from shardwise.config.schema import Run
from shardwise.observe.profile import KERNELS, OPERATORS, REST, StepProfile, _kind, of_kernels, of_operators
from shardwise.observe.profile_advice import Speed, advise

# As an H200's profiler gave them.
NAMES = {
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "products",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x32x8_stage3": "products",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>": "products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*)": "attention",
    "_split_adamw": "optimizer",
    "_kernel_8bit": "optimizer",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::TensorListMetadata<1>": "optimizer",
    "_cross_entropy": "loss",
    "_add_low_rank": "adapters and few bits",
    "_transpose": "adapters and few bits",
    "_dequantize": "adapters and few bits",
    "Memcpy DtoD (Device -> Device)": "copies",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "triton_poi_fused_add_cat_mul_neg_slice_transpose_unsqueeze_view_1": REST,
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": REST,
}


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_known_by_name(name: str) -> None:
    assert _kind(name, KERNELS) == NAMES[name]


@pytest.mark.parametrize(("name", "kind"), [
    ("aten::mm", "products"), ("aten::addmm", "products"), ("aten::mul", REST), ("c10d::allreduce_", "communication"),
    ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"), ("aten::copy_", "copies"),
    ("FSDP::all_gather", "communication"), ("FSDP::pre_forward", REST),
])  # fmt: skip
def test_operators_are_known_by_name(name: str, kind: str) -> None:
    assert _kind(name, OPERATORS) == kind


def test_what_overlaps_counts_once() -> None:
    kernels = [("gemm", 0.0, 4.0), ("gemm", 3.0, 5.0), ("nccl", 4.0, 8.0), ("triton_", 9.0, 10.0)]
    found = of_kernels(kernels)
    assert found.whole == 10 and found.idle == 1
    assert found.kinds == {"products": 5, "communication": 4, REST: 1}
    assert found.exposed == {"products": 4, "communication": 3, REST: 1}
    assert found.largest[0] == ("gemm", 6.0, 2)


def test_operators_within_the_update_are_the_optimizer() -> None:
    operators = [
        ("shardwise::step", 0.0, 10.0, 0.0, 1), ("aten::mm", 1.0, 4.0, 3.0, 1), ("shardwise::update", 5.0, 9.0, 0.5, 1),
        ("aten::mul", 6.0, 8.0, 2.0, 1), ("aten::mm", 11.0, 12.0, 1.0, 1),
    ]  # fmt: skip
    found = of_operators(operators)
    assert found.kinds == {"products": 3, "optimizer": 2} and found.idle == 5 and found.whole == 10


def test_what_gloo_does_beside_computing_is_hidden() -> None:
    operators = [
        ("shardwise::step", 0.0, 10.0, 0.0, 1), ("aten::mm", 1.0, 4.0, 3.0, 1), ("aten::mm", 6.0, 7.0, 1.0, 1),
        ("gloo:all_gather", 3.0, 6.0, 3.0, 2), ("aten::copy_", 3.5, 4.0, 0.5, 2), ("gloo:all_reduce", 5.5, 9.0, 3.5, 3),
    ]  # fmt: skip
    found = of_operators(operators)
    assert found.kinds == {"communication": 6, "products": 4}
    assert found.exposed == {"communication": 4, "products": 4} and found.idle == 2
    assert found.sent == {"gathers": [3, 2], "reductions": [3.5, 2.5], "all": [6, 4]}


def test_waiting_for_a_collective_counts_once() -> None:
    """A thread that computes waits, in FSDP's copying, for what gloo's thread does meanwhile."""
    operators = [
        ("shardwise::step", 0.0, 10.0, 0.0, 1), ("aten::mm", 1.0, 4.0, 3.0, 1), ("gloo:all_gather", 3.0, 6.0, 3.0, 2),
        ("FSDP::all_gather_copy_out", 4.0, 7.0, 2.0, 1), ("aten::split", 6.5, 7.0, 0.5, 1),
    ]  # fmt: skip
    found = of_operators(operators)
    assert found.exposed["communication"] == 2.5 and found.kinds["communication"] == 3.5
    assert sum(found.exposed.values()) <= found.whole


def speed(kinds: dict[str, float], idle: float = 0.0, memory: int = 90, **changes: Any) -> Speed:
    whole = sum(kinds.values()) + idle
    values = {"seconds": whole, "tokens": 100, "mfu": None, "memory": memory, "room": 100, "device": "G", "ranks": 1,
              "rank": 0}  # fmt: skip
    return Speed(**values | changes, profile=StepProfile(whole, kinds, dict(kinds), idle, []))


def a_run(**changes: Any) -> Run:
    base = {"model": "m", "data": {"train": "x"}, "train": {"batch_size": 8, "micro_batch_size": 2}, "device": "cuda",
            "precision": "bf16"}  # fmt: skip
    return Run.model_validate(base | changes)


def test_reductions_that_nothing_hides_are_told_with_what_fewer_bytes_would_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardwise.config.resolve._has_fp8", lambda machine: False)
    found = speed({"products": 6, "communication": 4}, ranks=2)
    bare = replace(found, profile=replace(found.profile, sent={"reductions": [4.0, 3.0], "all": [4.0, 3.0]}))
    (said,) = [line for line in advise(a_run(compile=True), bare) if "reduce_dtype: bf16" in line]
    assert "half of the 30%" in said
    hidden = replace(found, profile=replace(found.profile, sent={"reductions": [4.0, 0.5], "all": [4.0, 0.5]}))
    assert not any("reduce_dtype: bf16" in line for line in advise(a_run(compile=True), hidden))
    assert not any("reduce_dtype: bf16" in line for line in advise(a_run(parallel={"reduce_dtype": "bf16"}), bare))


@pytest.mark.parametrize(("run", "found", "words"), [
    ({}, speed({"products": 4, REST: 4}), ["compile: true"]),
    ({"compile": True}, speed({"products": 4, REST: 4}), []),
    ({"compile": True}, speed({"products": 4}, idle=4), ["waits for the host 50%"]),
    ({"compile": True, "parallel": {"zero": 3}}, speed({"products": 4, "communication": 4}, ranks=2), ["zero: 2"]),
    ({"compile": True}, speed({"products": 4, "optimizer": 4}), ["train.batch_size"]),
    ({"compile": True, "recompute": "full"}, speed({"products": 4}, memory=20), ["recompute: auto"]),
    ({"compile": True}, speed({"products": 4}, memory=20), ["micro_batch_size"]),
    ({"device": "cpu"}, speed({"products": 4, "copies": 4, REST: 4}, device="CPU"), []),
    ({"device": "cpu", "parallel": {"pipeline": 2}}, speed({"products": 4}, idle=4, device="CPU"), ["bubble"]),
])  # fmt: skip
def test_advice_by_figures(run: dict[str, Any], found: Speed, words: list[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("shardwise.config.resolve._has_fp8", lambda machine: False)
    said = advise(a_run(**run), found)
    assert len(said) == len(words) and all(word in line for word, line in zip(words, said, strict=True))


def test_fp8_is_advised_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.config.resolve._has_fp8", lambda machine: True)
    assert "precision: fp8" in advise(a_run(compile=True), speed({"products": 9, "attention": 1}))[0]
    assert "bits: fp8" in advise(a_run(compile=True, method="lora"), speed({"products": 9, "attention": 1}))[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_command(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = LLAMA if ranks == 1 else config_of("mixtral")
    run = {"model": {"config": config, "tokenizer": "none"}, "data": {"train": "none", "sequence_length": 64},
           "train": {"batch_size": 4, "micro_batch_size": 1, "steps": 1}, "device": "cpu", "precision": "fp32",
           "ranks": ranks, "parallel": {"zero": 3}, "advanced": {"prefetch": ranks - 1}}  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    more = ["--json", "--trace", str(tmp_path / "traces")] if ranks == 2 else []
    with pytest.raises(SystemExit) as left:
        main(["bench", "train", str(tmp_path / "run.yaml"), "--steps", "2", *more])
    assert not left.value.code
    told = capsys.readouterr().out
    if ranks == 1:
        assert "tokens/s" in told and "products" in told and "optimizer" in told
        return
    found = json.loads(told)
    assert found["tokens"] == 256 and found["ranks"] == 2 and found["tokens_per_second"] > 0
    assert found["profile"]["kinds"]["communication"] > 0 and not (tmp_path / "out").exists()
    spent, bare = found["profile"]["sent"]["all"]
    # How much lies beside computing is the machine's matter, and counted exactly on made-up events above.
    assert 0 < bare <= spent * (1 + 1e-9)
    for rank in range(2):
        events = json.loads((tmp_path / f"traces/rank-{rank}.json").read_text())["traceEvents"]
        assert {"gloo:all_gather", "gloo:all_reduce"} <= {event.get("name") for event in events}


AXES = ["parallel.tensor=2", "parallel.context=2", "parallel.pipeline=2", "parallel.expert=2", "parallel.zero=3"]


def test_one_rank_of_a_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A later stage of a pipeline, which must know what reaches it, on all five axes."""
    run = {"model": {"config": config_of("qwen3_moe") | {"num_hidden_layers": 4}, "tokenizer": "none"},
           "data": {"train": "none", "sequence_length": 64}, "train": {"batch_size": 16, "micro_batch_size": 2},
           "device": "cpu", "precision": "fp32"}  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    words = ["--nodes", "4", "--gpus", "8", "--rank", "29", "--steps", "1", "--json"]
    with pytest.raises(SystemExit) as left:
        main(["bench", "train", str(tmp_path / "run.yaml"), *AXES, *words])
    assert not left.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"] and found["ranks"] == 32 and found["rank"] == 29
    assert found["tokens"] == 16 * 64 and found["host"] > 0
    assert found["profile"]["kinds"]["products"] > 0


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"model": {"config": LLAMA, "tokenizer": "none"}, "data": {"train": "none", "sequence_length": 64},
           "train": {"batch_size": 4}, "device": "cpu"}  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as left:
        main(["bench", "train", str(tmp_path / "run.yaml")])
    assert left.value.code == 2 and "without torchrun" in capsys.readouterr().err
    monkeypatch.delenv("WORLD_SIZE")
    for words, told in (
        (["--documents", "7"], "cannot be divided"),
        (["objective=dpo"], "only causal"),
        (["--rank", "1"], "is one of a larger run's"),
        (["--nodes", "2", "--gpus", "4", "--rank", "8"], "there are 8 ranks"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["bench", "train", str(tmp_path / "run.yaml"), *words])
        assert left.value.code == 2 and told in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    for place in ("file", "file/within"):
        with pytest.raises(SystemExit) as left:
            main(["bench", "train", str(tmp_path / "run.yaml"), "--trace", str(tmp_path / place)])
        assert left.value.code == 2 and "no folder can be made there" in " ".join(capsys.readouterr().err.split())


def test_an_interrupt_that_was_swallowed_is_heeded() -> None:
    import contextlib
    import signal

    from shardwise.foresight.verify.ranks import heeding_interrupts

    with pytest.raises(KeyboardInterrupt), heeding_interrupts() as check:
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGINT)
        check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
