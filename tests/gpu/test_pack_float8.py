"""Packed weights on a card: the kernels' bytes are the plain way's, and compiled layers round to the codes sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import float8
from support.ranks import run_ranks
from support.tiny import LLAMA, tiny_run, tokenizer_folder

from shardwise.nn.kernels.float8 import FORWARD, inverse_for, largest_of, scale_for
from shardwise.nn.kernels.pack_float8 import TILE, lay_out, pack, unpack_into
from shardwise.nn.kernels.transposed_round import rounded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROWS = {
    "aligned": [(64, -1), (4096, 0), (16, -1), (2 * TILE + 32, 1), (16, 2)],
    "odd": [(7, -1), (48, 0), (3, -1), (TILE + 5, 1), (5, -1), (0, 1), (1, 2)],
    "one": [(TILE, 0)],
    "none": [(33, -1)],
}


@pytest.mark.parametrize("name", ROWS)
def test_the_kernels_are_the_plain_way(name: str) -> None:
    torch.manual_seed(0)
    row = lay_out(ROWS[name])
    x = torch.randn(2, 3, row.elements).bfloat16()
    x[0, 0, 1], x[0, 0, 2] = -0.0, float("nan")
    largest = torch.tensor([2.0, 3.25, 0.5])  # some values are larger, and are cut off
    inverse, scales = inverse_for(largest), scale_for(largest)
    plain = torch.stack([torch.stack([pack(one, row, inverse) for one in two]) for two in x])
    packed = torch.stack([torch.stack([pack(one, row, inverse.cuda()) for one in two]) for two in x.cuda()])
    assert torch.equal(packed.cpu(), plain)
    for turned in (False, True):
        shape = (3, 2) if turned else (2, 3)
        outs = [torch.empty(*shape, row.elements, dtype=torch.bfloat16, device=d) for d in ("cpu", "cuda")]
        views = [out.transpose(0, 1) if turned else out for out in outs]
        unpack_into(views[0], plain, row, scales)
        unpack_into(views[1], packed, row, scales.cuda())
        bits = [torch.where(out.isnan(), 0.0, out.cpu()).view(torch.int16) for out in (outs[0], outs[1].cpu())]
        assert torch.equal(*bits)  # a nan is one, whatever its bits
        assert torch.equal(outs[0].isnan(), outs[1].cpu().isnan())


def _codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As a layer rounds its weight."""
    inverse = inverse_for(largest_of(x))
    return rounded(x, inverse, FORWARD), inverse


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_rounding_again_finds_the_same_codes(compiled: bool) -> None:
    """Every bf16 number, for every largest value of some exponents; a compiler divides in its own way."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()]
    codes = torch.compile(_codes, dynamic=False) if compiled else _codes
    wrong = torch.zeros(3, device="cuda", dtype=torch.int64)
    for exponent in (-60, -41, -40, -4, 0, 7):
        for mantissa in range(128):
            largest = (1 + mantissa / 128) * 2.0**exponent
            x = values.clamp(-largest, largest)[None]
            row, inverse = lay_out([(x.numel(), 0)]), inverse_for(largest_of(x))
            again = torch.empty_like(x)
            unpack_into(again, pack(x[0], row, inverse[None])[None], row, scale_for(largest_of(x))[None])
            (a, a_inverse), (b, b_inverse) = codes(x), codes(again)
            wrong[0] += (a.view(torch.uint8) != b.view(torch.uint8)).sum()
            wrong[1] += (a_inverse != b_inverse).sum()
            wrong[2] += (a_inverse != inverse).sum()
    print(f"\ncompiled {compiled}: codes, inverses, inverses beside the gather's: {wrong}")
    assert not wrong.any()


@pytest.mark.parametrize("more", [{}, {"compile": True}, {"offload__optimizer": "cpu"}], ids=str)
def test_two_ranks_of_one_card_train_the_same(more: dict[str, Any], tmp_path: Path) -> None:
    """Through gloo: gathers in fp8 and in bf16, to the bit."""
    wide = LLAMA | {"hidden_size": 256, "intermediate_size": 512}
    model, made = {"config": wide, "tokenizer": tokenizer_folder(tmp_path / "tokenizer")}, {}
    for gather in ("bf16", "fp8"):
        run = tiny_run(tmp_path, model, parallel={"zero": 3}, precision="bf16", device="cuda", backend="gloo",
                       fp8={"recipe": "tensorwise", "min_features": 16, "gather": gather},
                       train__steps=4, data__eval="5%",
                       train__micro_batch_size=2, train__eval_every=2, output=str(tmp_path / gather),
                       **more)  # fmt: skip
        made[gather] = run_ranks(float8.train_and_count, 2, run)[0]
    a, b = made["bf16"], made["fp8"]
    assert (a["losses"], a["norms"], a["evaluated"]) == (b["losses"], b["norms"], b["evaluated"])
    assert b["bytes"]["all_gather"] < 0.75 * a["bytes"]["all_gather"]


def test_no_host_sync() -> None:
    row, scales = lay_out(ROWS["aligned"]), torch.ones(3, device="cuda")
    x = torch.randn(row.elements, device="cuda").bfloat16()
    unpack_into(x[None], pack(x, row, scales)[None], row, scales)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        unpack_into(x[None], pack(x, row, scales)[None], row, scales)
    finally:
        torch.cuda.set_sync_debug_mode("default")
