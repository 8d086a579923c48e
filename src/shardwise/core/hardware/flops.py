"""Peak hardware speed and FLOPs per token: the two halves of model FLOPs utilisation (MFU).

An MFU against a wrong peak is worse than none, so a device counts only when its full name is known: laptop parts,
MIG slices, virtual GPUs and regional variants ("RTX 4090 D") share a prefix with a known device but not its speed.
"""

from __future__ import annotations

from shardwise.core.hardware.specs import peak_of

_FORMATS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16",
            "fp32": "fp32", "float32": "fp32", "float": "fp32"}  # fmt: skip


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Returns the dense peak in FLOP/s of one device by the name torch reports, or None if it is not known."""
    column = _FORMATS.get(dtype.removeprefix("torch."))
    return None if column is None else peak_of(device_name, column)


def flops_per_token(
    parameters: int,
    embedding_parameters: int,
    layers: int,
    hidden: int,
    sequence_length: int,
    frozen: int = 0,
    stacks: int = 1,
    causal: bool = True,
) -> float:
    """Returns the FLOPs that training spends on one token, forward and backward, without recomputation.

    `embedding_parameters` are those that are looked up and never multiplied: the input embedding, but not an output
    head, and nothing if head and embedding are tied. `hidden` is heads x head size. `frozen` parameters get no
    gradient. A token goes through one of an encoder–decoder's two `stacks`, assumed to be of equal size and use.
    """
    # Each weight is one multiply-add (2 FLOPs) forward; backward does it twice, for inputs and for weights: 2 x 3 = 6.
    matmul = (6 * (parameters - embedding_parameters) - 2 * max(0, frozen - embedding_parameters)) / stacks
    # Per layer QK^T and AV are each sequence x hidden multiply-adds: 2 x 2 FLOPs, x 3 for forward and backward = 12,
    # halved because a causal token sees on average half of the sequence.
    attention = (6 if causal else 12) * layers * hidden * sequence_length
    return float(matmul + attention)
