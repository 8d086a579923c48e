"""Reads the table: what is wrong with a run, and whether two features combine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from shardwise.config.combinations.features import ABSENT, Feature, feature, look_up
from shardwise.config.combinations.rules import DIVIDED, RULES, CombinationRule
from shardwise.config.paths import place
from shardwise.config.section import Clash
from shardwise.core.errors import UserError

if TYPE_CHECKING:
    from shardwise.config.schema import Run

NAMES = ("parallel", "offload", "train", "method", "objective", "precision", "recompute", "data")
AXIS_NAMES = ("tensor", "context", "pipeline", "expert")


@dataclass(frozen=True)
class Conflict:
    """A rule that a run meets, in the words for this run."""

    rule: CombinationRule
    field: str
    value: Any
    problem: str
    remedy: str

    def error(self) -> UserError:
        """The mistake as it is told."""
        return UserError(self.field, self.value, self.problem, self.remedy)


@dataclass(frozen=True)
class CombinationVerdict:
    """Whether two features combine, why not or with what remark, and what to do instead.

    `either`: a run has one or the other, such as two stages of ZeRO.
    """

    kind: Literal["allowed", "remark", "refused", "either"]
    why: str = ""
    remedy: str = ""
    field: str = ""


def clashes(settings: Any) -> list[Conflict]:
    """Every rule by which settings do not combine, in the order of the table; of a Run, or a config with its names."""
    return list(_met(settings, (rule for rule in RULES if rule.verdict == "refused")))


def remarks(settings: Any) -> list[Conflict]:
    """What is allowed, but may not be what was meant."""
    return list(_met(settings, (rule for rule in RULES if rule.verdict == "remark")))


def first_clash(settings: Any, objective_only: bool = False) -> None:
    """Raises the first mistake; `objective_only`: of those that wait for the objective to be known."""
    asked = (rule for rule in RULES if rule.verdict == "refused" and (rule.about_objective or not objective_only))
    for conflict in _met(settings, asked):
        raise conflict.error()


def check_section(name: str, section: Any) -> None:
    """What a section says against itself, raised while it is read."""
    settings = SimpleNamespace(**{name: section})
    for conflict in _met(settings, (rule for rule in RULES if rule.section)):
        raise Clash(conflict.field.removeprefix(f"{name}."), conflict.problem, conflict.remedy)


def combines(a: str | Feature, b: str | Feature) -> CombinationVerdict:
    """Whether a run can have both features, each with the settings that it cannot do without."""
    return _combines(*(feature(one) if isinstance(one, str) else one for one in (a, b)))


@cache
def _combines(a: Feature, b: Feature) -> CombinationVerdict:
    if a.of == b.of:
        return CombinationVerdict("either", "a run has one or the other")
    run = run_with(a, b)
    if found := clashes(run):
        return CombinationVerdict("refused", found[0].problem, found[0].remedy, found[0].field)
    told = [CombinationVerdict("remark", one.problem, one.remedy, one.field) for one in _beside(run, a, b)]
    told += [_unless(rule, a, b) for rule in RULES if rule.verdict == "refused" and _third(rule, a, b)]
    return told[0] if told else CombinationVerdict("allowed")


def _beside(run: Run, a: Feature, b: Feature) -> Iterator[Conflict]:
    """Remarks that are about the two, and not about what else the example has."""
    for found in remarks(run):
        first, second = found.rule.sides
        if (a in first and b in second) or (b in first and a in second):
            yield found


def _third(rule: CombinationRule, a: Feature, b: Feature) -> tuple[Feature, ...]:
    """What a rule wants besides the two to refuse a run, if they are sides of it."""
    left = [side for side in rule.sides if a not in side and b not in side]
    return left[0] if len(rule.sides) == 3 and len(left) == 1 else ()


def _unless(rule: CombinationRule, a: Feature, b: Feature) -> CombinationVerdict:
    third = " or ".join(one.name for one in _third(rule, a, b))
    return CombinationVerdict("remark", f"not with {third}: {rule.why}", rule.remedy, rule.field)


def settings_of(*features: Feature) -> dict[str, Any]:
    """Settings by dotted path that turn all of them on; what one chooses has precedence over what another needs."""
    company = {path: value for one in features for path, value in one.company.items()}
    return company | {one.field: one.value for one in features}


def run_with(*features: Feature) -> Run:
    """An example of a run with these features; it may be one that is refused."""
    from shardwise.config.schema import Run

    return Run.model_validate(nested({"model.name": "./model", "data.train": "rows.jsonl"} | settings_of(*features)))


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Dotted paths as sections within sections."""
    values: dict[str, Any] = {}
    for path, value in settings.items():
        place(values, path, value)
    return values


def axes_used(parallel: Any) -> list[str]:
    """The axes that are longer than one."""
    return [name for name in AXIS_NAMES if getattr(parallel, name) > 1]


def _met(settings: Any, rules: Iterable[CombinationRule]) -> Iterator[Conflict]:
    for rule in rules:
        if rule.applies(settings):
            value = look_up(settings, rule.shown or rule.field)
            value = list(value) if isinstance(value, tuple) else None if value is ABSENT else value
            words = _words(settings)
            yield Conflict(rule, rule.field, value, rule.why.format(**words), rule.remedy.format(**words))


def _words(settings: Any) -> dict[str, Any]:
    """What texts of rules can name."""
    used = axes_used(settings.parallel)
    divided = sorted({one.field.rpartition(".")[2] for one in DIVIDED} & set(used))
    known = {name: getattr(settings, name, None) for name in NAMES}
    return known | {"axes": ", ".join(used), "divided": " and ".join(divided)}
