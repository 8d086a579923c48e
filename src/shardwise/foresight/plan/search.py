"""Searches the best strategies for a model on a cluster: all are scored roughly, the best few sketched and ranked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from statistics import median

from shardwise.config.schema import Run
from shardwise.core.errors import RunFailed, UserError
from shardwise.core.hardware.specs import Cluster
from shardwise.foresight.plan.estimate import Estimate, estimate, without_pipeline
from shardwise.foresight.plan.quick import Quick, Strategy, profile, sizes_of
from shardwise.foresight.plan.sketch import Sketched, sketch, sketch_all
from shardwise.foresight.plan.strategies import applied, enumerate_strategies, legal
from shardwise.nn.models.source import ModelSource

AT_ONCE = 2  # strategies that are sketched before the clock is looked at
BUDGET, PATIENCE = 5.0, 4  # seconds for sketches once something fits; so many times that where nothing does yet
ROUGH = 6  # further strategies that are told with their rough scores
MOST = 16  # strategies that are sketched at all
NEARLY = 1.02  # the rough score is trusted this far: what it puts a little above the memory is looked at too
TINY = 0.03  # a faster strategy must win this much over a simpler one

Say = Callable[[str], None]


@dataclass(frozen=True)
class Option:
    """A strategy with its estimate."""

    strategy: Strategy
    estimate: Estimate


@dataclass(frozen=True)
class Plan:
    """The result of a search: options that fit, best first; those that do not; and how many were considered."""

    source: ModelSource
    run: Run
    cluster: Cluster
    options: list[Option]
    too_large: list[Option]
    considered: int
    refused: dict[str, str] = field(default_factory=dict)  # strategies that the code cannot do, with the reason
    quick: Quick | None = field(default=None, repr=False)
    rough: list[Strategy] = field(default_factory=list)  # the next ones, by the rough score alone
    scale: tuple[float, float] = (1.0, 1.0)  # what brings rough times and sizes to those of the sketches

    @property
    def best(self) -> Option | None:
        """The fastest option that fits; None if none does."""
        return self.options[0] if self.options else None


def search(
    source: ModelSource,
    run: Run,
    cluster: Cluster,
    say: Say = lambda _: None,
    budget: float = BUDGET,
    pick: Callable[[Strategy], bool] = lambda _: True,
    last_resort: bool = True,
) -> Plan:
    """Searches strategies and ranks them by time, which on a given cluster is also by cost.

    `run` is resolved for the cluster's ranks. If nothing fits, strategies with offload are searched; without
    `last_resort` those are only scored roughly.
    """
    say("looking at one block")
    profiled_run = _profiling_run(run)
    quick = Quick(
        profile(sizes_of(source), sketch(source, profiled_run, 1), profiled_run, _single_device(cluster)), run, cluster
    )
    fitting: list[Option] = []
    too_large: list[Option] = []
    refused: dict[str, str] = {}
    considered = 0
    sketches = Sketches(source)
    for offload in (False, True):
        scored: list[tuple[float, int, Strategy]] = []
        for strategy in enumerate_strategies(source.config, run, cluster, offload):
            considered += 1
            may_fit = quick.memory(strategy) <= NEARLY * cluster.device.memory
            if pick(strategy) and may_fit and (not offload or quick.host(strategy) <= cluster.host_memory):
                scored.append((quick.seconds(strategy), _complexity(strategy), strategy))
        ranked = _ranked(scored)
        started = time.perf_counter()
        doubtful = partial(_doubtful, quick, too_large)
        for wave in _waves(ranked, source, run, cluster, refused, doubtful) if last_resort or not offload else ():
            say(f"{considered:,} strategies looked at, sketching {', '.join(s.name() for s, _ in wave[:3])}")
            for option in _sketched(sketches, cluster, wave, refused):
                (fitting if option.estimate.fits else too_large).append(option)
            limit = budget
            if not fitting:
                limit = budget * PATIENCE
            elif offload:  # a makeshift anyway
                limit = budget / 3
            if fitting and not offload and _promising(quick, ranked, fitting, too_large):
                limit = 2 * budget
            if time.perf_counter() - started > limit and (fitting or budget):
                break
        if fitting:
            break
    fitting.sort(key=lambda o: o.estimate.time.seconds * (1 + TINY * _complexity(o.strategy) / 10))
    seen = {option.strategy.family() for option in (*fitting, *too_large)}
    remaining = (s for s in ranked if s.family() not in seen and s.name() not in refused)
    rough = list(islice((s for s in remaining if legal(applied(run, s), source.config, cluster.ranks) is None), ROUGH))
    if not considered:
        problem = f"cannot be divided among {cluster.ranks} devices in any way"
        raise UserError("train.batch_size", run.train.batch_size, problem, f"use a multiple of {cluster.ranks}")
    scale = _scale(quick, [*fitting, *too_large])
    rough.sort(key=quick.seconds)
    return Plan(source, run, cluster, fitting, too_large, considered, refused, quick, rough, scale)


def _profiling_run(run: Run) -> Run:
    """The run on one rank with one sequence, to profile a block."""
    base = applied(run, Strategy(2))
    values = base.model_dump()
    values["train"] |= {"batch_size": 1, "micro_batch_size": 1}
    values["ranks"] = 1
    return Run.model_validate(values)


def _single_device(cluster: Cluster) -> Cluster:
    return replace(cluster, nodes=1, per_node=1)


def _complexity(strategy: Strategy) -> int:
    """Ranks strategies of equal time: fewer moving parts are better."""
    axes = sum(size > 1 for size in (strategy.tensor, strategy.context, strategy.pipeline, strategy.expert))
    extras = (strategy.shard is not None) + (strategy.secondary is not None) + strategy.interleaved + strategy.recompute
    return 3 * axes + extras + 5 * (strategy.offload != "none") + 5 * (strategy.offload_parameters != "none")


def _ranked(scored: list[tuple[float, int, Strategy]]) -> list[Strategy]:
    """The best of each family by score, with the second best of the leading families in between."""
    best: dict[tuple[object, ...], tuple[float, int, Strategy]] = {}
    runners_up: list[tuple[float, int, Strategy]] = []
    for entry in sorted(scored, key=lambda entry: entry[:2]):
        if entry[2].family() in best:
            runners_up.append(entry)
        else:
            best[entry[2].family()] = entry
    first = [s for _, _, s in best.values()]
    second = [s for _, _, s in runners_up]
    return [*first[:3], *second[:2], *first[3:40], *second[2:20]]


def _waves(
    ranked: list[Strategy],
    source: ModelSource,
    run: Run,
    cluster: Cluster,
    refused: dict[str, str],
    doubtful: Callable[[Strategy], bool],
) -> Iterator[list[tuple[Strategy, Run]]]:
    """Yields a few legal strategies at a time; illegal ones are recorded in `refused`."""
    wave: list[tuple[Strategy, Run]] = []
    tried = 0
    for strategy in ranked:
        if tried == MOST:
            break
        if doubtful(strategy):
            continue
        tried += 1
        applied_run = applied(run, strategy)
        problem = legal(applied_run, source.config, cluster.ranks)
        if problem is not None:
            refused.setdefault(strategy.name(), problem)
            continue
        wave.append((strategy, applied_run))
        if len(wave) == AT_ONCE:
            yield wave
            wave = []
    if wave:
        yield wave


def _scale(quick: Quick, options: list[Option]) -> tuple[float, float]:
    """By how much rough times and sizes are off, on the strategies that were sketched."""
    if not options:
        return 1.0, 1.0
    times = median(o.estimate.time.seconds / quick.seconds(o.strategy) for o in options)
    return times, median(o.estimate.peak / quick.memory(o.strategy) for o in options)


def _promising(quick: Quick, ranked: list[Strategy], fitting: list[Option], too_large: list[Option]) -> bool:
    """Whether a strategy that was not sketched would win if its rough score is off as the others' are."""
    times, _ = _scale(quick, fitting)
    best = min(option.estimate.time.seconds for option in fitting)
    seen = {option.strategy for option in (*fitting, *too_large)}
    return any(times * quick.seconds(s) < 0.97 * best for s in ranked if s not in seen)


