"""Runs that execute pairs of features: a cover of all pairs by few runs, and what ranks do with each (see ranks.py)."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from shardwise.config.combinations import clashes, combines
from shardwise.config.combinations import features as f
from shardwise.config.combinations.check import nested, run_with, settings_of
from shardwise.config.combinations.features import FEATURES, Feature
from support.families import config_of
from support.judged import kto_file, preference_file
from support.tiny import PAIRS, rows_of_pairs, saved_model

RANKS, STEPS = 4, 2
NOT_HERE = (f.CPU, f.CUDA)  # every run here is on a CPU
NO_MODEL = [(f.EXPERT, f.SEQ2SEQ), (f.EXPERT, f.MASKED)]  # none whose experts could be divided
TRIED = tuple(one for one in FEATURES if one not in NOT_HERE)
Cover = tuple[tuple[Feature, ...], ...]
STILL = {"bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, "t5": {"dropout_rate": 0.0}}


def pairs_to_try(compiled: bool = False) -> list[frozenset[Feature]]:
    """Every pair that combines: those of `compile`, which takes a compiler's time, or all others."""
    pairs = (frozenset(pair) for pair in combinations(TRIED, 2) if (f.COMPILE in pair) == compiled)
    untried = [frozenset(pair) for pair in NO_MODEL]
    return [pair for pair in pairs if combines(*pair).kind in ("allowed", "remark") and pair not in untried]


@cache
def cover(compiled: bool = False) -> Cover:
    """Few sets of features that combine and hold every pair, those with the most pairs first: greedy, always the same.

    Two axes at most in each, which is what four ranks have room for.
    """
    left = dict.fromkeys(pairs_to_try(compiled))
    groups = list(dict.fromkeys(one.of for one in TRIED if compiled or one is not f.COMPILE))
    found: list[tuple[Feature, ...]] = []
    while left:
        chosen = list(sorted(next(iter(left)), key=TRIED.index))
        for group in groups:
            if any(one.of == group for one in chosen):
                continue
            gains = [
                (sum(frozenset((one, other)) in left for other in chosen), -TRIED.index(one), one)
                for one in TRIED if one.of == group
            ]  # fmt: skip
            for gain, _, one in sorted(gains, reverse=True, key=lambda g: g[:2]):
                if gain and _possible([*chosen, one]):
                    chosen.append(one)
                    break
        for pair in pairs_of(chosen):
            left.pop(pair, None)
        found.append(tuple(chosen))
    return _most_first(found, set(pairs_to_try(compiled)))


def pairs_of(features: Sequence[Feature]) -> set[frozenset[Feature]]:
    """The pairs that a set of features executes."""
    return {frozenset(pair) for pair in combinations(features, 2)}


def _most_first(rows: list[tuple[Feature, ...]], left: set[frozenset[Feature]]) -> Cover:
    """In the order of what each adds to those before it; a row that adds nothing is left out."""
    ordered = []
    while left:
        best = max(rows, key=lambda row: len(left & pairs_of(row)))
        left -= pairs_of(best)
        ordered.append(best)
    return tuple(ordered)


def _possible(features: Sequence[Feature]) -> bool:
    axes = {one.of for one in features} & {"parallel.tensor", "context", "pipeline"}
    if len(axes) > 2 or any({a, b} <= set(features) for a, b in NO_MODEL):
        return False
    if axes == {"parallel.tensor", "pipeline"} and f.REDUCE in features:  # four ranks: none is left to sum over
        return False
    run = run_with(*features)
    return not clashes(run) and all(one.on(run) for one in features)


def name_of(features: Sequence[Feature]) -> str:
    return ", ".join(one.name for one in features)


def plain(features: Sequence[Feature]) -> tuple[Feature, ...]:
    """What is left of them where nothing is sharded, moved, recomputed or divided: the losses should be the same."""
    return (f.ZERO[0], *(one for one in features if one.numbers == "other"))


