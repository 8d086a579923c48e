"""The parts of DeepSpeed that are not supported, each with its replacement; using one raises an error."""

from __future__ import annotations

from typing import Any

from shardwise.core.errors import UserError

_PIPELINE = "pipeline parallelism is not offered through this API"
_INFERENCE = "this API trains; for inference use `shardwise chat` or transformers with the exported model"
_MOE = "expert parallelism is not offered through this API; experts train as ordinary, sharded parameters"
_KERNELS = "use the model's own layers: they are sharded as they are"

REFUSED = {
    "PipelineModule": _PIPELINE,
    "PipelineEngine": _PIPELINE,
    "DualPipeVEngine": _PIPELINE,
    "DualPipeVModule": _PIPELINE,
    "pipe": _PIPELINE,
    "InferenceEngine": _INFERENCE,
    "DeepSpeedInferenceConfig": _INFERENCE,
    "init_inference": _INFERENCE,
    "default_inference_config": _INFERENCE,
    "inference": _INFERENCE,
    "module_inject": _INFERENCE,
    "model_implementations": _INFERENCE,
    "replace_transformer_layer": _INFERENCE,
    "DeepSpeedHybridEngine": "one engine both to train and to generate is not offered",
    "moe": _MOE,
    "DeepSpeedTransformerLayer": _KERNELS,
    "DeepSpeedTransformerConfig": _KERNELS,
    "tp_model_init": "tensor parallelism is not offered through this API",
    "set_autotp_mode": "tensor parallelism is not offered through this API",
    "sequence": "sequence parallelism is not offered through this API",
    "compression": "compression while training is not offered",
    "autotuning": "`shardwise config` shows what a run resolves to; there is no search over settings",
    "profiling": 'use torch.profiler, or "wall_clock_breakdown" in the config',
    "nvme": 'offload to disk is set in the config: "offload_optimizer": {"device": "nvme"}',
    "io": "checkpoints are written by PyTorch's distributed checkpoint",
    "linear": "low-rank layers are not offered through this API",
    "compile": "compile the model with torch.compile before initialize",
    "monitor": "write your own metrics; the monitors of the config are accounted for by initialize",
    "OnDevice": "build the model on torch.device('meta'), or inside zero.Init",
    "DeepSpeedConfig": "pass the config to initialize, as a dictionary or a path",
    "DeepSpeedConfigError": "mistakes in a config raise shardwise.core.errors.UserError",
    "TiledLinear": _KERNELS,
    "TiledLinearReturnBias": _KERNELS,
    "register_external_parameter": "use a parameter within the forward of the module that holds it",
    "unwrap_model_for_generation": "generate with zero.GatheredParameters(model.parameters()) around it, on all ranks",
    "DeepSpeedZeRoOffload": 'offload is set in the config: "offload_param"',
    "FusedLamb": "use Adam, AdamW, SGD, Adagrad or an optimizer of torch",
    "OnebitAdam": "compressed communication of this kind is not offered; see zero_quantized_gradients",
    "OnebitLamb": "compressed communication of this kind is not offered; see zero_quantized_gradients",
    "ZeroOneAdam": "compressed communication of this kind is not offered; see zero_quantized_gradients",
}


def refuse(name: str, remedy: str | None = None) -> UserError:
    """The UserError for an unsupported part of DeepSpeed; for the caller to raise."""
    return UserError(f"deepspeed.{name}", None, "is not supported by shardwise", remedy or REFUSED[name])


def missing(module: str, name: str) -> Any:
    """For a module's `__getattr__`: raises UserError for unsupported names of DeepSpeed; others are typos."""
    if name in REFUSED:
        raise refuse(name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