def _doubtful(quick: Quick, too_large: list[Option], strategy: Strategy) -> bool:
    """Whether it would not fit if the rough score were as far off as for those that turned out too large."""
    if not too_large:
        return False
    factor = max(1.0, median(option.estimate.peak / quick.memory(option.strategy) for option in too_large))
    return quick.memory(strategy) * factor > NEARLY * quick.cluster.device.memory


def _sketched(
    sketches: Sketches, cluster: Cluster, wave: list[tuple[Strategy, Run]], refused: dict[str, str]
) -> list[Option]:
    """Estimates of a wave; strategies that cannot be rehearsed cannot run, and are recorded in `refused`."""
    sketches.make([(without_pipeline(run), cluster.ranks // run.parallel.pipeline) for _, run in wave])
    options = []
    for strategy, run in wave:
        try:
            options.append(Option(strategy, estimate(sketches.source, run, cluster, sketches)))
        except (RunFailed, UserError) as error:
            refused.setdefault(strategy.name(), str(error).strip().splitlines()[-1])
    return options


class Sketches:
    """Caches sketches of one model: schedules and pipelines of a strategy share a sketch."""

    def __init__(self, source: ModelSource, documents: int = 1) -> None:
        self.source = source
        self.documents = documents
        self._known: dict[str, Sketched | Exception] = {}

    def make(self, runs: list[tuple[Run, int]]) -> None:
        """Makes the missing sketches, several at once."""
        missing = {self._key(run, ranks): (run, ranks) for run, ranks in runs}
        missing = {key: entry for key, entry in missing.items() if key not in self._known}
        self._known |= dict(zip(missing, sketch_all(self.source, list(missing.values()), self.documents), strict=True))

    def __call__(self, source: ModelSource, run: Run, ranks: int) -> Sketched:
        self.make([(run, ranks)])
        result = self._known[self._key(run, ranks)]
        if isinstance(result, Exception):
            raise result
        return result

    @staticmethod
    def _key(run: Run, ranks: int) -> str:
        return f"{ranks} {run.model_dump_json(exclude={'output', 'log', 'checkpoint'})}"
