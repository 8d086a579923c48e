"""`deepspeed.checkpointing`: activation recomputation by torch's non-reentrant checkpoint."""

from __future__ import annotations

from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from shardwise.deepspeed.refused import refuse


def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function; its activations are recomputed in backward instead of saved."""
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
    """Rejects settings that would have no effect: `checkpoint` needs no configuration."""
    settings = {"mpu_": mpu_, "partition_activations": partition_activations, "checkpoint_in_cpu": checkpoint_in_cpu,
             "profile": profile}  # fmt: skip
    remedies = {"checkpoint_in_cpu": 'set "activation_checkpointing": {"cpu_checkpointing": true} in the config'}
    for name, value in settings.items():
        if value:
            raise refuse(f"checkpointing.configure({name}=…)", remedies.get(name, "leave it out"))


def is_configured() -> bool:
    """Always True: there is nothing to configure."""
    return True


def reset() -> None:
    """Does nothing: no state is kept between calls."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds every device; there is no separate model-parallel stream."""
    import torch

    torch.manual_seed(seed)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed
