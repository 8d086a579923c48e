"""The optimizer of a DeepSpeed config, and DeepSpeed's optimizer classes, implemented by torch's.

Sharding makes special classes unnecessary: every optimizer sees only this rank's shards. `FusedAdam` is torch's fused
AdamW, and `DeepSpeedCPUAdam` the same with the host's vector instructions.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from shardwise.core.errors import UserError
from shardwise.deepspeed.refused import refuse

NO_EFFECT = ("torch_adam", "fp32_optimizer_states", "amsgrad", "set_grad_none", "cuda_aware", "comm_backend_name")
REFUSED = ("onebitadam", "zerooneadam", "onebitlamb", "lamb", "muadam", "muadamw", "musgd", "muon", "lion")


class FusedAdam(torch.optim.AdamW):
    """DeepSpeed's Adam: AdamW unless `adam_w_mode` is off, in torch's implementation."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise refuse(f"ops.adam.{type(self).__name__}(bias_correction=False)", "leave it on")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
        # torch's AdamW is its Adam with this flag on.
        for group in (self.defaults, *self.param_groups):
            group["decoupled_weight_decay"] = adam_w_mode


class DeepSpeedCPUAdam(FusedAdam):
    """The same as FusedAdam; the config's offload decides where the states are stored, not the class."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


def configured(config: dict[str, Any], parameters: Any) -> torch.optim.Optimizer | None:
    """The optimizer of the config's `optimizer` block over parameters or groups; None if there is none."""
    block = config.get("optimizer")
    if not block:
        return None
    name = str(block.get("type", ""))
    settings = dict(block.get("params") or {})
    if "max_grad_norm" in settings:
        raise UserError("optimizer.params.max_grad_norm", settings["max_grad_norm"], "is no setting of an optimizer",
                        "use gradient_clipping")  # fmt: skip
    parameters = list(parameters)
    if name.lower() in ("adam", "adamw"):
        decoupled = settings.pop("adam_w_mode", True) or name.lower() == "adamw"
        supported = {k: v for k, v in settings.items() if k not in NO_EFFECT or k == "amsgrad"}
        _check_settings(FusedAdam, supported, name)
        return FusedAdam(parameters, adam_w_mode=decoupled, **supported)
    if name.lower() in REFUSED:
        raise refuse(f"ops ({name})", "use Adam, AdamW, SGD, Adagrad, or pass an optimizer of your own to initialize")
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise UserError("optimizer.type", name, "is not known", "use Adam, AdamW, SGD, or a class of torch.optim")
    _check_settings(kind, settings, name)
    return kind(parameters, **settings)


def _check_settings(kind: type, settings: dict[str, Any], name: str) -> None:
    known = list(inspect.signature(kind).parameters)[1:]
    for key in settings:
        if key not in known:
            raise UserError(f"optimizer.params.{key}", settings[key], f"{name} does not have it",
                            f"it has {', '.join(known)}")  # fmt: skip
