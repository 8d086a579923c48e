"""train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks, as DeepSpeed infers it.

The ranks are those that see different data: ranks along tensor, context and pipeline share theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config.deepspeed.plan import PartialTranslation, default_of
from shardwise.config.paths import ABSENT, find

TRAIN, MICRO, ROUNDS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchSizes:
    """The three batch numbers; None = left to the run (an "auto" that nothing decides)."""

    train: int | None
    micro: int | None
    rounds: int | None


def solve(plan: PartialTranslation) -> BatchSizes:
    """Solves for the missing numbers: two give the third, one implies no accumulation; raises if they do not divide."""
    train, micro, rounds = (_given(plan, key) for key in (TRAIN, MICRO, ROUNDS))
    autos = {key for key in (TRAIN, MICRO, ROUNDS) if find(plan.config, key) == "auto"}
    train = _from_run(plan, TRAIN, "train.batch_size") if train is None else train
    micro = _from_run(plan, MICRO, "train.micro_batch_size") if micro is None else micro
    if train is None and micro is None:
        if not autos & {TRAIN, MICRO}:
            remedy = f'add e.g. "{MICRO}": 1, or train.batch_size to the run'
            raise plan.mistake(TRAIN, None, f"neither it nor {MICRO} is given", remedy)
        if rounds is None:
            return BatchSizes(None, None, None)
        train = int(default_of("train.batch_size"))
    ranks = _data_ranks(plan)
    if train is None:
        assert micro is not None
        rounds = rounds or 1
        train = micro * rounds * ranks
    elif micro is None and rounds is None and MICRO in autos:
        return BatchSizes(train, None, None)  # the run chooses the micro-batch by its budget of tokens
    elif micro is None:
        rounds = rounds or 1
        micro = train // ranks // rounds
    elif rounds is None:
        rounds = train // micro // ranks
    assert micro is not None and rounds is not None
    if micro * rounds * ranks != train or not train:
        problem = f"is not {MICRO} {micro} × {ROUNDS} {rounds} × {ranks} ranks = {micro * rounds * ranks}"
        near = max(1, micro) * max(1, rounds) * ranks
        raise plan.mistake(TRAIN, train, problem, f"use {near}, or leave one of the three out")
    return BatchSizes(train, micro, rounds)


def _data_ranks(plan: PartialTranslation) -> int:
    """Ranks that see different data; all of them where the axes do not divide them, which is refused later."""
    sharing = 1
    for name in ("tensor", "context", "pipeline"):
        size = plan.now(f"parallel.{name}")
        sharing *= size if isinstance(size, int) and size > 0 else 1
    return plan.ranks // sharing if plan.ranks % sharing == 0 else plan.ranks


def _given(plan: PartialTranslation, key: str) -> int | None:
    value = plan.get(key)
    return None if value is None else plan.integer(key, value, 1)


def _from_run(plan: PartialTranslation, key: str, target: str) -> int | None:
    value = plan.run_value(target)
    return (
        None if value is ABSENT or value in (None, "auto") else plan.integer(f"{key} ({target} of the run)", value, 1)
    )


def batch_rule(plan: PartialTranslation, key: str, value: object) -> str:
    """Account entry of one of the three keys; the values are set by `put_batch`."""
    batch = solve(plan)
    number = {TRAIN: batch.train, MICRO: batch.micro, ROUNDS: batch.rounds}[key]
    lead = "auto → " if value == "auto" else ""
    if key == ROUNDS:
        if number is None:
            return f"{lead}train.batch_size / (train.micro_batch_size × {_data_ranks(plan)} ranks)"
        return f"{lead}{number} round{'s' * (number > 1)} of {batch.micro} × {_data_ranks(plan)} ranks"
    target = "train.batch_size" if key == TRAIN else "train.micro_batch_size"
    return plan.auto(target) if number is None else f"{lead}{target}: {number}"


def put_batch(plan: PartialTranslation) -> BatchSizes:
    """Sets train.batch_size and train.micro_batch_size."""
    batch = solve(plan)
    present = next((key for key in (TRAIN, MICRO, ROUNDS) if key in plan.config), TRAIN)
    if batch.train is not None:
        plan.put(TRAIN if TRAIN in plan.config else present, "train.batch_size", batch.train)
    if batch.micro is not None:
        plan.put(MICRO if MICRO in plan.config else present, "train.micro_batch_size", batch.micro)
    return batch
