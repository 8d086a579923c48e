"""Asks an installed DeepSpeed for its learning rates, momenta and loss scales, for the tests to hold ours to.

    PYTHON_WITH_DEEPSPEED benchmarks/deepspeed_reference.py > tests/optim/deepspeed_reference.json

Runs on a CPU, without compiled ops. The tests then need no DeepSpeed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
UPDATES, PEAK = 60, 2e-3

# (type, DeepSpeed's parameters): every parameter takes a value that is not its default somewhere.
SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_max_lr": PEAK, "warmup_num_steps": 20}),
    ("WarmupLR", {"warmup_min_lr": 1e-4, "warmup_max_lr": PEAK, "warmup_num_steps": 7, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_max_lr": PEAK, "warmup_num_steps": 1, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": UPDATES, "warmup_max_lr": PEAK, "warmup_num_steps": 10}),
    ("WarmupDecayLR", {"total_num_steps": 40, "warmup_min_lr": 1e-4, "warmup_max_lr": PEAK, "warmup_num_steps": 9,
                       "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 10, "warmup_max_lr": PEAK, "warmup_num_steps": 20}),
    ("WarmupCosineLR", {"total_num_steps": UPDATES, "warmup_num_steps": 10}),
    ("WarmupCosineLR", {"total_num_steps": 45, "warmup_num_steps": 8, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05,
                        "warmup_type": "linear"}),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": PEAK, "cycle_first_step_size": 10}),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": PEAK, "cycle_first_step_size": 12,
                  "cycle_second_step_size": 7, "decay_step_size": 5, "decay_lr_rate": 0.5, "cycle_min_mom": 0.85,
                  "cycle_max_mom": 0.95, "decay_mom_rate": 0.001}),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": PEAK, "cycle_first_step_size": 12,
                  "cycle_first_stair_count": 4, "cycle_second_stair_count": 3, "cycle_momentum": False}),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": PEAK, "cycle_first_step_size": 9, "cycle_second_step_size": 0,
                  "cycle_first_stair_count": 3}),
    ("LRRangeTest", {"lr_range_test_min_lr": PEAK, "lr_range_test_step_size": 7, "lr_range_test_step_rate": 2.0}),
    ("LRRangeTest", {"lr_range_test_min_lr": PEAK, "lr_range_test_step_size": 7, "lr_range_test_staircase": True}),
]  # fmt: skip
SCALERS: list[dict[str, Any]] = [
    {"init_scale": 2.0**16, "scale_window": 4, "min_scale": 1, "delayed_shift": 1, "consecutive_hysteresis": False},
    {"init_scale": 2.0**16, "scale_window": 4, "min_scale": 1, "delayed_shift": 2, "consecutive_hysteresis": False},
    {"init_scale": 2.0**16, "scale_window": 3, "min_scale": 1, "delayed_shift": 3, "consecutive_hysteresis": True},
    {"init_scale": 2.0**4, "scale_window": 5, "min_scale": 4, "delayed_shift": 1, "consecutive_hysteresis": False},
]


def rates(kind: str, params: dict[str, Any]) -> dict[str, Any]:
    """The rate and first beta that each update would run with: the engine steps the schedule after the optimizer."""
    import torch
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK, betas=(0.9, 0.999))
    schedule = getattr(lr_schedules, kind)(optimizer, **params)
    found: dict[str, Any] = {"type": kind, "params": params, "rates": [], "momenta": []}
    for _ in range(UPDATES):
        found["rates"].append(optimizer.param_groups[0]["lr"])
        found["momenta"].append(optimizer.param_groups[0]["betas"][0])
        optimizer.step()
        schedule.step()
    return found


def scales(settings: dict[str, Any]) -> dict[str, Any]:
    """The loss scale that each step runs with, under overflows drawn at random; ends where DeepSpeed gives up."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler, draw = DynamicLossScaler(**settings), random.Random(0)
    overflows, found, failed = [], [], None
    for step in range(80):
        overflow = draw.random() < (0.2 if step < 60 else 0.9)
        found.append(scaler.cur_scale)
        overflows.append(overflow)
        try:
            scaler.update_scale(overflow)
        except Exception:
            failed = step
            break
    return {"settings": settings, "overflows": overflows, "scales": found, "failed": failed}


def main() -> None:
    """Prints the reference as JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed
        import torch

        deepspeed.init_distributed(
            dist_backend="gloo", auto_mpi_discovery=False, rank=0, world_size=1,
            init_method=f"file:///tmp/deepspeed_reference_{os.getpid()}",
        )  # fmt: skip
        versions = f"DeepSpeed {deepspeed.__version__}, torch {torch.__version__}"
        result = {
            "made by": f"benchmarks/deepspeed_reference.py with {versions}",
            "peak": PEAK,
            "updates": UPDATES,
            "schedules": [rates(kind, params) for kind, params in SCHEDULES],
            "scalers": [scales(settings) for settings in SCALERS],
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
