"""Warnings about a run's data: what must not be trained on, and what looks wrong.

Each notice says what was counted, why it matters and what to do; the thresholds are below and tested one by one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shardwise.core.errors import UserError
from shardwise.core.printable import counted
from shardwise.data.row_warnings import explained
from shardwise.data.statistics import CHAT, LOST, REFINED, REPEATS, DataStatistics, SourceStatistics, remedy_of

LEAST_LEARNED, MOST_LEARNED = 0.02, 0.99
MOST_LOST, MOST_REPEATS, MOST_REFINED = 0.05, 0.20, 0.50
LEAST_FULL = 0.90
LEAST_SHARE = 0.01
FAR = 2  # times sequence_length
FEW_EVAL = 20
FEW_SEQUENCES = 8  # fewer: what the last one lacks shows in the mean


@dataclass(frozen=True)
class Notice:
    """A warning: its kind, the source it is about ("" = all), and the text."""

    kind: str
    source: str
    text: str

    def to_json(self) -> dict[str, Any]:
        """Returns the notice as plain values."""
        return asdict(self)


def problems(statistics: DataStatistics) -> list[UserError]:
    """Returns the errors that must fail the run before it starts: sources without a single loss token."""
    errors = []
    for kind, sources in (("train", statistics.train), ("eval", statistics.eval)):
        for index, source in enumerate(sources):
            if not source.supervised:
                field = f"data.{kind}.{index}"
                errors.append(UserError(field, source.path, *_nothing_learned(source, statistics)))
    return errors


def _nothing_learned(source: SourceStatistics, statistics: DataStatistics) -> tuple[str, str]:
    if not source.rows:
        return "holds no rows", "check the file, or leave the source out"
    problem = f"no token of its {source.rows:,} rows would be learned"
    if source.fates:
        fate, count = max(source.fates.items(), key=lambda item: item[1])
        if count * 2 >= source.rows:
            longest = source.longest or source.percentile(1.0)
            return f"{problem}: {count:,} of them were left out ({fate})", remedy_of(fate, longest)
    if source.format in CHAT and statistics.loss_on != "all":
        return problem, "give the rows answers (role assistant), or set data.loss_on: all"
    return problem, "check that the rows hold text, or leave the source out"


def warnings(statistics: DataStatistics) -> list[Notice]:
    """Returns what looks wrong but may be intended."""
    notices: list[Notice] = []
    for source in statistics.sources:
        if source.supervised:
            notices += _learned(source, statistics) + _remarks(source) + _left_out(source) + _long(source, statistics)
    if len(statistics.train) > 1:
        for source in statistics.train:
            if source.supervised and source.share < LEAST_SHARE:
                text = f"is {_percent(source.share)} of the mixture, which will hardly be noticed"
                notices.append(Notice("share", source.name, f"{text}; raise its weight or epochs, or data.temperature"))
    for source in statistics.train:
        if source.epochs is not None and source.weight != 1.0:
            text = f"has both epochs ({source.epochs:g}) and weight ({source.weight:g}): epochs decides"
            notices.append(Notice("mixture", source.name, f"{text}, and the weight has no effect; remove one of them"))
    return notices + _packing(statistics) + _batch(statistics) + _evaluation(statistics)


def _learned(source: SourceStatistics, statistics: DataStatistics) -> list[Notice]:
    share = source.learned_share
    counted = f"{source.supervised:,} of {source.tokens:,} tokens"
    if statistics.purpose in ("masked", "classify"):
        return []  # what is learned is no part of the tokens there
    if share < LEAST_LEARNED:
        text = f"only {_percent(share)} of its tokens are learned ({counted}): most of the computing goes into prompts"
        return [Notice("learned", source.name, f"{text}; look at the preview for answers that are cut off or missing")]
    if source.format in CHAT and statistics.loss_on != "all" and share > MOST_LEARNED:
        text = f"{_percent(share)} of its tokens are learned ({counted}), though these are conversations"
        return [Notice("learned", source.name, f"{text}; look at the preview for prompts that count as answers")]
    return []


def _remarks(source: SourceStatistics) -> list[Notice]:
    sentences = explained(source.remarks, source.rows, source.format, source.columns)
    return [Notice("rows", source.name, text) for text in sentences.values()]


def _left_out(source: SourceStatistics) -> list[Notice]:
    notices = []
    rows = max(1, source.rows)
    lost = source.lost(LOST)
    repeats = source.lost(REPEATS)
    if lost / rows > MOST_LOST:
        parts = ", ".join(f"{source.fates[fate]:,} {fate}" for fate in LOST if source.fates.get(fate))
        text = f"{_percent(lost / rows)} of its rows do not go in whole ({parts})"
        notices.append(Notice("left out", source.name, f"{text}; look at those that are listed"))
    refined = source.lost(REFINED)
    if refined / rows > MOST_REFINED:
        parts = ", ".join(f"{source.fates[fate]:,} {fate}" for fate in REFINED if source.fates.get(fate))
        text = f"data.refine leaves out {_percent(refined / rows)} of its rows ({parts})"
        notices.append(
            Notice("refined", source.name, f"{text}; look at those that are listed, and loosen it if need be")
        )
    if repeats / rows > MOST_REPEATS:
        text = f"{_percent(repeats / rows)} of its rows repeat others ({repeats:,} of {source.rows:,}) and are left out"
        notices.append(Notice("duplicates", source.name, f"{text}; look at how the file was made"))
    return notices


def _long(source: SourceStatistics, statistics: DataStatistics) -> list[Notice]:
    longest = source.longest or source.percentile(1.0)
    splits = source.format == "text" or statistics.purpose == "masked"
    split = statistics.over_length == "split" or (statistics.over_length is None and splits)
    if split or longest <= FAR * statistics.sequence_length:
        return []
    nearly_longest = source.percentile(0.999)
    text = f"its longest row has {longest:,} tokens, data.sequence_length is {statistics.sequence_length:,}"
    if nearly_longest > statistics.sequence_length:
        enough = min(_rounded(nearly_longest), longest)
        return [Notice("long rows", source.name, f"{text}; {enough:,} would hold 99.9% of its rows")]
    return [Notice("long rows", source.name, f"{text}; 99.9% of its rows fit, so look at the few that do not")]


def _packing(statistics: DataStatistics) -> list[Notice]:
    packing = statistics.packing
    one_a_row = statistics.purpose in ("seq2seq", "masked", "classify")
    if not packing.sequences or packing.efficiency >= LEAST_FULL or one_a_row:
        return []
    full = _percent(packing.efficiency)
    mean = packing.tokens / max(1, packing.documents)
    text = f"sequences are {full} full, the rest is padding"
    if not packing.on:
        text = f"rows fill {full} of data.sequence_length and are padded to the longest of their batch"
        return [Notice("packing", "", f"{text}; data.packing: true puts several into a sequence")]
    if packing.sequences < FEW_SEQUENCES:
        sequences = counted(packing.sequences, "sequence", "sequences")
        text += f": all data fill {sequences} of {packing.sequence_length:,} tokens"
        return [Notice("packing", "", f"{text}; a shorter data.sequence_length or more data would fill them")]
    if mean * 3 > packing.sequence_length:
        text += f": data.sequence_length is short for documents of {mean:,.0f} tokens on average, which leave gaps"
        return [Notice("packing", "", f"{text}; raise it to {_rounded(int(mean * 8)):,} so that several fit into one")]
    if packing.documents <= packing.window:
        return []  # all were there to choose from: their lengths do not add up, and no setting would change that
    text += f": {packing.window:,} documents at a time are too few to choose from"
    return [Notice("packing", "", f"{text}; raise advanced.data.packing_window")]


def _batch(statistics: DataStatistics) -> list[Notice]:
    steps = statistics.steps
    sequences = statistics.packing.sequences
    if steps is None or sequences >= steps.batch_size:
        return []
    text = f"an epoch has {counted(sequences, 'sequence', 'sequences')}, fewer than train.batch_size {steps.batch_size}"
    text += ": with train.epochs it is one smaller step, with train.steps a step repeats rows"
    remedy = f"lower it to {sequences}" + (", or set data.packing: false" if statistics.packing.on else "")
    return [Notice("batch", "", f"{text}; {remedy}")]


def _evaluation(statistics: DataStatistics) -> list[Notice]:
    trained_paths = {source.path for source in statistics.train}
    notices = [
        Notice("evaluation", s.name, "is trained on as well, so its loss says nothing about what the model has not "
                                     "seen; use other rows, or a share: data.eval: 2%")
        for s in statistics.eval if s.path in trained_paths
    ]  # fmt: skip
    held_out = sum(source.held_out for source in statistics.train)
    if held_out:  # a share is held out of every source but these
        notices += [
            Notice("evaluation", s.name, "has a single row, which is trained on; nothing of it is held out")
            for s in statistics.train if s.rows == 1
        ]  # fmt: skip
    if not statistics.eval and 0 < held_out < FEW_EVAL:
        rows = counted(held_out, "row is", "rows are")
        text = f"only {rows} held out for evaluation: its loss will jump about by chance"
        notices.append(Notice("evaluation", "", f"{text}; raise data.eval, or give it files of its own"))
    return notices + [
        Notice("evaluation", s.name, f"only {counted(s.rows, 'row', 'rows')} to evaluate on: the loss will jump about "
                                     "by chance; add rows")
        for s in statistics.eval if 0 < s.rows < FEW_EVAL
    ]  # fmt: skip


def _percent(share: float) -> str:
    return f"{share:.1%}" if 0.001 <= share <= 0.999 or share in (0, 1) else f"{share * 100:.3g}%"


def _rounded(length: int) -> int:
    """Rounds up to a multiple of 64, which suits kernels."""
    return -(-length // 64) * 64
