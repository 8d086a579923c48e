"""Checks that the axes of `parallel` fit the ranks and the model; errors suggest valid values nearby.

Settings that do not combine with an axis are in the table of `config/combinations`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from shardwise.config.schema import Parallel, Run
from shardwise.core.errors import UserError

HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
ZBV_SINCE = (2, 13)  # of torch: earlier ones lose nodes of the graph between the two parts of a backward
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def data_ranks(parallel: Parallel, ranks: int) -> int:
    """Number of ranks that see different data."""
    return ranks // (parallel.tensor * parallel.context * parallel.pipeline)


def divisors_of(number: int) -> list[int]:
    """All divisors of a number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def near_divisors(number: int, target: int, at_most: int = 4) -> list[int]:
    """The divisors of a number that are closest to `target`."""
    return sorted(sorted(divisors_of(number), key=lambda d: (abs(d - target), d))[:at_most])


def check_axes(run: Run, ranks: int) -> None:
    """Checks the axes against the number of ranks."""
    parallel = run.parallel
    inner = 1
    for name in ("tensor", "context", "pipeline"):
        size = getattr(parallel, name)
        if (ranks // inner) % size or size * inner > ranks:
            left = max(1, ranks // inner)
            beside = f" / {inner} of the other axes" if inner > 1 else ""
            problem = f"does not divide the {ranks} ranks{beside}" if ranks > 1 else "needs more than one rank"
            remedy = (
                f"use one of {near_divisors(left, size)}" if ranks > 1 else f"set ranks: {size} or a multiple of it"
            )
            raise UserError(f"parallel.{name}", size, problem, remedy)
        inner *= size
    stage = ranks // parallel.pipeline
    if stage % parallel.expert:
        problem = f"does not divide the {stage} ranks of {'a pipeline stage' if parallel.pipeline > 1 else 'the run'}"
        raise UserError(
            "parallel.expert", parallel.expert, problem, f"use one of {near_divisors(stage, parallel.expert)}"
        )
    if parallel.pipeline > 1 and parallel.pipeline_schedule == "zbv" and torch_version() < ZBV_SINCE:
        since = ".".join(map(str, ZBV_SINCE))
        problem = f"needs torch {since} or newer, and this is {version('torch')}"
        raise UserError(
            "parallel.pipeline_schedule",
            "zbv",
            problem,
            "use pipeline_schedule: interleaved or 1f1b, or install a newer torch",
        )


def torch_version() -> tuple[int, int]:
    """Of the torch that is installed, without importing it."""
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class _ModelAxes:
    """The sizes that the rules compare; None where the model's config does not name them."""

    parallel: Parallel
    config: Any
    ranks: int | None
    heads: int | None
    layers: int | None
    experts: int | None


def check_model_axes(run: Run, config: Any, ranks: int | None = None) -> None:
    """Checks the axes against the model's config: attention heads, blocks and experts they must divide."""
    if not run.parallel.uses_model_parallelism:
        return
    text = config.get_text_config(decoder=True)
    heads, layers, experts = (first_of(text, names) for names in (HEADS, LAYERS, EXPERTS))
    if config.is_encoder_decoder and layers:
        layers += first_of(config, ("encoder_layers", "num_layers")) or 0
    model = _ModelAxes(run.parallel, config, ranks, heads, layers, experts)
    for check in MODEL_CHECKS:
        check(model)


def _one_sequence(model: _ModelAxes) -> None:
    if model.parallel.context > 1 and model.config.is_encoder_decoder:
        problem = "encoder–decoder models have two sequences, and attention across them"
        raise UserError("parallel.context", model.parallel.context, problem, "use tensor or pipeline instead")


def _tensor_divides_heads(model: _ModelAxes) -> None:
    if model.heads:
        _check_heads(model, "tensor", model.heads)


def _context_divides_heads(model: _ModelAxes) -> None:
    if model.heads and model.parallel.context_kind == "ulysses":
        _check_heads(model, "context", model.heads // model.parallel.tensor)


def _check_heads(model: _ModelAxes, axis: str, heads: int) -> None:
    size = getattr(model.parallel, axis)
    if heads % size == 0:
        return
    ranks = model.ranks
    valid = [n for n in near_divisors(heads, size, 9) if not ranks or ranks % n == 0]
    problem = f"does not divide the model's {heads} attention heads"
    remedy = f"use one of {valid}"
    if axis == "context":
        problem += " (ulysses)"
        remedy += ", or context_kind: ring"
    raise UserError(f"parallel.{axis}", size, problem, remedy)


def _expert_divides_experts(model: _ModelAxes) -> None:
    size = model.parallel.expert
    if size == 1:
        return
    if not model.experts:
        problem = f"{model.config.model_type} is a dense model: it has no experts"
        raise UserError("parallel.expert", size, problem, "leave it out")
    if model.experts % size:
        problem = f"does not divide the model's {model.experts} experts"
        raise UserError("parallel.expert", size, problem, f"use one of {near_divisors(model.experts, size)}")


def _stages_have_blocks(model: _ModelAxes) -> None:
    parallel = model.parallel
    stages = parallel.pipeline * parallel.chunks_per_rank
    if parallel.pipeline > 1 and model.layers and stages > model.layers:
        problem = f"makes {stages} stages of a model with {model.layers} blocks"
        limit = max(1, model.layers * parallel.pipeline // stages)
        raise UserError("parallel.pipeline", parallel.pipeline, problem, f"use {limit} or less")


MODEL_CHECKS: tuple[Callable[[_ModelAxes], None], ...] = (
    _one_sequence,
    _tensor_divides_heads,
    _context_divides_heads,
    _expert_divides_experts,
    _stages_have_blocks,
)


def first_of(config: Any, names: tuple[str, ...]) -> int | None:
    """The first of these attributes of a config that is a non-zero integer; None if there is none."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int) and value), None)


def shard_size(zero: int, shard: int | None, ranks: int) -> int:
    """Number of ranks over which one copy of the states is sharded."""
    return 1 if zero == 0 else (shard or ranks)
