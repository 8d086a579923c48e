"""Evaluates the table: conflicts within a run, and whether two features combine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from shardwise.config.advanced import written
from shardwise.config.combinations.features import ABSENT, Feature, feature, look_up
from shardwise.config.combinations.rules import RULES, CombinationRule
from shardwise.config.paths import place
from shardwise.config.section import Clash
from shardwise.core.errors import UserError

if TYPE_CHECKING:
    from shardwise.config.schema import Run

NAMES = ("parallel", "offload", "train", "method", "objective", "precision", "recompute", "data")
AXIS_NAMES = ("tensor", "context", "pipeline", "expert")


@dataclass(frozen=True)
class Conflict:
    """A rule that a run violates, worded for this run."""

    rule: CombinationRule
    field: str
    value: Any
    problem: str
    remedy: str

    def error(self) -> UserError:
        """Converts it to a UserError."""
        return UserError(self.field, self.value, self.problem, self.remedy)


@dataclass(frozen=True)
class CombinationVerdict:
    """Whether two features combine, the reason or remark, and what to do instead.

    `either`: a run has one or the other, such as two stages of ZeRO.
    """

    kind: Literal["allowed", "remark", "refused", "either"]
    why: str = ""
    remedy: str = ""
    field: str = ""


def clashes(settings: Any) -> list[Conflict]:
    """All conflicts within settings, in table order; takes a Run, or a config with its attribute names."""
    return list(_met(settings, (rule for rule in RULES if rule.verdict == "refused")))


def remarks(settings: Any) -> list[Conflict]:
    """Combinations that are allowed, but may not be intended."""
    return list(_met(settings, (rule for rule in RULES if rule.verdict == "remark")))


def first_clash(settings: Any, objective_only: bool = False) -> None:
    """Raises the first conflict; `objective_only`: only of rules that depend on the objective."""
    rules = (rule for rule in RULES if rule.verdict == "refused" and (rule.about_objective or not objective_only))
    for conflict in _met(settings, rules):
        raise conflict.error()


def check_section(name: str, section: Any) -> None:
    """Raises the first conflict within a section, while it is validated."""
    settings = SimpleNamespace(**{name: section})
    for conflict in _met(settings, (rule for rule in RULES if rule.section)):
        raise Clash(conflict.field.removeprefix(f"{name}."), conflict.problem, conflict.remedy)


def combines(a: str | Feature, b: str | Feature) -> CombinationVerdict:
    """Whether a run can have both features, each with the settings it requires."""
    return _combines(*(feature(item) if isinstance(item, str) else item for item in (a, b)))


@cache
def _combines(a: Feature, b: Feature) -> CombinationVerdict:
    if a.of == b.of:
        return CombinationVerdict("either", "a run has one or the other")
    run = run_with(a, b)
    if conflicts := clashes(run):
        return CombinationVerdict("refused", conflicts[0].problem, conflicts[0].remedy, conflicts[0].field)
    verdicts = [
        CombinationVerdict("remark", conflict.problem, conflict.remedy, conflict.field)
        for conflict in _beside(run, a, b)
    ]
    verdicts += [_unless(rule, a, b) for rule in RULES if rule.verdict == "refused" and _third(rule, a, b)]
    return verdicts[0] if verdicts else CombinationVerdict("allowed")


def _beside(run: Run, a: Feature, b: Feature) -> Iterator[Conflict]:
    """Remarks about the two features, not about the rest of the example run."""
    for conflict in remarks(run):
        first, second = conflict.rule.sides
        if (a in first and b in second) or (b in first and a in second):
            yield conflict


def _third(rule: CombinationRule, a: Feature, b: Feature) -> tuple[Feature, ...]:
    """What a rule requires besides the two features to reject a run, if they are sides of it."""
    left = [side for side in rule.sides if a not in side and b not in side]
    return left[0] if len(rule.sides) == 3 and len(left) == 1 else ()


def _unless(rule: CombinationRule, a: Feature, b: Feature) -> CombinationVerdict:
    third = " or ".join(other.name for other in _third(rule, a, b))
    return CombinationVerdict("remark", f"not with {third}: {rule.why}", rule.remedy, written(rule.field))


def settings_of(*features: Feature) -> dict[str, Any]:
    """Settings by dotted path that enable all features; a feature's own value overrides another's requirement."""
    company = {path: value for item in features for path, value in item.company.items()}
    return company | {item.field: item.value for item in features}


def run_with(*features: Feature) -> Run:
    """An example run with these features, which may be invalid."""
    from shardwise.config.schema import Run

    return Run.model_validate(nested({"model.name": "./model", "data.train": "rows.jsonl"} | settings_of(*features)))


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Converts dotted paths to nested sections."""
    values: dict[str, Any] = {}
    for path, value in settings.items():
        place(values, path, value)
    return values


def axes_used(parallel: Any) -> list[str]:
    """Names of the axes with size above one."""
    return [name for name in AXIS_NAMES if getattr(parallel, name) > 1]


def _met(settings: Any, rules: Iterable[CombinationRule]) -> Iterator[Conflict]:
    of_run = hasattr(settings, "data")  # a section, or the config of an own loop, has no `advanced`
    for rule in rules:
        if rule.applies(settings):
            value = look_up(settings, rule.shown or rule.field)
            if value is ABSENT:
                value = None
            elif isinstance(value, tuple):
                value = list(value)
            words = _words(settings)
            field = written(rule.field) if of_run else rule.field
            yield Conflict(rule, field, value, rule.why.format(**words), rule.remedy.format(**words))


def _words(settings: Any) -> dict[str, Any]:
    """Placeholders that the texts of rules can use."""
    known = {name: getattr(settings, name, None) for name in NAMES}
    return known | {"axes": ", ".join(axes_used(settings.parallel))}
