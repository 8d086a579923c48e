"""The best ways to run a model on a cluster: all are scored roughly, the best few are sketched and ranked."""

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
    """A strategy with its sketch."""

    strategy: Strategy
    estimate: Estimate


@dataclass(frozen=True)
class Plan:
    """What was found: the options that fit, best first, those that do not, and how many were looked at."""

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
    """Ranks by time (on a given cluster the cheapest is the fastest). `run` is resolved for the cluster's ranks.

    Where nothing fits, states leave the device; without `last_resort` that is only scored roughly.
    """
    say("looking at one block")
    plain = _plain(run)
    quick = Quick(profile(sizes_of(source), sketch(source, plain, 1), plain, _one(cluster)), run, cluster)
    found: list[Option] = []
    too_large: list[Option] = []
    refused: dict[str, str] = {}
    considered, known = 0, Sketches(source)
    for offload in (False, True):
        scored: list[tuple[float, int, Strategy]] = []
        for strategy in enumerate_strategies(source.config, run, cluster, offload):
            considered += 1
            small = quick.memory(strategy) <= NEARLY * cluster.device.memory
            if pick(strategy) and small and (not offload or quick.host(strategy) <= cluster.host_memory):
                scored.append((quick.seconds(strategy), _simplicity(strategy), strategy))
        ranked = _ranked(scored)
        begun = time.perf_counter()
        doubtful = partial(_doubtful, quick, too_large)
        for wave in _waves(ranked, source, run, cluster, refused, doubtful) if last_resort or not offload else ():
            say(f"{considered:,} strategies looked at, sketching {', '.join(s.name() for s, _ in wave[:3])}")
            for option in _sketched(known, cluster, wave, refused):
                (found if option.estimate.fits else too_large).append(option)
            limit = budget * (PATIENCE if not found else 1 / 3 if offload else 1)  # offload is a makeshift anyway
            if found and not offload and _promising(quick, ranked, found, too_large):
                limit = 2 * budget
            if time.perf_counter() - begun > limit and (found or budget):
                break
        if found:
            break
    found.sort(key=lambda o: o.estimate.time.seconds * (1 + TINY * _simplicity(o.strategy) / 10))
    seen = {option.strategy.family() for option in (*found, *too_large)}
    others = (s for s in ranked if s.family() not in seen and s.name() not in refused)
    rough = list(islice((s for s in others if legal(applied(run, s), source.config, cluster.ranks) is None), ROUGH))
    if not considered:
        problem = f"cannot be divided among {cluster.ranks} devices in any way"
        raise UserError("train.batch_size", run.train.batch_size, problem, f"use a multiple of {cluster.ranks}")
    scale = _scale(quick, [*found, *too_large])
    rough.sort(key=quick.seconds)
    return Plan(source, run, cluster, found, too_large, considered, refused, quick, rough, scale)


def _plain(run: Run) -> Run:
    """The run on one rank, with one sequence: what blocks need by themselves."""
    base = applied(run, Strategy(2))
    values = base.model_dump()
    values["train"] |= {"batch_size": 1, "micro_batch_size": 1}
    values["ranks"] = 1
    return Run.model_validate(values)


def _one(cluster: Cluster) -> Cluster:
    return replace(cluster, nodes=1, per_node=1)


def _simplicity(strategy: Strategy) -> int:
    """Fewer moving parts are better where the time is the same."""
    axes = sum(size > 1 for size in (strategy.tensor, strategy.context, strategy.pipeline, strategy.expert))
    more = (strategy.shard is not None) + (strategy.secondary is not None) + strategy.interleaved + strategy.recompute
    return 3 * axes + more + 5 * (strategy.offload != "none") + 5 * (strategy.offload_parameters != "none")


def _ranked(scored: list[tuple[float, int, Strategy]]) -> list[Strategy]:
    """The best of each family first, by their scores, with the second best of the leading ones in between."""
    best: dict[tuple[object, ...], tuple[float, int, Strategy]] = {}
    rest: list[tuple[float, int, Strategy]] = []
    for one in sorted(scored, key=lambda one: one[:2]):
        if one[2].family() in best:
            rest.append(one)
        else:
            best[one[2].family()] = one
    first, second = [s for _, _, s in best.values()], [s for _, _, s in rest]
    return [*first[:3], *second[:2], *first[3:40], *second[2:20]]


def _waves(
    ranked: list[Strategy],
    source: ModelSource,
    run: Run,
    cluster: Cluster,
    refused: dict[str, str],
    doubtful: Callable[[Strategy], bool],
) -> Iterator[list[tuple[Strategy, Run]]]:
    """A few at a time, those left out that cannot be."""
    wave: list[tuple[Strategy, Run]] = []
    looked = 0
    for strategy in ranked:
        if looked == MOST:
            break
        if doubtful(strategy):
            continue
        looked += 1
        wanted = applied(run, strategy)
        problem = legal(wanted, source.config, cluster.ranks)
        if problem is not None:
            refused.setdefault(strategy.name(), problem)
            continue
        wave.append((strategy, wanted))
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


def _promising(quick: Quick, ranked: list[Strategy], found: list[Option], too_large: list[Option]) -> bool:
    """Whether one that was not sketched would win, if its rough score is off like the others'."""
    times, _ = _scale(quick, found)
    best = min(option.estimate.time.seconds for option in found)
    seen = {option.strategy for option in (*found, *too_large)}
    return any(times * quick.seconds(s) < 0.97 * best for s in ranked if s not in seen)


def _doubtful(quick: Quick, too_large: list[Option], strategy: Strategy) -> bool:
    """Whether it would not fit if the rough score were as far off as it was for those that turned out too large."""
    if not too_large:
        return False
    off = max(1.0, median(option.estimate.peak / quick.memory(option.strategy) for option in too_large))
    return quick.memory(strategy) * off > NEARLY * quick.cluster.device.memory


def _sketched(
    known: Sketches, cluster: Cluster, wave: list[tuple[Strategy, Run]], refused: dict[str, str]
) -> list[Option]:
    """Estimates of a wave; what cannot be rehearsed cannot be run, and is refused."""
    known.make([(without_pipeline(run), cluster.ranks // run.parallel.pipeline) for _, run in wave])
    found = []
    for strategy, run in wave:
        try:
            found.append(Option(strategy, estimate(known.source, run, cluster, known)))
        except (RunFailed, UserError) as error:
            refused.setdefault(strategy.name(), str(error).strip().splitlines()[-1])
    return found


class Sketches:
    """Sketches of one model, each made once: schedules and pipelines of a strategy share theirs."""

    def __init__(self, source: ModelSource, documents: int = 1) -> None:
        self.source, self.documents = source, documents
        self._known: dict[str, Sketched | Exception] = {}

    def make(self, runs: list[tuple[Run, int]]) -> None:
        """Makes those that are missing, several at once."""
        missing = {self._key(run, ranks): (run, ranks) for run, ranks in runs}
        missing = {key: one for key, one in missing.items() if key not in self._known}
        self._known |= dict(zip(missing, sketch_all(self.source, list(missing.values()), self.documents), strict=True))

    def __call__(self, source: ModelSource, run: Run, ranks: int) -> Sketched:
        self.make([(run, ranks)])
        found = self._known[self._key(run, ranks)]
        if isinstance(found, Exception):
            raise found
        return found

    @staticmethod
    def _key(run: Run, ranks: int) -> str:
        return f"{ranks} {run.model_dump_json(exclude={'output', 'log', 'checkpoint'})}"
