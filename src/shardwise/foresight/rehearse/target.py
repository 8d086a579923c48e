"""A run resolved for a machine other than this one, with its model's config, without its data."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config.axes import data_ranks
from shardwise.config.load import LoadedRun
from shardwise.config.resolve import Machine, resolve_machine, resolve_model, resolve_objective, task_wanted
from shardwise.config.schema import Run
from shardwise.core.errors import UserError
from shardwise.foresight.plan.models import find_config
from shardwise.nn.models.adapt import settle_attention
from shardwise.nn.models.source import ModelSource


@dataclass(frozen=True)
class Target:
    """A resolved run to rehearse, with its model and number of ranks."""

    run: Run
    source: ModelSource
    ranks: int
    reasons: dict[str, str]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on each rank."""
        per_rank = self.run.train.batch_size // data_ranks(self.run.parallel, self.ranks)
        return max(1, per_rank // int(self.run.train.micro_batch_size))

    @property
    def stages(self) -> list[int]:
        """One rank of each kind: in the first, a middle and the last pipeline stage; or rank 0."""
        count = self.run.parallel.pipeline
        stages = range(count) if self.source.config.is_encoder_decoder else sorted({0, min(1, count - 1), count - 1})
        return [stage * (self.ranks // count) for stage in stages]


def aim(loaded: LoadedRun, nodes: int, gpus: int) -> Target:
    """Resolves a run for nodes with `gpus` GPUs each; with `device: cpu`, for as many CPU processes."""
    if nodes < 1 or gpus < 1:
        raise UserError("--nodes, --gpus", f"{nodes}, {gpus}", "there must be at least one of each", "e.g. --gpus 8")
    return aim_at(loaded, Machine(0 if loaded.run.device == "cpu" else gpus, ranks=nodes * gpus))


def aim_at(loaded: LoadedRun, machine: Machine) -> Target:
    """Resolves a run for a machine, which may be this one."""
    run = loaded.run
    if run.left_open:
        field = "parallel" if run.parallel.auto else "recompute"
        remedy = f"write what `shardwise plan` says, or e.g. {field}={'{zero: 3}' if run.parallel.auto else 'full'}"
        raise UserError(field, "auto", "is answered on the machine that trains", remedy)
    result = resolve_machine(run, machine)
    source = find_config(result.run.model, task_wanted(result.run))
    resolve_objective(result, source.task)
    if result.run.objective.type not in ("causal", "seq2seq", "masked"):  # type: ignore[union-attr]
        kind = result.run.objective.type  # type: ignore[union-attr]
        problem = "only causal, seq2seq and masked steps can be taken without their data yet"
        raise UserError("objective", kind, problem, "take it as causal: objective=causal")
    resolve_model(result, source.config)
    source = settle_attention(result, source, lambda _: None)
    return Target(result.run, source, machine.ranks or int(result.run.ranks), result.reasons)
