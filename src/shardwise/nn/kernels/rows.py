# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Gathers and sums rows by an order, at about the speed of memory: what routed experts do to tokens.

A compiler loads an index for each value rather than each row, and sums gathered rows with few loads in flight: for
131,072 rows of 2,048 on an H200 0.27 and 0.64 ms, where memory alone takes 0.13 and 0.14.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without
    triton = None

WIDEST, WARPS = 2048, 4


@torch.library.custom_op("shardwise::copied_rows", mutates_args=())
def copied_rows(rows: torch.Tensor, order: torch.Tensor, copies: int) -> torch.Tensor:
    """Returns row `order[i] // copies` for each i."""
    if not _takes(rows):
        return rows[order // copies]
    out = rows.new_empty(len(order), rows.shape[1])
    _launch(_copy, out, rows, order, copies)
    return out


@copied_rows.register_fake
def _copies(rows: torch.Tensor, order: torch.Tensor, copies: int) -> torch.Tensor:
    return rows.new_empty(len(order), rows.shape[1])


@torch.library.custom_op("shardwise::copied_again", mutates_args=())
def copied_again(rows: torch.Tensor, order: torch.Tensor, copies: int) -> torch.Tensor:
    """The same under another name, for backward: a compiler would save what is computed twice."""
    copied: torch.Tensor = copied_rows(rows, order, copies)
    return copied


copied_again.register_fake(_copies)


@torch.library.custom_op("shardwise::summed_rows", mutates_args=())
def summed_rows(rows: torch.Tensor, places: torch.Tensor, copies: int) -> torch.Tensor:
    """Returns for each i the sum of the rows at `places[i · copies]` and the next `copies - 1` places, in fp32."""
    if not _takes(rows):
        return rows[places].view(-1, copies, rows.shape[1]).sum(1)
    out = rows.new_empty(len(places) // copies, rows.shape[1])
    _launch(_add, out, rows, places, copies)
    return out


@summed_rows.register_fake
def _(rows: torch.Tensor, places: torch.Tensor, copies: int) -> torch.Tensor:
    return rows.new_empty(len(places) // copies, rows.shape[1])


def _takes(rows: torch.Tensor) -> bool:
    halves = rows.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return rows.is_cuda and triton is not None and halves and rows.stride(1) == 1


def _launch(kernel, out: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, copies: int) -> None:
    if out.numel() == 0:
        return
    width = rows.shape[1]
    block = min(WIDEST, triton.next_power_of_2(width))
    with torch.cuda.device(rows.device):
        kernel[(len(out), triton.cdiv(width, block))](
            out, rows, places, width, rows.stride(0), copies, block, num_warps=WARPS
        )


if triton is not None:

    @triton.jit
    def _copy(out, rows, order, width, stride, copies: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        source = (tl.load(order + row) // copies).to(tl.int64)
        tl.store(out + row * width + column, tl.load(rows + source * stride + column, mask=inside), mask=inside)

    @triton.jit
    def _add(out, rows, places, width, stride, copies: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for copy in tl.static_range(copies):
            place = tl.load(places + row * copies + copy).to(tl.int64)
            total += tl.load(rows + place * stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * width + column, total, mask=inside)
