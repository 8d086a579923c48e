"""How fast the hardware could be, and how much work a token is: the two halves of model FLOPs utilisation (MFU).

An MFU against a wrong peak is worse than none, so a device counts only when its whole name is known: laptop parts,
MIG slices, virtual GPUs and regional variants ("RTX 4090 D") share a prefix with a known device but not its speed.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class _Peak(NamedTuple):
    """Dense peak in TFLOP/s, per device as torch counts devices; None: the format is not supported or not published."""

    name: str  # a regular expression for the whole device name, without the vendor's prefix
    bf16: float | None
    fp16: float | None
    fp32: float | None


# Figures: the vendors' datasheets and architecture whitepapers, dense (a figure given "with sparsity" is halved).
#   bf16, fp16: tensor or matrix cores accumulating in fp32, as training does. GeForce runs that at half the rate of
#               fp16 accumulation, hence 165.2 and not 330.3 for the RTX 4090.
#   fp32:       true fp32 with TF32 off: CUDA cores at NVIDIA, fp32 matrix cores at AMD.
# NVIDIA: datasheets of each data-centre card and of the RTX A-series and RTX 6000 Ada; GeForce: the whitepapers of
#         Ampere GA102, Ada and RTX Blackwell; B100 to GB300: Blackwell and HGX datasheets; A10G: the datasheet by AWS.
# AMD:    Instinct MI100 to MI355X datasheets. MI250 and MI250X are two devices to torch: half a card each.
_PEAKS = (
    _Peak(r"B300( SXM6( AC)?)?", 2250, 2250, 75),
    _Peak(r"B200", 2250, 2250, 75),
    _Peak(r"B100", 1750, 1750, 60),
    _Peak(r"GB300", 2500, 2500, None),
    _Peak(r"GB200", 2500, 2500, 80),
    _Peak(r"GH200( \d+GB?)?( HBM3E?)?", 989.4, 989.4, 66.9),
    _Peak(r"H200", 989.4, 989.4, 66.9),
    _Peak(r"H200 NVL", 835.5, 835.5, 60),
    _Peak(r"H100 (80|96)GB HBM3|H100 SXM5( (80|96)GB)?", 989.4, 989.4, 66.9),
    _Peak(r"H100 PCIE|H100 80GB HBM2E", 756, 756, 51.2),
    _Peak(r"H100 NVL", 835.5, 835.5, 60),
    _Peak(r"H800( 80GB HBM3)?", 989.4, 989.4, 66.9),
    _Peak(r"H800 PCIE", 756, 756, 51.2),
    _Peak(r"H20(-3E)?", 148, 148, 44),
    _Peak(r"A[18]00([- ](SXM4|PCIE))?([- ](40|80)GB)?( PCIE)?", 312, 312, 19.5),
    _Peak(r"A30", 165, 165, 10.3),
    _Peak(r"A40", 149.7, 149.7, 37.4),
    _Peak(r"A10", 125, 125, 31.2),
    _Peak(r"A10G", 70, 70, 31.5),
    _Peak(r"L4", 121, 121, 30.3),
    _Peak(r"L20", 119.5, 119.5, 59.8),
    _Peak(r"L40", 181.05, 181.05, 90.5),
    _Peak(r"L40S", 362.05, 362.05, 91.6),
    _Peak(r"V100-SXM2-(16|32)GB", None, 125, 15.7),
    _Peak(r"V100-PCIE-(16|32)GB", None, 112, 14),
    _Peak(r"V100S-PCIE-32GB", None, 130, 16.4),
    _Peak(r"T4", None, 65, 8.1),
    _Peak(r"RTX A6000", 154.8, 154.8, 38.7),
    _Peak(r"RTX A5000", 111.1, 111.1, 27.8),
    _Peak(r"RTX 6000 ADA GENERATION", 364.2, 364.2, 91.1),
    _Peak(r"RTX 5090", 209.5, 209.5, 104.8),
    _Peak(r"RTX 5080", 112.6, 112.6, 56.3),
    _Peak(r"RTX 4090", 165.2, 165.2, 82.6),
    _Peak(r"RTX 4080", 97.5, 97.5, 48.7),
    _Peak(r"RTX 3090 TI", 80, 80, 40),
    _Peak(r"RTX 3090", 71, 71, 35.6),
    _Peak(r"MI355X", 2516.6, 2516.6, 157.3),
    _Peak(r"MI350X", 2306.9, 2306.9, 144.2),
    _Peak(r"MI3(00|25)X", 1307.4, 1307.4, 163.4),
    _Peak(r"MI300A", 980.6, 980.6, 122.6),
    _Peak(r"MI250X", 191.5, 191.5, 47.9),
    _Peak(r"MI250", 181.05, 181.05, 45.3),
    _Peak(r"MI210", 181, 181, 45.3),
    _Peak(r"MI100", 92.3, 184.6, 46.1),
)

_VENDOR = re.compile(r"AMD INSTINCT |(NVIDIA )?(GEFORCE |TESLA )?")
_FORMATS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16",
            "fp32": "fp32", "float32": "fp32", "float": "fp32"}  # fmt: skip


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Returns the dense peak in FLOP/s of one device by the name torch reports, or None where it is not known."""
    column = _FORMATS.get(dtype.removeprefix("torch."))
    if column is None:
        return None
    name = " ".join(device_name.upper().split())
    prefix = _VENDOR.match(name)
    model = name[prefix.end() :] if prefix else name
    for peak in _PEAKS:
        if re.fullmatch(rf"(?:{peak.name})(?: OAM)?", model):
            figure: float | None = getattr(peak, column)
            return None if figure is None else figure * 1e12
    return None


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
    """Returns the FLOPs that training spends on one token, forward and backward, recomputation not counted.

    `embedding_parameters` are those that are looked up and never multiplied: the input embedding, but not an output
    head, and nothing where head and embedding are one tied matrix. `hidden` is heads x head size. Of `frozen`
    parameters no gradient is computed. A token goes through one of an encoder–decoder's two `stacks`, taken to be as
    large and as much used as the other.
    """
    # Each weight is one multiply-add (2 FLOPs) forward; backward does it twice, for inputs and for weights: 2 x 3 = 6.
    matmul = (6 * (parameters - embedding_parameters) - 2 * max(0, frozen - embedding_parameters)) / stacks
    # Per layer QK^T and AV are each sequence x hidden multiply-adds: 2 x 2 FLOPs, x 3 for forward and backward = 12,
    # halved because a causal token sees on average half of the sequence.
    attention = (6 if causal else 12) * layers * hidden * sequence_length
    return float(matmul + attention)