class Shelf:
    """Models and rows for every objective, made once in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rows_of_pairs(folder)
        texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text().splitlines()]
        labelled = [{"text": text[:80], "label": "long" if len(text) > 90 else "short"} for text in texts]
        (folder / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labelled))
        pairs, judged = preference_file(folder, name="judged"), kto_file(folder, 24)
        self._rows = {
            "causal": str(PAIRS), "distill": str(PAIRS), "seq2seq": str(folder / "pairs.jsonl"), "masked": str(
                folder / "texts.jsonl"), "classify": str(folder / "labelled.jsonl"), "dpo": pairs, "orpo": pairs,
            "kto": judged,
        }  # fmt: skip
        deep = {"num_hidden_layers": 4}
        for name, family, task, seed in (
            ("llama", "llama", "causal", 0), ("teacher", "llama", "causal", 1), ("mixtral", "mixtral", "causal", 0),
            ("t5", "t5", "seq2seq", 0), ("bert", "bert", "masked", 0), ("judge", "bert", "classify", 0),
            ("sorter", "mixtral", "classify", 0),
        ):  # fmt: skip
            config = config_of(family) | ({} if family == "t5" else deep) | STILL.get(family, {})
            saved_model(folder / name, config, seed, task)  # type: ignore[arg-type]

    def run(self, features: Sequence[Feature], output: str, like: Sequence[Feature] = ()) -> dict[str, Any]:
        """A tiny run with these features; the model and the clipping are those of `like`, where given."""
        like = like or features
        kind = next((str(one.value) for one in like if one.of == "objective"), "causal")
        model = {"seq2seq": "t5", "masked": "bert", "classify": "judge"}.get(kind, "llama")
        if f.EXPERT in like or f.ROUTER in like:
            model = {"classify": "sorter"}.get(kind, "mixtral")
        defaults = {
            "data.train": self._rows[kind], "data.sequence_length": 160, "data.over_length": "drop",
            "data.packing": False, "objective.type": kind, "train.steps": STEPS, "train.batch_size": 8,
            "train.micro_batch_size": 2 if kind == "kto" else 1, "train.warmup": 0,
            "train.learning_rate": 0.3 if f.SGD in features else 3e-3,
            "train.max_grad_norm": None if f.IN_BACKWARD in like else 0.5, "precision": "fp32",
            "device": "cpu", "ranks": RANKS,
            "checkpoint.every": None, "output": str(self.folder / "out" / output),
        }  # fmt: skip
        if kind == "kto":
            defaults["data.sequence_length"] = 256
        settings = defaults | settings_of(*features) | {"model.name": str(self.folder / model)}
        if kind == "distill":
            settings["objective.teacher"] = str(self.folder / "teacher")
        if f.IA3 in features and (f.EXPERT in like or f.ROUTER in like):
            settings["method.feedforward_modules"] = []  # a stack of experts is no layer with a name
        if settings.get("parallel.dp_shard_size") and {f.TENSOR, *f.SCHEDULES} & set(features):
            settings["parallel.dp_shard_size"] = 1 if f.TENSOR in features and {*f.SCHEDULES} & set(features) else 2
        return nested(settings)


def train_each(runs: dict[str, dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Losses and gradient norms of each run, one after the other in the same processes."""
    found = {}
    for name, run in runs.items():
        try:
            found[name] = _train(run)
        except Exception as error:
            error.add_note(f"in {name}")
            raise
        gc.collect()
    return found


def _train(run: dict[str, Any]) -> list[tuple[float, float]]:
    import torch

    from shardwise.config.load import load_run
    from shardwise.distributed.mesh import init_world
    from shardwise.foresight.prepare import prepare_run
    from shardwise.optim.schedules import set_rates
    from shardwise.parallel.offload.disk import DiskFolder
    from shardwise.train.loop import accumulate, seed_step
    from shardwise.train.session import agree_on_units
    from shardwise.train.setup import build_state
    from shardwise.train.status import Status
    from support.scenarios import batch_of

    job = prepare_run(load_run(run))
    world = init_world(job.run)
    train = job.run.train
    with DiskFolder(job.offload_folder, world.rank, world.size) as disk:
        parts = build_state(job, world, Status(None), disk=disk)
        for step in range(train.steps or 0):
            seed_step(train.seed, step, world.rank // world.layout.tensor)
            batch = batch_of(parts, step)
            if not parts.loader.layout.counted:
                batch = agree_on_units(batch, world)
            rate = set_rates(parts.optimizer, train, step, train.steps)
            summed = accumulate(parts, batch)
            norm = parts.update()
            parts.meter.add(step, rate, summed if parts.context.counts else torch.zeros_like(summed), norm, batch)
        return [(record["loss"], record["grad_norm"]) for record in parts.meter.flush()]
