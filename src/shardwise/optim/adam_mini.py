"""Adam with one second moment per row instead of per element: half of AdamW's state, and hardly any communication.

A block (the elements that share a second moment) is a vector along the last dim: the weights of one output of a linear
layer, one token of an embedding. That is finer than Adam-mini's own blocks (a head of queries and keys; a row
elsewhere). Where tensor parallelism shards rows, one number per row is summed over the ranks. In vectors (norms,
biases) each element is a block, as in Adam.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardwise.core.effective_device import count_of
from shardwise.optim.grouped import Grouped
from shardwise.optim.shards import cuts_of, local_grad, local_of, new_step, summed, zeros_beside


class AdamMini(Grouped):
    """Adam-mini. state[p]: "step", "exp_avg" like p, "exp_avg_sq" like p without its last dim; sharded as p is."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Takes one step on some parameters of a group."""
        local_sums = [_squares_by_row(local_grad(p)) for p in parameters]
        cuts = [[cut for cut in cuts_of(p) if p.ndim == 2 and cut.dim == 1] for p in parameters]
        for parameter, squares in zip(parameters, summed(local_sums, cuts), strict=True):
            self._update(parameter, squares, group)

    def _update(self, parameter: Tensor, squares: Tensor, group: dict[str, Any]) -> None:
        state: dict[str, Any] = self.state[parameter]
        is_vector = parameter.ndim < 2
        if not state:
            shape = parameter.shape if is_vector else parameter.shape[:-1]
            state["step"] = new_step()
            state["exp_avg"] = zeros_beside(parameter, parameter.shape)
            state["exp_avg_sq"] = zeros_beside(parameter, shape)
        state["step"] += 1
        step = count_of(state["step"])
        beta1, beta2 = group["betas"]
        rate = group["lr"]
        param = local_of(parameter)
        mean = local_of(state["exp_avg"])
        square = local_of(state["exp_avg_sq"])
        if not square.numel():
            return
        mean.lerp_(local_grad(parameter), 1 - beta1)
        mean_square = squares if is_vector else squares.div_(parameter.shape[-1])
        square.lerp_(mean_square, 1 - beta2)
        root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        param.mul_(1 - rate * group["weight_decay"])
        param.addcdiv_(mean, root if is_vector else root.unsqueeze(-1), value=-rate / (1 - beta1**step))


def _squares_by_row(grad: Tensor) -> Tensor:
    """Sums of squares along the last dim; of a vector, the squares."""
    return grad.square() if grad.ndim < 2 else torch.linalg.vector_norm(grad, dim=-1).square_()
