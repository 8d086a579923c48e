"""`deepspeed.checkpointing`: activations computed again in backward, by torch's own non-reentrant checkpoint."""

from __future__ import annotations

from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from shardwise.deepspeed.refused import refuse


def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The function's value; what it computes on the way is computed again in backward, not kept."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Checks that nothing is asked for that would have no effect: `checkpoint` needs no configuration."""
    asked = {"mpu_": mpu_, "partition_activations": partition_activations, "checkpoint_in_cpu": checkpoint_in_cpu,
             "profile": profile}  # fmt: skip
    remedies = {"checkpoint_in_cpu": 'set "activation_checkpointing": {"cpu_checkpointing": true} in the config'}
    for name, value in asked.items():
        if value:
            raise refuse(f"checkpointing.configure({name}=…)", remedies.get(name, "leave it out"))


def is_configured() -> bool:
    """Always: there is nothing to configure."""
    return True


def reset() -> None:
    """Nothing is kept between calls, so there is nothing to reset."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds every device; there is no model-parallel stream to keep apart."""
    import torch

    torch.manual_seed(seed)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed
