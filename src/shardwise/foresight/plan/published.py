"""Memory formulas that others have published, and their figures: what our own accounts are compared with.

ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054). Mixed-precision Adam holds 2 bytes of parameters, 2 of gradients and
K = 12 of optimizer states (fp32 master, momentum, variance) per parameter. Of Ψ parameters on N devices, one holds

    stage 0   (2 + 2 + K) Ψ
    stage 1   (2 + 2) Ψ + K Ψ/N
    stage 2   2 Ψ + (2 + K) Ψ/N
    stage 3   (2 + 2 + K) Ψ/N

Activations of a GPT-2-like model are about 12 x hidden x batch x sequence x layers elements: 60 GB in fp16 for 1.5B
parameters at 32 rows of 1K. Recomputation leaves about those of √layers: 8.7 GB, which the paper gives as about 8.

DeepSpeed's estimators (their documentation, "Memory Requirements"): functions of the same names and signatures, written
from the formulas given there. They describe DeepSpeed, with GB meaning 2^30 bytes; what shardwise itself holds is told
by `shardwise plan`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

GB = 10**9
K = 12  # bytes per parameter of Adam's states in mixed precision
PARAMETER = GRADIENT = 2

GIB = 2**30
BUILT = 4  # bytes per parameter of the fp32 model that every process builds on the host
STATES = 16  # fp32: parameters, gradients, momentum, variance
HALF = 2  # the fp16 parameters


def zero_model_states(stage: int, parameters: float, devices: int, optimizer: float = K) -> float:
    """Bytes of parameters, gradients and optimizer states on one device, by the ZeRO paper's formulas."""
    assert stage in (0, 1, 2, 3), stage
    held = ((PARAMETER, 3), (GRADIENT, 2), (optimizer, 1))  # with the stage that divides each
    return sum(size * parameters / (devices if stage >= divided else 1) for size, divided in held)


def activations(hidden: int, layers: int, sequence: int, batch: int, recompute: bool = False) -> float:
    """Bytes of fp16 activations of a GPT-2-like model, by the ZeRO paper's estimate; with `recompute`, of √layers."""
    return 2.0 * 12 * hidden * batch * sequence * (layers**0.5 if recompute else layers)


def estimate_zero2_model_states_mem_needs(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes that DeepSpeed's ZeRO-2 needs: of host memory per node, and of device memory per GPU."""
    built = BUILT * num_gpus_per_node
    if cpu_offload:
        host = max(built, STATES)
        device = HALF * total_params
    else:
        host = built
        device = 4 * total_params + STATES * total_params / (num_nodes * num_gpus_per_node)
    return int(total_params * host * additional_buffer_factor), int(device)


def estimate_zero3_model_states_mem_needs(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes that DeepSpeed's ZeRO-3 needs: of host memory per node, of device memory per GPU, of the largest layer."""
    layer = 4 * largest_layer_params  # gathered parameters and their gradients, 2 bytes each
    share = total_params / (num_nodes * num_gpus_per_node)
    built = BUILT * num_gpus_per_node
    if cpu_offload:
        states = STATES + (HALF if cpu_offload_params else 0)
        device = layer + (0 if cpu_offload_params else HALF * share)
        host = total_params * max(0 if zero_init else built, states / num_nodes)
    else:
        device = layer + (STATES + HALF) * share
        host = (largest_layer_params if zero_init else total_params) * built
    return int(host * additional_buffer_factor), int(device), int(layer)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints what DeepSpeed's ZeRO-2 needs for a model, with and without offload."""
    total, _ = model_to_params(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints what DeepSpeed's ZeRO-2 needs for a number of parameters, with and without offload."""
    rows = []
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        rows.append((host, device, f"offload_optimizer={_place(offload).strip()}"))
    _print(f"{total_params / 1e6:.0f}M total params", num_nodes, num_gpus_per_node, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints what DeepSpeed's ZeRO-3 needs for a model, with and without offload and zero.Init."""
    estimate_zero3_model_states_mem_needs_all_cold(
        *model_to_params(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints what DeepSpeed's ZeRO-3 needs for a number of parameters, with and without offload and zero.Init."""
    rows = []
    for offload, parameters in ((True, True), (True, False), (False, False)):
        for init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, num_gpus_per_node, num_nodes, offload, parameters, init,
                additional_buffer_factor,
            )  # fmt: skip
            options = f"offload_param={_place(parameters)}, offload_optimizer={_place(offload)}, zero_init={init:d}"
            rows.append((host, device, options))
    size = f"{total_params / 1e6:.0f}M total params, {largest_layer_params / 1e6:.0f}M largest layer params"
    _print(size, num_nodes, num_gpus_per_node, rows)


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """Parameters of a model (shared ones once) and of its largest layer: a module's own, not its children's."""
    layers = []
    for module in model.modules():
        layers.append(sum(p.numel() for p in module.parameters(recurse=False)))
    return sum(p.numel() for p in model.parameters()), max(layers)


def _place(offloaded: bool) -> str:
    return "cpu " if offloaded else "none"


def _print(size: str, nodes: int, gpus: int, rows: list[tuple[int, int, str]]) -> None:
    """The table in DeepSpeed's layout: scripts may look for its figures by column."""
    plurals = ("" if nodes == 1 else "s", "" if gpus == 1 else "s")
    print("DeepSpeed's estimate of the memory for parameters, optimizer states and gradients:")
    print(f"HW: {nodes} node{plurals[0]}, {gpus} GPU{plurals[1]} per node.")
    print(f"SW: {size}.")
    print("  per CPU  |  per GPU |   Options")
    for host, device, options in rows:
        print(f"{host / GIB:8.2f}GB |{device / GIB:7.2f}GB | {options}")
