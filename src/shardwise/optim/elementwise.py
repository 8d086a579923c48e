"""Any elementwise update rule with its states stored by any codec, over sharded parameters.

Nothing is communicated, but scales of coded states whose block lies on several ranks (see [Note: coded states]).
States are decoded, updated and encoded a bounded piece at a time. What a step does to an element depends neither on the
number of ranks nor on the size of the pieces (see [Note: coded states]), down to the last bit; only fused AdamW on a
CPU may differ there, where it treats the last few elements of a tensor separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.core.effective_device import count_of, effective_device, stands_in
from shardwise.optim.codecs import (
    BLOCK,
    FP32,
    Blockwise,
    Codec,
    Kind,
    SharedBlocks,
    StoredState,
    codec_of,
    columns,
    mix,
    part_name,
)
from shardwise.optim.grouped import Grouped
from shardwise.optim.rules import AdamW, Hyper, UpdateRule
from shardwise.optim.shards import (
    column_cut,
    first_column,
    first_row,
    local_grad,
    local_of,
    new_step,
    zeros_beside,
)

# Elements at a time, by device: enough to keep a GPU busy, at about 40 bytes of temporary memory each; a CPU's cache.
PIECE = {"cuda": 1 << 23, "cpu": 1 << 20}


@dataclass
class ParameterPiece:
    """Some rows of a parameter with gradient and states.

    `offset` is the index of its first element in the full one, `stride` the distance of rows there.
    """

    param: Tensor
    grad: Tensor
    states: dict[str, StoredState]
    offset: int
    stride: int


class Elementwise(Grouped):
    """Applies `rule` to the shards of each parameter, with states stored as `kind` (fp32, bf16, 8bit, 4bit).

    state[p] holds "step" and, sharded as p is, each part of each state: "exp_avg", or "exp_avg.codes" and its scales.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rule: UpdateRule,
        kind: Kind = "fp32",
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.rule = rule
        self.kind = kind
        self.seed = seed
        self.piece: int | None = None  # elements at a time; None: by device
        self.numbers: dict[Tensor, int] = {}  # of the parameters, for the seeds: the same on every mesh

    @torch.no_grad()
    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Takes one step on some parameters of a group: their counts advance, small ones are batched."""
        pending: list[ParameterPiece] = []
        count = 0
        last = 0
        for parameter in parameters:
            state = self.allocate(parameter)
            state["step"] += 1
            step = count_of(state["step"])
            limit = self.piece or PIECE[effective_device(local_of(parameter))]
            for piece in self._pieces(parameter, step, limit):
                if pending and (step != last or count + piece.param.numel() > limit):
                    self._run(pending, group, last)
                    pending = []
                    count = 0
                pending.append(piece)
                count += piece.param.numel()
                last = step
        if pending:
            self._run(pending, group, last)

    def allocate(self, parameter: Tensor) -> dict[str, Any]:
        """Returns the states of a parameter, initialised to zeros if there are none yet."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            assert parameter.dtype is torch.float32, "the rules compute in fp32, on fp32 masters"
            state["step"] = new_step()
            for name in self.rule.states:
                codec = codec_beside(parameter, self.kind, name)
                for part, (shape, dtype) in codec.shapes(parameter.shape).items():
                    dims = (0, -1) if part == "scales" and isinstance(codec, SharedBlocks) else None
                    state[part_name(name, part)] = zeros_beside(parameter, shape, dtype, dims)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, which casts every state to fp32; codes and bf16 are restored from that exactly."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            for name in self.rule.states:
                codec = codec_of(self.kind, name, parameter.shape)
                for part, (_, dtype) in codec.shapes(parameter.shape).items():
                    if (key := part_name(name, part)) in state:
                        state[key] = state[key].to(dtype)

    def _run(self, pieces: list[ParameterPiece], group: dict[str, Any], step: int) -> None:
        hyper = Hyper(group["lr"], group["betas"], group["eps"], group["weight_decay"], step)
        plain: list[ParameterPiece] = []
        for piece in pieces:
            if self._fits_kernel(piece):
                self._run_kernel(piece, hyper)
            else:
                plain.append(piece)
        values: dict[str, list[Tensor]] = {name: [] for name in self.rule.states}
        for piece in plain:
            for name, stored in piece.states.items():
                values[name].append(stored.codec.decode(stored.parts, piece.param.shape))
        self.rule([piece.param for piece in plain], [piece.grad for piece in plain], values, hyper)
        for index, piece in enumerate(plain):
            for name, stored in piece.states.items():
                stored.codec.encode(values[name][index], stored.parts, stored.seed, piece.offset, piece.stride)

    def _fits_kernel(self, piece: ParameterPiece) -> bool:
        """Whether the fused kernel can update the piece: AdamW on coded states on a GPU."""
        coded = all(isinstance(stored.codec, Blockwise) for stored in piece.states.values())
        return (
            effective_device(piece.param) == "cuda"
            and coded
            and isinstance(self.rule, AdamW)
            and piece.grad.is_contiguous()
        )

    def _run_kernel(self, piece: ParameterPiece, hyper: Hyper) -> None:
        if stands_in():
            piece.param.add_(piece.grad)
            return
        from shardwise.optim.kernels import coded_adamw as fused  # imports Triton

        first, second = (piece.states[name] for name in self.rule.states)
        fused.adamw(piece.param, piece.grad, first, second, piece.offset, hyper, stride=piece.stride)

    def _number(self, parameter: Tensor) -> int:
        """A parameter's number; its index among all if it was given none."""
        if parameter not in self.numbers:
            parameters = [p for group in self.param_groups for p in group["params"]]
            self.numbers = {p: number for number, p in enumerate(parameters)} | self.numbers
        return self.numbers[parameter]

    def _pieces(self, parameter: Tensor, step: int, limit: int) -> Iterator[ParameterPiece]:
        """The local shard, full rows at a time; a row longer than the limit is cut between blocks."""
        local = local_of(parameter)
        if not local.numel():
            return
        rows = local.shape[0] if local.ndim else 1
        cols = local.numel() // rows
        param = local.view(rows, cols)
        grad = local_grad(parameter).reshape(rows, cols)
        stored = self._stored(parameter, step, rows)
        first = first_row(parameter)
        left_column = first_column(parameter)
        stride = columns(parameter.shape)
        # Where ranks agree on scales, all of them cut the same pieces.
        shared = any(isinstance(state.codec, SharedBlocks) for state in stored.values())
        height = max(1, limit // (stride if shared else cols))
        width = cols if shared or cols <= limit else max(1, limit // BLOCK) * BLOCK
        for top in range(0, rows, height):
            for left in range(0, cols, width):
                bottom = min(top + height, rows)
                right = min(left + width, cols)
                window = {}
                for name, state in stored.items():
                    parts = state.codec.window(state.parts, top, bottom, left, right)
                    window[name] = StoredState(state.codec, parts, state.seed)
                offset = (first + top) * stride + left_column + left
                yield ParameterPiece(
                    param[top:bottom, left:right], grad[top:bottom, left:right], window, offset, stride
                )

    def _stored(self, parameter: Tensor, step: int, rows: int) -> dict[str, StoredState]:
        """The local parts of a parameter's states, in rows, with the seeds of this step."""
        state = self.state[parameter]
        number = self._number(parameter)
        stored = {}
        for index, name in enumerate(self.rule.states):
            codec = codec_beside(parameter, self.kind, name)
            parts = {}
            for part in [""] if codec is FP32 else codec.shapes(parameter.shape):
                parts[part] = local_of(state[part_name(name, part)]).view(rows, -1)
            stored[name] = StoredState(codec, parts, mix(self.seed, step, number, index))
        return stored


def codec_beside(parameter: Tensor, kind: Kind, state: str) -> Codec:
    """Returns the codec of a state of this rank's part of a parameter."""
    codec = codec_of(kind, state, parameter.shape)
    cut = column_cut(parameter)
    if cut is None or not isinstance(codec, Blockwise):
        return codec
    if columns_each(parameter) % BLOCK == 0:
        return codec
    assert (cut.size - 1) * cut.span(parameter.shape[1], 0)[1] < parameter.shape[1], "a rank has no columns"
    return SharedBlocks(codec, first_column(parameter), columns(parameter.shape), cut.group)


def columns_each(parameter: Tensor) -> int:
    """Returns the columns of a rank, seen as [rows, cols]; the last ranks may have fewer."""
    cut = column_cut(parameter)
    if cut is None:
        return columns(parameter.shape)
    return cut.span(parameter.shape[1], 0)[1] * parameter.shape[2:].numel()
