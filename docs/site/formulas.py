"""What the literature says a rank holds and sends, beside what was measured: the tables of docs/concepts.md.

P is the number of parameters, N of ranks, n of micro-batches a step; bytes throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drawing import size

S, H, L = 2048, 2048, 16  # tokens of a sequence, width, blocks of the Llama; one sequence a micro-batch
KV = 8 * 64  # width of its keys
STATE = 2 * S * H  # bytes of a micro-batch's hidden state
EXPERTS, TOP, E_H, E_L, INNER = (
    32,
    4,
    1024,
    8,
    512,
)  # of the mixture: experts, those a token meets, width, blocks, inner width
IN_EXPERTS = E_L * EXPERTS * 3 * E_H * INNER
STATES = "parameters + gathered + gradients + optimizer"

Value = Callable[[float, int, int], float]
Formula = tuple[str, Value]
NONE: Formula = ("–", lambda p, N, n: -1.0)
ZERO3: tuple[Formula, Formula] = (
    ("16Ψ/N", lambda p, N, n: 16 * p / N), ("n(2·2Ψ + 4Ψ)", lambda p, N, n: 8 * n * p),
)  # fmt: skip
DATA: Formula = ("2·4Ψ", lambda p, N, n: 8 * p)
ALONE: tuple[Formula, Formula] = (("16Ψ", lambda p, N, n: 16 * p), ("0", lambda p, N, n: 0.0))
SENT3 = ZERO3[1]
SENT2: Formula = ("2Ψ + n·4Ψ", lambda p, N, n: (2 + 4 * n) * p)
MEGATRON: Formula = ("2·4L·n·2sbh", lambda p, N, n: 8 * L * n * STATE)
TIED = 8 * 128256 * H  # an all-reduce of the gradients of embedding and head in fp32

# Figure: kinds that the first formula is of, and for each cell the formulas for held and sent.
FORMULAS: dict[str, tuple[str, dict[str, tuple[Formula, Formula]]]] = {
    "stages": (STATES, {
        "stage 0": (("16Ψ", lambda p, N, n: 16 * p), DATA),
        "stage 1": (("4Ψ + 12Ψ/N", lambda p, N, n: (4 + 12 / N) * p), ("2Ψ + 4Ψ", lambda p, N, n: 6 * p)),
        "stage 2": (("2Ψ + 14Ψ/N", lambda p, N, n: (2 + 14 / N) * p), SENT2),
        "stage 3": ZERO3,
    }),
    "hybrid": (STATES, {
        "stage 3 over 8": ZERO3,
        "stage 3 over 4, twice": (("16Ψ/4", lambda p, N, n: 4 * p),
                                  ("n(2·2Ψ + 4Ψ) + 2·4Ψ/4", lambda p, N, n: (8 * n + 2) * p)),
    }),
    "zeror": ("activations", {
        "stage 3": (("34sbhL", lambda p, N, n: 34 * S * H * L), SENT3),
        "recompute": (("2sbhL", lambda p, N, n: STATE * L), SENT3),
        "recompute, inputs on the host": (("0", lambda p, N, n: 0.0), SENT3),
        "recompute, inputs over 2 tensor ranks": (
            ("2sbhL/2", lambda p, N, n: STATE * L / 2),
            ("n(2·2Ψ + 4Ψ)/2 + 2·6L·n·2sbh", lambda p, N, n: 4 * n * p + 12 * L * n * STATE)),
        "recompute, buckets of 50 MB": (("2sbhL", lambda p, N, n: STATE * L), SENT3),
    }),
    "offload": ("host", {
        "stage 2": (("0", lambda p, N, n: 0.0), SENT2),
        "optimizer on the host": (("14Ψ/N", lambda p, N, n: 14 * p / N), SENT2),
        "8-bit optimizer on the host": (NONE, SENT2),
    }),
    "infinity": ("host + disk", {
        "stage 3": (("0", lambda p, N, n: 0.0), SENT3),
        "all on the host": (("16Ψ/N", lambda p, N, n: 16 * p / N), SENT3),
        "all on disk": (("16Ψ/N", lambda p, N, n: 16 * p / N), SENT3),
    }),
    "data": (STATES, {"1 rank": ALONE, "4 ranks, stage 0": (ALONE[0], DATA), "4 ranks, stage 3": ZERO3}),
    "tensor": (STATES, {
        "1 rank": ALONE,
        "tensor 2": (("16Ψ/2", lambda p, N, n: 8 * p), MEGATRON),
        "tensor 4": (("16Ψ/4", lambda p, N, n: 4 * p), MEGATRON),
    }),
    "context": ("activations", {
        "1 rank": (("34sbhL", lambda p, N, n: 34 * S * H * L), ALONE[1]),
        "ring of 4": (("34sbhL/4", lambda p, N, n: 34 * S * H * L / 4),
                      ("2·4Ψ + nL(N − 1)·4·4(s/N)k", lambda p, N, n: 8 * p + n * L * (N - 1) * 16 * (S / N) * KV)),
        "Ulysses over 4": (("34sbhL/4", lambda p, N, n: 34 * S * H * L / 4),
                           ("2·4Ψ + nL·2·2(s/N)(2h + 2k)", lambda p, N, n: 8 * p + n * L * 8 * (S / N) * (H + KV))),
    }),
    "pipeline": ("activations", {
        "1 rank": (("34sbhL", lambda p, N, n: 34 * S * H * L), ALONE[1]),
        "first of 4 stages": (("4 · 34sbhL/4", lambda p, N, n: 34 * S * H * L),
                              ("n·2sbh + 2·4Vh", lambda p, N, n: n * STATE + TIED)),
        "second of 4 stages": (("3 · 34sbhL/4", lambda p, N, n: 0.75 * 34 * S * H * L),
                               ("2n·2sbh", lambda p, N, n: 2 * n * STATE)),
        "last of 4 stages": (("34sbhL/4", lambda p, N, n: 34 * S * H * L / 4),
                             ("n·2sbh + 2·4Vh", lambda p, N, n: n * STATE + TIED)),
    }),
    "expert": (STATES, {
        "1 rank": ALONE,
        "4 ranks, stage 0": (ALONE[0], DATA),
        "expert 4": (("16(Ψ − E) + 16E/N", lambda p, N, n: 16 * (p - IN_EXPERTS) + 16 * IN_EXPERTS / N),
                     ("2·4(Ψ − E) + 4nL·2s·t·h", lambda p, N, n: 8 * (p - IN_EXPERTS) + 8 * n * E_L * S * TOP * E_H)),
    }),
}  # fmt: skip
CROSSING = {  # the ZeRO++ paper's table, in parameters of 16 bits that cross nodes
    "stage 3": 3.0, "hpZ": 2.0, "qwZ": 2.5, "qgZ": 2.25, "hpZ + qwZ + qgZ": 0.75,
}  # fmt: skip


def table(figure: str, cells: dict[str, dict[str, Any]]) -> str:
    """A table in Markdown."""
    if figure == "zeropp":
        return _crossing(cells)
    kinds, formulas = FORMULAS[figure]
    named = "states" if kinds == STATES else kinds
    lines = [
        f"| | {named}: formula | measured | sent: formula | measured | peak |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for label, cell in cells.items():
        held = cell["held"] | {"host": cell["host"], "disk": cell["disk"]}
        values = (sum(held.get(kind, 0) for kind in kinds.split(" + ")), sum(cell["sent"].values()))
        row = [label]
        for (text, value), found in zip(formulas[label], values, strict=True):
            said = value(float(cell["parameters"]), cell["ranks"], cell["micro_batches"])
            row += [text if said <= 0 else f"{text} = {size(said)}", size(found) if found else "0"]
        lines.append("| " + " | ".join([*row, size(cell["peak"])]) + " |")
    return "\n".join(lines)


def _crossing(cells: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| | crosses nodes: paper | share | measured | share | held at the peak |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    whole = cells["stage 3"]["across"]
    for label, cell in cells.items():
        share = f"{CROSSING[label] / 3:.0%} | {size(cell['across'])} | {cell['across'] / whole:.0%}"
        lines.append(f"| {label} | {CROSSING[label]:g} M | {share} | {size(cell['peak'])} |")
    return "\n".join(lines)
