"""Every key of DeepSpeed's config in one table: how it is handled here, and why.

The order is the order of translation (the stage before what depends on it). A path that ends in `.*` stands for a full
block whose keys are handled alike. docs/deepspeed.md is generated from this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.config.deepspeed import rules as r
from shardwise.config.deepspeed.batch import MICRO, ROUNDS, TRAIN, batch_rule
from shardwise.config.deepspeed.plan import Rule, Verdict

OFF = (False, None, "none", 0)


@dataclass(frozen=True)
class Key:
    """One row: the path, the verdict, our equivalent or the reason, and the rule that translates a supported key.

    `off` are the values of a rejected key that request nothing and are accepted.
    """

    path: str
    verdict: Verdict
    note: str
    rule: Rule | None = None
    off: tuple[Any, ...] = OFF
    remedy: str = "remove the key"


def honoured(path: str, note: str, rule: Rule) -> Key:
    return Key(path, "honoured", note, rule)


def idle(path: str, note: str) -> Key:
    return Key(path, "no effect", note)


def refused(path: str, note: str, remedy: str = "remove the key", off: tuple[Any, ...] = OFF) -> Key:
    return Key(path, "refused", note, off=off, remedy=remedy)


def several(prefix: str, names: str, note: str) -> list[Key]:
    """Rows of keys that share one reason."""
    return [idle(f"{prefix}.{name}", note) for name in names.split()]


def scheduled(names: str) -> list[Key]:
    """Rows of schedule parameters that our schedule takes under the same name."""
    return [
        honoured(f"scheduler.params.{name}", "of the schedule, under the same name", r.schedule_parameter)
        for name in names.split()
    ]


_Z = "zero_optimization"
_OPT, _PAR = f"{_Z}.offload_optimizer", f"{_Z}.offload_param"
_VARIANT = "the optimizers here have no such variant"
_ONE_BIT = (
    "freeze_step cuda_aware comm_backend_name var_freeze_step var_update_scaler local_step_scaler local_step_clipper "
    "max_coeff min_coeff coeff_beta factor_max factor_min factor_threshold"
)
_MEMORY = "every report has the memory in use; `metrics.jsonl`"
_NO_TENSOR_PARALLEL = "with `parallel.tensor` activations are divided along the sequence as they are"
_NO_PIPELINE = "read by PipelineModule alone, which is not here; `model` is not split into stages"

_PLAN = "which layers are cut, and how, is found on a tiny model of the class"

# Before the batch, which is divided among the ranks that see different data.
AXES = [
    honoured("tensor_parallel.autotp_size", "`parallel.tensor`; 0 and 1 = off", r.axis("parallel.tensor")),
    idle("tensor_parallel.dtype", "`precision` decides"),
    idle("tensor_parallel.tp_overlap_comm", "what overlaps is decided here, and changes no result"),
    *several("tensor_parallel", "preset_model injection_policy_tuple", _PLAN),
    idle("tensor_parallel.partition_config.*", _PLAN),
    idle("tensor_parallel.keep_module_on_host", "each rank takes its part of the model by itself"),
    refused("tensor_parallel.replace_with_kernel_inject", "those kernels are for inference"),
    refused("tensor_parallel.tp.*", "of DeepSpeed's inference", "use tensor_parallel.autotp_size"),
    refused("tensor_parallel.tensor_parallel.*", "of DeepSpeed's inference", "use tensor_parallel.autotp_size"),
    honoured("sequence_parallel_size", "`parallel.context`; 0 and 1 = off. Ranks of a group are handed full sequences",
             r.axis("parallel.context")),
]  # fmt: skip

BATCH = [
    honoured(
        TRAIN,
        "`train.batch_size`; checked against micro-batch × accumulation × ranks that see different data",
        batch_rule,
    ),
    honoured(MICRO, "`train.micro_batch_size`", batch_rule),
    honoured(ROUNDS, "`train.batch_size` / (`train.micro_batch_size` × ranks)", batch_rule),
    idle("managed_gradient_accumulation", "the loop always knows which micro-batch is the last"),
]

PRECISION = [
    honoured("fp16.enabled", "`precision: fp16`; false (with bf16 false too) = `fp32`", r.precision),
    honoured("bf16.enabled", "`precision: bf16`; false (with fp16 false too) = `fp32`", r.precision),
    honoured("bfloat16.enabled", "the old name of bf16.enabled", r.precision),
    honoured("fp16.loss_scale", "`loss_scale.value`; 0 = `dynamic`", r.loss_scale),
    honoured("fp16.initial_scale_power", "`advanced.loss_scale.initial`, 2 to this power", r.initial_scale),
    honoured("fp16.loss_scale_window", "`advanced.loss_scale.growth_interval`",
             r.to("loss_scale.growth_interval", r.count)),
    honoured("fp16.hysteresis", "`advanced.loss_scale.hysteresis`", r.to("loss_scale.hysteresis", r.count)),
    honoured("fp16.consecutive_hysteresis", "`advanced.loss_scale.consecutive_hysteresis`",
             r.to("loss_scale.consecutive_hysteresis", r.flag)),
    honoured("fp16.min_loss_scale", "`advanced.loss_scale.minimum`", r.to("loss_scale.minimum", r.number)),
    idle("fp16.auto_cast", "inputs to each block are cast with the block's weights; token ids need no cast"),
    refused("fp16.fp16_master_weights_and_grads", "master weights are fp32 here", "set it to false; bf16 states: "
            "advanced.optimizer_state: bf16"),
    idle("bf16.immediate_grad_update", "gradients are added up as they come, in fp32"),
    idle("bf16.check_grad_overflow", "a gradient that is no number ends the run at the next report, with the step"),
    refused("bf16.bf16_master_weights_and_grads", "master weights are fp32 here", "set it to false; bf16 states: "
            "advanced.optimizer_state: bf16"),
    refused("bf16.bf16_optimizer_states", "there it goes with bf16 masters, and masters are fp32 here",
            "set it to false, and advanced.optimizer_state: bf16 in the run"),
    *several("bfloat16", "immediate_grad_update check_grad_overflow", "as under bf16"),
    refused("amp.*", "Apex's amp is not here (DeepSpeed has removed it too)", "use the fp16 or bf16 block"),
    refused("torch_autocast.*", "autocast casts per operation; here weights are cast once, as they are gathered",
            "use the fp16 or bf16 block"),
    idle("data_types.grad_accum_dtype", "gradients are added up and reduced in fp32 always"),
    idle("data_types.param_dtype", "the compute type is that of the fp16 or bf16 block; masters are fp32"),
    idle("data_types.buffer_dtype", "buffers keep the type the model gives them"),
    idle("data_types.keep_in_fp32_modules", "masters are fp32, and buffers keep the type the model gives them"),
    honoured("communication_data_type", "`parallel.reduce_dtype`: fp32, or bfp16 = `bf16`; fp16 is refused",
             r.reduced_in),
    idle("seq_parallel_communication_data_type", "exchanged as they are computed"),
    idle("fp32_allreduce", "gradients are reduced in fp32 unless `parallel.reduce_dtype: bf16`"),
]  # fmt: skip

STEP = [
    honoured("gradient_clipping", "`train.max_grad_norm`; 0 = `null`", r.clip),
    honoured("steps_per_print", "`log.every`", r.steps_per_print),
    idle("prescale_gradients", "the mean is taken in fp32, where the order of division does not matter"),
    idle("gradient_predivide_factor", "the mean is taken in fp32, where the order of division does not matter"),
    honoured("gradient_allreduce_op", "`mean` is what is done; `sum` is refused",
             r.only("mean", why="gradients are averaged over ranks", remedy="use mean")),
    idle("sparse_gradients", "gradients of embeddings are reduced dense: the same values"),
    idle("disable_allgather", "DeepSpeed itself does nothing with it"),
    idle("zero_allow_untested_optimizer", "every optimizer here is tested sharded, so there is nothing to allow"),
    idle("zero_force_ds_cpu_optimizer", "no compiled CPU optimizer is needed; torch's fused one is used"),
]  # fmt: skip

OPTIMIZER = [
    honoured("optimizer.type", "`train.optimizer`: Adam and AdamW = `adamw`, Lion, SGD; any other is refused. "
             "All parameters decay: `advanced.decay_norms: true`", r.optimizer_type),
    honoured("optimizer.params.lr", "`train.learning_rate`, unless the scheduler names its own", r.learning_rate),
    honoured("optimizer.params.betas", "`train.betas`", r.betas),
    honoured("optimizer.params.eps", "`train.eps`", r.to("train.eps", r.number)),
    honoured("optimizer.params.weight_decay", "`train.weight_decay`, with `advanced.decay_norms: true`",
             r.weight_decay),
    honoured("optimizer.params.momentum", "the first of `train.betas` (SGD)", r.momentum),
    honoured("optimizer.params.adam_w_mode", "true is what is done; false is refused with weight decay",
             r.adam_w_mode),
    honoured("optimizer.params.bias_correction", "true is what is done; false is refused",
             r.only(True, why="the moments are always corrected", remedy="set it to true")),
    *[refused(f"optimizer.params.{name}", "belongs to Muon, whose rates would not carry over", off=(None,))
      for name in ("muon_lr", "adam_lr", "ns_method")],
    idle("optimizer.params.torch_adam", "torch's fused AdamW is what is used"),
    idle("optimizer.params.foreach", "torch's fused AdamW is what is used"),
    idle("optimizer.params.fused", "torch's fused AdamW is what is used"),
    idle("optimizer.params.set_grad_none", "gradients are freed after each step always"),
    idle("optimizer.params.fp32_optimizer_states", "states are fp32 unless `advanced.optimizer_state: bf16`"),
    refused("optimizer.params.amsgrad", _VARIANT),
    refused("optimizer.params.nesterov", _VARIANT),
    refused("optimizer.params.dampening", _VARIANT),
    refused("optimizer.params.max_grad_norm", "DeepSpeed refuses it too", "use gradient_clipping"),
    *[refused(f"optimizer.params.{name}", "belongs to 1-bit or LAMB optimizers, which are not here", off=())
      for name in _ONE_BIT.split()],
    idle("optimizer.legacy_fusion", "one fused optimizer serves every precision"),
]  # fmt: skip

SCHEDULER = [
    honoured("scheduler.type", "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, with DeepSpeed's own "
             "formulas; RUN.yaml itself has no such schedules", r.scheduler_type),
    *[honoured(f"scheduler.params.{name}", "`train.learning_rate`", r.schedule_peak)
      for name in ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr")],
    *scheduled("warmup_min_lr warmup_num_steps warmup_type total_num_steps warmup_min_ratio cos_min_ratio cycle_min_lr "
               "cycle_first_step_size cycle_second_step_size cycle_first_stair_count cycle_second_stair_count "
               "decay_step_size decay_lr_rate cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate "
               "lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase"),
    idle("scheduler.params.last_batch_iteration", "a resumed run knows its step"),
]  # fmt: skip

ZERO = [
    honoured(_Z, "the form of early versions: true = `parallel.zero: 1`", r.zero_as_flag),
    honoured(f"{_Z}.stage", "`parallel.zero`", r.stage),
    honoured(f"{_OPT}.device", "`offload.optimizer`; nvme = `disk`",
             r.offload_device("optimizer", 1)),
    honoured(f"{_OPT}.nvme_path", "`offload.disk`", r.nvme_path),
    honoured(f"{_OPT}.ratio", "`offload.ratio`", r.offload_ratio),
    idle(f"{_OPT}.buffer_count", "states are read ahead and written behind through a ring of four buffers"),
    idle(f"{_OPT}.pin_memory", "host memory is pinned wherever there is a GPU to copy from"),
    *several(_OPT, "pipeline_read pipeline_write pipeline", "reading, computing and writing always overlap"),
    idle(f"{_OPT}.fast_init", "states begin as zeros, which need not be written first"),
    idle(f"{_OPT}.super_offload", "states are streamed through the device and updated there, beside backward"),
    idle(f"{_OPT}.cpuadam_cores_perc", "the update runs on the device"),
    honoured(f"{_PAR}.device", "`offload.parameters`; nvme = `disk`; stage 3", r.offload_device("parameters", 3)),
    honoured(f"{_PAR}.nvme_path", "`offload.disk`", r.nvme_path),
    *several(_PAR, "buffer_count buffer_size", "shards are fetched two units ahead in the order of use"),
    idle(f"{_PAR}.max_in_cpu", "host memory holds the buffers alone"),
    idle(f"{_PAR}.pin_memory", "host memory is pinned wherever there is a GPU to copy to"),
    honoured(f"{_Z}.cpu_offload", "`offload.optimizer: cpu`; the form of early versions", r.cpu_offload("optimizer")),
    honoured(f"{_Z}.cpu_offload_param", "`offload.parameters: cpu`; early versions", r.cpu_offload("parameters")),
    honoured(f"{_Z}.cpu_offload_params", "`offload.parameters: cpu`; early versions", r.cpu_offload("parameters")),
    idle(f"{_Z}.cpu_offload_use_pin_memory", "host memory is pinned wherever there is a GPU to copy from"),
    honoured(f"{_Z}.reduce_bucket_size", "`advanced.bucket`, in bytes: elements × 4 (gradients travel in fp32)",
             r.bucket),
    honoured(f"{_Z}.allgather_bucket_size", "`advanced.bucket` at stages 0 to 2; the smaller of the two counts",
             r.bucket),
    honoured(f"{_Z}.zero_hpz_partition_size", "`parallel.hpz_size` (hpZ); 1 = off", r.hpz_size),
    honoured(f"{_Z}.zero_quantized_weights", "`parallel.quantize_weights` (qwZ)",
             r.quantize("parallel.quantize_weights")),
    honoured(f"{_Z}.zero_quantized_gradients", "`parallel.quantize_gradients` (qgZ): 4 bits; 8 within the nodes "
             "of a group of several nodes with several ranks each",
             r.quantize("parallel.quantize_gradients")),
    refused(f"{_Z}.zero_quantized_nontrainable_weights", "every weight is trained here, so none is kept quantised"),
    honoured(f"{_Z}.mics_shard_size", "`parallel.dp_shard_size` (hybrid sharding); below 1 = off", r.mics),
    idle(f"{_Z}.mics_hierarchical_params_gather", "a shard group gathers in one go"),
    honoured(f"{_Z}.zeropp_loco_param", "`advanced.error_feedback: true` (LoCo; qgZ has it by default). `err_beta` "
             "and `reset_T` have no counterpart: what is lost is added whole, and dropped at each checkpoint", r.loco),
    idle(f"{_Z}.overlap_comm", "communication overlaps with compute always"),
    idle(f"{_Z}.contiguous_gradients", "the gradients of a unit are reduced through one contiguous buffer always"),
    idle(f"{_Z}.sub_group_size", "the optimizer step runs in bounded pieces always"),
    idle(f"{_Z}.reduce_scatter", "gradients are reduce-scattered at stages 1 to 3 always; the values are the same"),
    idle(f"{_Z}.allgather_partitions", "parameters are all-gathered always; the values are the same"),
    idle(f"{_Z}.use_multi_rank_bucket_allreduce", "one reduce-scatter serves all ranks always"),
    idle(f"{_Z}.round_robin_gradients", "each parameter is divided over all ranks, so every rank copies its share"),
    idle(f"{_Z}.compute_grad_norm", "the norm is in every report"),
    idle(f"{_Z}.load_from_fp32_weights", "checkpoints hold the fp32 masters, and these are loaded"),
    idle(f"{_Z}.elastic_checkpoint", "every checkpoint loads on any number of ranks"),
    idle(f"{_Z}.ignore_unused_parameters", "a parameter without a gradient is left as it is"),
    idle(f"{_Z}.legacy_stage1", "there is one implementation of stage 1"),
    idle(f"{_Z}.parameter_alignment", "parameters are divided one by one, each aligned"),
    idle(f"{_Z}.stage3_prefetch_bucket_size",
         "`advanced.prefetch` counts units ahead of use; `advanced.bucket` bounds their size"),
    idle(f"{_Z}.stage3_param_persistence_threshold",
         "small parameters travel in the gather of their unit at no cost of their own, so none is kept whole"),
    idle(f"{_Z}.stage3_model_persistence_threshold", "no parameter is kept whole"),
    idle(f"{_Z}.stage3_max_live_parameters", "at most the unit in use and the next are whole at a time"),
    idle(f"{_Z}.stage3_max_reuse_distance", "a unit is freed after use; the last stays for backward"),
    idle(f"{_Z}.stage3_gather_16bit_weights_on_model_save", "the run ends with a whole Hugging Face folder always; "
         "`export.dtype: bf16` for 16 bits"),
    idle(f"{_Z}.stage3_gather_fp16_weights_on_model_save", "the run ends with a whole Hugging Face folder always"),
    idle(f"{_Z}.stage3_module_granularity_threshold", "units are the model's blocks, not single modules"),
    idle(f"{_Z}.stage3_use_all_reduce_for_fetch_params", "one all-gather per unit; the values are the same"),
    idle(f"{_Z}.stage3_allgather_sequential", "one all-gather per unit; `advanced.bucket` bounds its buffer"),
    *several(_Z, "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
             "max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold "
             "use_all_reduce_for_fetch_params allgather_sequential", "as with stage3_ before it"),
    idle(f"{_Z}.memory_efficient_linear", "torch's own linear layers are used"),
    idle(f"{_Z}.pipeline_loading_checkpoint", "weights are streamed into the shards always"),
    idle(f"{_Z}.override_module_apply", "models are built without memory and filled shard by shard"),
    idle(f"{_Z}.log_trace_cache_warnings", "there is no trace cache"),
    idle(f"{_Z}.enable_sanity_checks", "the model is checked before the first step always"),
    idle(f"{_Z}.save_muon_momentum_buffer_in_memory", "Muon's momentum lives where `offload.optimizer` puts it"),
    idle(f"{_Z}.leaf_module.*", "units are the model's blocks, experts included"),
    refused(f"{_Z}.zenflow.*", "ZenFlow updates a chosen part of the gradients late; that is another algorithm",
            "remove the block; offload_optimizer overlaps the host step as it is"),
    idle("allgather_size", "belongs to the form of early versions; see allgather_bucket_size"),
]  # fmt: skip

ACTIVATIONS = [
    honoured("activation_checkpointing.cpu_checkpointing", "`offload.activations: cpu` and `recompute: full`",
             r.cpu_checkpointing),
    idle("activation_checkpointing.partition_activations", _NO_TENSOR_PARALLEL),
    idle("activation_checkpointing.contiguous_memory_optimization",
         "of use with partitioned activations; watch the reserved memory in the reports"),
    idle("activation_checkpointing.number_checkpoints", "with `recompute: full` there is one per block"),
    idle("activation_checkpointing.synchronize_checkpoint_boundary", "the device is waited for at reports alone"),
    idle("activation_checkpointing.profile", "`advanced.log.breakdown: true` has the times of forward and backward"),
]  # fmt: skip

_AIO = "files are read and written in large aligned pieces by threads of our own"
IO = several(
    "aio", "block_size queue_depth single_submit overlap_events intra_op_parallelism thread_count use_gds", _AIO
)

_FLOPS = "every report has the FLOPs used as a share of the device's peak (`mfu`)"
REPORTS = [
    honoured("wall_clock_breakdown", "`advanced.log.breakdown`", r.to("log.breakdown", r.flag)),
    idle("memory_breakdown", _MEMORY),
    honoured("comms_logger.enabled", "`advanced.log.comms`", r.to("log.comms", r.flag)),
    *several("comms_logger", "verbose prof_all prof_ops debug",
             "`advanced.log.comms` counts every collective, by kind"),
    honoured("csv_monitor.enabled", "one CSV file per figure beside `metrics.jsonl`", r.csv_folder),
    honoured("csv_monitor.output_path", "the folder of these files", r.csv_folder),
    honoured("csv_monitor.job_name", "the last part of that folder", r.csv_folder),
    *several("tensorboard", "enabled output_path job_name", "the figures are in `metrics.jsonl`; `log.trackers` has "
             "TensorBoard"),
    *several("wandb", "enabled group team project", "nothing leaves the machine; the figures are in `metrics.jsonl`"),
    *several("comet", "enabled project workspace api_key experiment_name experiment_key mode online "
             "samples_log_interval", "nothing leaves the machine; the figures are in `metrics.jsonl`"),
    *several("flops_profiler", "enabled profile_step module_depth top_modules detailed output_file "
             "recompute_fwd_factor", _FLOPS),
    idle("dump_state", "`shardwise config` shows every value, and each checkpoint holds the resolved run"),
    idle("log_level", "ranks log in full to `logs/`"),
    idle("timers.*", "throughput is in every report"),
]  # fmt: skip

CHECKPOINT = [
    idle("checkpoint.tag_validation", "a checkpoint is named by its step, which all ranks share"),
    idle("checkpoint.load_universal", "every checkpoint loads on any number of ranks and at any stage"),
    refused("checkpoint.use_node_local_storage", "a checkpoint is one folder that all hosts see",
            "set it to false and use a shared folder"),
    idle("checkpoint.parallel_write.pipeline_stage", "every rank writes its own shards always"),
    idle("checkpoint.checkpoint_serialization", "checkpoints have one form"),
    idle("checkpoint.writer.*", "checkpoints are written in the background by threads of our own"),
    refused("datastates_ckpt.*", "that checkpoint engine is not here; checkpoints are written in the background"),
    refused("nebula.*", "that service is not here (DeepSpeed has removed it too)"),
    idle("dataloader_drop_last", "the last batch of an epoch takes what is left: nothing is dropped or repeated"),
    idle("disable_python_gc", "the collector is left alone"),
    idle("vocabulary_size", "DeepSpeed only warns by it"),
]  # fmt: skip

OTHERS = [
    refused("sparse_attention.*", "block-sparse attention is not here (DeepSpeed has removed it too)"),
    refused("progressive_layer_drop.*", "layers are never dropped (DeepSpeed has removed it too)"),
    refused("eigenvalue.*", "belongs to quantised training, which is not here"),
    refused("quantize_training.*", "quantised training is not here"),
    refused("compression_training.*", "compression while training is not here"),
    refused("weight_quantization.*", "it is for inference"),
    refused("curriculum_learning.*", "sequences come in one seeded order; there is no curriculum"),
    refused("data_efficiency.*", "there is neither curriculum nor token dropping"),
    refused("elasticity.*", "the batch is fixed; a run may go on with another number of ranks all the same",
            "remove the block and give the batch by train_batch_size"),
    refused("autotuning.*", "nothing is tried out before the run", "remove the block; micro_batch_size: auto chooses"),
    refused("hybrid_engine.*", "it serves generation while training (RLHF), which is not here"),
    refused("expert_parallel.*", "a setting of RUN.yaml here", "remove the block, and set parallel.expert"),
    idle("use_data_before_expert_parallelism", "ranks with other experts are neighbours (`parallel.expert`)"),
    idle("pipeline.*", _NO_PIPELINE),
    idle("compile.*", "DeepSpeed's own graph passes, which change no result; ours is `compile`"),
    refused("graph_harvesting", "captured graphs are not here (DeepSpeed has removed it too)"),
]  # fmt: skip

SECTIONS: dict[str, list[Key]] = {
    "Axes": AXES,
    "Batch": BATCH,
    "Precision": PRECISION,
    "Step and communication": STEP,
    "ZeRO": ZERO,
    "Optimizer": OPTIMIZER,
    "Scheduler": SCHEDULER,
    "Activation checkpointing": ACTIVATIONS,
    "Asynchronous I/O": IO,
    "Reports": REPORTS,
    "Checkpoints and data": CHECKPOINT,
    "Others": OTHERS,
}
TABLE: dict[str, Key] = {key.path: key for keys in SECTIONS.values() for key in keys}
