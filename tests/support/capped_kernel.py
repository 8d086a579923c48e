"""The kernel of capped attention against its reference, forward and backward; alone it runs in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.nn.attention.softcap import attend_capped, reference


@dataclass(frozen=True)
class Shape:
    """Documents, heads of queries and keys, sizes of heads of keys and values."""

    lengths: tuple[int, ...]
    heads: int
    keys: int
    size: int
    value: int
    softcap: float | None = None
    sunk: bool = False
    window: int | None = None


SMALL = [
    Shape((40, 3, 1, 70, 36), 4, 2, 16, 16, softcap=5.0),
    Shape((40, 3, 1, 70, 36), 4, 4, 24, 16, sunk=True, window=20),
    Shape((97,), 2, 1, 64, 64, softcap=3.0, sunk=True, window=9),
    Shape((65, 65), 2, 2, 16, 16, sunk=True),
]


def errors(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Of the output and each gradient: how far the kernel, and plain operations in this type, are from fp32's truth.

    Both as shares of the truth's largest element.
    """
    made = torch.Generator(device).manual_seed(seed)
    tokens = sum(shape.lengths)
    given = [
        (2 * torch.randn(tokens, h, d, generator=made, device=device)).to(dtype)
        for h, d in ((shape.heads, shape.size), (shape.keys, shape.size), (shape.keys, shape.value))
    ]
    sinks = torch.randn(shape.heads, generator=made, device=device).to(dtype) if shape.sunk else None
    weight = torch.randn(tokens, shape.heads, shape.value, generator=made, device=device)
    lengths = torch.tensor(shape.lengths, device=device)
    ends = lengths.cumsum(0)
    starts, stops = ((x.repeat_interleave(lengths)).int() for x in (ends - lengths, ends))
    scale = shape.size**-0.5

    def results(kind: torch.dtype, kernel: bool) -> list[torch.Tensor]:
        q, k, v = (x.to(kind).detach().requires_grad_() for x in given)
        s = None if sinks is None else sinks.to(kind).detach().requires_grad_()
        if kernel:
            out = attend_capped(q, k, v, starts, stops, max(shape.lengths), scale, shape.softcap, s, shape.window)
        else:
            out = reference(q, k, v, starts, scale, shape.softcap, s, shape.window)
        inputs = [x for x in (q, k, v, s) if x is not None]
        return [out, *torch.autograd.grad((out.float() * weight).sum(), inputs)]

    names = ("output", "query", "key", "value", "sinks")
    truth = results(torch.float32, False)
    largest = max(float(true.abs().max()) for true in truth)
    found = {}
    for name, ours, plain, true in zip(names, results(dtype, True), results(dtype, False), truth, strict=False):
        scale_of = max(float(true.abs().max()), largest / 100)  # a query that sees itself alone has no gradient
        found[name] = tuple(float((x.float() - true).abs().max()) / scale_of for x in (ours, plain))
    return found  # type: ignore[return-value]


if __name__ == "__main__":
    for one in SMALL:
        for name, (apart, _) in errors(one, torch.float32, "cpu").items():
            assert apart <= 1e-5, (one, name, apart)
