"""DeepSpeed's memory estimators, under their own names and signatures, with what shardwise really holds.

Bytes per parameter with bf16 compute and fp32 masters, for N ranks (measured, see `tests/zero/test_account.py`):
master and two moments 12/N; in a step, stage 2 adds 2 (gathered weights) + 4/N (gradients), stage 3 4/N and the
largest layer's 2 (gathered) + 2 (gradient). With the optimizer offloaded, the moments and the low halves of the masters
(10) are on the host, and the high halves (2) stay with the gradients; with the parameters offloaded those go too.
Activations and the allocator's slack are not in it. `additional_buffer_factor` multiplies the host's figure only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

GB = 2**30
MASTER_AND_MOMENTS, GRADIENT, GATHERED, LAYER = 12, 4, 2, 4
OFFLOADED, HIGH_HALF = 10, 2  # of the 12, where the optimizer is offloaded
BUILT = 4  # of the fp32 model that every rank builds before it is sharded, unless zero.Init is used


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of host memory per node and of device memory per GPU."""
    ranks = num_gpus_per_node * num_nodes
    built = BUILT * total_params * num_gpus_per_node
    if cpu_offload:
        device = GATHERED * total_params + (HIGH_HALF + GRADIENT) * total_params // ranks
        host = max(built, OFFLOADED * total_params // num_nodes)
    else:
        device = GATHERED * total_params + (MASTER_AND_MOMENTS + GRADIENT) * total_params // ranks
        host = built
    return int(host * additional_buffer_factor), int(device)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes of host memory per node, of device memory per GPU, and of the largest layer."""
    ranks, layer = num_gpus_per_node * num_nodes, LAYER * largest_layer_params
    built = BUILT * (largest_layer_params if zero_init else total_params) * num_gpus_per_node
    states, kept = MASTER_AND_MOMENTS + GRADIENT, HIGH_HALF + GRADIENT
    if cpu_offload:
        device = layer + (0 if cpu_offload_params else kept * total_params // ranks)
        host = max(built, (OFFLOADED + (kept if cpu_offload_params else 0)) * total_params // num_nodes)
    else:
        device, host = layer + states * total_params // ranks, built
    return int(host * additional_buffer_factor), int(device), layer


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the needs of stage 2 for a model, with and without offload."""
    total, _ = model_to_params(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the needs of stage 2 for a number of parameters, with and without offload."""
    rows = []
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        rows.append((host, device, f"offload_optimizer={_place(offload)}"))
    _print(f"stage 2, {total_params / 1e6:,.0f}M parameters", num_nodes, num_gpus_per_node, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the needs of stage 3 for a model, with and without offload."""
    estimate_zero3_model_states_mem_needs_all_cold(
        *model_to_params(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the needs of stage 3 for a number of parameters, with and without offload and zero.Init."""
    rows = []
    for offload, parameters in ((True, True), (True, False), (False, False)):
        for init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, num_gpus_per_node, num_nodes, offload, parameters, init,
                additional_buffer_factor,
            )  # fmt: skip
            options = f"offload_param={_place(parameters)}, offload_optimizer={_place(offload)}, zero_init={int(init)}"
            rows.append((host, device, options))
    title = f"stage 3, {total_params / 1e6:,.0f}M parameters, {largest_layer_params / 1e6:,.0f}M in the largest layer"
    _print(title, num_nodes, num_gpus_per_node, rows)


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """Parameters of a model (shared ones once) and of its largest layer: of a module's own, not its children's."""
    own: Callable[[Any], int] = lambda module: sum(p.numel() for p in module.parameters(recurse=False))  # noqa: E731
    return sum(p.numel() for p in model.parameters()), max(own(module) for module in model.modules())


def _place(offloaded: bool) -> str:
    return "cpu" if offloaded else "none"


def _print(title: str, nodes: int, gpus: int, rows: list[tuple[int, int, str]]) -> None:
    print(f"Memory for parameters, optimizer states and gradients: {title}; {nodes} nodes, {gpus} GPUs per node.")
    print("  per CPU  |  per GPU |   Options")
    for host, device, options in rows:
        print(f"{host / GB:8.2f}GB |{device / GB:7.2f}GB | {options}")
