"""GB/s of each quantisation kernel against a plain copy on the same card, and what quantising does to the numbers.

    python benchmarks/quantize.py [--millions 256]

GB/s counts the bytes that must be read and written (for a copy: twice its size); the share is of the copy's rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from shardwise.nn.kernels.pack_float8 import lay_out, pack, unpack_into
from shardwise.nn.kernels.quantize import (
    Bits,
    dequantize_into,
    packed_bytes,
    quantize,
    requantize_sum,
    sum_dequantized_into,
)

PEERS = 8


def seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Median time on the device."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=256, help="elements, in millions")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: the kernels measured here run on one")
    n = args.millions << 20
    gradients = torch.randn(n, device="cuda") * torch.randn(n, device="cuda").abs()
    weights = torch.randn(n, device="cuda").mul_(0.02).to(torch.bfloat16)
    target = torch.empty_like(weights)
    print(f"{torch.cuda.get_device_name()}, {args.millions}M elements; blocks of 128, bf16 scales")
    copy = 2 * weights.nbytes / seconds(lambda: target.copy_(weights)) / 1e9
    print(f"{'copy (bf16)':48} {copy:7.0f} GB/s")

    def show(name: str, moved: int, work: Callable[[], object]) -> None:
        rate = moved / seconds(work) / 1e9
        print(f"{name:48} {rate:7.0f} GB/s  {rate / copy:5.1%} of the copy")

    row, scale = lay_out([(n, 0)]), torch.full((1,), 1e-3, device="cuda")
    codes = pack(weights, row, scale.reciprocal())
    show("pack bf16 → fp8", weights.nbytes + row.bytes, lambda: pack(weights, row, scale.reciprocal()))
    show("unpack fp8 → bf16", weights.nbytes + row.bytes, lambda: unpack_into(target, codes, row, scale))
    bits: Bits
    for bits in (8, 4):
        size = packed_bytes(n, bits)
        packed = quantize(weights, bits)
        show(f"quantise bf16 → int{bits}", weights.nbytes + size, lambda bits=bits: quantize(weights, bits))
        show(f"quantise fp32 → int{bits}, random rounding", gradients.nbytes + size,
             lambda bits=bits: quantize(gradients, bits, 1))  # fmt: skip
        show(f"dequantise int{bits} → bf16", weights.nbytes + size,
             lambda bits=bits, packed=packed: dequantize_into(target, packed, bits))  # fmt: skip
        part = n // PEERS
        peers = quantize(gradients.view(PEERS, 1, part), bits, 1)
        one, total = packed_bytes(part, bits), torch.empty(1, part, device="cuda")
        show(f"sum of {PEERS} int{bits} → int{bits}, random rounding", peers.nbytes + one,
             lambda b=bits, peers=peers, part=part: requantize_sum(peers, part, b, b, 1 / PEERS, 1))  # fmt: skip
        show(f"sum of {PEERS} int{bits} → fp32", peers.nbytes + 4 * part,
             lambda bits=bits, peers=peers, out=total: sum_dequantized_into(out, peers, bits, 1 / PEERS))  # fmt: skip
    print("error of one round trip, as a share of the input's norm:")
    for name, x in (("weights (normal)", weights.float()), ("gradients (heavy-tailed)", gradients)):
        for bits, seed in ((8, None), (4, None), (4, 1)):
            out = torch.empty_like(x)
            dequantize_into(out, quantize(x, bits, seed), bits)
            how = "to nearest" if seed is None else "at random"
            print(f"  {name:26} int{bits} {how:11} {((out - x).norm() / x.norm()).item():.4f}")


if __name__ == "__main__":
    main()
