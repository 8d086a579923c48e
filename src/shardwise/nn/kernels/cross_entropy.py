# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Cross-entropy of rows of logits, and its gradient written over them: two passes of reading, one of writing.

In plain steps the logits are copied to fp32, exponentiated and copied back, each as large as the vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.core.effective_device import stands_in

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without
    triton = None

BLOCK = 8192
WARPS = 16


def cross_entropy_(logits: torch.Tensor, labels: torch.Tensor, ignore: int, gradient: bool) -> torch.Tensor:
    """Returns -log p of each row's label in fp32, 0 if it is `ignore`.

    With `gradient`, logits become d loss / d logits.
    """
    if stands_in():
        logits.mul_(1)
        return logits.amax(1).float()  # reads and writes as much as the kernel
    if not logits.is_cuda or triton is None:
        return cross_entropy_reference_(logits, labels, ignore, gradient)
    assert logits.is_contiguous() and logits.ndim == 2
    losses = torch.empty(len(logits), device=logits.device)
    _cross_entropy[(len(logits),)](
        logits, labels, losses, logits.shape[1], ignore, gradient, BLOCK, num_warps=WARPS
    )  # fmt: skip
    return losses


def cross_entropy_reference_(logits: torch.Tensor, labels: torch.Tensor, ignore: int, gradient: bool) -> torch.Tensor:
    """Reference implementation of `cross_entropy_` in plain PyTorch."""
    logits32 = logits.float()
    has_loss = labels != ignore
    index = labels.clamp(min=0)[:, None]
    total = logits32.logsumexp(1)
    losses = (total - logits32.gather(1, index)[:, 0]) * has_loss
    if gradient:
        probability = (logits32 - total[:, None]).exp_()
        probability.scatter_add_(1, index, probability.new_full(index.shape, -1.0))
        logits.copy_(probability.mul_(has_loss[:, None]))
    return losses


def cross_entropy_parallel_(
    logits: torch.Tensor, labels: torch.Tensor, ignore: int, gradient: bool, first: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Like `cross_entropy_`, for logits sharded by columns, from `first` on: communicates three numbers per row."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    has_loss = labels != ignore
    highest = wide.amax(1) if wide.shape[1] else wide.new_full((len(wide),), -torch.inf)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    has_label = has_loss & (labels >= first) & (labels < first + wide.shape[1])
    index = (labels - first).clamp(0, max(0, wide.shape[1] - 1))[:, None]
    label_logit = wide.gather(1, index)[:, 0] if wide.shape[1] else highest
    probability = (wide - highest[:, None]).exp_()
    sums = torch.stack([probability.sum(1), torch.where(has_label, label_logit, 0)])
    dist.all_reduce(sums, group=group)
    total, target = sums.unbind()
    if gradient and wide.shape[1]:
        probability /= total[:, None]
        probability.scatter_add_(1, index, -has_label[:, None].to(probability.dtype))
        logits.copy_(probability.mul_(has_loss[:, None]))
    return (total.log() + highest - target) * has_loss


if triton is not None:

    @triton.jit
    def _cross_entropy(logits, labels, losses, columns, ignore, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        label = tl.load(labels + row)
        logits += row * columns
        at = tl.arange(0, BLOCK)
        if label == ignore:
            tl.store(losses + row, 0.0)
            if GRADIENT:
                for start in range(0, columns, BLOCK):
                    tl.store(logits + start + at, 0.0, mask=start + at < columns)
            return
        picked = tl.load(logits + label).to(tl.float32)  # before the loop below may write over it
        highest = -float("inf")
        total = 0.0
        for start in range(0, columns, BLOCK):
            x = tl.load(logits + start + at, mask=start + at < columns, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(highest, tl.max(x))
            total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher))
            highest = higher
        norm = highest + tl.log(total)
        tl.store(losses + row, norm - picked)
        if GRADIENT:
            for start in range(0, columns, BLOCK):
                x = tl.load(logits + start + at, mask=start + at < columns, other=-float("inf")).to(tl.float32)
                share = tl.exp(x - norm) - tl.where(start + at == label, 1.0, 0.0)
                tl.store(logits + start + at, share, mask=start + at < columns)
