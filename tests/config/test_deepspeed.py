"""DeepSpeed's config: the table is complete, honoured keys do something, and mistakes are named."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.each import check_each

from shardwise.config.deepspeed import TABLE, read_config, translate
from shardwise.config.deepspeed.__main__ import page
from shardwise.config.deepspeed.plan import default_of
from shardwise.config.load import from_deepspeed, load_run
from shardwise.config.schema import Run
from shardwise.core.errors import UserError, UserErrors

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/deepspeed/ds_config_zero3.json"
RUN: dict[str, Any] = {"model": "m", "data": {"train": "a.jsonl"}, "device": "cpu"}

# What a DeepSpeed user expects to be dealt with, key by key.
_NAMES = """
fp16 bf16 train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
steps_per_print wall_clock_breakdown optimizer scheduler zero_optimization zero_optimization.stage
zero_optimization.offload_optimizer zero_optimization.offload_param zero_optimization.overlap_comm
zero_optimization.contiguous_gradients zero_optimization.sub_group_size zero_optimization.reduce_bucket_size
zero_optimization.allgather_bucket_size zero_optimization.stage3_prefetch_bucket_size
zero_optimization.stage3_param_persistence_threshold zero_optimization.stage3_max_live_parameters
zero_optimization.stage3_max_reuse_distance zero_optimization.stage3_gather_16bit_weights_on_model_save
zero_optimization.round_robin_gradients zero_optimization.zero_hpz_partition_size
zero_optimization.zero_quantized_weights zero_optimization.zero_quantized_gradients activation_checkpointing aio
flops_profiler comms_logger tensorboard wandb csv_monitor communication_data_type data_types
zero_allow_untested_optimizer fp16.enabled fp16.auto_cast fp16.loss_scale fp16.initial_scale_power
fp16.loss_scale_window fp16.hysteresis fp16.consecutive_hysteresis fp16.min_loss_scale
fp16.fp16_master_weights_and_grads bf16.enabled zero_optimization.offload_optimizer.device
zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_optimizer.ratio
zero_optimization.offload_optimizer.pin_memory zero_optimization.offload_optimizer.buffer_count
zero_optimization.offload_optimizer.fast_init zero_optimization.offload_param.device
zero_optimization.offload_param.nvme_path zero_optimization.offload_param.pin_memory
zero_optimization.offload_param.buffer_count zero_optimization.offload_param.buffer_size
zero_optimization.offload_param.max_in_cpu scheduler.params.warmup_min_lr scheduler.params.warmup_max_lr
scheduler.params.warmup_num_steps scheduler.params.warmup_type scheduler.params.total_num_steps
scheduler.params.warmup_min_ratio scheduler.params.cos_min_ratio scheduler.params.cycle_min_lr
scheduler.params.cycle_max_lr scheduler.params.lr_range_test_min_lr prescale_gradients gradient_predivide_factor
sparse_gradients amp torch_autocast autotuning elasticity compression_training data_efficiency curriculum_learning
sparse_attention progressive_layer_drop eigenvalue checkpoint hybrid_engine tensor_parallel compile dump_state
memory_breakdown comet pipeline
"""
EXPECTED = _NAMES.split()
# The blocks of the example must have every key listed; these alternatives and older names need not be there.
IN_EXAMPLE = [
    key for key in EXPECTED[: EXPECTED.index("prescale_gradients")]
    if not any(word in key for word in ("min_ratio", "cycle_", "range_test"))
]  # fmt: skip


def config(**changes: Any) -> dict[str, Any]:
    """A small config; `changes` are dotted paths with __ for dots."""
    values: dict[str, Any] = {"train_batch_size": 8}
    for path, value in changes.items():
        place = values
        *parents, leaf = path.split("__")
        for part in parents:
            place = place.setdefault(part, {})
        place[leaf] = value
    return values


def paths(values: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        found += paths(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return found


def has(values: Any, path: str) -> bool:
    for part in path.split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def test_the_table_has_every_key() -> None:
    missing = [key for key in EXPECTED if not any(row == key or row.startswith(f"{key}.") for row in TABLE)]
    assert EXPECTED and missing == []


def test_every_row_is_whole() -> None:
    """A verdict with its reason; a rule for what is honoured, and for nothing else."""
    for path, key in TABLE.items():
        assert key.note and key.path == path
        assert (key.rule is not None) is (key.verdict == "honoured"), path


def test_the_page_is_printed_from_the_table() -> None:
    """If this fails: python -m shardwise.config.deepspeed > docs/deepspeed.md"""
    assert (ROOT / "docs/deepspeed.md").read_text() == page()
    assert all(f"| `{path}` |" in page() for path in TABLE)


def test_the_example_has_every_expected_key() -> None:
    values = read_config(EXAMPLE)
    assert [key for key in IN_EXAMPLE if not has(values, key)] == []


def test_the_account_misses_no_key() -> None:
    values = read_config(EXAMPLE)
    account = translate(values, ranks=2, run=RUN).account
    given = [entry.key for entry in account if entry.given]
    assert sorted(given) == sorted(paths(values))
    assert all(entry.done for entry in account) and {entry.verdict for entry in account} == {"honoured", "no effect"}


# Every honoured key with a value that changes the run: our path and value.
EFFECTS: list[tuple[str, dict[str, Any], str, Any]] = [
    ("train_batch_size", {"train_batch_size": 16}, "train.batch_size", 16),
    ("train_micro_batch_size_per_gpu", {"train_micro_batch_size_per_gpu": 2}, "train.micro_batch_size", 2),
    ("gradient_accumulation_steps", {"gradient_accumulation_steps": 2}, "train.micro_batch_size", 2),
    ("tensor_parallel.autotp_size", {"tensor_parallel__autotp_size": 2}, "parallel.tensor", 2),
    ("sequence_parallel_size", {"sequence_parallel_size": 2}, "parallel.context", 2),
    ("fp16.enabled", {"fp16__enabled": True}, "precision", "fp16"),
    ("bf16.enabled", {"bf16__enabled": True}, "precision", "bf16"),
    ("bfloat16.enabled", {"bfloat16__enabled": True}, "precision", "bf16"),
    ("fp16.loss_scale", {"fp16__enabled": True, "fp16__loss_scale": 128}, "loss_scale.value", 128),
    ("fp16.initial_scale_power", {"fp16__enabled": True, "fp16__initial_scale_power": 8}, "loss_scale.initial", 256),
    ("fp16.loss_scale_window", {"fp16__enabled": True, "fp16__loss_scale_window": 7}, "loss_scale.growth_interval", 7),
    ("fp16.hysteresis", {"fp16__enabled": True, "fp16__hysteresis": 3}, "loss_scale.hysteresis", 3),
    ("fp16.consecutive_hysteresis", {"fp16__enabled": True, "fp16__consecutive_hysteresis": True},
     "loss_scale.consecutive_hysteresis", True),
    ("fp16.min_loss_scale", {"fp16__enabled": True, "fp16__min_loss_scale": 4}, "loss_scale.minimum", 4),
    ("communication_data_type", {"communication_data_type": "bfp16"}, "parallel.reduce_dtype", "bf16"),
    ("gradient_clipping", {"gradient_clipping": 0.3}, "train.max_grad_norm", 0.3),
    ("gradient_clipping", {"gradient_clipping": 0}, "train.max_grad_norm", None),
    ("steps_per_print", {"steps_per_print": 5}, "log.every", 5),
    ("wall_clock_breakdown", {"wall_clock_breakdown": True}, "log.breakdown", True),
    ("comms_logger.enabled", {"comms_logger__enabled": True}, "log.comms", True),
    ("csv_monitor.enabled", {"csv_monitor__enabled": True}, "log.csv", "DeepSpeedJobName"),
    ("csv_monitor.output_path", {"csv_monitor__enabled": True, "csv_monitor__output_path": "a"}, "log.csv",
     "a/DeepSpeedJobName"),
    ("csv_monitor.job_name", {"csv_monitor__enabled": True, "csv_monitor__job_name": "j"}, "log.csv", "j"),
    ("optimizer.type", {"optimizer__type": "Lion"}, "train.optimizer", "lion"),
    ("optimizer.type", {"optimizer__type": "Adam"}, "train.decay_norms", True),
    ("optimizer.params.lr", {"optimizer__type": "Adam", "optimizer__params__lr": 3e-4}, "train.learning_rate", 3e-4),
    ("optimizer.params.betas", {"optimizer__type": "Adam", "optimizer__params__betas": [0.8, 0.9]}, "train.betas",
     [0.8, 0.9]),
    ("optimizer.params.eps", {"optimizer__type": "Adam", "optimizer__params__eps": 1e-6}, "train.eps", 1e-6),
    ("optimizer.params.weight_decay", {"optimizer__type": "Adam", "optimizer__params__weight_decay": 0.2},
     "train.weight_decay", 0.2),
    ("optimizer.params.momentum", {"optimizer__type": "SGD", "optimizer__params__momentum": 0.7}, "train.betas",
     [0.7, 0.95]),
    ("scheduler.type", {"scheduler__type": "WarmupLR"}, "train.schedule.type", "WarmupLR"),
    ("scheduler.params.warmup_max_lr", {"scheduler__type": "WarmupLR", "scheduler__params__warmup_max_lr": 3e-4},
     "train.learning_rate", 3e-4),
    ("scheduler.params.lr_range_test_min_lr",
     {"scheduler__type": "LRRangeTest", "scheduler__params__lr_range_test_min_lr": 3e-4}, "train.learning_rate", 3e-4),
    ("zero_optimization", {"zero_optimization": True}, "parallel.zero", 1),
    ("zero_optimization.stage", {"zero_optimization__stage": 3}, "parallel.zero", 3),
    ("zero_optimization.reduce_bucket_size", {"zero_optimization__reduce_bucket_size": 5e8}, "parallel.bucket",
     2_000_000_000),
    ("zero_optimization.allgather_bucket_size",
     {"zero_optimization__reduce_bucket_size": 5e8, "zero_optimization__allgather_bucket_size": 1e6},
     "parallel.bucket", 4_000_000),
    ("zero_optimization.zero_hpz_partition_size",
     {"zero_optimization__stage": 3, "zero_optimization__zero_hpz_partition_size": 2}, "parallel.hpz_size", 2),
    ("zero_optimization.zero_quantized_weights",
     {"zero_optimization__stage": 3, "zero_optimization__zero_quantized_weights": True},
     "parallel.quantize_weights", True),
    ("zero_optimization.zero_quantized_gradients",
     {"zero_optimization__stage": 3, "zero_optimization__zero_quantized_gradients": True},
     "parallel.quantize_gradients", True),
    ("zero_optimization.zeropp_loco_param",
     {"zero_optimization__stage": 3, "zero_optimization__zero_quantized_gradients": True,
      "zero_optimization__zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}, "parallel.error_feedback", True),
    ("zero_optimization.mics_shard_size", {"zero_optimization__stage": 3, "zero_optimization__mics_shard_size": 2},
     "parallel.dp_shard_size", 2),
    ("zero_optimization.cpu_offload", {"zero_optimization__cpu_offload": True}, "offload.optimizer", "cpu"),
    ("zero_optimization.cpu_offload_param", {"zero_optimization__cpu_offload_param": True}, "offload.parameters",
     "cpu"),
    ("zero_optimization.cpu_offload_params", {"zero_optimization__cpu_offload_params": True}, "offload.parameters",
     "cpu"),
    ("activation_checkpointing.cpu_checkpointing", {"activation_checkpointing__cpu_checkpointing": True},
     "offload.activations", "cpu"),
    ("activation_checkpointing.cpu_checkpointing", {"activation_checkpointing__cpu_checkpointing": True}, "recompute",
     "full"),
]  # fmt: skip
for _kind, _parameters in {
    "WarmupLR": {"warmup_min_lr": 1e-6, "warmup_num_steps": 9, "warmup_type": "linear"},
    "WarmupDecayLR": {"total_num_steps": 77},
    "WarmupCosineLR": {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.2},
    "LRRangeTest": {"lr_range_test_step_size": 5, "lr_range_test_step_rate": 2.0, "lr_range_test_staircase": True},
    "OneCycle": {"cycle_first_step_size": 5, "cycle_second_step_size": 6, "cycle_first_stair_count": 2,
                 "cycle_second_stair_count": 3, "decay_step_size": 4, "decay_lr_rate": 0.5, "cycle_momentum": False,
                 "cycle_min_mom": 0.7, "cycle_max_mom": 0.8, "decay_mom_rate": 0.01},
}.items():  # fmt: skip
    _needed = {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3} if _kind == "OneCycle" else {}
    for _name, _value in _parameters.items():
        _all = {"scheduler__type": _kind} | {
            f"scheduler__params__{k}": v for k, v in (_needed | {_name: _value}).items()
        }
        EFFECTS.append((f"scheduler.params.{_name}", _all, f"train.schedule.{_name}", _value))
    if _needed:
        _all = {"scheduler__type": _kind, "scheduler__params": _needed}
        EFFECTS += [("scheduler.params.cycle_min_lr", _all, "train.schedule.cycle_min_lr", 1e-5)]
        EFFECTS += [("scheduler.params.cycle_max_lr", _all, "train.learning_rate", 1e-3)]
for _block, _target in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
    _z = f"zero_optimization.{_block}"
    _path = f"zero_optimization__{_block}__"
    _disk = {"zero_optimization__stage": 3, f"{_path}device": "nvme"}
    EFFECTS += [(f"{_z}.device", _disk, f"offload.{_target}", "disk")]
    EFFECTS += [(f"{_z}.device", _disk | {f"{_path}device": "cpu"}, f"offload.{_target}", "cpu")]
    EFFECTS += [(f"{_z}.nvme_path", _disk | {f"{_path}nvme_path": "/nvme"}, "offload.disk", "/nvme")]
_OPTIMIZER = "zero_optimization__offload_optimizer__"
EFFECTS += [
    ("zero_optimization.offload_optimizer.ratio",
     {"zero_optimization__stage": 2, f"{_OPTIMIZER}device": "cpu", f"{_OPTIMIZER}ratio": 0.3}, "offload.ratio", 0.3),
]  # fmt: skip
# Of these one value is what is done anyway and any other is refused: see the mistakes below.
AS_IT_IS = {"gradient_allreduce_op", "optimizer.params.adam_w_mode", "optimizer.params.bias_correction"}


def value_of(run: Run, path: str) -> Any:
    place: Any = run
    for part in path.split("."):
        place = getattr(place, part)
    return list(place) if isinstance(place, tuple) else place


def load(tmp_path: Path, ds: dict[str, Any], run: dict[str, Any] | None = None, *overrides: str) -> Any:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(ds))
    values = copy.deepcopy(RUN | {"ranks": 2} | (run or {}))
    values["parallel"] = values.get("parallel", {}) | {"deepspeed": str(file)}
    return load_run(values, overrides)


def test_an_honoured_key_changes_the_run(tmp_path: Path) -> None:
    def check(effect: tuple[str, Any, str, Any]) -> None:
        key, given, path, value = effect
        loaded = load(tmp_path, config(**given))
        assert key in TABLE and TABLE[key].verdict == "honoured"
        found = value_of(loaded.run, path)
        assert str(found) == str(value) if path.endswith("warmup_num_steps") else found == value
        assert value != default_of(path) or path == "train.batch_size"
        assert loaded.origin_of(path).startswith("ds_config.json: ")
        assert next(entry for entry in loaded.account if entry.key == key and entry.given).verdict == "honoured"

    check_each(EFFECTS, check, lambda effect: f"{effect[0]} {effect[2]}")


def test_no_honoured_key_is_left_untested() -> None:
    honoured = {path for path, key in TABLE.items() if key.verdict == "honoured"}
    assert honoured - {effect[0] for effect in EFFECTS} == AS_IT_IS


# The batch: given train, micro, rounds and the ranks, what comes out.
@pytest.mark.parametrize(("train", "micro", "rounds", "ranks", "batch", "size"), [
    (32, 4, 2, 4, 32, 4),
    (32, 4, None, 4, 32, 4),
    (32, None, 2, 4, 32, 4),
    (None, 4, 2, 4, 32, 4),
    (32, None, None, 4, 32, 8),
    (None, 4, None, 4, 16, 4),
])  # fmt: skip
def test_any_of_the_three_give_the_rest(
    train: int | None, micro: int | None, rounds: int | None, ranks: int, batch: int, size: int
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {name: value for name, value in zip(names, (train, micro, rounds), strict=True) if value is not None}
    found = translate(given, ranks=ranks)
    assert (found.values["train"]["batch_size"], found.values["train"]["micro_batch_size"]) == (batch, size)
    assert found.batch.rounds == batch // size // ranks


@pytest.mark.parametrize("given", [
    {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
    {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4},
    {"train_batch_size": 31},
    {"train_batch_size": 2},
])  # fmt: skip
def test_a_product_that_does_not_fit(given: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"train_batch_size = \d+: is not train_micro_batch_size_per_gpu .*4 ranks"):
        translate(given, ranks=4)


@pytest.mark.parametrize("given", [{}, {"gradient_accumulation_steps": 2}])
def test_a_batch_must_be_given(given: dict[str, int]) -> None:
    with pytest.raises(UserError, match="neither it nor train_micro_batch_size_per_gpu is given"):
        translate(given, ranks=1)
    assert translate(given, ranks=1, run={"train": {"batch_size": 4}}).batch.train == 4


def test_auto_takes_the_run_s_value_and_shows_it(tmp_path: Path) -> None:
    ds = config(
        train_batch_size="auto",
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
        gradient_clipping="auto",
        bf16__enabled="auto",
        optimizer__type="AdamW",
        optimizer__params={"lr": "auto", "weight_decay": "auto"},
        scheduler__type="WarmupDecayLR",
        scheduler__params={"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
        zero_optimization__stage=3,
        zero_optimization__reduce_bucket_size="auto",
    )
    train = {"batch_size": 12, "micro_batch_size": 3, "learning_rate": "3e-4", "max_grad_norm": 0.7, "warmup": 17}
    loaded = load(tmp_path, ds, {"train": train, "precision": "bf16"})
    run = loaded.run
    assert (run.train.batch_size, run.train.micro_batch_size, run.train.max_grad_norm) == (12, 3, 0.7)
    assert run.train.learning_rate == 3e-4 and run.precision == "bf16" and run.parallel.bucket == "auto"
    assert run.train.schedule.warmup_num_steps.steps(1000) == 17 and run.train.schedule.total_num_steps is None
    told = {entry.key: entry.done for entry in loaded.account}
    assert told["train_batch_size"] == "auto → train.batch_size: 12"
    assert told["gradient_accumulation_steps"] == "auto → 2 rounds of 3 × 2 ranks"
    assert told["optimizer.params.lr"] == "auto → train.learning_rate: 3e-4 (of the run)"
    assert told["optimizer.params.weight_decay"] == "auto → train.weight_decay: 0.01 (our default)"
    assert told["zero_optimization.reduce_bucket_size"] == "auto → advanced.bucket: auto (our default)"


def test_what_is_left_out_takes_deepspeed_s_default_where_the_run_is_silent(tmp_path: Path) -> None:
    ds = config(optimizer__type="Adam", fp16__enabled=True)
    run = load(tmp_path, ds).run
    assert (run.parallel.zero, run.train.schedule, run.train.warmup.steps(100)) == (0, "constant", 0)
    assert (run.train.betas, run.train.weight_decay, run.train.learning_rate) == ((0.9, 0.999), 0.0, 1e-3)
    assert (run.loss_scale.hysteresis, run.loss_scale.growth_interval) == (2, 1000)
    assert load(tmp_path, config()).run.precision == "fp32"
    own = {"parallel": {"zero": 2}, "train": {"schedule": "cosine", "betas": [0.9, 0.99]}}
    run = load(tmp_path, ds, own).run
    assert (run.parallel.zero, run.train.schedule, run.train.betas) == (2, "cosine", (0.9, 0.99))
    assert run.train.warmup.steps(100) == 3, "the run chose its schedule, so its warm-up is ours too"


@pytest.mark.parametrize(("given", "run", "message"), [
    ({"gradient_clipping": 0.5}, {"train": {"max_grad_norm": 1.0}},
     "gradient_clipping = 0.5: contradicts train.max_grad_norm = 1.0"),
    ({"zero_optimization__stage": 3}, {"parallel": {"zero": 2}}, "stage = 3: contradicts parallel.zero = 2"),
    ({"train_batch_size": 16}, {"train": {"batch_size": 8}}, "train_batch_size = 16: contradicts train.batch_size = 8"),
    ({"fp16__enabled": True}, {"precision": "bf16"}, "fp16.enabled = True: contradicts precision = 'bf16'"),
    ({"bf16__enabled": "auto", "fp16__enabled": False}, {"precision": "fp16"}, "contradicts precision = 'fp16'"),
    ({"scheduler__type": "WarmupLR"}, {"train": {"schedule": "cosine"}}, "contradicts train.schedule = 'cosine'"),
])  # fmt: skip
def test_a_conflict_names_both(tmp_path: Path, given: Any, run: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as found:
        load(tmp_path, config(**given), run)
    assert "ds_config.json: " in str(found.value) and message in str(found.value)


def test_equal_values_do_not_conflict(tmp_path: Path) -> None:
    run = {"train": {"max_grad_norm": "0.5", "learning_rate": "1e-4"}, "advanced": {"bucket": "4MB"}}
    ds = config(
        gradient_clipping=0.5,
        optimizer__type="AdamW",
        optimizer__params__lr=1e-4,
        zero_optimization__reduce_bucket_size=1e6,
    )
    assert load(tmp_path, ds, run).run.train.max_grad_norm == 0.5


def test_the_command_line_has_the_last_word(tmp_path: Path) -> None:
    ds = config(gradient_clipping=0.5, zero_optimization__stage=3)
    loaded = load(tmp_path, ds, None, "train.max_grad_norm=2.0", "parallel.zero=1")
    assert (loaded.run.train.max_grad_norm, loaded.run.parallel.zero) == (2.0, 1)
    assert loaded.origin_of("train.max_grad_norm") == "command line"
    assert any("train.max_grad_norm: 2 on the command line has the last word" in entry.done for entry in loaded.account)


def test_a_loaded_run_loads_again(tmp_path: Path) -> None:
    """As the library does with a Run it is given; what the config decided the first time does not contradict it."""
    ds = json.loads(EXAMPLE.read_text())
    first = load(tmp_path, ds, {"train": {"batch_size": 8, "micro_batch_size": 2}})
    assert load_run(first.run).run == first.run


@pytest.mark.parametrize(("given", "message"), [
    ({"gradient_cliping": 1.0}, "gradient_cliping = 1.0: unknown key\n  → did you mean gradient_clipping?"),
    ({"zero_optimization__stages": 3}, "did you mean zero_optimization.stage?"),
    ({"stage": 3}, "did you mean zero_optimization.stage?"),
    ({"zero_optimisation": {"stage": 3}}, "did you mean zero_optimization?"),
    ({"zero_optimization__stage": 4}, "there are stages 0 to 3"),
    ({"zero_optimization": "3"}, "neither true nor false"),
    ({"fp16": True}, "expected a block"),
    ({"fp16__enabled": True, "bf16__enabled": True}, "both enabled"),
    ({"fp16__enabled": "yes"}, "neither true nor false"),
    ({"fp16__enabled": True, "fp16__hysteresis": 1.5}, "not a whole number"),
    ({"amp__enabled": True}, "is refused: Apex"),
    ({"elasticity__enabled": True, "autotuning__enabled": True}, "autotuning: is refused"),
    ({"tensor_parallel__autotp_size": 1.5}, "not a whole number"),
    ({"tensor_parallel__tp__tp_size": 2}, "use tensor_parallel.autotp_size"),
    ({"zero_optimization__zenflow__topk_ratio": 0.1}, "ZenFlow"),
    ({"optimizer__type": "OneBitAdam"}, "1-bit Adam"),
    ({"optimizer__type": "Muon"}, "rates would not carry over"),
    ({"optimizer__type": "Adam", "optimizer__params": {"adam_w_mode": False, "weight_decay": 0.1}}, "(L2) is not here"),
    ({"optimizer__type": "Adam", "optimizer__params__bias_correction": False}, "always corrected"),
    ({"optimizer__type": "Adam", "optimizer__params__max_grad_norm": 1.0}, "use gradient_clipping"),
    ({"optimizer__type": "SGD", "optimizer__params": {"momentum": 0.9, "weight_decay": 0.1}}, "not the same"),
    ({"gradient_allreduce_op": "sum"}, "averaged over ranks"),
    ({"communication_data_type": "fp16"}, "use fp32 or bfp16"),
    ({"scheduler__type": "WarmupLRs"}, "WarmupCosineLR"),
    ({"scheduler__type": "WarmupLR", "scheduler__params__total_num_steps": 9}, "WarmupLR has no such parameter"),
    ({"scheduler__type": "OneCycle"}, "OneCycle needs it"),
    ({"zero_optimization__zeropp_loco_param": {"beta": 0.8}}, "has no beta"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
                            "offload_param": {"device": "nvme", "nvme_path": "/b"}}}, "make the two agree"),
])  # fmt: skip
def test_mistakes_are_named(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(UserError) as found:
        load(tmp_path, config(**given))
    assert str(found.value).startswith("ds_config.json: ") and message in str(found.value)


@pytest.mark.parametrize("given", [
    {"amp": {"enabled": False, "opt_level": "O1"}},
    {"elasticity": {"enabled": False}, "autotuning": {"enabled": False}},
    {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
    {"tensor_parallel": {"autotp_size": 1}},
    {"zero_optimization": {"stage": 3, "zenflow": None, "offload_param": None, "zeropp_loco_param": None}},
    {"fp16": {"enabled": False, "fp16_master_weights_and_grads": False}},
    {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.0, "amsgrad": False}}},
])  # fmt: skip
def test_what_is_switched_off_passes(tmp_path: Path, given: dict[str, Any]) -> None:
    load(tmp_path, config() | given)


def test_axes_leave_fewer_ranks_for_the_batch() -> None:
    """As in DeepSpeed: ranks that share their data count once in the batch."""
    given = {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2}
    done = translate(given, ranks=8)
    assert (done.values["parallel"]["tensor"], done.values["parallel"]["context"]) == (2, 2)
    assert (done.batch.train, done.batch.micro, done.batch.rounds) == (4, 2, 1)


def test_what_depends_on_the_stage_waits_for_it(tmp_path: Path) -> None:
    """In whatever order the keys stand; at a stage that has no use for them they have no effect, as in DeepSpeed."""
    offload = {"device": "nvme", "nvme_path": "/nvme"}
    late = {"offload_param": offload, "zero_quantized_weights": True, "zero_hpz_partition_size": 2, "stage": 3}
    run = load(tmp_path, config(zero_optimization=late)).run
    assert (run.offload.parameters, run.offload.disk) == ("disk", "/nvme")
    assert (run.parallel.quantize_weights, run.parallel.hpz_size) == (True, 2)
    run = load(tmp_path, config(zero_optimization=late | {"stage": 2})).run
    assert (run.offload.parameters, run.offload.disk) == ("none", None)
    assert (run.parallel.quantize_weights, run.parallel.hpz_size) == (False, None)


@pytest.mark.parametrize("with_run", [True, False])
def test_the_equivalent_run_says_the_same(tmp_path: Path, with_run: bool) -> None:
    """What is printed for a config loads into the same run; it names the config only for the scheduler."""
    run_file = tmp_path / "run.yaml"
    train = {"batch_size": 8, "micro_batch_size": 2, "learning_rate": 1e-4}
    run_file.write_text(yaml.safe_dump(RUN | {"ranks": 2, "train": train}))
    text = from_deepspeed(EXAMPLE, run_file if with_run else None, [] if with_run else ["ranks=2"])
    for key in paths(json.loads(EXAMPLE.read_text())):
        assert f"#   {key}: " in text
    printed = tmp_path / "printed.yaml"
    printed.write_text(text)
    loaded = load_run(printed)
    mine = loaded.run
    assert mine.parallel.zero == 3 and mine.offload.optimizer == "cpu" and loaded.notes == ()
    if with_run:
        assert mine == load_run(run_file, [f"parallel.deepspeed={EXAMPLE}"]).run

    alone = tmp_path / "ds_config.json"
    given = {
        key: value for key, value in json.loads(EXAMPLE.read_text()).items() if key not in ("scheduler", "csv_monitor")
    }
    alone.write_text(json.dumps(given | {"fp16": {"enabled": True}, "bf16": {"enabled": False}}))
    printed.write_text(from_deepspeed(alone, run_file if with_run else None, [] if with_run else ["ranks=2"]))
    loaded = load_run(printed)
    assert loaded.run.parallel.deepspeed is None and loaded.notes == ()
    assert loaded.run.loss_scale.hysteresis == 2 and "advanced:" in printed.read_text()
    if with_run:
        theirs = load_run(run_file, [f"parallel.deepspeed={alone}"]).run
        parallel = theirs.parallel.model_copy(update={"deepspeed": None})
        assert loaded.run == theirs.model_copy(update={"parallel": parallel})


@pytest.mark.parametrize(("text", "message"), [
    ('{"a": 1,}', "ds.json:1': not valid JSON"),
    ("[]", "holds a list"),
    ('{"bf16": {}, "bf16": {}}', "bf16: given twice"),
])  # fmt: skip
def test_a_file_that_is_no_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(UserError) as found:
        read_config(tmp_path / "ds.json")
    assert message in str(found.value)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    """Those that follow from another are not, and what two keys get wrong together is told once."""
    given = config(gradient_cliping=1.0, zero_optimization={"stage": 4, "overlap_com": True}, fp16=True,
                   bf16={"enabled": "yes"}, scheduler={"type": "WarmupLRs", "params": {"warmup_num_steps": 5}},
                   train_batch_size=7, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1)  # fmt: skip
    with pytest.raises(UserErrors) as found:
        load(tmp_path, given)
    text = str(found.value)
    for word in ("gradient_cliping", "stage = 4", "overlap_com ", "fp16 = True", "bf16.enabled = 'yes'", "WarmupLRs",
                 "train_batch_size = 7"):  # fmt: skip
        assert text.count(word) == 1, (word, text)
    assert len(found.value.errors) == text.count("\n  → ") == 7
    assert str(pickle.loads(pickle.dumps(found.value))) == text


def test_the_account_of_loco_and_of_a_folder_that_is_not_named(tmp_path: Path) -> None:
    offload = {"device": "nvme"}
    loco = {"zeropp_loco_param": {"err_beta": 0.8}}
    loaded = load(
        tmp_path, config(zero_optimization={"stage": 3, "offload_optimizer": offload} | loco), {"output": "o"}
    )
    told = {entry.key: entry.done for entry in loaded.account}
    assert told["zero_optimization.offload_optimizer.device"] == "offload.optimizer: disk, in o/offload"
    assert "zero_quantized_gradients" in told["zero_optimization.zeropp_loco_param"]
    assert loaded.run.parallel.error_feedback is None
    on = config(zero_optimization={"stage": 3, "zero_quantized_gradients": True} | loco)
    told = {entry.key: entry.done for entry in load(tmp_path, on).account}
    assert "err_beta without effect" in told["zero_optimization.zeropp_loco_param"]


def test_a_misspelled_file(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"did you mean .*ds_config.json\?"):
        read_config(tmp_path / "ds_confg.json")
    with pytest.raises(UserError, match="give the path"):
        read_config(tmp_path / "nofile.json")
