"""ZeRO++'s collectives against plain ones: hpZ to the bit, int8 within half a step, 4 bits without bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import plusplus
from support.ranks import run_ranks

from shardwise.nn.kernels.quantize import packed_bytes

# Ranks, ranks of a shard group, ranks of a node: one node, several, nodes of one rank, and two replicas.
LAYOUTS = [(1, 1, 1), (2, 2, 1), (2, 2, 2), (4, 4, 1), (4, 4, 2), (4, 4, 4), (4, 2, 1)]
SIZES = [1, 127, 4097, 70_000]  # below a block, not a multiple of it, padding, more than a piece
KINDS = [(False, torch.float32), (False, torch.bfloat16), (True, torch.float32), (True, torch.bfloat16)]
KINDS += [(True, torch.uint8)]  # no floats: goes as it is


@pytest.mark.parametrize(("ranks", "shard", "node"), LAYOUTS)
def test_gather(ranks: int, shard: int, node: int) -> None:
    cases = [(n, quantized, dtype) for n in SIZES for quantized, dtype in KINDS]
    for results in run_ranks(plusplus.gathers, ranks, node, shard, cases):
        for (n, quantized, dtype), result in zip(cases, results, strict=True):
            packed, two_hops = quantized and dtype.is_floating_point, node < shard
            expected = list(result["plain"])
            if two_hops:
                expected[1] = expected[0]  # the secondary shard, until it is told to forget
            for ours, plain in zip(result["ours"], expected, strict=True):
                _close(ours, plain, shard, packed)
            size = packed_bytes(n, 8) if packed else n * dtype.itemsize
            if two_hops:
                nodes = shard // node
                within = shard * size * (node > 1)  # a group of one moves nothing
                assert result["moved"] == (within + nodes * size, within, within + nodes * size)
                assert result["across"] == ((nodes - 1) * size, 0, (nodes - 1) * size)
            else:
                assert result["moved"] == (shard * size * (shard > 1),) * 3


def _close(ours: torch.Tensor, plain: torch.Tensor, shard: int, packed: bool) -> None:
    if not packed:
        assert torch.equal(ours, plain)
        return
    rows = plain.float().view(shard, -1)
    largest = torch.cat([b.abs().amax(1, keepdim=True).expand_as(b) for b in rows.split(128, dim=1)], 1)
    bound = largest * 0.51 / 127 + (rows.abs() * 2**-8 if plain.dtype == torch.bfloat16 else 0)
    assert ((ours.float().view(shard, -1) - rows).abs() <= bound).all()


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize(("ranks", "shard", "node"), LAYOUTS)
def test_reduce(ranks: int, shard: int, node: int, feedback: bool) -> None:
    """One reduction is off by what 4 bits must be; the mean of many is not: there is no bias."""
    cases: list[tuple[int, Any, int]] = [(n, op, 1) for n in SIZES for op in ("avg", "sum", 0.25)]
    cases += [(4097, "avg", 64)]
    hops = 2 if 1 < node < shard else 1
    for results in run_ranks(plusplus.reductions, ranks, node, shard, feedback, cases):
        for (n, _, repeats), result in zip(cases, results, strict=True):
            scale = result["exact"].norm()
            error = (result["one"] - result["exact"]).norm() / scale
            # A normal variable rounded to powers of two: 19% to nearest, 27% at random; a single block varies.
            assert error < (0.21 if feedback else 0.3) + (0.0 if n > 1000 else 0.25) or n == 1
            if repeats > 1:
                bias = (result["mean"] - result["exact"]).norm() / scale
                assert bias < error / (10 if feedback else 5), "at random, 64 of them make it an eighth"
            one, within = packed_bytes(n, 4), packed_bytes(n, 8)
            sent = within * shard + one * (shard // node) if hops == 2 else one * shard
            assert result["bytes"] == sent * (shard > 1)
            assert result["held"] == (2 * n * (shard // node if hops == 2 else shard) if feedback else 0)
            assert result["across"] == one * (shard // node - 1 if hops == 2 else shard - node)
